"""Policies on disk: ordinary checkpoint folders (config.json, safetensors, tokenizer with its chat template)."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from turntree.core.errors import ConfigError, InputError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
_GET_FOLDER = "give the folder of a checkpoint on this machine (config.json, *.safetensors, tokenizer.json)"


def load_model(path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> PreTrainedModel:
    """The causal language model in folder `path`, in eval mode, with every weight taken from the folder.

    `dtype` is "float32", "bfloat16" or "auto" (as saved). Raises `InputError` in one line for a folder that is
    missing, incomplete, unreadable, or does not hold exactly the weights of its config.
    """
    folder = _checked_folder(path)
    if dtype not in (*_DTYPES, "auto"):
        raise ConfigError(f"{dtype!r} is not allowed", field="dtype", hint="use float32, bfloat16 or auto")
    if not (folder / "config.json").is_file():
        raise InputError("has no config.json", path=folder, hint=_GET_FOLDER)
    if not any((folder / name).is_file() for name in _WEIGHTS):
        raise InputError(f"has no weights ({' or '.join(_WEIGHTS)})", path=folder, hint=_GET_FOLDER)
    try:
        with _quiet():
            config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=_DTYPES.get(dtype, "auto"),
                attn_implementation="sdpa",
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except Exception as error:  # the boundary to foreign files and foreign code
        raise InputError(f"cannot be loaded as a causal language model ({_line(error)})", path=folder) from error
    model, report = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    absent = sorted({str(key) for kind in ("missing_keys", "mismatched_keys") for key in report[kind]})
    if absent:
        raise InputError(
            f"lacks {len(absent)} weights of its config, among them {absent[0]}", path=folder, hint="save it again"
        )
    try:
        return cast(Any, model).to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"cannot put the model on {device!r} ({_line(error)})", field="device") from error


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`. Raises `InputError` when it is missing or has no chat template."""
    folder = _checked_folder(path)
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError("has no tokenizer (tokenizer.json)", path=folder, hint=_GET_FOLDER)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the boundary to foreign files and foreign code
        raise InputError(f"the tokenizer cannot be loaded ({_line(error)})", path=folder) from error
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template",
            path=folder,
            hint="use an instruction-tuned policy, or add a chat_template.jinja to the folder",
        )
    return tokenizer


def save_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: str | Path, dtype: str | None = None
) -> Path:
    """Write a checkpoint folder that `load_model` and `load_tokenizer` read back, and return it.

    `dtype` ("float32" or "bfloat16") converts the weights on the way to disk; the model itself is left as it is.
    A reader sees the old folder or the new one, never a mixture: files are written beside it and renamed over.
    """
    if dtype is not None and dtype not in _DTYPES:
        raise ConfigError(f"{dtype!r} is not allowed", field="dtype", hint="use float32 or bfloat16")
    target = Path(folder).absolute()
    if target.exists() and not target.is_dir():
        raise InputError("is a file", path=folder, hint="name a folder for the checkpoint")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".partial", dir=target.parent))
    try:
        fresh.chmod(0o755)
        with _quiet():
            _write_weights(model, fresh, dtype)
            tokenizer.save_pretrained(fresh)
        _replace(fresh, target)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return target


def policy_hash(model: PreTrainedModel) -> str:
    """The name of these exact weights: 32 hexadecimal digits over name, dtype, shape and bytes of every parameter.

    Tied weights count once, under their first name; the device does not matter. Saving and loading in the same
    dtype keeps the hash.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in sorted(model.named_parameters(remove_duplicate=True)):
        digest.update(f"{name}|{parameter.dtype}|{tuple(parameter.shape)}\n".encode())
        values = parameter.detach().to("cpu").contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _write_weights(model: PreTrainedModel, folder: Path, dtype: str | None) -> None:
    if dtype is None or model.dtype == _DTYPES[dtype]:
        model.save_pretrained(folder)
        return
    converted = {
        name: value.to(_DTYPES[dtype]) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(folder, state_dict=converted)
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def _replace(fresh: Path, target: Path) -> None:
    """Rename `fresh` over `target`. A folder cannot be renamed over a full one, so the old one steps aside first."""
    if not target.exists():
        fresh.rename(target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
    old = target.rename(aside / target.name)
    try:
        fresh.rename(target)
    except BaseException:
        old.rename(target)
        raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _checked_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.exists():
        raise InputError("does not exist", path=folder, hint=_GET_FOLDER)
    if not folder.is_dir():
        raise InputError("is not a folder", path=folder, hint=_GET_FOLDER)
    return folder


def _line(error: Exception) -> str:
    """The first line of an error's text; loaders answer with whole paragraphs."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and only errors from Transformers inside; its settings are as before afterwards."""
    bars = transformers_logging.is_progress_bar_enabled()
    logger = transformers_logging.get_logger("transformers")
    level = logger.level
    transformers_logging.disable_progress_bar()
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
