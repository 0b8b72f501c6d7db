"""Rollouts without a trainer: tasks are drawn and played, judged, filtered and given credit, an iteration at a time.

`train.online` learns from the groups by itself; another trainer takes them the same way and says when the weights are
new (`turntree_interop.trl`). The budget is decided before a group starts and before it is trained on (filters such as
GRESO and DAPO), and while it grows (the gate; the brancher). `rollout.accounting` counts what branches share.

>>> service = RolloutService(Parts(policy, tasks), Iterations(groups=16), estimator)  # doctest: +SKIP
>>> for iteration in range(1, 41):  # doctest: +SKIP
...     learn_from([(group.tree, group.trained_credit) for group in service.groups(iteration)])
...     service.update(iteration)
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from turntree.core.errors import InputError
from turntree.core.foreign import call_part
from turntree.core.labels import Credit
from turntree.core.outcome import GroupOutcome
from turntree.core.protocols import (
    Brancher,
    Environment,
    Estimator,
    Filter,
    FinishedGroup,
    Gate,
    GateDecision,
    Renderer,
    StreamingEngine,
)
from turntree.core.tree import RolloutTree
from turntree.credit.checked import credit_of
from turntree.credit.scored import path_weighted
from turntree.decide.filters.dapo import DapoFilter, refill
from turntree.decide.gates.audited import GateMonitor
from turntree.env.local import LocalPool
from turntree.rollout.episode_figures import outcome_of
from turntree.rollout.groups import GrownGroup
from turntree.rollout.players import Player, player_of
from turntree.rollout.prompts import TaskStream, first_reason
from turntree.rollout.rewards import RewardSum
from turntree.rollout.scheduler import SchedulerConfig
from turntree.rollout.spread import Begun, Spread


class Speaker(Protocol):
    """Who is sampled from."""

    @property
    def engine(self) -> StreamingEngine: ...

    @property
    def renderer(self) -> Renderer: ...


S = TypeVar("S", bound=Speaker, covariant=True)


@dataclass(frozen=True)
class Parts(Generic[S]):
    """The components of rollouts. `gate`, `brancher`, `pool`, `rewards` are passed to the scheduler. With `spread`,
    groups are played by its workers instead."""

    policy: S
    tasks: Sequence[Environment]
    gate: Gate | None = None
    brancher: Brancher | None = None
    pool: LocalPool | None = None
    estimator: Estimator | None = None  # None: that of the configured credit
    rewards: RewardSum | None = None
    filters: Sequence[Filter] = ()
    spread: Callable[[SchedulerConfig], Spread] | None = None
    timing: Callable[[], dict[str, Any]] = dict  # of the tasks' tools

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


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """`groups` tasks an iteration, each played as `rollouts` says; the draws follow from `seed`. Workers begin `ahead`
    iterations before their turn, up to the `last` one (None: there is none)."""

    groups: int
    rollouts: SchedulerConfig = field(default_factory=SchedulerConfig)
    seed: int = 0
    ahead: int = 0
    last: int | None = None


@dataclass
class EpisodeGroup:
    """A finished group with what is decided about it. `credit` is that of its whole rollouts (None: there is nothing to
    compare), `dropped` names the filter that keeps it out of the update and why."""

    grown: GrownGroup
    credit: Credit | None
    dropped: tuple[str, str] | None = None

    @property
    def tree(self) -> RolloutTree:
        return self.grown.tree

    @property
    def trained_credit(self) -> Credit | None:
        """None for a group that a filter dropped."""
        return None if self.dropped else self.credit


@dataclass
class _Batch:
    """Tasks that were drawn together. `units` are what the workers play of them; None in this process."""

    tasks: Sequence[Environment]
    skipped: list[tuple[str, str]]  # task and reason
    counts: Counter[str]  # groups of the iteration that were begun, by task
    units: list[Begun] | None = None

    def to_json(self) -> dict[str, Any]:
        """Waits for the units."""
        units = [unit.to_json() for unit in self.units or ()]
        return {"skipped": [list(each) for each in self.skipped], "counts": dict(self.counts), "units": units}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> _Batch:
        skipped = [(task_id, why) for task_id, why in value["skipped"]]
        return cls((), skipped, Counter(value["counts"]), [Begun.from_json(unit) for unit in value["units"]])


class RolloutService:
    """Draws tasks, plays them with the engine's current weights, and yields their groups with credit.

    `skipped` are the tasks that a filter passed over in the last iteration, with the reason; `monitor` measures the
    gate. `state` is what a checkpoint keeps (with the groups that were played ahead), and the same seed gives the same
    groups, stopped or not.
    """

    def __init__(self, parts: Parts[Speaker], iterations: Iterations, estimator: Estimator) -> None:
        if not parts.tasks:
            raise InputError("there is no task to play", hint="choose a split with games in it")
        self.parts, self.iterations, self.estimator = parts, iterations, estimator
        rollouts = iterations.rollouts.of_training(
            iterations.groups,
            branching=parts.brancher is not None,
            counts_refills=getattr(estimator, "leaf_weights", None) is not path_weighted,
        )
        self.player = parts.player(rollouts)
        self._filters = list(parts.filters)
        self._refill_cap = max((part.refill_cap for part in self._filters), default=0.0)
        self.stream = TaskStream(parts.tasks, iterations.seed, self._filters)
        self.monitor = GateMonitor()
        self._ahead: dict[int, _Batch] = {}  # iterations that were begun, by number
        self.skipped: list[tuple[str, str]] = []

    @property
    def version(self) -> int:
        """Of the weights that are sampled from."""
        return self.parts.policy.engine.policy_version

    def update(self, version: int) -> None:
        """The weights are new, in the engine's own model or on its server, and count as this version. Raises
        `TurntreeError` while an iteration is played."""
        engine = self.parts.policy.engine
        engine.update_weights(getattr(engine, "model", None), version)

    def groups(self, iteration: int) -> Iterator[EpisodeGroup]:
        """The groups of an iteration (the first is 1), each as soon as it and those before it are over. Where a filter
        refills, further rounds replace what filters dropped; groups that a gate cut (as in Selective Rollout) or faults
        censored are not replaced. Closing the iterator cancels what is in flight in this process."""
        wished = self.iterations
        until = iteration + wished.ahead
        for number in range(iteration, (until if wished.last is None else min(until, wished.last)) + 1):
            if number not in self._ahead:
                self._ahead[number] = self._begin(wished.groups, number, Counter())
        batch = self._ahead.pop(iteration)
        self.skipped = []
        wanted = kept = started = 0
        while True:
            for group in self._play(batch, iteration):
                started += 1
                kept += group.dropped is None
                yield group
            wanted = wanted or started
            more = refill(self._refill_cap, wanted=wanted, kept=kept, started=started)
            if not more:
                break
            batch = self._begin(more, iteration, batch.counts)
        if isinstance(self.player, Spread):
            self.player.learn()
        for part in self._filters:
            call_part("filter", part.end_iteration)

    def _begin(self, count: int, iteration: int, counts: Counter[str]) -> _Batch:
        """Draw `count` tasks and, with workers, give them out. `counts` are the iteration's groups by task, so that no
        group repeats another's draws."""
        batch = _Batch(*self.stream.draw(count, iteration), counts)
        if isinstance(self.player, Spread):
            batch.units = self.player.begin(
                batch.tasks, seed=self.iterations.seed, iteration=iteration, begun=counts, urgent=bool(counts)
            )
        return batch

    def _play(self, batch: _Batch, iteration: int) -> Iterator[EpisodeGroup]:
        self.skipped += batch.skipped
        if isinstance(self.player, Spread):
            played = self.player.groups(batch.units or ())
        else:
            played = self.player.run(batch.tasks, seed=self.iterations.seed, iteration=iteration, begun=batch.counts)
        for grown in played:
            group = self._filtered(grown, iteration)
            if grown.decision is not None:
                outcome = outcome_of(grown)
                known = None if outcome is GroupOutcome.CENSORED else outcome.zero_variance
                self.monitor.record(grown.decision, known)
            yield group

    def _filtered(self, grown: GrownGroup, iteration: int) -> EpisodeGroup:
        """A finished group with its credit, shown to the filters."""
        scored = outcome_of(grown) is not GroupOutcome.CENSORED
        credit = credit_of(self.estimator, grown.tree, grown.rewards) if scored else None
        group = EpisodeGroup(grown, credit)
        shown = FinishedGroup(
            task_id=grown.tree.task_id, iteration=iteration, rewards=grown.rewards.values, credit=credit
        )
        reason = None if credit is None else first_reason(self._filters, lambda part: part.drop(shown))
        if reason is not None:
            part, why = reason
            group.dropped = ("dapo" if isinstance(part, DapoFilter) else type(part).__name__, why)
        for part in self._filters:
            call_part("filter", part.finished, shown)
        return group

    # checkpoints

    def state(self) -> dict[str, Any]:
        brancher = self.parts.brancher
        return {
            "stream": self.stream.state(),
            "filters": [part.state() for part in self._filters],
            "audits": [[dataclasses.asdict(decision), zero] for decision, zero in self.monitor.told],
            "brancher": None if brancher is None else brancher.state(),
            "ahead": {str(iteration): batch.to_json() for iteration, batch in self._ahead.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.stream.restore(state["stream"])
        for part, held in zip(self._filters, state["filters"], strict=True):
            part.restore(held)
        if self.parts.brancher is not None:
            self.parts.brancher.restore(state["brancher"])
        for decision, zero in state["audits"]:
            self.monitor.record(GateDecision(**decision), zero)
        self._ahead = {int(key): _Batch.from_json(held) for key, held in state["ahead"].items()}
        self.player.rendered = True  # an iteration was played: a task that fails now is one of many, as it was then
