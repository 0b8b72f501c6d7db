"""The events of a training run on workers, simulated: who samples, calls tools, waits and trains when.

A worker plays one group at a time on its replica of the engine, groups are handed out in order,
`max_off_policy_steps` iterations are begun ahead, and an update waits for all groups of its iteration, as in `turntree
train online` (docs/scale.md). `scale_model.py` uses it for GPUs, `scale_check.py` compares it with measured runs.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

REFILL = -1  # the parent of a rollout that begins when all others of its group have ended

Turn = tuple[float, float, float]  # tokens given since the last turn, tokens sampled, seconds of the tool after it


# what is given


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Seconds of one replica. A decoding step of n sequences takes `step` + n * `sequence` + `context` for each token
    of their contexts, and gives n tokens; a prompt token that is in no cache takes `prefill`."""

    step: float
    sequence: float = 0.0
    context: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Seconds, besides the engine's. `trained` is for one unique token on one train GPU, `scored` for the old
    log-probabilities of one (where rollouts are stale); `sync` stops a replica while it takes on new weights; `unit` is
    handing a group out and fetching it. With `inline_tools` a worker does nothing else while a tool runs."""

    engine: Engine
    trained: float
    scored: float = 0.0
    update: float = 0.0
    sync: float = 0.0
    unit: float = 0.0
    inline_tools: bool = False


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`workers` of a replica each play one group at a time. Trees above `max_tokens` are cut, and dealt to the ranks
    of the trainer by length."""

    replicas: int
    workers: int = 1
    trainers: int = 1
    staleness: int = 0
    max_tokens: int = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Its own turns; a branch begins when its `parent` has sampled `fork` turns, with `shared` tokens above it."""

    turns: Sequence[Turn]
    parent: int | None = None
    fork: int = 0
    shared: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Group:
    prompt: float
    rollouts: Sequence[Rollout]
    trained: bool = True  # False: a gate cut it

    @property
    def tokens(self) -> float:
        """Unique tokens of its tree."""
        return self.prompt + sum(given + sampled for one in self.rollouts for given, sampled, _ in one.turns)


# what is simulated


class Clock:
    """The events of a simulation, in order of their time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()


class Replica:
    """Continuous batching: all sequences decode at one rate, which falls with their number and contexts; a prompt that
    arrives stops them until it is computed. `_done` counts the steps since the start, so that a sequence of n tokens is
    finished when it has grown by n."""

    def __init__(self, clock: Clock, engine: Engine) -> None:
        self._clock, self._engine = clock, engine
        self._sequences: list[tuple[float, int, float, Callable[[], None]]] = []  # by the step at which they end
        self._numbers = itertools.count()
        self._done = self._at = self._free = self._load = 0.0
        self._due = 0  # the number of the last event that was scheduled; earlier ones are void
        self.version = self.workers = 0
        self.busy = self.sampled = 0.0

    def stop(self, seconds: float) -> float:
        """Compute nothing else for so long; returns when it ends."""
        self._advance()
        self._free = max(self._free, self._clock.now) + seconds
        self._schedule()
        return self._free

    def sample(self, fresh: float, tokens: float, context: float, then: Callable[[], None]) -> None:
        """Decode `tokens` behind a `context`, of which `fresh` tokens are computed first."""
        seconds = fresh * self._engine.prefill
        self.busy += seconds
        self.stop(seconds)
        weight = self._engine.sequence + self._engine.context * (context + tokens / 2)
        heapq.heappush(self._sequences, (self._done + tokens, next(self._numbers), weight, then))
        self._load += weight
        self.sampled += tokens
        self._schedule()

    def worked(self) -> float:
        """Seconds with something to compute, so far."""
        self._advance()
        return self.busy

    def _advance(self) -> None:
        seconds = self._clock.now - max(self._at, self._free)
        self._at = self._clock.now
        if self._sequences and seconds > 0:
            self.busy += seconds
            self._done += seconds / (self._engine.step + self._load)

    def _schedule(self) -> None:
        self._due += 1
        if self._sequences:
            left = max(0.0, self._sequences[0][0] - self._done) * (self._engine.step + self._load)
            number = self._due
            self._clock.after(max(self._free - self._clock.now, 0.0) + left, lambda: self._end(number))

    def _end(self, number: int) -> None:
        if number != self._due:
            return
        self._advance()
        end, _, weight, then = heapq.heappop(self._sequences)
        self._done = max(self._done, end)
        self._load = max(0.0, self._load - weight)
        self._schedule()
        then()


@dataclass
class Step:
    """One iteration: when it was trained on, how long the trainer waited for it, when each of its rollouts ended."""

    begun: float
    waited: float = 0.0
    update: float = 0.0
    ended: float = 0.0
    rollouts: list[float] = field(default_factory=list[float])
    tokens: float = 0.0
    balance: float = 1.0  # mean over most tokens of a rank
    busy: float = 0.0  # of all replicas since the start of the run, in seconds
    sampled: float = 0.0


