"""Policies on disk: ordinary Transformers checkpoint folders (safetensors, never pickle), and their fingerprint."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from turntree.core.errors import InputError

Dtype = Literal["float32", "bfloat16", "auto"]


def load_model(path: str | Path, *, dtype: Dtype = "float32", device: str | torch.device = "cpu") -> PreTrainedModel:
    """Load a decoder from a local folder, in eval mode, with SDPA attention; "auto" is the dtype that was saved.

    Raises `InputError` where the folder, its `config.json` or its weights are missing, and where a weight of the
    architecture is not in the files (Transformers would fill it with random numbers).
    """
    folder = _checked(path)
    if not any(folder.glob("*.safetensors")):
        raise InputError("holds no *.safetensors weights", path=folder, hint="save the model with save_pretrained")
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            attn_implementation="sdpa",
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"cannot be loaded as a causal language model ({error})", path=folder) from error
    if lost := sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}):
        raise InputError(f"lacks {len(lost)} weights of its architecture, {lost[0]!r} first", path=folder)
    return model.to(device).eval()


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint folder. Raises `InputError` where it is missing or has no chat template."""
    folder = _checked(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise InputError(f"holds no tokenizer that can be loaded ({error})", path=folder) from error
    if not tokenizer.chat_template:
        raise InputError(
            "its tokenizer has no chat template", path=folder, hint="add chat_template.jinja, as instruct models have"
        )
    return tokenizer


def policy_hash(model: PreTrainedModel) -> str:
    """BLAKE2b (hex, 128 bit) of names, dtypes, shapes and bytes of all weights; tied weights count once.

    The same weights saved and loaded again have the same hash; any changed bit gives another.
    """
    digest = hashlib.blake2b(digest_size=16)
    seen: set[tuple[int, torch.Size]] = set()
    for name, tensor in sorted(model.state_dict().items()):
        if (place := (tensor.data_ptr(), tensor.shape)) in seen:
            continue
        seen.add(place)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    dtype: Literal["float32", "bfloat16"] | None = None,
) -> Path:
    """Write a checkpoint folder (replacing one of the same name) and return it; `dtype` None keeps the model's.

    It is written beside its place and then renamed: a crash leaves no half-written checkpoint under its name.
    """
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as scratch:
        fresh, replaced = Path(scratch) / "new", Path(scratch) / "old"
        weights: dict[str, Any] | None = None
        if dtype is not None:
            weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in model.state_dict().items()}
        model.save_pretrained(fresh, state_dict=weights)
        if dtype is not None:
            _set_dtype(fresh / "config.json", dtype)
        tokenizer.save_pretrained(fresh)
        if folder.exists():
            folder.rename(replaced)
        shutil.move(fresh, folder)
    return folder


def _set_dtype(config: Path, dtype: str) -> None:
    """Let the configuration name the dtype that was written, so that "auto" loads it."""
    values = json.loads(config.read_text())
    values["dtype"] = dtype
    config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")


def _checked(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise InputError("is not a folder", path=folder, hint="give the folder of a downloaded or saved checkpoint")
    if not (folder / "config.json").is_file():
        raise InputError("holds no config.json", path=folder, hint="give the folder of a Transformers checkpoint")
    return folder
