"""The reader's path: `python tests/structure/path.py` lists the files that run in one PivotRL step, one online step,
one fork and one gate decision, with their lines.

It traces short trainings of the embedded household policy. Engines, renderers, worlds and the plain values of `core`
are taken on trust: what is counted is what a reader opens to follow the method.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "src" / "turntree"
ON_TRUST = ("core", "engine", "render")


def traced(owner: type, name: str, files: set[Path]) -> None:
    """Add the files of the library whose functions run within the method to `files`."""
    method: Callable[..., Any] = getattr(owner, name)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":  # of an import
            files.add(Path(frame.f_code.co_filename))

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return method(*arguments, **named)
        finally:
            sys.setprofile(before)

    setattr(owner, name, wrapped)


def paths() -> dict[str, list[Path]]:
    """The files of each path, in the order of their names."""
    sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]
    from golden import BEFORE, RUNS
    from turntree.cli.main import main
    from turntree.rollout import scheduler
    from turntree.train.online import OnlineGRPO
    from turntree.train.pivot import PivotRL

    found: dict[str, set[Path]] = {"PivotRL step": set(), "online step": set(), "fork": set(), "gate decision": set()}
    traced(PivotRL, "step", found["PivotRL step"])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)

        def run(*commands: tuple[Any, ...]) -> None:
            for words in commands:
                main([str(word) for word in words])

        run(*BEFORE, (*RUNS["pivot"], "--steps", 1, "--out", "pivot"))
        step = OnlineGRPO.step
        traced(OnlineGRPO, "step", found["online step"])
        run(("train", "online", *RUNS["online"][2:-4], "--iterations", 1, "--out", "online"))
        OnlineGRPO.step = step  # a fork is not a part of the path of every step
        traced(scheduler._Turns, "_decide", found["fork"])
        traced(scheduler._Turns, "_fork", found["fork"])
        traced(scheduler._Run, "_ask_gate", found["gate decision"])
        run((*RUNS["forks"], "--iterations", 1, "--out", "forks"))
        os.chdir(REPOSITORY)
    return {name: sorted(path for path in files if _counts(path)) for name, files in found.items()}


def _counts(path: Path) -> bool:
    return path.is_relative_to(LIBRARY) and path.relative_to(LIBRARY).parts[0] not in ON_TRUST


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    for name, files in paths().items():
        print(f"\n{name}: {len(files)} files, {sum(map(lines, files)):,} lines")
        for path in files:
            print(f"  {lines(path):5} {path.relative_to(LIBRARY)}")
