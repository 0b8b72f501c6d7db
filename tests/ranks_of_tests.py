"""What other ranks import: the policies that tests train, and questions to a rank."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tiny_models import tiny_mixture, tiny_model
from turntree.pack.attention import set_tree_attention
from turntree.train import forward, trainer
from turntree.train.config import LoRAConfig
from turntree.train.forward import set_checkpointing
from turntree.train.launch import open_ranks
from turntree.train.lora import add_adapter, freeze
from turntree.train.sharded import whole
from turntree.train.trainer import Trainer, follow

VOCABULARY = 24
SAVING = 2 * VOCABULARY  # logits of a chunk of the head, where memory is saved


def policy(kind: str) -> PreTrainedModel:
    """A tiny policy; `kind` names what is special about it."""
    dtype = torch.bfloat16 if "bfloat16" in kind else torch.float32
    if "mixture" in kind:
        model = tiny_mixture(VOCABULARY).to(dtype)
        if "adapter" not in kind:
            freeze(model, ["mlp.gate"])
    else:
        model = tiny_model("llama" if "untied" in kind else "qwen3", VOCABULARY, dtype=dtype)
    if "adapter" in kind:
        experts = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj") if "mixture" in kind else ()
        add_adapter(model, LoRAConfig(rank=4, targets=("all-linear", *experts)))
    if "trained" in kind:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    set_tree_attention(model)
    if "saving" in kind:
        set_checkpointing(model)
    forward.CHUNK_LOGITS = SAVING if "saving" in kind else 1 << 26
    return model


def moments(trainer: Trainer, _: None) -> dict[str, Tensor]:
    """The whole first moment of every parameter: after one step, the gradient times 1 - beta."""
    held = trainer.optimizer.tensors(trainer.names)
    return {name: whole(value).clone() for name, value in held.items() if name.startswith("exp_avg.")}


def shares(trainer: Trainer, _: None) -> list[tuple[int, int]]:
    """Of every rank: the numbers that it holds of the trained weights, and all of them."""
    masters = trainer.optimizer.masters
    own = sum(getattr(master, "to_local", lambda m=master: m)().numel() for master in masters)
    return trainer.group.collect((own, sum(master.numel() for master in masters)))


@contextlib.contextmanager
def two_ranks(work: Callable[..., object], *arguments: Any) -> Iterator[None]:
    """The environment that a launcher gives rank 0 of two, while another process calls `work(*arguments)` as rank 1.
    Not within others: rank 0 would go on in their group, and wait there for a rank that is not in it."""
    assert not torch.distributed.is_initialized(), "this process is a rank already (a fixture of the module?)"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    other = multiprocessing.get_context("spawn").Process(target=_rank_1, args=(place, work, arguments), daemon=True)
    other.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**place, "RANK": "0", "LOCAL_RANK": "0"}.items():
                patch.setenv(name, value)
            yield
        other.join(60)
    finally:
        other.kill()


def _rank_1(place: dict[str, str], work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ |= {**place, "RANK": "1", "LOCAL_RANK": "1"}
    work(*arguments)


def followed() -> None:
    """A rank that does what rank 0 says."""
    with open_ranks() as group:
        follow(group)


def measured(peaks: Any) -> None:
    """A rank that does what rank 0 says, and puts by how many bytes its memory rose at most while it got each shard."""
    shard = trainer.shard

    def watched(*arguments: Any, **named: Any) -> PreTrainedModel:
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = _status("VmRSS")
        model = shard(*arguments, **named)
        peaks.put(_status("VmHWM") - before)
        return model

    trainer.shard = watched
    followed()


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))
