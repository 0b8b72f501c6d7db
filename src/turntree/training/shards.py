"""The tensors of a checkpoint, written by every rank and read by any number of them: torch's distributed checkpoint
(DCP) in safetensors files.

DCP's own format keeps its index in a pickle (`.metadata`), which would run code when a checkpoint is opened. Its
safetensors storage has none: each rank writes one file with its shards, and the header of the file says where in the
whole tensor each shard lies (JSON). Readers gather the index from the headers.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from turntree.observe.identity import file_digest
from turntree.training.sharded import Alone

SUFFIX = ".safetensors"


def save(folder: Path, tensors: Mapping[str, Tensor], group: Alone) -> dict[str, str]:
    """Write one file a rank into `folder`, flushed to disk; the names of all files with their checksums."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with _plain_errors():
        state_dict_saver.save(
            dict(tensors), storage_writer=writer, process_group=group.control, no_dist=group.size == 1
        )
    own = sorted(folder.glob(f"shard-{group.rank + 1:05d}-*{SUFFIX}"))
    found = group.collect({path.name: file_digest(path)[0] for path in own})
    return {name: checksum for files in found for name, checksum in files.items()}


def shapes(folder: Path) -> dict[str, torch.Size]:
    """The whole shape of every tensor in `folder`."""
    index = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: torch.Size(held.size) for name, held in index.items()}  # pyright: ignore[reportAttributeAccessIssue]


def load(folder: Path, into: Mapping[str, Tensor], group: Alone) -> None:
    """Copy the tensors of `folder` into those of the same names: whole tensors, or a rank's shards."""
    reader = HuggingFaceStorageReader(str(folder))
    with _plain_errors():
        state_dict_loader.load(dict(into), storage_reader=reader, process_group=group.control, no_dist=group.size == 1)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """DCP warns where it runs in one process, and raises an exception that is no `Exception`, with those of all
    ranks inside."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        first, _ = min(error.failures.items())[1]
        raise first from None  # which also says whose disk is full
