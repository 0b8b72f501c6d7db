"""Many groups in flight: their rollouts share the engine's batch, and a free place is filled at once.

The law (tests/laws/test_scheduler_laws.py): every task that was pulled comes back exactly once, as a tree in which
every rollout has a named ending; with an engine whose completions depend on their requests only, the same seed gives
the same trees whatever the interleaving (limits of wall-clock time aside); the costs in the trees sum up to what the
engine charged; a censored leaf has no reward.

Faults. A generation that failed is submitted again, seed and all; an environment call that failed is made again, the
environment rebuilt from `reset` and the recorded actions (`env.pool`). So a retry never discards sampled
tokens and never draws again. A rollout that has used up its retries, or whose messages cannot be rendered, ends without
a reward. An exception of the engine itself (a diverged policy) ends the run.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from turntree.core import seeds
from turntree.core.completion import Completion, Finished
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError
from turntree.core.foreign import call_part
from turntree.core.messages import Message
from turntree.core.protocols import BranchDecision, Brancher, Environment, Gate, Observation, Renderer, StreamingEngine
from turntree.core.tree import StopReason
from turntree.core.verdict import Verdict
from turntree.env.local import LocalPool
from turntree.env.pool import Answer, Session
from turntree.rollout.accounting import Usage
from turntree.rollout.groups import Group, GrownGroup, SchedulerConfig, checked_decision, checked_fork, in_order
from turntree.rollout.live import (
    Ending,
    LiveRollout,
    RendererFault,
    cancelled,
    cut_ending,
    ending_of,
    has_room,
    next_prompt,
    no_room,
    played_turn,
    task_tokens,
)
from turntree.rollout.places import Place, Places
from turntree.rollout.rewards import RewardSum

_LONGEST_WAIT = 60.0


class Scheduler:
    """Plays tasks to their end on one engine.

    `pool` steps the environments (default: in this process), `gate` may stop groups mid-rollout. It is asked about
    turn t once all rollouts of the group have played t turns or ended before, for t = 1, 2, ..., and sees the group
    as it was then, although faster rollouts may have gone on; so its decisions do not depend on the interleaving. A
    cut cancels the group's generations in flight and frees their places at once.

    `brancher` may fork rollouts after tool results (`core.protocols.Brancher`). It is asked about a turn once it was
    sampled, and a fork shares the first tokens of it that the decision depended on; the environment is forked before
    the turn is executed. A branch takes the next free place; no rollout waits for another.

    `rewards` replaces the environment's reward of an episode (`rollout.rewards`).

    >>> for group in Scheduler(engine, renderer, config).run(tasks, seed=0):  # doctest: +SKIP
    ...     learn_from(group.tree, group.rewards)
    """

    def __init__(
        self,
        engine: StreamingEngine,
        renderer: Renderer,
        config: SchedulerConfig,
        *,
        pool: LocalPool | None = None,
        gate: Gate | None = None,
        brancher: Brancher | None = None,
        rewards: RewardSum | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self.renderer, self.gate, self.brancher, self.clock = engine, renderer, gate, brancher, clock
        self.rendered = False  # whether a task ever was
        self.rewards = rewards
        self.pool: LocalPool = pool if pool is not None else LocalPool()
        max_context = min(config.episodes.max_context, engine.max_context)
        self.config = replace(config, episodes=replace(config.episodes, max_context=max_context))
        self.usage = Usage(places=config.places)

    def run(
        self, tasks: Iterable[Environment], *, seed: int, iteration: int = 0, begun: Counter[str] | None = None
    ) -> Iterator[GrownGroup]:
        """Play `group_size` rollouts of every task; yields each task once, in order. `tasks` is pulled from when a
        place is free, so it may be endless. Draws are keyed by (seed, iteration, task, sample, turn); a task that comes
        again gets new draws. `begun` counts the groups of each task id: pass one counter to all runs of an iteration,
        and that holds across them too.

        Work continues only while the caller asks for the next group. Closing the iterator cancels what is in flight,
        and its tasks are not yielded. Raises `ValueError` while the engine has other requests."""
        if self.engine.in_flight:
            raise ValueError("the engine has requests in flight that are not this run's")
        run = _Run(self, iter(tasks), seed, iteration, Counter() if begun is None else begun)
        try:
            yield from in_order(run.groups())
        finally:
            run.abandon()


class _Run:
    """The state of one `Scheduler.run`."""

    def __init__(
        self, scheduler: Scheduler, tasks: Iterator[Environment], seed: int, iteration: int, begun: Counter[str]
    ) -> None:
        self._scheduler, self._config, self._usage = scheduler, scheduler.config, scheduler.usage
        self._tasks, self._seed, self._iteration = tasks, seed, iteration
        self._begun, self._indices = begun, itertools.count()
        self._places = Places(scheduler.engine, scheduler.pool, scheduler.config, scheduler.usage, scheduler.clock)
        self._turns = _Turns(scheduler, self._places)
        self._groups: dict[Group, None] = {}  # in order of their begin
        self._done: deque[GrownGroup] = deque()
        self._away = 0.0  # seconds of the caller, rewards and gate: what is in flight has no part in them

    def groups(self) -> Iterator[GrownGroup]:
        """Every group, as soon as it is over."""
        while True:
            started = self._scheduler.clock()
            self._admit()
            working = bool(self._places.playing)
            if working:
                self._advance()
            self._usage.seconds += self._scheduler.clock() - started
            while self._done:
                given = self._scheduler.clock()
                yield self._done.popleft()
                self._away += self._scheduler.clock() - given
            if not working:
                return

    def _clock(self) -> float:
        """The time by which rollouts and groups are limited: without what was no rollout's."""
        return self._scheduler.clock() - self._away

    def abandon(self) -> None:
        """Cancel everything in flight."""
        for place in self._places.all():
            self._places.release(place)

    # places

    def _admit(self) -> None:
        """Fill free places: first with branches, then with the rollouts of groups begun before, then with new tasks."""
        places = self._places
        while places.free:
            place = next(iter(places.branches), None)
            if place is not None:
                del places.branches[place]
                places.start(place, self._clock())
                assert place.rollout is not None
                places.submit(place, place.rollout)
                continue
            group = next(iter(self._places.refilling), None) or next(reversed(self._groups), None)
            if group is None or group.started == group.wanted:
                task = next(self._tasks, None)
                if task is None:
                    return
                group = self._begin(task)
            place = Place(group, (group.started,), self._scheduler.pool.open(group.task), 0.0)
            group.started += 1
            if group.started == group.wanted:
                self._places.refilling.pop(group, None)
            places.start(place, self._clock())
            places.ask(place)

    def _begin(self, task: Environment) -> Group:
        occurrence = self._begun[task.task_id]
        self._begun[task.task_id] += 1
        brancher = self._scheduler.brancher
        group = Group(
            index=next(self._indices),
            task=task,
            size=self._config.group_size,
            initial=self._config.initial,
            branched=self._config.branched if brancher else 0,
            prompt_wide=getattr(brancher, "prompt_wide", False),
            seed=seeds.again(self._seed, self._iteration, occurrence),
            iteration=self._iteration,
            occurrence=occurrence,
            max_turns=self._config.episodes.max_turns,
            begun=self._clock(),
        )
        self._groups[group] = None
        return group

    # what happens

    def _advance(self) -> None:
        """Process the environments' answers, then let the engine work until something is finished."""
        while answers := self._places.answered(self._patience):
            self._turns.take_answers(answers)
            self._look_at_groups()
            self._admit()
        finished, answers = self._places.news(self._patience)
        self._turns.take_completions(finished)
        self._turns.take_answers(answers)
        self._look_at_groups()
        self._expire()

    # groups

    def _look_at_groups(self) -> None:
        """Ask the gate about the groups with news, and finish those that are over.

        Call it after a whole batch of news, never in between, because a cut needs all costs to be recorded.
        """
        touched, self._turns.touched = self._turns.touched, {}
        for group in touched:
            if group not in self._groups:
                continue
            self._ask_gate(group)
            if group.ended and group.missing and group.cut is None:
                self._complete(group)
            if group.over:
                del self._groups[group]
                judging = self._scheduler.clock()
                self._done.append(group.grown(self._clock(), self._scheduler.rewards))
                self._away += self._scheduler.clock() - judging

    def _complete(self, group: Group) -> None:
        """All rollouts have ended, but the group is short of leaves: start fresh rollouts, all at once (or leave them
        out)."""
        if self._config.refills is False:
            group.unfilled += group.missing
        else:
            group.refills += group.missing
        if group.started < group.wanted:
            self._places.refilling[group] = None

    def _ask_gate(self, group: Group) -> None:
        """Ask the gate about every turn that the group has reached since it was last asked."""
        gate = self._scheduler.gate
        while gate is not None and not group.decided and group.reached(group.asked + 1):
            group.asked += 1
            progress = group.progress(group.asked)
            if not progress.actions:  # faults ended all of them before their first turn: there is nothing to stop
                group.decided = True
                return
            started = self._scheduler.clock()
            decision = checked_decision(call_part("gate", gate.decide, progress), progress)
            took = self._scheduler.clock() - started
            self._usage.gate_seconds, self._away = self._usage.gate_seconds + took, self._away + took
            group.decided = all(progress.finished) or (decision is not None and (decision.final or decision.cut))
            if decision is None:
                continue
            group.decision = decision
            action = "cut" if decision.cut else "audit" if decision.audited else "continue"
            group.record("gate", None, action, decision.reason, {"turn": group.asked, **decision.numbers})
            if decision.cut:
                group.cut = group.asked
                self._turns.stop(group)

    def _expire(self) -> None:
        """Cancel rollouts and groups that exceed their time limit."""
        now, config = self._clock(), self._config
        for group in [*self._groups]:
            if now - group.begun < config.longest_group:
                break
            self._cancel(self._places.of(group), "group", config.longest_group)
            for sample in range(group.started, group.wanted):
                group.endings[(sample,)] = cancelled("group", config.longest_group)
            group.unfilled += group.missing  # nothing more is started
            self._places.refilling.pop(group, None)
            self._turns.touched[group] = None
        for place in [*self._places.playing]:
            if now - place.started < config.rollout_seconds:
                break
            self._cancel([place], "rollout", config.rollout_seconds)
        self._look_at_groups()

    def _cancel(self, places: list[Place], what: str, limit: float) -> None:
        for place in places:
            ending = cancelled(what, limit)
            place.group.record("scheduler", place.key, "cancel", ending.verdict.reason, {"limit_seconds": limit})
            self._turns.end(place, ending)

    def _patience(self) -> float:
        """Seconds until something may have to be cancelled: the oldest rollout, or the oldest group."""
        rollout = next(iter(self._places.playing)).started + self._config.rollout_seconds
        group = next(iter(self._groups)).begun + self._config.longest_group
        return min(_LONGEST_WAIT, max(0.0, min(rollout, group) - self._clock()))


