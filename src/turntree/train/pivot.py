"""PivotRL, Algorithm 1: GRPO on one-turn rollouts at selected states of expert traces, or of the policy's own path.

`pivots.profile` and `pivots.select` choose the states beforehand; a step is `train.loop.RolloutAlgorithm.step`, after a
search for own states where one is due.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from turntree.core import seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import Engine, Renderer, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import censored
from turntree.credit.checked import credit_of, over_batch
from turntree.rollout.local import Prompted, occurrences_of, sample_local, score_wave
from turntree.run.means import mean
from turntree.train.config import PivotConfig
from turntree.train.loop import RolloutAlgorithm, Row, StepResult, Trainee
from turntree.train.sampler import PivotSampler


@dataclass(frozen=True)
class Pivot:
    """A training state, why it is in the mix ("pivot", "anchor" or "random"), and how often it is drawn, relative to
    the others. `own`: it is of the policy's own path, and a later search replaces it or shares the draws with it."""

    prompted: Prompted
    kind: str
    role: str
    weight: float = 1.0
    own: bool = False


@dataclass(frozen=True)
class SearchResult:
    """Pivots of the policy's own path, what finding them cost, and figures of how they were found."""

    pivots: Sequence[Pivot]
    cost: Cost = NO_COST
    figures: Mapping[str, Any] = field(default_factory=dict[str, Any])


class OwnPath(Protocol):
    """Where pivots on the policy's own path come from."""

    @property
    def keep(self) -> float:
        """Share of the weight of own pivots that earlier ones keep when new ones come (0: they are replaced)."""
        ...

    def due(self, step: int) -> bool:
        """Whether a step begins with new ones."""
        ...

    def draw(self, step: int, number: int) -> SearchResult:
        """New ones, from episodes of the policy as it is before the step; the `number` of this search is from 0."""
        ...

    def again(self, step: int) -> Sequence[Pivot]:
        """The pivots that `draw(step)` gave, for a run that resumes."""
        ...


@dataclass(frozen=True)
class PivotGroup:
    """One pivot's rollouts in one wave."""

    pivot: Pivot
    tree: RolloutTree
    rewards: Rewards


# judged rollouts at states, by a seed
Draw = Callable[[Sequence[Prompted], int], list[tuple[RolloutTree, Rewards]]]


def draw_local(
    prompted: Sequence[Prompted],
    engine: Engine,
    renderer: Renderer,
    verifier: TurnVerifier,
    config: PivotConfig,
    seed: int,
    occurrences: Sequence[int] | None = None,
) -> list[tuple[RolloutTree, Rewards]]:
    """The groups of one wave (or of a part of it, where `occurrences` are those in the whole): sampled and judged. What
    a verifier draws at a state that comes again is keyed by its occurrence, because another worker may judge that."""
    numbers = occurrences_of(prompted) if occurrences is None else occurrences
    trees = sample_local(prompted, engine, renderer, config.sampling, config.group_size, seed, occurrences=numbers)
    found: dict[int, Rewards] = {}
    for number in sorted(set(numbers)):
        places = [place for place, occurrence in enumerate(numbers) if occurrence == number]
        grown = [(trees[place], prompted[place].state) for place in places]
        draws = seeds.again(seed, 0, number)
        found |= zip(places, score_wave(grown, verifier, cut_turns=config.cut_turns, seed=draws), strict=True)
    return [(tree, found[place]) for place, tree in enumerate(trees)]


