"""Whole tasks that a training is looked at by: which ones, how they are played, and what is kept of it."""

from __future__ import annotations

import contextlib
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import action_kind, answer_text
from turntree.core.progress import notice
from turntree.core.tree import RolloutTree
from turntree.env.tasks import DEV, TRAIN, TaskSet, identity, open_tasks, options_of_record
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import Setting
from turntree.run.files import read_json, write_json
from turntree.run.folder import HELD_OUT, RunDirectory
from turntree.stages.config import SuccessConfig
from turntree.stages.evaluate import Evaluator
from turntree.stages.policy import Policy
from turntree.traces.schema import Trace
from turntree.train.loop import Algorithm, Checked, Row
from turntree.train.success import FALSE_ALARMS, Look, best, change, counts, fall, fewest_lost

BEST = "best"  # the folder of the weights of the highest success
_STEP = "step.json"  # in it
_FEWEST_TURNS = 16


@dataclass(frozen=True)
class TrainedOn:
    """What held-out tasks depend on: `episodes` says how they are played, with `turns` at most (0: as many as the
    longest trace has); the environment that the user named; the traces that are trained on (read only where they are
    needed); the number of training tasks that are played (0: none) and the seed that they are drawn by."""

    episodes: EpisodeConfig
    environment: Part | None = None
    traces: Callable[[], Iterable[Trace]] = tuple
    tasks: int = 0
    task_seed: int = 0
    turns: int = 0


@dataclass(frozen=True)
class HeldOutTasks:
    """Tasks that are not trained on, with the environment that they are of and how they are played, `places` at the
    same time."""

    environment: Part
    opened: TaskSet
    episodes: EpisodeConfig
    stops: bool
    places: int = Setting.places

    @property
    def identity(self) -> dict[str, Any]:
        return identity(self.environment, self.opened)


@contextlib.contextmanager
def open_held_out(config: SuccessConfig, trained: TrainedOn, policy: Policy) -> Iterator[HeldOutTasks | None]:
    """Tasks of the split "dev" of the environment that `check` or the command names, or that the traces were played
    in; None where `check.tasks` is 0, or no environment is known. An environment that divides a file is told how many
    of its tasks are trained on; tasks that the traces have seen all the same are left out, and counted. Without a word
    on `check.tasks` an environment that has no such tasks, or cannot be opened, is said and not looked at."""
    if config.tasks == 0:
        yield None
        return
    seen = _Seen(trained)
    environment = config.environment or seen.environment(trained.environment)
    if environment is None:
        if config.tasks:
            hint = "name it as check.environment, or set check.tasks to 0"
            raise ConfigError("needs to know an environment", field="check.tasks", hint=hint)
        yield None
        return
    turns = config.max_turns or trained.turns or max(_FEWEST_TURNS, seen.longest)
    with contextlib.ExitStack() as stack:
        try:
            environment = parts.resolve("environments", environment)
            opened = stack.enter_context(_fresh(environment, config, trained, seen, policy))
        except InputError as error:
            if config.tasks is not None:
                raise
            notice(f"success is not looked at: {error}")
            yield None
            return
        yield HeldOutTasks(environment, opened, replace(trained.episodes, max_turns=turns), config.stops)


@contextlib.contextmanager
def _fresh(
    environment: Part, config: SuccessConfig, trained: TrainedOn, seen: _Seen, policy: Policy
) -> Iterator[TaskSet]:
    """The held-out tasks, without those of the traces. Raises `InputError` where none is left."""
    used = max(trained.tasks, seen.count_in(environment.name))
    splits = ({TRAIN: used} if used else {}) | {DEV: config.wanted}
    with open_tasks(environment, splits, seed=trained.task_seed, model=policy.source) as opened:
        ids = seen.ids_in(environment.name)
        fresh = [task for task in opened.of(DEV) if task.task_id not in ids]
        known = len(opened.of(DEV)) - len(fresh)
        told = f"{known} of {len(opened.of(DEV))} held-out tasks are among those of the traces"
        if not fresh:
            hint = "set it to 0, or name other games as check.environment"
            raise InputError(told if known else "has no held-out task", field="check.tasks", hint=hint)
        if known:
            notice(f"{told}; they are left out of the checks")
        yield replace(opened, tasks={DEV: fresh})


