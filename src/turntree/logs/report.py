"""What reading a log counted: every line is a rollout or dropped for a reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class ReadReport:
    """Complete once the groups are read. `first` shows where each reason was met first, as "file:line"."""

    format: str
    files: int = 0
    lines: int = 0
    rollouts: int = 0
    groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once

    def drop(self, reason: str, path: Path, line: int | None = None, count: int = 1) -> None:
        self.dropped[reason] += count
        self.first.setdefault(reason, str(path) if line is None else f"{path}:{line}")

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