class Run:
    """The events of one training run; `draw(i)` are the groups of iteration i."""

    def __init__(self, costs: Costs, cluster: Cluster, draw: Callable[[int], Sequence[Group]], iterations: int) -> None:
        self.clock, self.costs, self.cluster, self.iterations = Clock(), costs, cluster, iterations
        self.replicas = [Replica(self.clock, costs.engine) for _ in range(cluster.replicas)]
        self.steps: list[Step] = []
        self._draw, self._begun = draw, 0
        self._queue: deque[tuple[int, int, Group]] = deque()  # iteration, version of the weights, group
        self._left: dict[int, int] = {}  # groups of an iteration that are not back
        self._groups: dict[int, Sequence[Group]] = {}
        self._ends: dict[int, list[float]] = {}
        self._begin()
        self.clock.run()

    # the trainer

    def _begin(self) -> None:
        """The next iteration, with those that are begun ahead; then wait for its groups."""
        now = len(self.steps)
        if now == self.iterations:
            return
        self.steps.append(Step(self.clock.now))
        while self._begun <= min(now + self.cluster.staleness, self.iterations - 1):
            one = self._begun
            self._groups[one], self._ends[one], self._begun = self._draw(one), [], one + 1
            self._left[one] = len(self._groups[one])
            self._queue.extend((one, now, group) for group in self._groups[one])
        self._hand_out()
        if not self._left[now]:
            self._update()

    def _update(self) -> None:
        step, number = self.steps[-1], len(self.steps) - 1
        step.waited, step.rollouts = self.clock.now - step.begun, sorted(self._ends.pop(number))
        dealt = self._deal([group for group in self._groups.pop(number) if group.trained])
        token = self.costs.trained + (self.costs.scored if self.cluster.staleness else 0.0)
        step.tokens, step.update = sum(dealt), self.costs.update + token * max(dealt)
        step.balance = sum(dealt) / (len(dealt) * max(dealt)) if step.tokens else 1.0

        def trained() -> None:
            step.ended = self.clock.now
            step.busy = sum(one.worked() for one in self.replicas)
            step.sampled = sum(one.sampled for one in self.replicas)
            self._begin()

        self.clock.after(step.update, trained)

    def _deal(self, groups: Iterable[Group]) -> list[float]:
        """Tokens of every rank: the longest part goes to the rank that has least."""
        ranks = [0.0] * self.cluster.trainers
        for tokens in sorted((part for group in groups for part in self._parts(group)), reverse=True):
            heapq.heapreplace(ranks, ranks[0] + tokens)
        return ranks

    def _parts(self, group: Group) -> Iterator[float]:
        """A tree that is cut computes the path above each further part again: the prompt and half a rollout."""
        count = max(1, math.ceil(group.tokens / self.cluster.max_tokens))
        again = group.prompt + (group.tokens - group.prompt) / len(group.rollouts) / 2
        return itertools.repeat(group.tokens / count + again * (count - 1) / count, count)

    # the workers

    def _hand_out(self) -> None:
        while self._queue:
            replica = min(self.replicas, key=lambda one: one.workers)
            if replica.workers == self.cluster.workers:
                return
            replica.workers += 1
            number, version, group = self._queue.popleft()
            if replica.version < version:
                replica.version = version
                replica.stop(self.costs.sync)
            self.clock.after(self.costs.unit, Playing(self, replica, number, group).begin)

    def back(self, replica: Replica, number: int, ends: list[float]) -> None:
        """A worker has played a group."""
        replica.workers -= 1
        self._left[number] -= 1
        self._ends[number] += ends
        self._hand_out()
        if number == len(self.steps) - 1 and not self._left[number]:
            self._update()


@dataclass
class Playing:
    """A worker with its group."""

    run: Run
    replica: Replica
    number: int
    group: Group

    def begin(self) -> None:
        self.ends: list[float] = []
        self.prompted = False
        self._start(lambda one: one.parent is None)

    def _start(self, chosen: Callable[[Rollout], bool]) -> None:
        for index, rollout in enumerate(self.group.rollouts):
            if chosen(rollout):
                self._sample(index, 0, self.group.prompt + rollout.shared)

    def _sample(self, index: int, turn: int, context: float) -> None:
        """Sample a turn of a rollout, then call its tool. The first rollout computes the prompt for all."""
        given, sampled, seconds = self.group.rollouts[index].turns[turn]
        fresh = given + (0.0 if self.prompted else self.group.prompt)
        self.prompted = True

        def act() -> None:
            self._start(lambda one: one.parent == index and one.fork == turn + 1)
            clock = self.run.clock
            wait = self.replica.stop(seconds) - clock.now if self.run.costs.inline_tools else seconds
            clock.after(wait, lambda: self._after(index, turn, context + given + sampled))

        self.replica.sample(fresh, sampled, context + given, act)

    def _after(self, index: int, turn: int, context: float) -> None:
        rollouts = self.group.rollouts
        if turn + 1 < len(rollouts[index].turns):
            return self._sample(index, turn + 1, context)
        self.ends.append(self.run.clock.now)
        if len(self.ends) == sum(one.parent != REFILL for one in rollouts):
            self._start(lambda one: one.parent == REFILL)
        if len(self.ends) == len(rollouts):
            self.run.back(self.replica, self.number, self.ends)


def figures(run: Run, warm: int = 2, full: int = 64) -> dict[str, float]:
    """Of the steps after the first `warm` (the last ones, ahead of which nothing is begun, left out): seconds; shares
    of the time in which rollout and train GPUs are busy; `effective`, the share in which the same tokens would be
    decoded at `full` sequences a replica; `waiting`, the trainer's share without work; `tail`, in which the last tenth
    of a step's rollouts is waited for."""
    steps = run.steps[warm : len(run.steps) - run.cluster.staleness]
    before, after = run.steps[warm - 1], steps[-1]
    seconds, engine = after.ended - before.ended, run.costs.engine
    replicas = len(run.replicas) * seconds
    tails = [one.rollouts[-1] - max(one.begun, one.rollouts[len(one.rollouts) * 9 // 10]) for one in steps]
    return {
        "seconds": seconds / len(steps),
        "rollout_busy": (after.busy - before.busy) / replicas,
        "rollout_effective": (after.sampled - before.sampled) * (engine.step / full + engine.sequence) / replicas,
        "train_busy": sum(one.update * one.balance for one in steps) / seconds,
        "waiting": sum(one.waited for one in steps) / seconds,
        "tail": sum(max(0.0, tail) for tail in tails) / seconds,
    }
