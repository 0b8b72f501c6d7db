"""What reading a log counted: every line is a rollout or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ReadReport:
    """Complete once the groups are read. `first` shows where each reason was met first, as "file:line". `watch` is
    called now and then while lines are read and groups are made: long logs show that they move."""

    format: str
    files: int = 0
    lines: int = 0
    rollouts: int = 0
    groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once
    watch: Callable[[ReadReport], None] | None = field(default=None, repr=False, compare=False)

    def saw_line(self) -> None:
        self.lines += 1
        if self.watch is not None and self.lines % 1024 == 0:
            self.watch(self)

    def saw_group(self, rollouts: int) -> None:
        self.groups += 1
        self.rollouts += rollouts
        if self.watch is not None and self.groups % 128 == 0:
            self.watch(self)

    def drop(self, reason: str, path: Path, line: int | None = None, count: int = 1, detail: str = "") -> None:
        """`reason` is one of few fixed texts; `detail` says more about the first line that was dropped for it."""
        self.dropped[reason] += count
        if reason not in self.first:
            place = str(path) if line is None else f"{path}:{line}"
            self.first[reason] = f"{place} ({detail[:200]})" if detail else place

    def note(self, text: str) -> None:
        self.notes[text] = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "files": self.files,
            "lines": self.lines,
            "rollouts": self.rollouts,
            "groups": self.groups,
            "dropped": dict(sorted(self.dropped.items())),
            "first_dropped": dict(sorted(self.first.items())),
            "notes": list(self.notes),
        }
