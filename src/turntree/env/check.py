"""Check an environment against its contract (`turntree check environment SPEC`).

Training relies on every law. A violation is reported with the task, the turn and the action, so that it can be
reproduced by hand.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from turntree.core import seeds
from turntree.core.config import Bounded, Part, Positive
from turntree.core.foreign import EnvironmentFault, call_foreign, reason_of
from turntree.core.messages import Message, ToolCall, as_object
from turntree.core.protocols import Environment, Observation, task_of
from turntree.env.pool import checked, start
from turntree.env.tasks import same_tasks

T = TypeVar("T")
WORDS = ("look", "help", "yes", "no", "0", "1", "left", "right", "up", "[stop]")


@dataclass(frozen=True, kw_only=True)
class CheckConfig(Bounded):
    """`turntree check environment`."""

    environment: Part
    """The environment to check: a registered name, or your own module:object."""
    split: Literal["train", "dev", "test"] = "train"
    """Which tasks."""
    count: Positive = 3
    """How many tasks are played."""
    turns: Positive = 8
    """Random actions a task."""
    seed: int = 0
    """Of the tasks and the actions."""


@dataclass(frozen=True)
class Finding:
    """One law that did not hold. `grave`: training on such an environment is wrong or impossible. Other violations
    only disable a named feature (branching, worker processes)."""

    law: str
    task: str
    turn: int | None
    said: str
    grave: bool = True

    def __str__(self) -> str:
        where = self.task if self.turn is None else f"{self.task}, turn {self.turn}"
        return f"{'VIOLATED' if self.grave else 'note'}: {self.law} [{where}]: {self.said}"


def check_splits(tasks: Mapping[str, Sequence[Environment]]) -> list[Finding]:
    """Whether tasks of two splits are the same under two ids, as far as their openings tell."""
    told: dict[str, dict[str, Sequence[Message]]] = {}
    for split, found in tasks.items():
        for task in found:
            with contextlib.suppress(EnvironmentFault):  # `check_environment` says why
                told.setdefault(split, {})[task.task_id] = call_foreign(lambda task=task: start(task.fork())).messages
    law = "a held-out task is not trained on under another id"
    return [Finding(law, same, None, "they tell the same", grave=False) for same in same_tasks(told)]


def check_environment(task: Environment, *, seed: int = 0, turns: int = 8) -> list[Finding]:
    """Play `task` with random actions and check every law. The task itself is never stepped, only copies of it."""
    found: list[Finding] = []
    task_id = str(task.task_id)
    try:
        first, second = task.fork(), task.fork()
        told, again = start(first), start(second)
    except BaseException as error:
        return [Finding("a copy of a task can be reset", task_id, None, reason_of(error))]
    found += _carried(told, task_id, 0)
    if (problem := task_of(first).state_problem()) is not None:
        said = f"{problem}; the verifier `executed` compares answers only"
        found.append(Finding("the states of two copies can be compared", task_id, 0, said, grave=False))
    if told != again:
        said = "reset told two copies different tasks; rollouts of a group must play the same one"
        found.append(Finding("a task is the same every time", task_id, 0, said))
    broken = list(_tools(first, task_id))
    found += broken
    tools = () if broken else tuple(first.tools)  # broken ones cannot be called: actions are words then
    found += _play(first, tools, told, task_id, seed, turns)
    found += _garbage(task, tools, task_id)
    found += _gold(task, task_id)
    sent, raised = _tried(pickle.dumps, task)
    if sent is None:
        said = f"{raised}; it is stepped in this process only"
        found.append(Finding("a task can be sent to a worker process", task_id, None, said, grave=False))
    return found


def _play(
    environment: Environment, tools: Sequence[dict[str, Any]], told: Observation, task_id: str, seed: int, turns: int
) -> Iterator[Finding]:
    """Random actions; after each, a fork must have answered the same and changed nothing."""
    rng = seeds.generator(seed, "check", task_id)
    last = told
    for turn in range(1, turns + 1):
        action = random_action(tools, last, rng)
        twin, cannot = _tried(environment.fork)
        if twin is None:
            said = f"{cannot}; it trains, but without branching"
            yield Finding("a fork stands where the original stood", task_id, turn, said, grave=False)
        answer, raised = _tried(_stepped, environment, action)
        if answer is None:
            said = f"{raised} for {_shown(action)}; the rollout would be censored"
            yield Finding("an action that a policy may sample is answered", task_id, turn, said)
            return
        if not 0 <= (answer.progress or 0.0) <= 1:
            yield Finding("progress is from 0 to 1", task_id, turn, f"it is {answer.progress:g}")
        if twin is not None:
            yield from _same(twin, action, answer, task_id, turn)
        yield from _carried(answer, task_id, turn)
        if answer.reward and not answer.done and not task_of(environment).total_reward:
            said = f"it is {answer.reward:g}, and the episode goes on: the rollout would be censored"
            yield Finding("a reward is 0 until the end, or the sum so far (total_reward)", task_id, turn, said)
        if answer.done:
            if answer.success is None and answer.reward is None:
                said = "the episode is over with neither success nor reward: only a reward function could judge it"
                yield Finding("an ending says how it went", task_id, turn, said, grave=False)
            return
        last = answer


def _tried(call: Callable[..., T], *given: Any) -> tuple[T | None, str]:
    """What a call gave, or None and why it raised."""
    try:
        return call(*given), ""
    except BaseException as error:
        return None, reason_of(error)


def _stepped(environment: Environment, action: Message) -> Observation:
    return checked(environment.step(action))


def _same(twin: Environment, action: Message, answer: Observation, task_id: str, turn: int) -> Iterator[Finding]:
    again, raised = _tried(_stepped, twin, action)
    if again != answer:
        differs = again and f"{_shown(action)} was answered {_short(again)} in a fork, and not {_short(answer)}"
        yield Finding("a fork answers as the original", task_id, turn, differs or f"the fork raised {raised}")


def _carried(observation: Observation, task_id: str, turn: int) -> Iterator[Finding]:
    for message in observation.messages:
        try:
            row = json.loads(json.dumps(message.to_chat(), allow_nan=False, ensure_ascii=False).encode("utf-8"))
            kept = Message.from_chat(row) == message
        except BaseException as error:
            kept, said = False, reason_of(error)
        else:
            said = "it reads back as another message"
        if not kept:
            yield Finding("JSON carries every message", task_id, turn, said)


def _tools(environment: Environment, task_id: str) -> Iterator[Finding]:
    from jsonschema.validators import validator_for

    names: set[str] = set()
    for tool in environment.tools:
        function = as_object(as_object(tool).get("function"))
        name, parameters = function.get("name"), function.get("parameters") or {"type": "object"}
        if not isinstance(name, str) or name in names:
            yield Finding("every tool has a name of its own", task_id, None, json.dumps(tool, default=str)[:200])
            continue
        names.add(name)
        try:
            validator_for(parameters).check_schema(parameters)
        except BaseException as error:
            yield Finding("parameters are a JSON schema", task_id, None, f"{name}: {reason_of(error)}")


def _garbage(task: Environment, tools: Sequence[dict[str, Any]], task_id: str) -> Iterator[Finding]:
    """A policy may sample any action, so no action may raise."""
    tool = tools[0]["function"]["name"] if tools else "tool"
    actions = (
        Message("assistant", ""),
        Message("assistant", "\x00 \u202e 𝕏" * 20),
        Message("assistant", "", (ToolCall("no_such_tool", {}),)),
        Message("assistant", "", (ToolCall(tool, {"no_such_argument": [None, {"a": 1e308}]}),)),
    )
    for action in actions:
        answer, raised = _tried(_last_of, task, [action])
        if answer is None:
            said = f"{raised} for {_shown(action)}; the rollout would be censored"
            yield Finding("an action that a policy may sample is answered", task_id, 1, said)


def _gold(task: Environment, task_id: str) -> Iterator[Finding]:
    """An expert's messages, where the task holds them, end in success."""
    law, gold = "the task's own gold solves it", task_of(task).gold
    if not gold:
        return
    last, raised = _tried(_last_of, task, gold)
    if last is None or not last.success:
        unsolved = "it does not end in success; `turntree traces gold` leaves this task out"
        said = f"raised {raised}" if last is None else unsolved
        yield Finding(law, task_id, None, said, grave=False)