class _Seen:
    """The tasks that the traces which are trained on were made of."""

    def __init__(self, trained: TrainedOn) -> None:
        self.longest = 0  # turns of the longest trace
        self._options: list[dict[str, Any]] = []
        self._tasks: set[tuple[str | None, str, int]] = set()  # its environment, its id, of how many it was drawn
        for trace in trained.traces():
            self._add(trace)

    def _add(self, trace: Trace) -> None:
        record: Mapping[str, Any] = trace.environment or {}
        name, drawn = record.get("name"), record.get("count")  # the record may be a user's own
        self.longest = max(self.longest, len(trace.turn_positions))
        if not isinstance(drawn, int) or isinstance(drawn, bool) or "task_id" not in record:
            drawn = 0
        self._tasks.add((name if isinstance(name, str) else None, str(record.get("task_id", trace.id)), drawn))
        options = options_of_record(record)
        if options is not None and options not in self._options:
            self._options.append(options)

    def environment(self, named: Part | None) -> Part | None:
        """The environment that the user named, with the options that all traces agree on where they are of it; or the
        one that all traces name. None for traces that name none, or several."""
        names = {name for name, _, _ in self._tasks}
        name = names.pop() if len(names) == 1 else None
        options = self._options[0] if name is not None and len(self._options) == 1 else None
        if name is None or options is None:
            return named
        if named is None:
            return Part(name, options)
        return Part(name, {**options, **named.options}) if name == named.name else named

    def ids_in(self, environment: str) -> set[str]:
        return {task for name, task, _ in self._tasks if name in (None, environment)}

    def count_in(self, environment: str) -> int:
        """Of how many tasks those of the traces were drawn."""
        drawn = [count for name, _, count in self._tasks if name in (None, environment)]
        return max([len(drawn), *drawn])