class PivotRL(RolloutAlgorithm[PivotGroup]):
    """PivotRL on `pivots` (which may be empty where `own` adds pivots of the policy's own path). `draw` samples and
    judges elsewhere than here."""

    def __init__(
        self,
        policy: Trainee,
        config: PivotConfig,
        pivots: Sequence[Pivot],
        verifier: TurnVerifier,
        *,
        own: OwnPath | None = None,
        draw: Draw | None = None,
    ) -> None:
        if own is None and not any(pivot.weight > 0 for pivot in pivots):
            raise InputError("there is no pivot to train on", hint="raise the threshold, or profile more candidates")
        super().__init__(policy, config, config.steps)
        self.config, self.verifier, self.own = config, verifier, own
        self.check_every = math.ceil(config.steps / 4) if config.check_every is None else config.check_every
        self.pivots = list(pivots)
        self._draw = draw or (
            lambda shown, seed: draw_local(shown, self.engine, self.policy.renderer, verifier, config, seed)
        )
        self._estimator = config.loss.estimator(config.credit)
        self.sampler = PivotSampler(
            [pivot.weight for pivot in self.pivots], config.seed, _traces(self.pivots), config.per_trace
        )
        self._refreshed: list[int] = []  # the steps that began with new pivots of the policy's own path
        self._spent: Row = {}  # what was spent before the update of this step

    def state(self) -> Row:
        return {**super().state(), "curriculum": self.sampler.state(), "refreshed": self._refreshed}

    def restore(self, state: Row) -> None:
        super().restore(state)
        if self.own is not None:
            for earlier in state["refreshed"]:
                self._enter(self.own, self.own.again(earlier), earlier)
        self.sampler.restore(state["curriculum"])

    def step(self, step: int) -> StepResult:
        searched = self._search(self.own, step) if self.own and self.own.due(step) else {}
        result = super().step(step)
        return replace(result, row={**result.row, **searched})

    # own states

    def _search(self, own: OwnPath, step: int) -> Row:
        """New pivots of the policy's own path."""
        found = own.draw(step, len(self._refreshed))
        self.engine.clear_cache()  # the step must not see the search
        self.cost += found.cost
        if not self.pivots and not found.pivots:
            problem = f"no state of the policy's own path is a pivot ({dict(found.figures)})"
            hint = "play more tasks (own.tasks), or look at the verifier and, where there is one, the teacher"
            raise InputError(problem, field="own", hint=hint)
        self._enter(own, found.pivots, step)
        return {"own_path": {**found.figures, "cost": found.cost.counts()}}

    def _enter(self, own: OwnPath, pivots: Sequence[Pivot], step: int) -> None:
        """Put new pivots of the policy's own path in place of the earlier ones, or beside them (`OwnPath.keep`); where
        there are none, these stay."""
        self._refreshed.append(step)
        if not pivots:
            return
        earlier, weights = [i for i, pivot in enumerate(self.pivots) if pivot.own], [pivot.weight for pivot in pivots]
        if earlier and own.keep:  # together they weigh what the new ones would alone
            self.sampler.scale(earlier, own.keep * sum(weights))
            weights = [(1 - own.keep) * weight for weight in weights]
        else:
            self.sampler.remove(earlier)
        self.sampler.add(weights, _traces(pivots))
        self.pivots += pivots

    # a step

    def sample(self, step: int) -> Sequence[PivotGroup]:
        batch = [self.pivots[index] for index in self.sampler.draw(self.config.groups, step)]
        drawn = self._draw([pivot.prompted for pivot in batch], seeds.derive(self.config.seed, "train", step))
        self.cost = sum((tree.cost + rewards.cost for tree, rewards in drawn), self.cost)
        self._spent = {"turns": self.cost.turns, "spent": self.cost.counts(), "timing": {"seconds": self.cost.seconds}}
        return [PivotGroup(pivot, tree, rewards) for pivot, (tree, rewards) in zip(batch, drawn, strict=True)]

    def credit(self, step: int, groups: Sequence[PivotGroup]) -> Sequence[Credit | None]:
        scored = [group_outcome(group.rewards.values) is not GroupOutcome.CENSORED for group in groups]
        rule = over_batch(self._estimator, [group.rewards for group, kept in zip(groups, scored, strict=True) if kept])
        return [
            credit_of(rule, group.tree, group.rewards) if kept else None
            for group, kept in zip(groups, scored, strict=True)
        ]

    def observe(self, step: int, groups: Sequence[PivotGroup], credits: Sequence[Credit | None]) -> Row:
        return {**_reward_metrics(groups), "live_pivots": self.sampler.live, **self._spent}


def _traces(pivots: Sequence[Pivot]) -> list[str]:
    return [pivot.prompted.state.trace_id for pivot in pivots]


def _reward_metrics(groups: Sequence[PivotGroup]) -> dict[str, Any]:
    """Mean reward, overall and by kind of demonstrated action; mixed groups; censored rollouts."""
    everything: list[float] = []
    by_kind: dict[str, list[float]] = defaultdict(list)
    reasons = censored(verdict for group in groups for verdict in group.rewards.verdicts.values())
    outcomes = [group_outcome(group.rewards.values) for group in groups]
    cut = 0
    for group in groups:
        scored = list(group.rewards.scored().values())
        everything += scored
        by_kind[group.pivot.kind] += scored
        cut += sum(group.tree.stop_reason(leaf) is StopReason.MAX_TOKENS for leaf in group.rewards.verdicts)
    return {
        "reward_mean": mean(everything),
        "reward_std": statistics.pstdev(everything) if everything else None,  # of the batch (paper, Figure 3)
        "mixed_groups": outcomes.count(GroupOutcome.MIXED) / len(groups),
        "rollouts": sum(len(group.rewards.verdicts) for group in groups),
        "censored": sum(reasons.values()),
        "censored_reasons": reasons,
        "cut_turns": cut,
        "reward_by_kind": {kind: mean(scored) for kind, scored in sorted(by_kind.items())},
    }
