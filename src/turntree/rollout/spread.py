"""Groups played by workers: what `Scheduler.run` does in this process, as units for a `cluster.WorkerPool`.

A unit names its tasks by their number and the weights by their version. Its draws are keyed as in one process, and it
is played from empty caches, so the same units give the same bits on any number of workers. Groups come back in the form
in which trees are kept (docs/design/trees.md).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.labels import Rewards
from turntree.core.protocols import BranchDecision, Brancher, Environment, ForkMoment, GateDecision
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollout.accounting import Usage
from turntree.rollout.cluster.pool import UnitLost, WorkerPool
from turntree.rollout.groups import GrownGroup
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

Weights = Callable[[], dict[str, Any]]  # what a unit says of the weights to sample with: those of now

_CUMULATED = [each.name for each in dataclasses.fields(Usage) if each.name != "places"]


# groups as plain values


def labelled(tree: RolloutTree, rewards: Rewards) -> dict[str, Any]:
    """A tree with its verdicts as a JSON value that `unlabelled` restores exactly."""
    verdicts = {str(leaf): dataclasses.asdict(verdict) for leaf, verdict in rewards.verdicts.items()}
    return {
        "tree": tree.to_json(),
        "verdicts": verdicts,
        "completions": {str(n): r for n, r in rewards.completions.items()},
    }


def unlabelled(value: Mapping[str, Any]) -> tuple[RolloutTree, Rewards]:
    verdicts: dict[int, Verdict] = {}
    for leaf, verdict in value["verdicts"].items():
        verdicts[int(leaf)] = Verdict(**{**verdict, "cost": Cost(**verdict.get("cost", {}))})
    completions = {int(node): reward for node, reward in value.get("completions", {}).items()}
    return RolloutTree.from_json(value["tree"]), Rewards(verdicts, completions)


def packed(group: GrownGroup) -> dict[str, Any]:
    said = None if group.decision is None else dataclasses.asdict(group.decision)
    rest = {"seconds": group.seconds, "cut": group.cut, "unfilled": group.unfilled, "decision": said}
    return {**labelled(group.tree, group.rewards), **rest}


def unpacked(value: Mapping[str, Any], index: int, task: Environment) -> GrownGroup:
    tree, rewards = unlabelled(value)
    decision = None if value["decision"] is None else GateDecision(**value["decision"])
    rest = {name: value[name] for name in ("seconds", "cut", "unfilled")}
    return GrownGroup(index=index, task=task, tree=tree, rewards=rewards, decision=decision, **rest)


def lost(task_id: str, why: str) -> dict[str, Any]:
    """The group of a task whose workers were lost: one censored leaf, which counts and teaches nothing."""
    tree = RolloutTree(task_id)
    root = tree.add(None, NodeKind.PROMPT, ()).id
    tree.stop(root, StopReason.ENGINE_ERROR)
    group = {"seconds": 0.0, "cut": None, "unfilled": 0, "decision": None}
    return {**labelled(tree, Rewards({root: Verdict(None, f"lost: {why}")})), **group}


# at the worker


class Listening(Brancher):
    """A brancher that also writes down what it was asked, so that the command's own brancher can learn from it."""

    def __init__(self, brancher: Brancher) -> None:
        self._brancher, self.asked = brancher, []
        self.biased, self.prompt_wide = brancher.biased, brancher.prompt_wide

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        self.asked.append(dataclasses.asdict(moment))
        return self._brancher.decide(moment)

    def state(self) -> dict[str, Any]:
        return self._brancher.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._brancher.restore(state)


def numbered(tasks: Sequence[Environment], named: Sequence[tuple[int, str]]) -> list[Environment]:
    """The tasks with these numbers, which must have these ids here too. Raises `InputError`."""
    for number, task_id in named:
        found = tasks[number].task_id if number < len(tasks) else "no task"
        if found != task_id:
            problem = f"task {number} is {task_id!r} in the command and {found!r} in a worker"
            raise InputError(problem, field="environment", hint="its tasks must be the same in every process")
    return [tasks[number] for number, _ in named]


