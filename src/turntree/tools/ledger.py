"""What the tools of a run were asked and what they did for it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from turntree.core.additive import Additive


@dataclass(frozen=True, kw_only=True)
class ToolCounts(Additive):
    """Additive counters of one tool. Laws: calls = hits + joined + misses + refused (once nothing is in flight), and
    executions = misses + retries; executions are the *fresh* calls, `failures` and `abandoned` are among them."""

    calls: int = 0
    hits: int = 0  # answered before
    joined: int = 0  # waited for an identical call that was under way
    misses: int = 0  # had to be executed
    refused: int = 0  # no such tool, or wrong arguments
    retries: int = 0  # executed again because an execution failed
    failures: int = 0  # calls that no execution answered
    abandoned: int = 0  # executions that were still running at their time limit
    truncated: int = 0  # answers cut to the output cap
    seconds: float = 0.0  # of executions

    @property
    def executions(self) -> int:
        return self.misses + self.retries


class ToolLedger:
    """Counts of every tool, by name; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, ToolCounts] = {}

    def add(self, tool: str, counts: ToolCounts) -> None:
        with self._lock:
            self._counts[tool] = self._counts.get(tool, ToolCounts()) + counts

    def counts(self) -> dict[str, ToolCounts]:
        with self._lock:
            return dict(self._counts)

    def total(self) -> ToolCounts:
        return sum(self.counts().values(), ToolCounts())
