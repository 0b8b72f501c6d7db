"""Tokenizers on disk, and whose an adapter's folder is. No torch: of a policy on a server this is all that is read."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from turntree.core.errors import InputError, first_line
from turntree.engine.hub import folder_of
from turntree.run.identity import fingerprint
from turntree.run.jsonl import read_config

ADAPTER, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TOKENIZERS = ("tokenizer.json", "tokenizer_config.json")
GET_FOLDER = "give the folder of a checkpoint on this machine (config.json, *.safetensors, tokenizer.json)"


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in folder `path`, for an adapter without one that of its base. Raises `InputError` when it is
    missing."""
    folder = checked_folder(path)
    if (folder / ADAPTER).is_file() and not any((folder / name).is_file() for name in _TOKENIZERS):
        folder = checked_folder(base_of(folder))
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError("has no tokenizer (tokenizer.json)", path=folder, hint=GET_FOLDER)
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the boundary to foreign files and foreign code
        raise InputError(f"the tokenizer cannot be loaded ({first_line(error)})", path=folder) from error
    return tokenizer


def base_of(folder: Path) -> str:
    """The folder of the model that the adapter in `folder` belongs to, fetched where it names one of the Hub."""
    config, field = folder / ADAPTER, "base_model_name_or_path"
    name = read_config(config).get(field)
    if not isinstance(name, str):
        raise InputError("is missing", path=config, field=field, hint="name the base's folder")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise InputError(f"has no {ADAPTER_WEIGHTS}", path=folder, hint="save the adapter again, as safetensors")
    try:
        base = str(folder_of(name))
    except InputError as error:
        raise InputError(f"{name!r} {error.problem}", path=config, field=field, hint=error.hint) from error
    if (Path(base) / ADAPTER).is_file() or not (Path(base) / "config.json").is_file():
        hint = "name the folder of the base that the adapter was trained on"
        raise InputError(f"{base!r} is not the folder of a whole model here", path=config, field=field, hint=hint)
    return base


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of everything in a tokenizer that decides token ids: vocabulary, merges, normaliser, added and special
    tokens, but not the chat template. Saving and loading keeps it."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules: dict[str, Any] = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    else:
        rules = json.loads(backend.to_str())
        for setting in ("truncation", "padding"):  # of a call, not of the tokenizer
            rules.pop(setting, None)
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return fingerprint([rules, special], 16)


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the chat template (or templates)."""
    return fingerprint(tokenizer.chat_template, 16)


def checked_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.exists():
        raise InputError("does not exist", path=folder, hint=GET_FOLDER)
    if not folder.is_dir():
        raise InputError("is not a folder", path=folder, hint=GET_FOLDER)
    if (inside := folder / "model").is_dir() and not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError("is no model", path=folder, hint=f"of a run, name its model: {inside}")
    return folder


@contextmanager
def quiet() -> Iterator[None]:
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
