"""Whole tasks that a training on turns is looked at by: which ones, how they are played, and what is kept of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from turntree.core import parts
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import action_kind, answer_text
from turntree.core.progress import notice
from turntree.core.tree import RolloutTree
from turntree.engine.checkpoint import save_model
from turntree.env.tasks import DEV, TRAIN, TaskSet, identity, open_tasks, options_of_record
from turntree.rollout.live import CutTurns
from turntree.run.folder import RunDirectory
from turntree.stages.config import EvaluateConfig, SuccessConfig
from turntree.stages.evaluate import Evaluation, Evaluator
from turntree.stages.policy import Policy
from turntree.traces.schema import Trace, read_traces
from turntree.train.loop import Checked, Row
from turntree.train.success import Look, best, runs_away

FILE_NAME = "held_out.jsonl"
BEST = "best"  # the folder of the weights of the highest success
_USUAL_TASKS = 64  # a collapse from one success in five is seen in 64 tasks (`train.success.has_fallen`)
_FEWEST_TURNS = 16


@dataclass(frozen=True)
class TrainedOn:
    """What held-out tasks depend on. `environment` is the one that the user named; `tasks` is the number of training
    tasks that are played, and `turns` the longest episode of these; completions are sampled as in training."""

    sampling: Sampling
    environment: Part | None = None
    traces: str = ""
    tasks: int = 0
    turns: int = 0
    cut_turns: CutTurns = "fail"


@dataclass(frozen=True)
class HeldOutTasks:
    """Tasks that are not trained on, with the environment that they are of and how they are played."""

    environment: Part
    opened: TaskSet
    settings: EvaluateConfig
    temperature: float

    @property
    def identity(self) -> dict[str, Any]:
        return identity(self.environment, self.opened)


@contextlib.contextmanager
def open_held_out(config: SuccessConfig, trained: TrainedOn, policy: Policy) -> Iterator[HeldOutTasks | None]:
    """Tasks of the split "dev" of the environment that `check` or the command names, or that the traces were played
    in; None where `check.tasks` is 0, or no environment is known. An environment that divides a file is told how many
    of its tasks are trained on; tasks that the traces have seen all the same are left out, and counted."""
    if config.tasks == 0:
        yield None
        return
    seen = _Seen()
    for trace in read_traces(trained.traces) if trained.traces else ():
        seen.add(trace)
    environment = config.environment or trained.environment or seen.environment()
    if environment is None:
        if config.tasks:
            hint = "name it as check.environment, or set check.tasks to 0"
            raise ConfigError("needs to know an environment", field="check.tasks", hint=hint)
        yield None
        return
    environment = parts.resolve("environments", environment)
    count, ids = config.tasks or _USUAL_TASKS, seen.ids_in(environment.name)
    used = max(trained.tasks, seen.count_in(environment.name))
    splits = ({TRAIN: used} if used else {}) | {DEV: count}
    settings = EvaluateConfig(
        max_turns=config.max_turns or trained.turns or max(_FEWEST_TURNS, seen.longest),
        max_tokens=config.max_tokens or trained.sampling.max_tokens,
        max_context=config.max_context,
        cut_turns=trained.cut_turns,
    )
    with open_tasks(environment, splits, seed=config.task_seed, model=policy.source) as opened:
        fresh = [task for task in opened.of(DEV) if task.task_id not in ids]
        if known := len(opened.of(DEV)) - len(fresh):
            told = f"{known} of {len(opened.of(DEV))} held-out tasks are among those of the traces"
            if not fresh:
                hint = "set it to 0, or name other games as check.environment"
                raise InputError(told, field="check.tasks", hint=hint)
            notice(f"{told}; they are left out of the checks")
        yield HeldOutTasks(environment, replace(opened, tasks={DEV: fresh}), settings, trained.sampling.temperature)


class _Seen:
    """The tasks that traces were made of, by the name of their environment."""

    def __init__(self) -> None:
        self.longest = 0  # turns of the longest trace
        self._options: list[dict[str, Any]] = []
        self._traces: list[tuple[str | None, set[str], int]] = []  # name, ids of its task, tasks that it was drawn from

    def add(self, trace: Trace) -> None:
        record = trace.environment or {}
        name: str | None = record.get("name")
        self.longest = max(self.longest, len(trace.turn_positions))
        drawn: Any = record.get("count")  # of a recording; the record may be a user's own
        ids = {trace.id, str(record.get("task_id", trace.id))}
        self._traces.append((name, ids, drawn if isinstance(drawn, int) else 0))
        options = options_of_record(record)
        if options is not None and options not in self._options:
            self._options.append(options)

    def environment(self) -> Part | None:
        """The one environment with the one set of options that all traces name; None for traces that name none, or
        several."""
        names = {name for name, _, _ in self._traces}
        name = names.pop() if len(names) == 1 else None
        return Part(name, self._options[0]) if name is not None and len(self._options) == 1 else None

    def ids_in(self, environment: str) -> set[str]:
        return {each for name, ids, _ in self._traces if name in (None, environment) for each in ids}

    def count_in(self, environment: str) -> int:
        """Of how many tasks those of the traces were drawn."""
        drawn = [count for name, _, count in self._traces if name in (None, environment)]
        return max([len(drawn), *drawn])


class SuccessCheck:
    """Plays held-out tasks at every check of a run and keeps what came of it, so that a run that resumes knows the
    checks before: outcomes in `held_out.jsonl`, the weights of the highest success in `best/`."""

    def __init__(self, run: RunDirectory, policy: Policy, tasks: HeldOutTasks) -> None:
        self._run, self._policy, self._temperature = run, policy, tasks.temperature
        self._evaluator = Evaluator(policy, tasks.settings, tasks.opened.of(DEV), tasks.opened.pool)

    def __call__(self, step: int, row: Row) -> Checked:
        played = self._evaluator.play(self._temperature, 1, quiet=True)
        keep_outcomes(self._run, step, played)
        turns = Counter(kind for kept in played.trees for kind in _kinds(kept.tree))
        actions = {kind: count / turns.total() for kind, count in turns.most_common()}
        looks = self.looks({"step": step, **row, "held_out_actions": actions})
        if step and best(looks) is looks[-1]:
            save_model(self._policy.model, self._policy.tokenizer, self._run.path / BEST)
        figures = held_out_figures(played, "success", "turns_per_episode")
        return Checked({**figures, "held_out_actions": actions}, played.cost, runs_away(looks))

    def looks(self, row: Row | None = None) -> list[Look]:
        """The checks so far; `row` is that of the step of the last one, where it was not logged yet."""
        outcomes: dict[int, dict[str, float]] = {}
        for each in self._run.rows(FILE_NAME):
            rewards = [reward for reward in each["rewards"] if reward is not None]
            if rewards:
                outcomes.setdefault(each["iteration"], {})[each["task"]] = sum(rewards) / len(rewards)
        found: list[Look] = []
        rewards_since: list[float] = []
        for each in [*self._run.metrics(), *([row] if row else [])]:
            if each.get("reward_mean") is not None:
                rewards_since.append(each["reward_mean"])
            if "held_out_actions" in each:
                reward = sum(rewards_since) / len(rewards_since) if rewards_since else None
                found.append(Look(each["step"], outcomes.get(each["step"], {}), each["held_out_actions"], reward))
                rewards_since = []
        return found

    def result(self, start: str) -> dict[str, Any]:
        """What a run says of its success; `start` names the policy that it began with."""
        looks = self.looks()
        highest = best(looks)
        first, last = looks[0], looks[-1]
        if highest is None:
            return {"tasks": 0}
        return {
            "tasks": len(last.outcomes),
            "start": first.success,
            "end": last.success,
            "best": highest.success,
            "best_step": highest.step,
            "best_model": str(self._run.path / BEST) if highest.step else start,
        }


def _kinds(tree: RolloutTree) -> Iterator[str]:
    """The kind of every action: its tools, or the first word of a command that is written as text."""
    for action in (node.message for node in tree if node.sampled):
        if action is None:  # no action could be read
            continue
        kind = action_kind(action)
        words = answer_text(action).split()
        yield (words[0][:20] if words else "nothing") if kind == "message" else kind


def keep_outcomes(run: RunDirectory, step: int, played: Evaluation) -> None:
    """Append the outcome of every task at the check after `step`."""
    outcomes = played.summary["outcomes"]
    run.append(FILE_NAME, [{"iteration": step, "task": each["task"], "rewards": each["rewards"]} for each in outcomes])


def held_out_figures(played: Evaluation, *names: str) -> Row:
    """These figures of the play, and what the tasks count for themselves."""
    return {
        f"held_out_{name}": value for name, value in played.summary.items() if name in names or name.endswith("_share")
    }