def _last_of(task: Environment, actions: Sequence[Message]) -> Observation:
    """The last answer to these actions on a copy of the task; the first that ends it is the last."""
    environment = task.fork()
    environment.reset()
    for action in actions[:-1]:
        answer = checked(environment.step(action))
        if answer.done:
            return answer
    return checked(environment.step(actions[-1]))


def random_action(tools: Sequence[dict[str, Any]], last: Observation, rng: random.Random) -> Message:
    """A tool call with random arguments of the declared types, or a word from the observation or common in games."""
    if tools and rng.random() < 0.9:
        function = rng.choice(list(tools))["function"]
        parameters = function.get("parameters") or {}
        properties = parameters.get("properties", {})
        required = parameters.get("required", list(properties))
        arguments = {name: _value(properties.get(name, {}), rng) for name in required}
        return Message("assistant", "", (ToolCall(function["name"], arguments, f"call_{rng.randrange(1000)}"),))
    heard = " ".join(message.content for message in last.messages).split()
    return Message("assistant", " ".join(rng.choice((*WORDS, *heard)) for _ in range(rng.randint(1, 3))))


def _value(schema: Any, rng: random.Random) -> Any:
    if not isinstance(schema, dict):  # true: any value
        return rng.choice(WORDS)
    if schema.get("enum"):
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "integer":
            return rng.randint(0, 9)
        case "number":
            return rng.random()
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [_value(schema.get("items", {}), rng) for _ in range(rng.randint(0, 2))]
        case "object":
            return {name: _value(inner, rng) for name, inner in schema.get("properties", {}).items()}
        case _:
            return rng.choice(WORDS)


def _shown(action: Message) -> str:
    return json.dumps({key: value for key, value in action.to_chat().items() if key != "role"}, default=str)[:200]


def _short(observation: Observation) -> str:
    return repr(" | ".join(message.content for message in observation.messages)[:120])
