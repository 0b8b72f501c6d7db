"""The run directory: `config.json`, `metrics.jsonl`, `cost.json`, and what the stage makes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from turntree.core.cost import NO_COST, Cost
from turntree.observe import files

T = TypeVar("T")


class RunDirectory:
    """One stage's output folder. Metrics are appended and flushed a line at a time; everything else is atomic."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)

    def start(self, stage: str, config: dict[str, Any]) -> None:
        """Write the resolved configuration and begin a new metrics file."""
        files.write_json(self.path / "config.json", {"stage": stage, "config": config})
        (self.path / "metrics.jsonl").write_text("", encoding="utf-8")

    def log(self, row: dict[str, Any]) -> None:
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(row, allow_nan=False) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The rows logged so far. Raises `InputError` for a line that is not JSON."""
        path = self.path / "metrics.jsonl"
        lines = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        return [files.parse_line(text, path, number) for number, text in lines]

    def write_cost(self, cost: Cost, checks: Cost = NO_COST) -> None:
        """The bill of the stage; what held-out checks spent is an entry of its own."""
        bill = {**cost.counts(), "timing": cost.timing()}
        files.write_json(self.path / "cost.json", {**bill, "checks": {**checks.counts(), "timing": checks.timing()}})


def progress(items: Iterable[T], what: str, total: int | None = None, *, quiet: bool = False) -> tqdm[T]:
    """Progress on standard error (standard output carries results only); `quiet` inside another bar."""
    return tqdm(items, desc=what, total=total, file=sys.stderr, mininterval=1.0, dynamic_ncols=True, disable=quiet)
