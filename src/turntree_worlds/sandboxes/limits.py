"""The limits of one execution, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from turntree.core.config import FIXED, Above0, Bounded, Positive

EPOCH = 1_577_836_800  # 1 January 2020: old enough for listings to show the date alone
Language = Literal["python", "shell"]
FileKind = Literal["file", "folder", "link"]


@dataclass(frozen=True)
class File:
    """One entry of the scratch folder; `data` is what a file holds, or where a link leads. `time` (of the last change)
    is in seconds, and no part of what makes two entries equal."""

    data: bytes = b""
    kind: FileKind = "file"
    mode: int = 0o644
    time: int = field(default=EPOCH, compare=False)


Files = Mapping[str, File]
"""The scratch folder as a value, by path below it. It is never changed in place, so any number of states share it."""


@dataclass(frozen=True, kw_only=True)
class Limits(Bounded):
    """Bounds of one execution."""

    seconds: Above0 = 10.0
    """Wall-clock time of one execution."""
    memory_bytes: Positive = 512 * 2**20
    """Address space of a process, so a box may use up to `processes` times as much."""
    processes: Positive = field(default=16, metadata=FIXED)
    """Processes of a box, threads included."""
    disk_bytes: Positive = field(default=32 * 2**20, metadata=FIXED)
    """Size of the whole scratch folder."""
    output_bytes: Positive = field(default=16 * 2**10, metadata=FIXED)
    """Bytes of each stream that are kept."""


@dataclass(frozen=True, kw_only=True)
class SandboxConfig(Bounded):
    """Where programs of the policy run."""

    limits: Limits = Limits()
    boxes: Positive = field(default=2, metadata=FIXED)
    """Executions that may run at once."""
    packages: tuple[str, ...] = ()
    """Folders of importable packages that programs may read."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """The result of one program. `value` is the repr of a last line that is an expression (Python only; None when there
    is none or it is None). `exit_code` is 128 + n where signal n ended the program, and None where it was ended for its
    time or amount of output."""

    stdout: str
    stderr: str
    value: str | None
    truncated: bool  # more was written than `output_bytes`
    timed_out: bool
    exit_code: int | None
    seconds: float
    files: Files | None = None  # of a program that ran among files: what became of them
    not_kept: str | None = None  # why they cannot be kept, where that is so

    @property
    def failed(self) -> bool:
        return self.exit_code != 0