def play_groups(scheduler: Scheduler, tasks: Sequence[Environment], unit: Mapping[str, Any]) -> dict[str, Any]:
    """Play the groups of a unit on a fresh `scheduler`."""
    brancher = scheduler.brancher
    if isinstance(brancher, Listening):
        brancher.restore(unit["brancher"])
    scheduler.rendered = unit["rendered"]
    named = [(number, task_id) for number, task_id, _ in unit["tasks"]]
    begun = Counter({task_id: occurrence for _, task_id, occurrence in reversed(unit["tasks"])})
    played = scheduler.run(numbered(tasks, named), seed=unit["seed"], iteration=unit["iteration"], begun=begun)
    groups = [packed(group) for group in played]
    asked = brancher.asked if isinstance(brancher, Listening) else []
    return {"groups": groups, "asked": asked, "usage": {name: getattr(scheduler.usage, name) for name in _CUMULATED}}


# at the command


@dataclass
class Spread:
    """Plays groups on the workers of `crew`, like a `Scheduler`. `tasks` are those that the workers have, too.

    `brancher` is the command's own: units carry its state, and `learn` tells it what the branchers of the workers were
    asked (its decisions do not depend on the order of calls, so it then is as if it had been asked itself).
    """

    crew: WorkerPool
    config: SchedulerConfig
    tasks: Sequence[Environment]
    weights: Weights
    brancher: Brancher | None = None
    rendered: bool = False  # the first unit of a run finds out whether the model and the tasks fit
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        most = min(self.config.places, self.config.group_size)
        self.config = dataclasses.replace(self.config, max_live_rollouts=most)
        self.usage.places = most
        self._numbers = {task.task_id: number for number, task in enumerate(self.tasks)}
        self._asked: list[dict[str, Any]] = []

    def begin(
        self, tasks: Sequence[Environment], *, seed: int, iteration: int, begun: Counter[str], urgent: bool = False
    ) -> list[Begun]:
        """Give the groups out, `urgent` ones before those of later iterations."""
        shared = {
            "rollouts": self.config,
            "seed": seed,
            "iteration": iteration,
            "brancher": None if self.brancher is None else self.brancher.state(),
            **self.weights(),
        }
        found: list[Begun] = []
        for task in tasks:
            named = (self._numbers[task.task_id], task.task_id, begun[task.task_id])
            begun[task.task_id] += 1
            unit = {**shared, "tasks": [named], "rendered": self.rendered}
            found.append(Begun([named], self.crew.submit(unit, urgent=urgent)))
            self.rendered = True
        return found

    def groups(self, begun: Sequence[Begun]) -> Iterator[GrownGroup]:
        """The groups in order, each as soon as it is there."""
        index = 0
        for batch in begun:
            result = batch.result()
            self._asked += result["asked"]
            for name, value in result["usage"].items():
                setattr(self.usage, name, getattr(self.usage, name) + value)
            for (number, _, _), value in zip(batch.tasks, result["groups"], strict=True):
                yield unpacked(value, index, self.tasks[number])
                index += 1

    def learn(self) -> None:
        """The iteration is over: let the command's brancher learn what the workers' branchers saw of it."""
        if (brancher := self.brancher) is not None:
            for moment in self._asked:
                entropies = tuple(tuple(turn) for turn in moment["entropies"])
                brancher.decide(ForkMoment(**{**moment, "key": tuple(moment["key"]), "entropies": entropies}))
        self._asked = []


@dataclass
class Begun:
    """A unit that was given out: its tasks (number, id, occurrence), and its result when it is there."""

    tasks: Sequence[tuple[int, str, int]]
    future: Future[dict[str, Any]]

    def result(self) -> dict[str, Any]:
        """What the worker sent, as a JSON value; groups that were lost with their workers are censored."""
        try:
            return self.future.result()
        except UnitLost as error:
            return {"groups": [lost(task_id, str(error)) for _, task_id, _ in self.tasks], "asked": [], "usage": {}}

    def to_json(self) -> dict[str, Any]:
        """Waits for the result."""
        return {"tasks": [list(each) for each in self.tasks], "result": self.result()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Begun:
        future: Future[dict[str, Any]] = Future()
        future.set_result(value["result"])
        return cls([(number, task_id, occurrence) for number, task_id, occurrence in value["tasks"]], future)
