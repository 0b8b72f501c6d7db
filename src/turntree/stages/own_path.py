"""Pivots on the policy's own path: play, label, profile, select (`turntree train pivot --states own`).

An expert's traces never show the policy its own mistakes. A state is worth profiling wherever the policy goes, so the
current policy plays training tasks, and its states go through the same steps as those of traces. What a search found is
kept in the run's folder `own`, from which a run that resumes reads it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.core import parts, seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError
from turntree.core.progress import notice
from turntree.core.protocols import Environment, Teacher, TurnState, TurnVerifier
from turntree.env.tasks import TRAIN, TaskSet, identity, open_tasks
from turntree.pivots.profile import Judge, ProfileConfig, profile_wave
from turntree.pivots.samples import Sampler, together
from turntree.pivots.select import SelectConfig, over_kinds, select
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.local import Limits, Prompted, that_fit
from turntree.rollout.scheduler import Scheduler, SchedulerConfig
from turntree.rollout.teachers import NO_LABEL
from turntree.run.jsonl import parse_json, read_lines, write_lines
from turntree.stages.config import RecordConfig, TrainPivotConfig
from turntree.stages.policy import Policy
from turntree.stages.record import kept_episodes
from turntree.traces.candidates import candidates, skipped_turns, states_of
from turntree.traces.schema import Trace, read_traces, write_traces
from turntree.train.pivot import Pivot, SearchResult

_WAVE = 32  # states that are sampled together
Row = dict[str, Any]


@contextlib.contextmanager
def open_own_path(
    config: TrainPivotConfig, policy: Policy, verifier: TurnVerifier, folder: Path
) -> Iterator[OwnStates | None]:
    """The source of own states; None with `states: expert`."""
    if config.states == "expert":
        yield None
        return
    assert config.environment is not None  # the configuration refuses it
    if config.teacher is None and verifier.compares:
        hint = "pass --teacher NAME, or a verifier with compares = False, which needs no label: rubric, or your own"
        problem = f"is missing: {verifier.name!r} compares own states with what a teacher says there"
        raise ConfigError(problem, field="teacher", hint=hint)
    environment = parts.resolve("environments", config.environment)
    own, train = config.own, config.train
    episodes = EpisodeConfig(
        cut_turns=train.cut_turns, sampling=train.sampling, max_turns=own.max_turns, max_context=train.max_tokens
    )
    recorded = RecordConfig(
        environment=environment, split=TRAIN, count=own.count, task_seed=config.task_seed, episodes=episodes
    )
    with open_tasks(environment, {TRAIN: own.count}, seed=config.task_seed, model=policy.source) as opened:
        teacher = None if config.teacher is None else parts.build("teachers", config.teacher)
        yield OwnStates(config, recorded, policy, verifier, teacher, opened, folder)


@dataclass
class OwnStates:
    """Protocol `train.pivot.OwnPath` over a policy and its environment."""

    config: TrainPivotConfig
    recorded: RecordConfig
    policy: Policy
    verifier: TurnVerifier
    teacher: Teacher | None
    opened: TaskSet
    folder: Path

    @property
    def identity(self) -> dict[str, Any]:
        """What is played, for the identity of the run."""
        return {"own_path": identity(self.recorded.environment, self.opened)}

    @property
    def keep(self) -> float:
        return self.config.own.keep

    def due(self, step: int) -> bool:
        every = self.config.own.refresh
        return step == 1 or (every > 0 and (step - 1) % every == 0)

    def draw(self, step: int, number: int) -> SearchResult:
        """Where no state is a pivot, `SearchResult.pivots` is empty."""
        seed = seeds.derive(self.config.train.seed, "own path", step)
        self.policy.engine.clear_cache()  # a resumed run has kept nothing
        traces, counts, played = self._play(step, number, seed)
        visited, skipped = self._rendered(self._states(traces))
        rows, profiled = self._profile(visited, seed)
        chosen = select(rows, SelectConfig(threshold=1.0, **vars(self.config.own.select))).rows
        self.folder.mkdir(exist_ok=True)
        write_traces(self._traces(step), traces, {"made_by": "own path", "step": step})
        write_lines(self._pivots(step), chosen)
        figures = {
            "tasks": counts["tasks"],
            "successes": counts["successes"],
            "states": len(visited) + skipped.total(),
            "profiled": len(rows),
            "mixed": sum(bool(row["reward_var"]) for row in rows),
            "pivots": len(chosen),
            "dropped": {reason: n for reason, n in {**counts, **skipped}.items() if reason.startswith("dropped")},
        }
        if not chosen:
            notice(f"step {step}: none of {figures['states']} states of the policy's own path is a pivot")
        return SearchResult(self._pivots_of(visited, chosen), played + profiled, figures)

    def again(self, step: int) -> Sequence[Pivot]:
        states = self._states(list(read_traces(self._traces(step))))
        path = self._pivots(step)
        rows = [parse_json(text, path, number) for number, text in read_lines(path)]
        return self._pivots_of(self._rendered(states)[0], rows)

    # the steps of a search

    def _play(self, step: int, number: int, seed: int) -> tuple[list[Trace], Counter[str], Cost]:
        """The labelled episodes of this search's tasks; the step is part of their ids, because tasks come again."""
        tasks, episodes = self._tasks(number), self.recorded.episodes
        greedy = round(self.config.own.greedy * len(tasks))
        certain = replace(episodes, sampling=replace(episodes.sampling, temperature=0.0))
        counts: Counter[str] = Counter()
        traces: list[Trace] = []
        cost = NO_COST
        for part, played in ((tasks[:greedy], certain), (tasks[greedy:], episodes)):
            settings = SchedulerConfig(episodes=played, group_size=1)
            scheduler = Scheduler(self.policy.engine, self.policy.renderer, settings, pool=self.opened.pool)
            for group in scheduler.run(part, seed=seed):
                found, labels = kept_episodes(group, self.recorded, self.policy.source, self.teacher, counts)
                traces += [replace(trace, id=f"{trace.id}@{step}") for trace in found]
                cost += group.tree.cost + labels
        skipped = (why for trace in traces if self.verifier.compares for why in skipped_turns(trace).values())
        counts.update(f"dropped turn: {why}" for why in skipped if not why.startswith(NO_LABEL))  # these are counted
        return traces, counts, cost

    def _tasks(self, number: int) -> list[Environment]:
        """The tasks of search `number`: the next `own.tasks` training tasks, which are shuffled once an epoch."""
        tasks, wanted = self.opened.of(TRAIN), min(self.config.own.tasks, len(self.opened.of(TRAIN)))
        epoch, place = divmod(number, max(1, len(tasks) // wanted))
        order = list(range(len(tasks)))
        seeds.generator(self.config.train.seed, "own tasks", epoch).shuffle(order)
        return [tasks[index] for index in order[place * wanted : (place + 1) * wanted]]

    def _states(self, traces: Sequence[Trace]) -> list[TurnState]:
        """The candidates. Without labels every turn is one, whatever the policy said there."""
        of = candidates if self.verifier.compares else states_of
        return [state for trace in traces for state in of(trace)]

    def _rendered(self, states: Sequence[TurnState]) -> tuple[list[Prompted], Counter[str]]:
        """The states that can be sampled and trained on; the others are counted by reason."""
        train = self.config.train
        limits = Limits(
            completion=train.sampling.max_tokens,
            context=self.policy.engine.max_context,
            path=train.max_tokens,
            demonstrations=self.verifier.compares,
        )
        fitting, skipped = that_fit(states, self.policy.renderer, limits)
        return [item for _, item in fitting], Counter({f"dropped state: {why}": n for why, n in skipped.items()})

    def _profile(self, prompted: Sequence[Prompted], seed: int) -> tuple[list[Row], Cost]:
        """The rows of at most `own.candidates` of them, in their order, from every kind of action alike, and the cost.
        Pivots of rare kinds are drawn more often than these occur (`own.select`): profiled as they occur, they would be
        few, and learned by heart."""
        train, own = self.config.train, self.config.own
        profile = ProfileConfig(rollouts=own.rollouts, sampling=train.sampling, seed=seed, cut_turns=train.cut_turns)
        sampler = Sampler(together(self.policy.engine), self.policy.renderer, train.sampling, seed)
        judge = Judge(self.verifier, profile)
        told = judge.demonstrated([item.state for item in prompted])
        cost = sum((verdict.cost for verdict in told), NO_COST)
        drawn = list(zip(prompted, (replace(verdict, cost=NO_COST) for verdict in told), strict=True))
        drawn = over_kinds(drawn, [verdict.kind for verdict in told], own.candidates or len(told), seed)
        rows: list[Row] = []
        for start in range(0, len(drawn), _WAVE):
            states, verdicts = zip(*drawn[start : start + _WAVE], strict=True)
            wave = profile_wave(states, sampler, judge, profile, demonstrated=verdicts)
            rows += [one.to_json() for one in wave]
            cost += sum((one.cost for one in wave), NO_COST)
        return rows, cost

    def _pivots_of(self, prompted: Sequence[Prompted], rows: Sequence[Row]) -> list[Pivot]:
        by_place = {(item.state.trace_id, item.state.turn): item for item in prompted}
        return [
            Pivot(by_place[row["trace_id"], row["turn"]], row["kind"], row["role"], row["weight"], own=True)
            for row in rows
        ]

    def _traces(self, step: int) -> Path:
        return self.folder / f"traces-{step:05}.jsonl"

    def _pivots(self, step: int) -> Path:
        return self.folder / f"pivots-{step:05}.jsonl"
