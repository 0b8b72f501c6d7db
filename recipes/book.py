"""A recipe as stages: commands that are run in a folder, recorded there, and not run again when they are done.

A recipe that is killed goes on where it was when the same command is given again. Every stage has a key of its command
and of those of all stages that it depends on, so that results of other settings are refused and not mixed.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from turntree.run.files import read_json, write_json

TURNTREE = ("-m", "turntree.cli.main")
PROGRAMS = {"torchrun": ("-m", "torch.distributed.run")}  # starts turntree on every rank
GIVEN = ("given",)  # the command of a stage that is there from the start, and is only part of others' keys


@dataclass(frozen=True)
class Stage:
    """A command of turntree (behind torchrun, on ranks), or a script of the recipe and its arguments. `result`,
    relative to the folder, exists when it is done. `needs` are the stages whose results it reads. `model` is the
    folder of weights that it makes."""

    name: str
    result: str
    command: tuple[str, ...]
    needs: tuple[Stage, ...] = ()
    codes: tuple[int, ...] = (0,)  # exit codes with which it is done: some say what was found
    key: str = field(default="", init=False)  # of all settings that the result depends on

    def __post_init__(self) -> None:
        told = json.dumps([self.command, [need.key for need in self.needs]])
        object.__setattr__(self, "key", hashlib.sha256(told.encode()).hexdigest()[:16])

    @property
    def model(self) -> str:
        return self.result.removesuffix("/cost.json") + ("/model" if self.result.endswith("/cost.json") else "")


@dataclass(frozen=True)
class Book:
    """Runs stages in `folder` and records them. Scripts lie in `scripts`; `only` is a shell pattern of the names that
    are run, and with `plan` none is."""

    folder: Path
    scripts: Path
    only: str = "*"
    plan: bool = False
    listed: set[str] = field(default_factory=set[str], init=False, repr=False)  # of a plan

    def done(self, stage: Stage) -> bool:
        """Ends the script where the stage was begun with other settings."""
        path = self._record(stage)
        if not path.exists():
            return False
        found = read_json(path)
        if found["key"] != stage.key:
            sys.exit(
                f"{stage.name} was begun with other settings:\n  {' '.join(found['command'])}\nnow:\n  "
                f"{' '.join(stage.command)}\nuse another folder, or delete {path} and {self.folder / stage.result}"
            )
        result = self.folder / stage.result  # a file is there when it is whole, also of a recipe that was killed then
        return result.is_file() or (found["finished"] and result.exists())

    def run(self, stage: Stage) -> None:
        """Nothing where the stage is done, not asked for, or lacks what it needs. Ends the script where the command
        fails."""
        done = self.done(stage)
        if self.plan and stage.name not in self.listed:
            print("done" if done else "open", stage.name)
            self.listed.add(stage.name)
        if done or self.plan or not fnmatch.fnmatch(stage.name, self.only):
            return
        if missing := [need.name for need in stage.needs if need.command != GIVEN and not self.done(need)]:
            print(f"{stage.name} waits for {', '.join(missing)}", flush=True)
            return
        told = {"command": list(stage.command), "key": stage.key, "load": [os.getloadavg()[0]]}
        write_json(self._record(stage), told | {"finished": False})
        print(shown(stage.command), flush=True)
        first = stage.command[0]
        program = (str(self.scripts / first),) if first.endswith(".py") else PROGRAMS.get(first, (*TURNTREE, first))
        began, processor = time.perf_counter(), _processor()
        code = subprocess.run([sys.executable, *program, *stage.command[1:]], cwd=self.folder).returncode
        if code not in stage.codes:
            sys.exit(code)
        seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": _processor() - processor}
        told["load"].append(os.getloadavg()[0])
        told |= {name: round(value, 1) for name, value in seconds.items()}
        write_json(self._record(stage), told | {"finished": True})
        print("  {seconds:.0f} s, of a processor {cpu_seconds:.0f} s".format(**seconds), flush=True)

    def _record(self, stage: Stage) -> Path:
        return self.folder / "stages" / f"{stage.name}.json"


def _processor() -> float:
    """Seconds of the commands so far. Of a stage that was killed and goes on, its record has the last attempt only."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(command: Sequence[str]) -> str:
    """The command as it is typed."""
    before = {"torchrun": ""}.get(command[0], "python " if command[0].endswith(".py") else "turntree ")
    return before + shlex.join(command)


def words(*parts: object) -> tuple[str, ...]:
    return tuple(map(str, parts))
