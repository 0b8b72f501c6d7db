"""What each filter saved, on one ledger: every group has one fate, so nothing is counted twice.

A skipped prompt (GRESO) and the turns that a cut group no longer plays (gate) were never paid for, so their price is
an estimate: the mean of what the groups of this run cost that were not cut, and for a cut rollout the mean of what
their rollouts that were alive at the same turn went on to cost. It assumes that cut groups would have gone on like the
rest; an audited share, or an arm without the gate, measures it. What DAPO keeps out of the update is known exactly.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from turntree.core.additive import Additive
from turntree.core.cost import NO_COST, Cost
from turntree.core.tree import RolloutTree, StopReason
from turntree.rollouts.groups import GrownGroup


@dataclass(frozen=True, kw_only=True)
class Saving(Additive):
    """Means times counts, hence fractions. `seconds` are those of engine and environments."""

    turns: float = 0.0
    decoded_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    tool_calls: float = 0.0
    trained_tokens: float = 0.0
    seconds: float = 0.0

    def __mul__(self, times: int) -> Saving:
        return Saving(**{f.name: getattr(self, f.name) * times for f in dataclasses.fields(self)})

    @classmethod
    def mean(cls, total: Cost, count: int) -> Saving:
        """The mean of `count` costs that add up to `total`."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: getattr(total, name) / count for name in names}) if count else cls()


@dataclass
class _Sum:
    total: Cost = NO_COST
    count: int = 0

    def add(self, cost: Cost) -> None:
        self.total += cost
        self.count += 1

    @property
    def mean(self) -> Saving:
        return Saving.mean(self.total, self.count)


class SavingsLedger:
    """Tell it every group that came back, every skipped prompt, and what was kept out of an update."""

    def __init__(self) -> None:
        self.saved = {"greso": Saving(), "gate": Saving(), "dapo": Saving()}
        self._group = _Sum()
        self._after: dict[int, _Sum] = defaultdict(_Sum)  # by turn: what a rollout alive then went on to cost

    def came_back(self, group: GrownGroup) -> None:
        tree = group.tree
        if group.cut is not None:
            alive = sum(tree.stop_reason(leaf) is StopReason.GATED for leaf in tree.leaves())
            self.saved["gate"] += self._after[group.cut].mean * alive
            return
        self._group.add(tree.cost)
        paid: set[int] = set()
        for leaf in tree.leaves():
            own = [node for node in tree.path(leaf) if node.id not in paid]  # a branch begins where it was made
            paid.update(node.id for node in own)
            for turn in range(max(1, own[0].turn), own[-1].turn):
                self._after[turn].add(sum((node.cost for node in own if node.turn > turn), NO_COST))

    def skipped(self, prompts: int) -> None:
        self.saved["greso"] += self._group.mean * prompts

    def dropped(self, tree: RolloutTree) -> None:
        """A finished group that stayed out of the update: every token position of its tree."""
        self.saved["dapo"] += Saving(trained_tokens=sum(len(node.token_ids) for node in tree))

    def counts(self) -> dict[str, dict[str, float]]:
        """What was saved so far, by filter, without the clock."""
        return {
            name: {key: value for key, value in dataclasses.asdict(saving).items() if key != "seconds"}
            for name, saving in self.saved.items()
        }

    def seconds(self) -> dict[str, float]:
        return {name: saving.seconds for name, saving in self.saved.items()}

    def state(self) -> dict[str, Any]:
        """A JSON value that `restore` takes back."""
        after = {str(turn): _state(part) for turn, part in self._after.items()}
        saved = {name: dataclasses.asdict(saving) for name, saving in self.saved.items()}
        return {"saved": saved, "group": _state(self._group), "after": after}

    def restore(self, state: dict[str, Any]) -> None:
        self.saved = {name: Saving(**row) for name, row in state["saved"].items()}
        self._group = _sum(state["group"])
        self._after = defaultdict(_Sum, {int(turn): _sum(row) for turn, row in state["after"].items()})


def _state(part: _Sum) -> dict[str, Any]:
    return {"total": dataclasses.asdict(part.total), "count": part.count}


def _sum(row: dict[str, Any]) -> _Sum:
    return _Sum(Cost(**row["total"]), row["count"])
