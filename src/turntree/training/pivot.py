"""PivotRL, Algorithm 1: GRPO on one-turn rollouts at selected states of expert traces, or of the policy's own path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turntree.core import seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import Engine, Estimator, Renderer, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import censored
from turntree.rollouts.local import Prompted, occurrences_of, sample_local, score_wave
from turntree.training.config import PivotConfig
from turntree.training.curriculum import Curriculum
from turntree.training.drift import DriftMonitor
from turntree.training.loop import Checked, RolloutAlgorithm, Row, StepResult, Trainee
from turntree.training.update import credit_of


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
class Drawn:
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

    def draw(self, step: int, number: int) -> Drawn:
        """New ones, from episodes of the policy as it is before the step; the `number` of this search is from 0."""
        ...

    def again(self, step: int) -> Sequence[Pivot]:
        """The pivots that `draw(step)` gave, for a run that resumes."""
        ...


@dataclass(frozen=True)
class PivotGroup:
    """One pivot's rollouts in one wave. `index` is its place among the pivots."""

    index: int
    pivot: Pivot
    tree: RolloutTree
    rewards: Rewards

    @property
    def verdicts(self) -> list[float | None]:
        return [verdict.reward for verdict in self.rewards.verdicts.values()]

    @property
    def wanted(self) -> bool:
        """Whether the group has reward variance, or is an anchor, which trains either way."""
        return self.pivot.role == "anchor" or group_outcome(self.verdicts) is GroupOutcome.MIXED


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
    judges elsewhere than here; `estimator` replaces that of `config.credit`. Ends early when every pivot has retired.
    """

    def __init__(
        self,
        policy: Trainee,
        config: PivotConfig,
        pivots: Sequence[Pivot],
        verifier: TurnVerifier,
        *,
        own: OwnPath | None = None,
        draw: Draw | None = None,
        estimator: Estimator | None = None,
    ) -> None:
        if not pivots and own is None:
            raise InputError("there is no pivot to train on", hint="raise the threshold, or profile more candidates")
        super().__init__(policy, config, config.sampling, config.steps)
        self.config, self.verifier, self.own = config, verifier, own
        self.check_every = config.check_every
        self.pivots = list(pivots)
        self._draw = draw or self._draw_here
        self._estimator = estimator or config.loss.estimator(config.credit)
        roles, weights = [pivot.role for pivot in self.pivots], [pivot.weight for pivot in self.pivots]
        self.curriculum = Curriculum(roles, config.curriculum, config.seed, weights)
        self.drift = DriftMonitor(config.drift, {pivot.kind for pivot in self.pivots})
        self._refreshed: list[int] = []  # the steps that began with new pivots of the policy's own path
        self._alarms: list[dict[str, Any]] = []  # of this step
        self._sampled: Row = {}  # what was spent before the update of this step
        self._ended = False  # a search has found nothing to go on with

    def state(self) -> Row:
        state = {**super().state(), "curriculum": self.curriculum.state(), "drift": self.drift.state()}
        return {**state, "refreshed": self._refreshed} if self.own else state

    def restore(self, state: Row) -> None:
        super().restore(state)
        if self.own is not None:
            for earlier in state.get("refreshed", ()):
                self._enter(self.own, self.own.again(earlier), earlier)
        self.curriculum.restore(state["curriculum"])
        self.drift.restore(state["drift"])

    def step(self, step: int) -> StepResult | None:
        self._alarms = []
        searched = self._search(step)
        if self.curriculum.exhausted(step):
            self._ended = True
            return StepResult({"trained_groups": 0, **self._spent(), **searched}) if searched else None
        law = self._weights(step) if step == 1 or searched else {}
        result = super().step(step)
        assert result is not None
        return StepResult({**result.row, **searched, **law}, result.groups, result.credits)

    def is_over(self, step: int) -> bool:
        return self._ended or (self.own is None and self.curriculum.exhausted(step + 1))

    def checked(self, check: Checked) -> Row:
        super().checked(check)
        alarms = self._alarms + self.drift.held_out(check.acceptance)
        return {"drift_alarms": alarms} if alarms else {}

    # own states

    def _search(self, step: int) -> Row:
        """Where it is due, or no pivot is left, new pivots of the policy's own path."""
        if self.own is None or not (self.own.due(step) or self.curriculum.exhausted(step)):
            return {}
        found = self.own.draw(step, len(self._refreshed))
        self.engine.clear_cache()  # clear the caches: the step must not see the search
        self.cost += found.cost
        if not self.pivots and not found.pivots:
            problem = f"no state of the policy's own path is a pivot ({dict(found.figures)})"
            hint = "play more tasks (own.tasks), or look at the verifier and, where there is one, the teacher"
            raise InputError(problem, field="own", hint=hint)
        earlier = {index for index, pivot in enumerate(self.pivots) if pivot.own}
        self._enter(self.own, found.pivots, step)
        figures = {**found.figures, "cost": found.cost.counts()}
        if self.own.keep and earlier and found.pivots:
            figures["kept_share"] = self._share(earlier, step)
        return {"own_path": figures}

    def _enter(self, own: OwnPath, pivots: Sequence[Pivot], step: int) -> None:
        """Put new pivots of the policy's own path in place of the earlier ones, or beside them (`OwnPath.keep`); where
        there are none, these stay."""
        self._refreshed.append(step)
        if not pivots:
            return
        earlier, weights = [i for i, pivot in enumerate(self.pivots) if pivot.own], [pivot.weight for pivot in pivots]
        if earlier and own.keep:  # together they weigh what the new ones would alone
            self.curriculum.scale(earlier, own.keep * sum(weights))
            weights = [(1 - own.keep) * weight for weight in weights]
        else:
            self.curriculum.remove(earlier)
        self.curriculum.add([pivot.role for pivot in pivots], weights)
        self.pivots += pivots

    def _share(self, earlier: Collection[int], step: int) -> float:
        """The share of the draws of own pivots that these are expected to have. A step draws distinct ones, so it is
        more than `OwnPath.keep` where new ones are few."""
        expected = self.curriculum.expected(self.config.states, step)
        own = {index: count for index, count in expected.items() if self.pivots[index].own}
        return sum(count for index, count in own.items() if index in earlier) / (sum(own.values()) or 1.0)

    def _weights(self, step: int) -> Row:
        """Where a step draws so many of the pivots that their weights say little: what they asked for, and what is."""
        found = self.curriculum.saturation(self.config.states, step)
        return {"weights": {**found, "states": self.config.states}} if found else {}

    # a step

    def sample(self, step: int) -> Sequence[PivotGroup]:
        """All drawn groups: `config.states` of them, and those that replace groups without reward variance."""
        drawn = self._wave(step, 0, self.config.states)
        for number in range(1, self.config.curriculum.replacement_rounds + 1):
            missing = self.config.states - sum(group.wanted for group in drawn)
            if not missing:
                break
            drawn += self._wave(step, number, missing)
        self._sampled = self._spent()
        return drawn

    def _wave(self, step: int, number: int, count: int) -> list[PivotGroup]:
        """`count` groups of the next pivots; wave `number` of its step, with its own draws."""
        indices = self.curriculum.draw(count, step)
        batch = [self.pivots[index] for index in indices]
        seed = seeds.derive(self.config.seed, "train", step, *([number] if number else []))
        drawn = self._draw([pivot.prompted for pivot in batch], seed)
        self.cost = sum((tree.cost + rewards.cost for tree, rewards in drawn), self.cost)
        return [
            PivotGroup(index, pivot, tree, rewards)
            for index, pivot, (tree, rewards) in zip(indices, batch, drawn, strict=True)
        ]

    def _draw_here(self, prompted: Sequence[Prompted], seed: int) -> list[tuple[RolloutTree, Rewards]]:
        return draw_local(prompted, self.engine, self.policy.renderer, self.verifier, self.config, seed)

    def _trained(self, drawn: Sequence[PivotGroup]) -> list[bool]:
        """Which of the groups to train on: the wanted ones, filled up to `config.states` with the first others."""
        spare = self.config.states - sum(group.wanted for group in drawn)
        trains: list[bool] = []
        for group in drawn:
            spare -= not group.wanted
            trains.append(group.wanted or spare >= 0)
        return trains

    def credit(self, step: int, groups: Sequence[PivotGroup]) -> Sequence[Credit | None]:
        return [
            credit_of(self._estimator, group.tree, group.rewards)
            if trains and group_outcome(group.verdicts) is not GroupOutcome.CENSORED
            else None
            for group, trains in zip(groups, self._trained(groups), strict=True)
        ]

    def observe(self, step: int, groups: Sequence[PivotGroup], credits: Sequence[Credit | None]) -> Row:
        """Enter what was drawn into the pivots' records and the drift monitor; the step's reward metrics."""
        for group in groups:
            self.curriculum.record(group.index, step, group.verdicts)
        retired = self.curriculum.retired
        for group in groups:
            scored = list(group.rewards.scored().values())
            if scored and not group.pivot.own:  # own pivots change, so there is nothing to compare with
                self._alarms += self.drift.live(group.pivot.kind, group.index, _mean(scored), retired)
        trains = self._trained(groups)
        trained = [group for group, kept in zip(groups, trains, strict=True) if kept]
        return {
            **_reward_metrics(groups),
            "mixed_groups_trained": _mixed_share(trained),
            "replaced_groups": len(groups) - len(trained),
            "replaced_turns": sum(g.tree.cost.turns for g, kept in zip(groups, trains, strict=True) if not kept),
            **self.curriculum.metrics(),
            **self._sampled,
            **({"drift_alarms": self._alarms} if self._alarms else {}),
        }

    def _spent(self) -> Row:
        return {
            "turns": self.cost.turns,
            "spent": self.cost.counts(),
            "timing": {"seconds": self.cost.seconds},
        }


