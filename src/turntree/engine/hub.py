"""Models on the Hugging Face Hub: fetched into the cache that Transformers uses."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

from turntree.core.errors import InputError
from turntree.run.jsonl import read_config

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
_FILES = ["*.json", "*.jinja", "*.safetensors", "*.model", "*.txt"]  # no pickle, and no code
# copies in other formats: all folders but additional_chat_templates, which these patterns cannot name as one
_LEAVE = ["[!a]*/*", "a[!d]*/*", "consolidated*"]
_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]


def folder_of(source: str, *, weights: bool = True) -> Path:
    """The folder `source`, or the local copy of the model of that name on the Hub (`owner/name` or
    `owner/name@revision`), fetched where it is not in the cache, with its weights or without.

    `source` is taken as a path where it or its parent folder exists. Raises `InputError` for a model that the Hub does
    not have, that may not be read, or that cannot be fetched.
    """
    path = Path(source)
    if path.exists() or path.parent.is_dir() or not _NAME.fullmatch(source):
        return path
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        leave = _LEAVE if weights else [*_LEAVE, *_WEIGHTS]
        found = snapshot_download(name, revision=revision or None, allow_patterns=_FILES, ignore_patterns=leave)
    except Exception as error:  # the boundary to a server
        _refuse(source, error)
    return Path(found)


def context_of(folder: Path) -> int | None:
    """The context length of the model in a folder, where its config.json tells one. Raises `InputError`."""
    row = read_config(folder / "config.json")
    row = row.get("text_config", row)
    length = row.get("max_position_embeddings") if isinstance(row, dict) else None
    return length if type(length) is int and length > 0 else None


def _refuse(source: str, error: Exception) -> NoReturn:
    """Raise one line that says whether the model, the permission or the connection is missing."""
    from huggingface_hub import constants, errors

    line = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
    kinds: list[tuple[type[Exception], str, str]] = [
        (errors.GatedRepoError, "asks for permission", "ask for access on its page, then `hf auth login`"),
        (errors.RevisionNotFoundError, "does not have this revision", "leave @REVISION out, or correct it"),
        (errors.RepositoryNotFoundError, "does not show it", "correct the name, or `hf auth login` if it is private"),
        (errors.HFValidationError, "takes no such name", "write OWNER/NAME"),
    ]
    for kind, what, hint in kinds:
        if isinstance(error, kind):
            raise InputError(f"is not a folder here, and the Hub {what}", path=source, hint=hint) from error
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else line
    problem = f"is not a folder here, and the Hub cannot be reached ({why})"
    hint = "give the folder of a model on this machine, or try again when online"
    raise InputError(problem, path=source, hint=hint) from error
