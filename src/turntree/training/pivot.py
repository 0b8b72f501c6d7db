"""PivotRL, Algorithm 1: GRPO on one-turn rollouts at selected states of expert traces."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers import PreTrainedModel

from turntree.core import seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import Engine, Estimator, Renderer, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.core.verdict import censored
from turntree.rollouts.local import Prompted, occurrences_of, sample_local, score_wave
from turntree.training.checkpoints import Checkpoints
from turntree.training.config import PivotConfig
from turntree.training.curriculum import Curriculum, PivotRecord
from turntree.training.drift import DriftMonitor
from turntree.training.group import SINGLE, ProcessGroup
from turntree.training.lora import Reference
from turntree.training.trainer import open_trainers
from turntree.training.update import Learner, credit_of


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
class Checked:
    """The figures of a held-out check, and its cost. `acceptance`: by kind of action the mean reward at each state
    (None: censored), the same states in the same order at every check; it is monitored for drift."""

    figures: dict[str, Any]
    cost: Cost = NO_COST
    acceptance: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The cost of a run, the separate cost of its checks, and the record of every pivot: those given in their order,
    then those of the policy's own path."""

    cost: Cost
    checks: Cost
    pivots: Sequence[Pivot]
    records: Sequence[PivotRecord]


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


Log = Callable[[dict[str, Any]], None]
Keep = Callable[[int, Sequence[PivotGroup], Sequence[Credit | None]], None]
Check = Callable[[int], Checked]
Draw = Callable[[Sequence[Prompted], int], list[tuple[RolloutTree, Rewards]]]  # judged rollouts at states, by a seed


def train_pivot(
    model: PreTrainedModel,
    reference: Reference | None,
    engine: Engine,
    renderer: Renderer,
    pivots: Sequence[Pivot],
    verifier: TurnVerifier,
    config: PivotConfig,
    *,
    log: Log,
    keep: Keep = lambda step, groups, credits: None,
    check: Check | None = None,
    own: OwnPath | None = None,
    estimator: Estimator | None = None,
    checkpoints: Checkpoints | None = None,
    group: ProcessGroup = SINGLE,
    draw: Draw | None = None,
    shared: bool = True,
) -> Trained:
    """Update `model` (which `engine` samples from) in place. `log` gets one row per step. Before it, `keep` gets all
    drawn groups with the credit of those that were trained on (None: replaced). `check(step)` adds held-out figures.
    `estimator` replaces that of `config.credit`; `draw` samples and judges elsewhere than here. `own` adds pivots of
    the policy's own path to `pivots` (which may then be empty). Ends early when every pivot has retired. Without
    `shared` every rollout is trained in a row of its own (`isolation.shares_prefixes`).

    The same seed gives the same weights with a single thread. Where `checkpoints` holds an earlier part of this run, it
    is resumed and ends with the same weights and rows.
    """
    if not pivots and own is None:
        raise InputError("there is no pivot to train on", hint="raise the threshold, or profile more candidates")
    trainers = open_trainers(model, reference, config.optimizer, config.steps * config.updates, group)
    learner = Learner(
        model, trainers, engine, config.loss.of(config.sampling), config.updates, config.max_tokens, shared
    )
    estimator = estimator or config.loss.estimator(config.credit)
    run = _Run(learner, renderer, list(pivots), verifier, config, check, own, draw)
    done = run.restore(checkpoints)
    if run.row:
        log(run.closed(done))
    elif done == 0 and check is not None:
        log({"step": 0, **run.check(0)})
    for step in range(done + 1, config.steps + 1):
        figures = run.refresh(step)
        if run.curriculum.exhausted(step):
            if figures:  # of the search that found none
                checked = run.check(step)
                log({"step": step, "trained_groups": 0, **run.spent(), **figures, **checked, **run.alarms()})
            break
        law = run.law(step) if step == 1 or figures else {}
        drawn, trained = run.sample(step)
        compared = [group for group in trained if group_outcome(group.verdicts) is not GroupOutcome.CENSORED]
        credits = [credit_of(estimator, group.tree, group.rewards) for group in compared]
        observed = {**run.observe(step, drawn, trained), **figures, **law}
        run.row = {"step": step, **run.update(compared, credits), **observed}
        labels = {id(group): credit for group, credit in zip(compared, credits, strict=True)}
        keep(step, drawn, [labels.get(id(group)) for group in drawn])
        saves = checkpoints if checkpoints and checkpoints.due(step, last=run.is_last(step)) else None
        if saves and run.only_closing(step):
            saves.save(step, learner.trainers, run.state())
        log(run.closed(step))
        if saves and not run.only_closing(step):
            saves.save(step, learner.trainers, run.state())
    return Trained(run.cost, run.checks, run.pivots, run.curriculum.records)


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


