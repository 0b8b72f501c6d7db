"""End-to-end GRPO: sample whole episodes with the current policy, update on them, repeat.

The budget is decided before a group starts and before it is trained on (filters such as GRESO and DAPO), and while it
grows (the gate; the brancher). `rollout.accounting` counts what branches share.

All groups of an iteration are sampled with the weights of the previous update, or (`max_off_policy_steps` K, with
`Parts.spread`) of K updates before: the workers then play the next K iterations during the updates. The trainer
computes the old log-probabilities of such groups, and the loss weighs their tokens by the truncated ratio of these to
the sampled ones (`importance_cap`).
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.foreign import decided
from turntree.core.labels import Credit
from turntree.core.outcome import GroupOutcome
from turntree.core.protocols import Brancher, Environment, Estimator, Filter, FinishedGroup, Gate, GateDecision
from turntree.core.tree import RolloutTree
from turntree.credit.credit import with_turns
from turntree.decide.filters.dapo import DapoFilter, refill
from turntree.decide.gates.audited import GateMonitor
from turntree.env.pool import EnvironmentPool
from turntree.rollout.accounting import TreeAccount, account
from turntree.rollout.groups import GrownGroup
from turntree.rollout.players import Player, player_of
from turntree.rollout.rewards import RewardSum
from turntree.rollout.scheduler import SchedulerConfig
from turntree.rollout.spread import Begun, Spread
from turntree.train.config import OnlineConfig
from turntree.train.episode_figures import branch_figures, group_figures, outcome_of, rewards_of, staleness
from turntree.train.loop import RolloutAlgorithm, Row, Trainee
from turntree.train.prompts import TaskStream, first_reason
from turntree.train.update import credit_of, over_batch


@dataclass(frozen=True)
class JudgedTurns:
    """Verdicts on the turns of an iteration's episodes: what they cost, figures for the row, and for each group the
    advantages of judged turns, by node, in the unit of an episode's reward."""

    cost: Cost
    figures: dict[str, Any]
    advantages: Sequence[Mapping[int, float]]


