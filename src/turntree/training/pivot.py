"""PivotRL, Algorithm 1: GRPO on one-turn rollouts at selected states of expert traces."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedModel

from turntree.core import seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.labels import Credit, Rewards
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import Engine, Estimator, Renderer, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.rollouts.local import Prompted, sample_local, score_wave
from turntree.training.checkpoints import Checkpoints
from turntree.training.config import PivotConfig
from turntree.training.curriculum import Curriculum, PivotRecord
from turntree.training.drift import DriftMonitor
from turntree.training.learner import Learner
from turntree.training.lora import Reference
from turntree.training.optimizer import Optimizer


@dataclass(frozen=True)
class Pivot:
    """A training state and why it is in the mix ("pivot", "anchor" or "random")."""

    prompted: Prompted
    kind: str
    role: str


@dataclass(frozen=True)
class Checked:
    """The figures of a held-out check, and its cost. `acceptance`: by kind of action the mean reward at each state
    (None: censored), the same states in the same order at every check; it is monitored for drift."""

    figures: dict[str, Any]
    cost: Cost = NO_COST
    acceptance: Mapping[str, Sequence[float | None]] = field(default_factory=dict)


@dataclass(frozen=True)
class Trained:
    """The cost of a run, the separate cost of its checks, and the record of every pivot (in the order given)."""

    cost: Cost
    checks: Cost
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


def train_pivot(
    model: PreTrainedModel,
    reference: Reference,
    engine: Engine,
    renderer: Renderer,
    pivots: Sequence[Pivot],
    verifier: TurnVerifier,
    config: PivotConfig,
    *,
    log: Log,
    keep: Keep = lambda step, groups, credits: None,
    check: Check | None = None,
    estimator: Estimator | None = None,
    checkpoints: Checkpoints | None = None,
) -> Trained:
    """Update `model` (which `engine` samples from) in place. `log` gets one row per step. Before it, `keep` gets all
    drawn groups with the credit of those that were trained on (None: replaced). `check(step)` adds held-out figures.
    `estimator` replaces that of `config.credit`. Ends early when every pivot has retired.

    The same seed gives the same weights with a single thread. Where `checkpoints` holds an earlier part of this run, it
    is resumed and ends with the same weights and rows.
    """
    if not pivots:
        raise InputError("there is no pivot to train on", hint="raise the threshold, or profile more candidates")
    optimizer = Optimizer(model.parameters(), config.optimizer, config.steps * config.updates)
    learner = Learner(model, reference, optimizer, engine, config.loss, config.updates, config.max_tokens)
    estimator = estimator or config.loss.estimator(config.credit)
    run = _Run(learner, renderer, pivots, verifier, config, check)
    done = run.restore(checkpoints)
    if run.row:
        log(run.closed(done))
    elif done == 0 and check is not None:
        log({"step": 0, **run.check(0)})
    for step in range(done + 1, config.steps + 1):
        if run.curriculum.exhausted(step):
            break
        drawn, trained = run.sample(step)
        credits = [estimator(group.tree, group.rewards) for group in trained]
        run.row = {"step": step, **run.update(trained, credits), **run.observe(step, drawn, trained)}
        labels = {id(group): credit for group, credit in zip(trained, credits, strict=True)}
        keep(step, drawn, [labels.get(id(group)) for group in drawn])
        saves = checkpoints if checkpoints and checkpoints.due(step, last=run.is_last(step)) else None
        if saves and run.only_closing(step):
            saves.save(step, model, optimizer, run.state())
        log(run.closed(step))
        if saves and not run.only_closing(step):
            saves.save(step, model, optimizer, run.state())
    return Trained(run.cost, run.checks, run.curriculum.records)


@dataclass
class _Run:
    """The state of a run between two steps, and the parts of a step."""

    learner: Learner
    renderer: Renderer
    pivots: Sequence[Pivot]
    verifier: TurnVerifier
    config: PivotConfig
    checker: Check | None
    cost: Cost = NO_COST
    checks: Cost = NO_COST

    def __post_init__(self) -> None:
        self.engine = self.learner.engine
        self.curriculum = Curriculum([pivot.role for pivot in self.pivots], self.config.curriculum, self.config.seed)
        self.drift = DriftMonitor(self.config.drift, {pivot.kind for pivot in self.pivots})
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
            "drift": self.drift.state(),
            "policy_version": self.engine.policy_version,
        }

    def restore(self, checkpoints: Checkpoints | None) -> int:
        """The step after which this run resumes; 0 for a new run."""
        state = None if checkpoints is None else checkpoints.restore(self.learner.model, self.learner.optimizer)
        if state is None:
            return 0
        self.row, self._alarms = state["row"], state["alarms"]
        self.cost, self.checks = Cost(**state["cost"]), Cost(**state["checks"])
        self.curriculum.restore(state["curriculum"])
        self.drift.restore(state["drift"])
        self.engine.update_weights(self.learner.model, state["policy_version"])
        return state["step"]

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
        trees = sample_local(
            [pivot.prompted for pivot in batch],
            self.engine,
            self.renderer,
            self.config.sampling,
            self.config.group_size,
            seeds.derive(self.config.seed, "train", step, *([number] if number else [])),
        )
        self.cost = sum((tree.cost for tree in trees), self.cost)
        grown = [(tree, pivot.prompted.state) for tree, pivot in zip(trees, batch, strict=True)]
        rewards = score_wave(grown, self.verifier, cut_turns=self.config.cut_turns)
        return [PivotGroup(*each) for each in zip(indices, batch, trees, rewards, strict=True)]

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
            if scored:
                self._alarms += self.drift.live(group.pivot.kind, group.index, _mean(scored), retired)
        kept = {id(group) for group in trained}
        return {
            **_reward_metrics(drawn),
            "mixed_groups_trained": _mixed_share(trained),
            "replaced_groups": len(drawn) - len(trained),
            "replaced_turns": sum(group.tree.cost.turns for group in drawn if id(group) not in kept),
            **self.curriculum.metrics(),
            "turns": self.cost.turns,
            "spent": self.cost.counts(),
            "timing": {"seconds": self.cost.seconds},
        }

    def is_last(self, step: int) -> bool:
        return step == self.config.steps or self.curriculum.exhausted(step + 1)

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
        self.engine.weights_changed(self.engine.policy_version)  # what a check kept must not serve the next step
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
    censored = cut = 0
    for group in groups:
        scored = list(group.rewards.scored().values())
        by_role[group.pivot.role] += scored
        by_kind[group.pivot.kind] += scored
        censored += len(group.rewards.verdicts) - len(scored)
        cut += sum(group.tree.stop_reason(leaf) is StopReason.MAX_TOKENS for leaf in group.rewards.verdicts)
    everything = [reward for scored in by_role.values() for reward in scored]
    return {
        "reward_mean": _mean_or_none(everything),
        "mixed_groups": _mixed_share(groups),
        "censored": censored,
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
