"""`turntree models`: write the adapter of a server as a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.engine.checkpoint import load_model, policy_hash
from turntree.engine.limits import TinkerConfig
from turntree.engine.tokenizer import ADAPTER
from turntree.stages.tinker import fetch_adapter
from turntree.train.tinker import STATE


def get_adapter(run: Path, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the adapter that a run with --carrier tinker trained (its `model` folder names it) in PEFT's format, from
    the server at TINKER_BASE_URL. Raises `InputError` where it names none or the folder is there."""
    if not (run / STATE).is_file():
        hint = "name RUN/model of a run with --carrier tinker; a model on the Hub needs no folder: --model OWNER/NAME"
        raise InputError("names no adapter on a server", path=run, hint=hint)
    _require_new(out, overwrite)
    fetch_adapter(run, out, TinkerConfig())
    model = load_model(out)
    return {"model": str(out), "parameters": model.num_parameters(), "policy_hash": policy_hash(model)}


def _require_new(out: Path, overwrite: bool) -> None:
    if out.exists() and not overwrite:
        raise InputError("exists already", path=out, hint="pass --overwrite to replace it")
    held = list(out.iterdir()) if out.is_dir() else []
    configs = [path for path in held if path.name in ("config.json", ADAPTER)]
    if held and not (configs and all(path.is_file() for path in held)):
        raise InputError("holds more than a model, and would be replaced", path=out, hint="choose another --out")