class SuccessCheck:
    """Plays held-out tasks at every check of a run and keeps what came of it, so that a run that resumes knows the
    checks before: outcomes in `held_out.jsonl`, the weights of the highest success in `best/`."""

    def __init__(
        self,
        run: RunDirectory,
        policy: Policy,
        tasks: HeldOutTasks,
        algorithm: Algorithm,
        seen: Callable[[Iterable[RolloutTree]], object] = list,
    ) -> None:
        self._run, self._policy, self._episodes, self._stops = run, policy, tasks.episodes, tasks.stops
        self._seen = seen  # is shown what was played
        every = algorithm.check_every or algorithm.steps
        self._planned = math.ceil(algorithm.steps / every)  # checks after the start
        self._evaluator = Evaluator(policy, tasks.opened.of(DEV), Setting(pool=tasks.opened.pool, places=tasks.places))

    def __call__(self, step: int, row: Row) -> Checked:
        logged = self._run.metrics()
        if any("held_out_unknown" in each for each in logged):
            return Checked({})
        kept = self._kept()
        if kept is None or kept >= step:  # half saved, or of a step that a killed process took: this one may differ
            shutil.rmtree(self._run.path / BEST, ignore_errors=True)
        played = self._evaluator.play(self._episodes, 1, quiet=True)
        outcomes = played.summary["outcomes"]
        rows = [{"iteration": step, "task": each["task"], "rewards": each["rewards"]} for each in outcomes]
        self._run.append(HELD_OUT, rows)
        self._seen(each.tree for each in played.trees)
        turns = Counter(kind for each in played.trees for kind in _kinds(each.tree))
        actions = {kind: count / turns.total() for kind, count in turns.most_common()}
        looks = self._looks([*logged, {"step": step, **row, "held_out_actions": actions}])
        if step and self._stops and best(looks) is looks[-1]:
            folder = self._run.path / BEST
            self._policy.save(folder)  # replaces it whole
            write_json(folder / _STEP, {"step": step})
        figures = {  # `_share`: what the tasks count for themselves
            f"held_out_{name}": value
            for name, value in played.summary.items()
            if name in ("success", "turns_per_episode") or name.endswith("_share")
        }
        silent = played.summary["unknown"] == len(outcomes) - played.summary["censored"] > 0
        if silent:
            figures["held_out_unknown"] = played.summary["unknown"]
            notice("success is not looked at: the environment does not say it (check.tasks=0 plays none of its tasks)")
        return Checked({**figures, "held_out_actions": actions}, played.cost, "" if silent else self._stop(looks))

    def _stop(self, looks: Sequence[Look]) -> str:
        """Why the run ends here; empty where it goes on. What is not reason enough is said."""
        start, now = looks[0], looks[-1]
        lost = fewest_lost(FALSE_ALARMS / self._planned)
        if len(looks) == 1 and sum(start.outcomes.values()) < lost:
            won, known = sum(start.outcomes.values()), len(start.outcomes)
            told = f"{won:g} of {known} held-out tasks succeed at the start: a fall could not be told from chance"
            notice(f"{told} (with more of them it might: check.tasks={2 * len(self._evaluator.tasks)})")
        if not counts(start, now):
            total = f"{len(now.outcomes)} held-out tasks say whether they succeeded, {len(start.outcomes)} at the start"
            notice(f"warning: step {now.step}: {total}: the success of the others is not known")
            return ""
        fallen = fall(looks, self._planned)
        if fallen is None:
            return ""
        if fallen.runs_away and self._stops:
            return fallen.text
        notice(f"warning: {fallen.text}")
        return ""

    def _looks(self, rows: Sequence[Row]) -> list[Look]:
        """The checks of the steps with these rows."""
        outcomes = self._run.outcomes()
        first = next((each["reward_mean"] for each in rows if each.get("reward_mean") is not None), None)
        found: list[Look] = []
        since: list[float] = []
        for each in rows:
            if each.get("reward_mean") is not None:
                since.append(each["reward_mean"])
            if "held_out_actions" in each:
                reward = sum(since) / len(since) if since else None if found else first
                found.append(Look(each["step"], outcomes.get(each["step"], {}), each["held_out_actions"], reward))
                since = []
        return found

    def result(self, start: str) -> dict[str, Any]:
        """What a run says of its success; `start` names the policy that it began with. A share is None where its tasks
        have no outcome, and `best_model` where its weights were lost with a killed process."""
        looks = self._looks(self._run.metrics())
        highest, changed = best(looks), change(looks[0], looks[-1])
        kept = str(self._run.path / BEST) if highest is not None and self._kept() == highest.step else None
        return {
            "tasks": len(looks[-1].outcomes),
            "start": looks[0].success,
            "end": looks[-1].success,
            "change": None if changed is None else list(changed),
            "looks": len(looks),
            "best": None if highest is None else highest.success,
            "best_step": None if highest is None else highest.step,
            "best_model": start if highest is not None and highest.step == 0 else kept,
        }

    def _kept(self) -> int | None:
        """The step whose weights are in `best/`."""
        path = self._run.path / BEST / _STEP
        return read_json(path)["step"] if path.exists() else None


def _kinds(tree: RolloutTree) -> Iterator[str]:
    """The kind of every action: its tools, or the first word of a command that is written as text."""
    for action in (node.message for node in tree if node.sampled):
        if action is None:
            yield "unreadable"
            continue
        kind = action_kind(action)
        words = answer_text(action).split()
        yield (words[0][:20] if words else "nothing") if kind == "message" else kind
