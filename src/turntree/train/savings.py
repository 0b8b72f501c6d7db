"""What each filter saved, compared with the same iteration without it.

Gate: an estimate. The turns after a cut were not sampled, so each rollout alive at the cut is priced at the mean
remaining cost of rollouts of whole groups that were alive at the same turn, minus what faster ones had played beyond
the cut when it came. This assumes that cut groups would have continued like the others; an audited share, or an arm
without the gate, measures it.

DAPO, and filters of one's own: exact, given the groups that were played. Saved are the tokens that an update on the
groups of the first round would have computed beyond those that were trained. Refills would not have been played, so
their cost is negative, and that of the filter whose drop they replaced.

GRESO: not a saving in itself. Another prompt takes the place of a skipped one, so the work is redirected. Only the
refills that DAPO would have requested for the skipped groups can be saved. Their outcomes are unknown, so only a bound
is given: as many groups as were skipped, and as many as the cap on refills had left.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core.cost import NO_COST, Additive, Cost
from turntree.core.tree import Node, RolloutTree, StopReason
from turntree.rollout.groups import GrownGroup


@dataclass(frozen=True, kw_only=True)
class Saving(Additive):
    """Means times counts, hence fractions. `seconds` are those of engine and environments."""

    turns: float = 0.0
    decoded_tokens: float = 0.0
    prefilled_tokens: float = 0.0
    tool_calls: float = 0.0
    trained_tokens: float = 0.0
    seconds: float = 0.0

    def __mul__(self, times: float) -> Saving:
        return Saving(**{f.name: getattr(self, f.name) * times for f in dataclasses.fields(self)})

    @classmethod
    def mean(cls, total: Cost, count: int) -> Saving:
        """The mean of `count` costs that add up to `total`."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**{name: getattr(total, name) / count for name in names}) if count else cls()


@dataclass(frozen=True, kw_only=True)
class Redirected(Additive):
    """`prompts` that GRESO skipped and replaced by others, each counted once per iteration."""

    prompts: int = 0
    refills_avoided_at_most: int = 0  # groups


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
    """Call it with every finished group, and with what each iteration skipped and filtered."""

    def __init__(self) -> None:
        self.saved = {"gate": Saving(), "dapo": Saving()}
        self.redirected = Redirected()
        self._after: dict[int, _Sum] = defaultdict(_Sum)  # by turn: remaining costs of rollouts alive then

    def came_back(self, group: GrownGroup) -> None:
        tree = group.tree
        if group.cut is not None:
            alive = [leaf for leaf in tree.leaves() if tree.stop_reason(leaf) is StopReason.GATED]
            if (after := self._after[group.cut]).count:
                beyond = sum((tree[leaf].cost for leaf in alive), NO_COST)  # in the empty observation that each ends in
                self.saved["gate"] += after.mean * len(alive) + Saving.mean(beyond, 1) * -1
            return
        paid: set[int] = set()
        for end in tree.ends():
            own = [(turn, node) for turn, node in _by_turn(tree, end) if node.id not in paid]
            paid.update(node.id for _, node in own)  # a branch begins where it was made
            for turn in range(max(1, own[0][0]), own[-1][0]):
                self._after[turn].add(sum((node.cost for at, node in own if at > turn), NO_COST))

    def skipped(self, tasks: Sequence[str], *, refills_left: int) -> None:
        """The tasks that an iteration skipped, once for every time, and how many further refills its cap allowed."""
        avoided = min(len(tasks), refills_left)
        self.redirected += Redirected(prompts=len(set(tasks)), refills_avoided_at_most=avoided)

    def filtered(self, part: str, trained_tokens: int, refills: Sequence[Cost]) -> None:
        """The tokens by which an iteration's filter reduced the update, and the cost of each refill of what it
        dropped."""
        played = Saving.mean(sum(refills, NO_COST), 1)
        before = self.saved.get(part, Saving())
        self.saved[part] = before + Saving(trained_tokens=trained_tokens) + played * -1

    def counts(self) -> dict[str, dict[str, float]]:
        """What was saved and redirected so far, by filter, without seconds."""
        saved = {
            name: {key: value for key, value in dataclasses.asdict(saving).items() if key != "seconds"}
            for name, saving in self.saved.items()
        }
        return {"greso": dataclasses.asdict(self.redirected), **saved}

    def seconds(self) -> dict[str, float]:
        return {name: saving.seconds for name, saving in self.saved.items()}

    def state(self) -> dict[str, Any]:
        """A JSON value that `restore` takes back."""
        after = {str(turn): _state(part) for turn, part in self._after.items()}
        saved = {name: dataclasses.asdict(saving) for name, saving in self.saved.items()}
        return {"saved": saved, "redirected": dataclasses.asdict(self.redirected), "after": after}

    def restore(self, state: dict[str, Any]) -> None:
        self.saved = {name: Saving(**row) for name, row in state["saved"].items()}
        self.redirected = Redirected(**state["redirected"])
        self._after = defaultdict(_Sum, {int(turn): _sum(row) for turn, row in state["after"].items()})


def _by_turn(tree: RolloutTree, end: int) -> list[tuple[int, Node]]:
    """The nodes of a rollout with its turns so far, which go on where its context was rewritten."""
    turn, found = 0, list[tuple[int, Node]]()
    for node in map(tree.__getitem__, tree.nodes_of(end)):
        above = None if node.parent is None else tree[node.parent]
        turn += node.sampled and not (above is not None and above.sampled)
        found.append((turn, node))
    return found


def _state(part: _Sum) -> dict[str, Any]:
    return {"total": dataclasses.asdict(part.total), "count": part.count}


def _sum(row: dict[str, Any]) -> _Sum:
    return _Sum(Cost(**row["total"]), row["count"])
