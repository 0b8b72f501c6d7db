"""Runs in processes of their own that die by SIGKILL, and what they leave behind.

The processes are forked from a server that has imported the stages and run nothing, so a start costs no import. Before
Python 3.13 the server looks for modules where its environment says, not where this process does, and passes over what
it does not find.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from turntree.core.errors import InputError

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["turntree.stages.sft", "turntree.stages.train_pivot", "pytest", "tiny_models", "killed_runs"]
)
OPERATIONS = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove")

Stage = Callable[[Path], Any]


def finished(stage: Stage, out: Path) -> bool:
    """Run to the end."""
    return not _died(_start(stage, out))


def killed_after(seconds: float, stage: Stage, out: Path) -> bool:
    """Kill the run so long after its process was asked for; False where it had ended before."""
    process = _start(stage, out)
    process.join(seconds)
    process.kill()
    return _died(process)


def killed_at(operation: int, stage: Stage, out: Path) -> bool:
    """Kill the run just before its `operation`-th file operation in `out`; False where it had ended before."""
    return _died(_start(stage, out, operation))


def artifacts(out: Path) -> dict[str, Any]:
    """Everything that a run left, without the fields under `timing`, and without what a kill left half-written under a
    temporary name (`run.files`): nothing reads it."""
    found = [path for path in sorted(out.rglob("*")) if path.is_file()]
    return {str(path.relative_to(out)): _contents(path) for path in found if path.suffix != ".tmp"}


def _start(stage: Stage, out: Path, operation: int = 0) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    process = SERVER.Process(target=_work, args=(stage, out, operation))
    process.start()
    return process


def _died(process: Any) -> bool:
    process.join()
    assert process.exitcode in (0, -signal.SIGKILL), "the stage failed on its own"
    return process.exitcode != 0


def _work(stage: Stage, out: Path, operation: int) -> None:
    countdown = operation

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal countdown
        if event in OPERATIONS and str(arguments[0]).startswith(str(out)):
            countdown -= 1
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)  # Python raises an event before every such operation
    if (out / "cost.json").exists():  # killed after its last act: nothing is left to do but tidy up
        with contextlib.suppress(InputError):
            stage(out)
    else:
        stage(out)


def _contents(path: Path) -> Any:
    match path.suffix:
        case ".json":
            return _timeless(json.loads(path.read_text()))
        case ".jsonl":
            return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
        case ".safetensors":  # its header lists remarks in any order
            size = int.from_bytes(path.read_bytes()[:8], "little")
            header = json.loads(path.read_bytes()[8 : 8 + size])
            return header, path.read_bytes()[8 + size :]
        case _:
            return path.read_bytes()


def _timeless(value: Any) -> Any:
    if isinstance(value, list):
        return [_timeless(v) for v in value]
    return {k: _timeless(v) for k, v in value.items() if k != "timing"} if isinstance(value, dict) else value