class _Turns:
    """What happens to single rollouts. `touched` are the groups with news since they were last looked at."""

    def __init__(self, scheduler: Scheduler, places: Places) -> None:
        self._scheduler, self._places = scheduler, places
        self._config, self._pool, self._renderer = scheduler.config, scheduler.pool, scheduler.renderer
        self.touched: dict[Group, None] = {}

    def take_completions(self, batch: list[tuple[Place, Finished]]) -> None:
        """Append what the engine sampled and step the environments."""
        for place, finished in batch:
            rollout = self._places.taken(place)
            if finished.completion is None:
                self._fail(place, StopReason.ENGINE_ERROR, finished.fault or "")
                continue
            try:
                self._take_turn(place, rollout, finished.completion)
            except RendererFault as fault:
                rollout.append_turn(finished.completion, Message("assistant"))  # sampled tokens stay in the tree
                place.group.mark_refill(place.key, rollout)
                self.end(place, fault.ending)

    def _take_turn(self, place: Place, rollout: LiveRollout, completion: Completion) -> None:
        """Append a turn, fork where the brancher decides so, and step the environment unless the turn was cut."""
        group, episodes = place.group, self._config.episodes
        action = played_turn(self._renderer, rollout.turn_tokens(completion), completion, episodes, group.task.tools)
        fails = episodes.fails(action)
        if fails:  # no answer will follow that could carry it
            completion = replace(completion, cost=completion.cost + group.owed.pop(place.key, NO_COST))
        decision = self._decide(group, rollout, completion)
        shared = decision.shared if decision is not None and decision.branches > 1 else 0
        rollout.append_turn(completion, action, shared=shared)
        if decision is not None:
            self._fork(place, rollout, completion, decision)
        else:
            group.mark_refill(place.key, rollout)
        if fails:
            self.end(place, cut_ending(rollout, group.task, episodes))
        else:
            self._places.ask(place)

    def _decide(self, group: Group, rollout: LiveRollout, completion: Completion) -> BranchDecision | None:
        """Ask about a turn that follows a tool result. Refills do not fork, nor does a turn that was forked before."""
        brancher = self._scheduler.brancher
        if brancher is None or rollout.turns == 0 or rollout.key[0] >= group.initial or rollout.just_forked:
            return None
        moment = group.moment(rollout, completion)
        return checked_fork(call_part("brancher", brancher.decide, moment), rollout, completion)

    def _fork(self, place: Place, rollout: LiveRollout, completion: Completion, decision: BranchDecision) -> None:
        """Record the decision at the node that the branches share, and queue them for places."""
        place.group.branched_at(rollout, decision)
        if decision.branches > 1:
            for twin in place.group.fork(rollout, completion, decision):
                self._places.queue(place.group, twin, self._pool.fork(place.session))

    def take_answers(self, batch: dict[Session, Answer]) -> None:
        """Append what the environments answered and ask the engine for the next turns."""
        for session, answer in batch.items():
            if (place := self._places.asking(session)) is None:
                continue  # the task leaves no room: an answer of this batch ended the group
            place.group.owed[place.key] += Cost(tool_calls=answer.calls, environment_seconds=answer.seconds)
            if answer.observation is None:
                self._fail(place, StopReason.ENVIRONMENT_ERROR, answer.fault or "")
            else:
                self._take_observation(place, answer.observation)

    def _take_observation(self, place: Place, observation: Observation) -> None:
        try:
            if place.rollout is None:
                self._plant(place, observation)
            else:
                self._extend(place, place.rollout, observation)
        except RendererFault as fault:
            if not self._scheduler.rendered:  # no rollout has worked yet: the model and the tasks do not fit
                raise InputError(str(fault), hint="see turntree check model") from fault
            self.end(place, fault.ending)

    def _plant(self, place: Place, told: Observation) -> None:
        """Begin a rollout with its task, which must be the same for all rollouts of a group."""
        group, episodes = place.group, self._config.episodes
        if group.opening is None:
            group.prompt_ids = task_tokens(self._renderer, told, group.task.tools)
            group.opening, self._scheduler.rendered = told, True
        if group.opening != told:
            why = "reset told two rollouts of the group different tasks"
            self.end(place, Ending(StopReason.ENVIRONMENT_ERROR, Verdict(None, why)))
        elif not has_room(group.prompt_ids, episodes):
            group.ending = no_room(episodes)
            self.stop(group)
        else:
            place.rollout = group.plant(place.key, told)
            self._places.submit(place, place.rollout)

    def _extend(self, place: Place, rollout: LiveRollout, observation: Observation) -> None:
        group = place.group
        prompt = next_prompt(rollout, observation, group.task, self._renderer)
        rollout.append_answer(observation, prompt, group.owed.pop(place.key, NO_COST))
        self.touched[group] = None
        ending = ending_of(rollout, group.task, self._config.episodes)
        if ending is None:
            self._places.submit(place, rollout)
        else:
            self.end(place, ending)

    def _fail(self, place: Place, stop: StopReason, why: str) -> None:
        """Make a failed call again, or end the rollout without a reward."""
        place.failures += 1
        if place.failures > self._config.max_retries:
            return self.end(place, Ending(stop, Verdict(None, why)))
        turn = 0 if place.rollout is None else place.rollout.turns + 1
        numbers: dict[str, float] = {"failures": place.failures, "turn": turn}
        place.group.record("scheduler", place.key, "retry", why, numbers)
        if place.rollout is not None and stop is StopReason.ENGINE_ERROR:
            self._places.submit(place, place.rollout)
        else:
            self._places.ask(place)

    def end(self, place: Place, ending: Ending) -> None:
        self._places.release(place)
        place.group.endings[place.key] = ending
        self.touched[place.group] = None

    def stop(self, group: Group) -> None:
        for place in self._places.of(group):
            self._places.release(place)
        self._places.refilling.pop(group, None)
        self.touched[group] = None