def _reward_metrics(groups: Sequence[PivotGroup]) -> dict[str, Any]:
    """Mean reward, overall, by role and by kind of demonstrated action; mixed groups; censored rollouts. Over all
    groups that were drawn: those that remain after a replacement were chosen by their rewards."""
    by_role: dict[str, list[float]] = defaultdict(list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    reasons = censored(verdict for group in groups for verdict in group.rewards.verdicts.values())
    cut = 0
    for group in groups:
        scored = list(group.rewards.scored().values())
        by_role[group.pivot.role] += scored
        by_kind[group.pivot.kind] += scored
        cut += sum(group.tree.stop_reason(leaf) is StopReason.MAX_TOKENS for leaf in group.rewards.verdicts)
    everything = [reward for scored in by_role.values() for reward in scored]
    return {
        "reward_mean": _mean_or_none(everything),
        "mixed_groups": _mixed_share(groups),
        "rollouts": sum(len(group.rewards.verdicts) for group in groups),
        "censored": sum(reasons.values()),
        "censored_reasons": reasons,
        "cut_turns": cut,
        "reward_by_role": {role: _mean_or_none(scored) for role, scored in sorted(by_role.items())},
        "reward_by_kind": {kind: _mean_or_none(scored) for kind, scored in sorted(by_kind.items())},
    }


def _mixed_share(groups: Sequence[PivotGroup]) -> float:
    return sum(group_outcome(group.verdicts) is GroupOutcome.MIXED for group in groups) / len(groups)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mean_or_none(values: Sequence[float]) -> float | None:
    return _mean(values) if values else None
