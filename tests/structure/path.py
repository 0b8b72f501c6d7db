"""The reader's path: `python tests/structure/path.py` lists the files that run in one PivotRL step, one online step,
one fork and one gate decision, with the lines of the functions that run, and of the files.

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
from types import CodeType, FrameType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
LIBRARY = REPOSITORY / "src" / "turntree"
ON_TRUST = ("core", "engine", "render")


def traced(owner: type, name: str, codes: set[CodeType]) -> None:
    """Add the code of the functions that run within the method to `codes`."""
    method: Callable[..., Any] = getattr(owner, name)

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":  # of an import
            codes.add(frame.f_code)

    @functools.wraps(method)
    def wrapped(*arguments: Any, **named: Any) -> Any:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            return method(*arguments, **named)
        finally:
            sys.setprofile(before)

    setattr(owner, name, wrapped)


def paths() -> dict[str, dict[Path, int]]:
    """The files of each path, in the order of their names, with the lines of their functions that run."""
    sys.path[:0] = [str(REPOSITORY / "src"), str(REPOSITORY / "tests")]
    from golden import BEFORE, RUNS
    from turntree.cli.main import main
    from turntree.rollout import scheduler
    from turntree.train.online import OnlineGRPO
    from turntree.train.pivot import PivotRL

    found: dict[str, set[CodeType]] = {name: set() for name in ("PivotRL step", "online step", "fork", "gate decision")}
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
    return {name: _by_file(codes) for name, codes in found.items()}


def _by_file(codes: set[CodeType]) -> dict[Path, int]:
    run: dict[Path, set[int]] = {}
    for code in codes:
        lines = [line for _, _, line in code.co_lines() if line is not None]
        run.setdefault(Path(code.co_filename), set()).update(range(code.co_firstlineno, max(lines) + 1))
    return {path: len(run[path]) for path in sorted(run) if _counts(path)}


def _counts(path: Path) -> bool:
    return path.is_relative_to(LIBRARY) and path.relative_to(LIBRARY).parts[0] not in ON_TRUST


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


if __name__ == "__main__":
    for name, files in paths().items():
        print(f"\n{name}: {sum(files.values()):,} lines run, of {sum(map(lines, files)):,} in {len(files)} files")
        for path, run in files.items():
            print(f"  {run:5} of {lines(path):5} {path.relative_to(LIBRARY)}")