class TurnJudge(Protocol):
    """Judges the turns that the episodes of an iteration took."""

    def judge(self, groups: Sequence[GrownGroup], iteration: int) -> JudgedTurns: ...

    def state(self) -> dict[str, Any]:
        """A JSON value of what was learned from earlier iterations, for `restore`."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Parts:
    """The components of a run. `gate`, `brancher`, `pool`, `rewards` are passed to the scheduler. With `spread`, groups
    are played by its workers instead. `judge` gives verdicts on turns (`OnlineConfig.local`)."""

    policy: Trainee
    tasks: Sequence[Environment]
    gate: Gate | None = None
    brancher: Brancher | None = None
    pool: EnvironmentPool | None = None
    estimator: Estimator | None = None  # None: that of `OnlineConfig.credit`
    rewards: RewardSum | None = None
    filters: Sequence[Filter] = ()
    spread: Callable[[SchedulerConfig], Spread] | None = None
    judge: TurnJudge | None = None
    timing: Callable[[], Row] = dict  # of the tasks' tools

    def player(self, config: SchedulerConfig) -> Player | Spread:
        """Who plays the groups: the workers, or this process."""
        if self.spread is not None:
            return self.spread(config)
        return player_of(
            self.tasks,
            self.policy.engine,
            self.policy.renderer,
            config,
            pool=self.pool,
            gate=self.gate,
            brancher=self.brancher,
            rewards=self.rewards,
        )


@dataclass
class _Batch:
    """Tasks that were drawn together. `units` are what the workers play of them; None in this process."""

    tasks: Sequence[Environment]
    skipped: list[tuple[str, str]]  # task and reason
    counts: Counter[str]  # groups of the iteration that were begun, by task
    units: list[Begun] | None = None

    def to_json(self) -> Row:
        """Waits for the units."""
        units = [unit.to_json() for unit in self.units or ()]
        return {"skipped": [list(each) for each in self.skipped], "counts": dict(self.counts), "units": units}

    @classmethod
    def from_json(cls, value: Row) -> _Batch:
        skipped = [(task_id, why) for task_id, why in value["skipped"]]
        return cls((), skipped, Counter(value["counts"]), [Begun.from_json(unit) for unit in value["units"]])


@dataclass
class EpisodeGroup:
    """A finished group with what is decided about it. `credit` is that of its whole rollouts (None: there is nothing to
    compare), `dropped` names the filter that keeps it out of the update and why."""

    grown: GrownGroup
    credit: Credit | None
    dropped: tuple[str, str] | None = None
    turns: Mapping[int, float] = field(default_factory=dict[int, float])  # advantages of judged turns, by node

    @property
    def tree(self) -> RolloutTree:
        return self.grown.tree

    @property
    def whole_credit(self) -> Credit | None:
        """That of an update without filters."""
        return with_turns(self.credit, self.turns) if self.credit is not None and self.turns else self.credit

    @property
    def trained_credit(self) -> Credit | None:
        return None if self.dropped else self.whole_credit


class OnlineGRPO(RolloutAlgorithm[EpisodeGroup]):
    """GRPO on whole episodes; a step is an iteration. A checkpoint holds the groups that were played ahead."""

    def __init__(self, parts: Parts, config: OnlineConfig) -> None:
        if not parts.tasks:
            raise InputError("there is no task to play", hint="choose a split with games in it")
        super().__init__(parts.policy, config, config.rollouts.episodes.sampling, config.iterations)
        self.config, self.parts, self.check_every = config, parts, config.check_every
        rollouts = config.rollouts.of_training(
            config.groups,
            branching=parts.brancher is not None,
            counts_refills=parts.estimator is not None or config.credit.leaf_weights != "path_weighted",
        )
        if parts.estimator is None and config.credit.advantages == "remax":
            rollouts = dataclasses.replace(rollouts, greedy_first=True)
        self.player = parts.player(rollouts)
        self.learner.minibatch = config.minibatch
        self._filters = list(parts.filters)
        rule = config.loss.estimator(config.credit)
        self._estimator = parts.estimator or rule
        # an advantage in the unit of a reward, in that of the estimator: by a group with as many successes as failures
        self._unit = config.local.verdicts * 2 * rule.advantages([1.0, 0.0] * 4)[0]
        self._refill_cap = max((part.refill_cap for part in self._filters), default=0.0)
        self.stream = TaskStream(parts.tasks, config.seed, self._filters)
        self.monitor = GateMonitor()
        self._audits: list[tuple[GateDecision, bool | None]] = []  # all that the monitor was told
        self.account = TreeAccount()
        self._ahead: dict[int, _Batch] = {}  # iterations that were begun, by number
        # of the iteration
        self._skipped: list[tuple[str, str]] = []  # task and reason
        self._sampled_for = 0  # the version of the policy before the update
        self._waited = 0.0  # seconds for the groups
        self._judged: Row = {}

    def state(self) -> Row:
        brancher, judge = self.parts.brancher, self.parts.judge
        return {
            **super().state(),
            "stream": self.stream.state(),
            "filters": [part.state() for part in self._filters],
            "audits": [[dataclasses.asdict(decision), zero] for decision, zero in self._audits],
            "account": dataclasses.asdict(self.account),
            "brancher": None if brancher is None else brancher.state(),
            "judge": None if judge is None else judge.state(),
            "ahead": {str(iteration): batch.to_json() for iteration, batch in self._ahead.items()},
        }

    def restore(self, state: Row) -> None:
        super().restore(state)
        self.stream.restore(state["stream"])
        for part, held in zip(self._filters, state["filters"], strict=True):
            part.restore(held)
        self.account = TreeAccount(**state["account"])
        if self.parts.brancher is not None:
            self.parts.brancher.restore(state["brancher"])
        if self.parts.judge is not None:
            self.parts.judge.restore(state["judge"])
        for decision, zero in state["audits"]:
            self._audit(GateDecision(**decision), zero)
        self._ahead = {int(key): _Batch.from_json(held) for key, held in state["ahead"].items()}
        self.player.rendered = True  # an iteration was played: a task that fails now is one of many, as it was then

    # sample

    def sample(self, step: int) -> Sequence[EpisodeGroup]:
        """Where a filter refills, further rounds replace what filters dropped; groups that a gate cut (as in Selective
        Rollout) or faults censored are not replaced."""
        started = time.perf_counter()
        for iteration in range(step, min(step + self.config.max_off_policy_steps, self.steps) + 1):
            if iteration not in self._ahead:
                self._ahead[iteration] = self._begin(self.config.groups, iteration, Counter())
        batch = self._ahead.pop(step)
        self._skipped = []
        groups = self._play(batch, step)
        wanted = len(groups)
        while more := refill(
            self._refill_cap,
            wanted=wanted,
            kept=sum(group.dropped is None for group in groups),
            started=len(groups),
        ):
            groups += self._play(self._begin(more, step, batch.counts), step)
        self._waited = time.perf_counter() - started
        self._sampled_for = self.engine.policy_version
        if isinstance(self.player, Spread):
            self.player.learn()
        for part in self._filters:
            decided("filter", part.end_iteration)
        return groups

    def _begin(self, count: int, iteration: int, counts: Counter[str]) -> _Batch:
        """Draw `count` tasks and, with workers, give them out. `counts` are the iteration's groups by task, so that no
        group repeats another's draws."""
        batch = _Batch(*self.stream.draw(count, iteration), counts)
        if isinstance(self.player, Spread):
            batch.units = self.player.begin(
                batch.tasks, seed=self.config.seed, iteration=iteration, begun=counts, urgent=bool(counts)
            )
        return batch

    def _play(self, batch: _Batch, iteration: int) -> list[EpisodeGroup]:
        self._skipped += batch.skipped
        if isinstance(self.player, Spread):
            played = self.player.groups(batch.units or ())
        else:
            played = self.player.run(batch.tasks, seed=self.config.seed, iteration=iteration, begun=batch.counts)
        groups: list[EpisodeGroup] = []
        for grown in list(played):
            self.cost += grown.tree.cost
            groups.append(self._filtered(grown, iteration))
            if grown.decision is not None:
                outcome = outcome_of(grown)
                self._audit(grown.decision, None if outcome is GroupOutcome.CENSORED else outcome.zero_variance)
        return groups

    def _filtered(self, grown: GrownGroup, iteration: int) -> EpisodeGroup:
        """A finished group with its credit, shown to the filters."""
        scored = outcome_of(grown) is not GroupOutcome.CENSORED
        credit = credit_of(self._estimator, grown.tree, grown.rewards) if scored else None
        group = EpisodeGroup(grown, credit)
        shown = FinishedGroup(
            task_id=grown.tree.task_id, iteration=iteration, rewards=tuple(rewards_of(grown)), credit=credit
        )
        reason = None if credit is None else first_reason(self._filters, lambda part: part.drop(shown))
        if reason is not None:
            group.dropped = _name_of(reason[0]), reason[1]
        for part in self._filters:
            decided("filter", part.finished, shown)
        return group

    def _audit(self, decision: GateDecision, zero_variance: bool | None) -> None:
        self.monitor.record(decision, zero_variance)
        self._audits.append((decision, zero_variance))

    # credit

    def credit(self, step: int, groups: Sequence[EpisodeGroup]) -> Sequence[Credit | None]:
        self._judged = {}
        kept = [group for group in groups if group.credit is not None and not group.dropped]
        if (rule := over_batch(self._estimator, [group.grown.rewards for group in kept])) is not self._estimator:
            for group in kept:
                group.credit = credit_of(rule, group.tree, group.grown.rewards)
        if self.parts.judge is not None:
            judged = self.parts.judge.judge([group.grown for group in groups], step)
            for group, advantages in zip(groups, judged.advantages, strict=True):
                group.turns = {node: self._unit * advantage for node, advantage in advantages.items()}
            self.cost += judged.cost
            self._judged = {"local": judged.figures}
        return [group.trained_credit for group in groups]

    # figures

    def observe(self, step: int, groups: Sequence[EpisodeGroup], credits: Sequence[Credit | None]) -> Row:
        grown = [group.grown for group in groups]
        trained = [credit for credit in credits if credit is not None]
        made = sum((account(group.tree) for group in groups), TreeAccount())
        self.account += made
        unmoved = self.config.loss.normalizer == "constant" or any(isinstance(f, DapoFilter) for f in self._filters)
        precision = self.monitor.precision()
        return {
            "redistributed_weight": sum(credit.redistributed for credit in trained),
            "uncounted_leaves": sum(credit.uncounted for credit in trained),
            "biased_forks": sum(credit.biased_forks for credit in trained),
            **group_figures(grown, amplifies=not unmoved),
            **({"gate_precision": precision} if precision else {}),
            **({} if self.parts.brancher is None else {"branching": branch_figures(grown, made)}),
            **self._staleness(groups),
            "groups_dropped": dict(Counter(group.dropped[1] for group in groups if group.dropped)),
            "prompts_skipped": dict(Counter(dict(self._skipped).values())),
            "spent": self.cost.counts(),
            "trees": dataclasses.asdict(self.account),
            "timing": {
                "seconds": self.cost.seconds,
                "busy_share": self.player.usage.busy_share,
                "gate_seconds": self.player.usage.gate_seconds,
                "wait_seconds": self._waited,
                **self.parts.timing(),
            },
            **self._judged,
        }

    def _staleness(self, groups: Sequence[EpisodeGroup]) -> dict[str, float]:
        """Updates between the weights that sampled a tree and those that were trained on it; nothing where rollouts
        are synchronous."""
        if not self.config.max_off_policy_steps:
            return {}
        kept = [group.tree for group in groups if group.trained_credit is not None]
        ages = [age for tree in kept if (age := staleness(tree, self._sampled_for)) is not None]
        return {"staleness_mean": sum(ages) / len(ages), "staleness_max": max(ages)} if ages else {}


def _name_of(part: Filter) -> str:
    """What the metrics call a filter: of one's own, its class."""
    return "dapo" if isinstance(part, DapoFilter) else type(part).__name__