@dataclass
class _Run:
    """The state of a run between two steps, and the parts of a step."""

    learner: Learner
    renderer: Renderer
    pivots: list[Pivot]
    verifier: TurnVerifier
    config: PivotConfig
    checker: Check | None
    own: OwnPath | None = None
    drawer: Draw | None = None
    cost: Cost = NO_COST
    checks: Cost = NO_COST

    def __post_init__(self) -> None:
        self.engine = self.learner.engine
        roles, weights = [pivot.role for pivot in self.pivots], [pivot.weight for pivot in self.pivots]
        self.curriculum = Curriculum(roles, self.config.curriculum, self.config.seed, weights)
        self.drift = DriftMonitor(self.config.drift, {pivot.kind for pivot in self.pivots})
        self.refreshed: list[int] = []  # the steps that began with new pivots of the policy's own path
        self.row: dict[str, Any] = {}  # of a step that was trained and is not logged yet
        self._alarms: list[dict[str, Any]] = []

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as plain JSON."""
        return {
            "row": self.row,
            "alarms": self._alarms,
            "cost": dataclasses.asdict(self.cost),
            "checks": dataclasses.asdict(self.checks),
            "curriculum": self.curriculum.state(),
            **({"refreshed": self.refreshed} if self.own else {}),
            "drift": self.drift.state(),
            "policy_version": self.engine.policy_version,
        }

    def restore(self, checkpoints: Checkpoints | None) -> int:
        """The step after which this run resumes; 0 for a new run."""
        state = None if checkpoints is None else checkpoints.restore(self.learner.trainers)
        if state is None:
            return 0
        self.row, self._alarms = state["row"], state["alarms"]
        self.cost, self.checks = Cost(**state["cost"]), Cost(**state["checks"])
        for earlier in state.get("refreshed", ()):
            assert self.own is not None  # the identity of the run says so
            self._enter(self.own.again(earlier), earlier)
        self.curriculum.restore(state["curriculum"])
        self.drift.restore(state["drift"])
        self.engine.update_weights(self.learner.model, state["policy_version"])
        return state["step"]

    def refresh(self, step: int) -> dict[str, Any]:
        """Where it is due, or no pivot is left, new pivots of the policy's own path."""
        if self.own is None or not (self.own.due(step) or self.curriculum.exhausted(step)):
            return {}
        found = self.own.draw(step, len(self.refreshed))
        self.engine.clear_cache()  # what the search kept must not serve the step
        self.cost += found.cost
        if not self.pivots and not found.pivots:
            problem = f"no state of the policy's own path is a pivot ({dict(found.figures)})"
            hint = "play more tasks (own.tasks), or look at the verifier and, where there is one, the teacher"
            raise InputError(problem, field="own", hint=hint)
        earlier = {index for index, pivot in enumerate(self.pivots) if pivot.own}
        self._enter(found.pivots, step)
        figures = {**found.figures, "cost": found.cost.counts()}
        if self.own.keep and earlier and found.pivots:
            figures["kept_share"] = self._share(earlier, step)
        return {"own_path": figures}

    def _share(self, earlier: Collection[int], step: int) -> float:
        """The share of the draws of own pivots that these are expected to have. A step draws distinct ones, so it is
        more than `OwnPath.keep` where new ones are few."""
        expected = self.curriculum.expected(self.config.states, step)
        own = {index: count for index, count in expected.items() if self.pivots[index].own}
        return sum(count for index, count in own.items() if index in earlier) / (sum(own.values()) or 1.0)

    def law(self, step: int) -> dict[str, Any]:
        """Where a step draws so many of the pivots that their weights say little: what they asked for, and what is."""
        found = self.curriculum.saturation(self.config.states, step)
        return {"weights": {**found, "states": self.config.states}} if found else {}

    def _enter(self, pivots: Sequence[Pivot], step: int) -> None:
        """Put new pivots of the policy's own path in place of the earlier ones, or beside them (`OwnPath.keep`); where
        there are none, these stay."""
        self.refreshed.append(step)
        if not pivots:
            return
        assert self.own is not None
        earlier, weights = [i for i, pivot in enumerate(self.pivots) if pivot.own], [pivot.weight for pivot in pivots]
        if earlier and (keep := self.own.keep):  # together they weigh what the new ones would alone
            self.curriculum.scale(earlier, keep * sum(weights))
            weights = [(1 - keep) * weight for weight in weights]
        else:
            self.curriculum.remove(earlier)
        self.curriculum.add([pivot.role for pivot in pivots], weights)
        self.pivots += pivots

    def sample(self, step: int) -> tuple[list[PivotGroup], list[PivotGroup]]:
        """The groups of a step: all drawn ones, and the `config.states` of them to train on."""
        drawn = self._wave(step, 0, self.config.states)
        for number in range(1, self.config.curriculum.replacement_rounds + 1):
            missing = self.config.states - sum(group.wanted for group in drawn)
            if not missing:
                break
            drawn += self._wave(step, number, missing)
        spare = self.config.states - sum(group.wanted for group in drawn)
        trained: list[PivotGroup] = []
        for group in drawn:
            if not group.wanted:
                spare -= 1
            if group.wanted or spare >= 0:
                trained.append(group)
        return drawn, trained

    def _wave(self, step: int, number: int, count: int) -> list[PivotGroup]:
        """`count` groups of the next pivots; wave `number` of its step, with its own draws."""
        indices = self.curriculum.draw(count, step)
        batch = [self.pivots[index] for index in indices]
        seed = seeds.derive(self.config.seed, "train", step, *([number] if number else []))
        drawn = (self.drawer or self._draw)([pivot.prompted for pivot in batch], seed)
        self.cost = sum((tree.cost + rewards.cost for tree, rewards in drawn), self.cost)
        return [
            PivotGroup(index, pivot, tree, rewards)
            for index, pivot, (tree, rewards) in zip(indices, batch, drawn, strict=True)
        ]

    def _draw(self, prompted: Sequence[Prompted], seed: int) -> list[tuple[RolloutTree, Rewards]]:
        return draw_local(prompted, self.engine, self.renderer, self.verifier, self.config, seed)

    def update(self, groups: Sequence[PivotGroup], credits: Sequence[Credit]) -> dict[str, Any]:
        """`config.updates` optimizer steps on the groups; metrics of the last. None where every rollout is censored."""
        metrics, cost = self.learner.learn([group.tree for group in groups], credits)
        self.cost += cost
        return metrics

    def observe(self, step: int, drawn: Sequence[PivotGroup], trained: Sequence[PivotGroup]) -> dict[str, Any]:
        """Enter what was drawn into the pivots' records and the drift monitor; the step's reward metrics."""
        for group in drawn:
            self.curriculum.record(group.index, step, group.verdicts)
        retired = self.curriculum.retired
        for group in drawn:
            scored = list(group.rewards.scored().values())
            if scored and not group.pivot.own:  # own pivots change, so there is nothing to compare with
                self._alarms += self.drift.live(group.pivot.kind, group.index, _mean(scored), retired)
        kept = {id(group) for group in trained}
        return {
            **_reward_metrics(drawn),
            "mixed_groups_trained": _mixed_share(trained),
            "replaced_groups": len(drawn) - len(trained),
            "replaced_turns": sum(group.tree.cost.turns for group in drawn if id(group) not in kept),
            **self.curriculum.metrics(),
            **self.spent(),
        }

    def spent(self) -> dict[str, Any]:
        return {
            "turns": self.cost.turns,
            "spent": self.cost.counts(),
            "timing": {"seconds": self.cost.seconds},
        }

    def is_last(self, step: int) -> bool:
        return step == self.config.steps or (self.own is None and self.curriculum.exhausted(step + 1))

    def only_closing(self, step: int) -> bool:
        """Whether this step is checked only because the run ends with it. The checkpoint is saved before that check,
        because an extended run does not make it."""
        every = self.config.check_every
        return step == self.config.steps and not (every and step % every == 0)

    def closed(self, step: int) -> dict[str, Any]:
        """The row of a step that was trained, with its check where one is due, and the alarms."""
        row, self.row, every = self.row, {}, self.config.check_every
        checked = self.check(step) if self.is_last(step) or (every and step % every == 0) else {}
        return {**row, **checked, **self.alarms()}

    def check(self, step: int) -> dict[str, Any]:
        """Held-out figures, where the caller measures any."""
        if self.checker is None:
            return {}
        found = self.checker(step)
        self.checks += found.cost
        self._alarms += self.drift.held_out(found.acceptance)
        self.engine.clear_cache()  # what a check kept must not serve the next step
        return found.figures

    def alarms(self) -> dict[str, Any]:
        """The drift monitor's alarms for this step."""
        found, self._alarms = self._alarms, []
        return {"drift_alarms": found} if found else {}


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
