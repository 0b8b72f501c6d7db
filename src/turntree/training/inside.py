"""Local rollouts in the update of whole episodes: their credit, and along with what their gradients point."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedModel

from turntree.advantages.credit import CreditRule
from turntree.advantages.local import local_credit, with_turns
from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.rollouts.acceptance import Acceptance
from turntree.rollouts.groups import GrownGroup
from turntree.training.config import OnlineConfig
from turntree.training.update import gradient


@dataclass(frozen=True)
class GrownInside:
    """The judged turns of an iteration: what they cost, figures for the row, for each group the nodes that local
    rollouts were sampled at with the kinds of their turns, what is known of the kinds, and for each group the
    advantages of turns that its episodes took, by node, in the unit of an episode's reward."""

    cost: Cost
    figures: dict[str, Any]
    places: Sequence[Mapping[int, str]]
    seen: Acceptance
    taken: Sequence[Mapping[int, float]] = ()


class Inside(Protocol):
    """What grows local rollouts inside the trees of an iteration."""

    def grow(self, groups: Sequence[GrownGroup], iteration: int) -> GrownInside: ...

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned from earlier iterations, for `restore`."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class JudgedCredits:
    """What judged turns add to the credit of a group: that of its local rollouts, and advantages of turns that its
    episodes took, by node."""

    local: Credit | None
    taken: Mapping[int, float]

    def beside(self, episodes: Credit | None) -> Credit | None:
        """Together with the credit of the whole rollouts; None where nothing is trained on."""
        if episodes is not None and self.taken:
            episodes = with_turns(episodes, self.taken)
        return episodes + self.local if episodes and self.local else episodes or self.local


@dataclass(frozen=True)
class LocalCredits:
    """Grows local rollouts, has turns judged, and gives them credit."""

    inside: Inside
    config: OnlineConfig
    model: PreTrainedModel
    shared: bool = True  # whether it is trained on packed trees

    def credits(
        self, groups: Sequence[GrownGroup], episodes: Sequence[Credit | None], iteration: int
    ) -> tuple[list[JudgedCredits], Cost, dict[str, Any]]:
        """The credit of each group's judged turns, the cost, and figures for the row. `episodes` is the credit of the
        groups' whole rollouts."""
        grown = self.inside.grow(groups, iteration)
        cost, figures, trained = grown.cost, grown.figures, set(_kinds(grown))
        if self.config.local.choose == "alignment":
            trained = {kind for kind in trained if grown.seen.trains(kind)}  # by earlier iterations
            cost += self._align(groups, episodes, grown)
            figures = {**figures, "gains": grown.seen.gains(), "trained_kinds": sorted(trained)}
        found = [self._credit(group.tree, places, trained) for group, places in zip(groups, grown.places, strict=True)]
        taken = [self._scaled(advantages) for advantages in grown.taken or [{}] * len(groups)]
        local = [credit if credit.nodes else None for credit in found]
        return [JudgedCredits(*each) for each in zip(local, taken, strict=True)], cost, figures

    def _scaled(self, advantages: Mapping[int, float]) -> dict[int, float]:
        """In the unit of the estimator's advantages, by what it makes of a group with as many successes as failures."""
        unit = self.config.local.verdicts * 2 * self._rule.advantages([1.0, 0.0] * 4)[0]
        return {node: unit * advantage for node, advantage in advantages.items()}

    @cached_property
    def _rule(self) -> CreditRule:
        return self.config.loss.estimator(self.config.credit)

    def _credit(self, tree: RolloutTree, places: Mapping[int, str], kinds: Collection[str]) -> Credit:
        return local_credit(
            tree,
            advantages=self._rule.advantages,
            per_rollout=self._rule.per_rollout,
            weight=self.config.local.weight,
            places=[node for node, kind in places.items() if kind in kinds],
        )

    def _align(self, groups: Sequence[GrownGroup], episodes: Sequence[Credit | None], grown: GrownInside) -> Cost:
        """Measure what a step along the gradient of each kind gains in the objective of the episodes."""
        started, kinds = time.perf_counter(), _kinds(grown)
        pairs = zip(groups, episodes, strict=True)
        kept = [(group.tree, credit) for group, credit in pairs if credit is not None and credit.nodes]
        if not kept or not kinds:
            return NO_COST
        wanted, tokens = self._gradient([tree for tree, _ in kept], [credit for _, credit in kept])
        length = float(wanted.norm())
        trees = [group.tree for group in groups]
        for kind, states in sorted(kinds.items()) if length else ():
            pairs = zip(trees, grown.places, strict=True)
            credits = [self._credit(tree, places, {kind}) for tree, places in pairs]
            if not any(credit.nodes for credit in credits):
                continue  # none of its local rollouts was judged
            found, more = self._gradient(trees, credits)
            tokens += more
            grown.seen.aligned(kind, float(wanted @ found) / length, states)
        return Cost(trained_tokens=tokens, training_seconds=time.perf_counter() - started)

    def _gradient(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[Tensor, int]:
        """Summed, whatever the loss divides by: the mean over a kind's tokens would be the same for one state as for
        many, and what a kind gains is divided by its states."""
        loss = self.config.loss.of(self.config.rollouts.episodes.sampling)
        loss = dataclasses.replace(loss, normalizer="constant", constant=1.0)
        return gradient(self.model, trees, credits, loss, max_tokens=self.config.max_tokens, shared=self.shared)


def _kinds(grown: GrownInside) -> Counter[str]:
    return Counter(kind for places in grown.places for kind in places.values())
