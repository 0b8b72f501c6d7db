"""`verifiers:ID`: environments of Prime Intellect's verifiers (its `load_environment` interface, versions 0.1 and 0.2).

`ID` is an installed environment, or `module:function` for a function that returns one. Any `MultiTurnEnv` is played
turn by turn: `SingleTurnEnv`, `ToolEnv` and games alike. The loop is that of its `rollout`; only where that asks a
model, turntree's policy speaks. The rubric scores the finished episode, and a reward function that raises censors the
rollout (verifiers itself would count 0). Success is a reward of at least the environment's `pass_threshold` (0.5).

What an episode knows must be in its `state`: that is what a fork copies. An episode that turntree's own limit of turns
cuts off is not scored and counts as failed: allow at least as many turns as the environment does. Rubrics over whole
groups are refused.

Records: `prompt` and `completion` of chat messages, with `reward`: verifiers' results and prime-rl's rollouts. Every
assistant turn is a candidate.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

from turntree.core import parts
from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, needs, package, reason_of
from turntree.core.messages import Message
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number, given_truth
from turntree.env.adapted import AdaptedEnvironment, held_apart, named, of_split
from turntree.env.loop import run, start
from turntree.env.tools.tool import ToolSpec
from turntree.run.jsonl import parse_json
from turntree.traces.formats.row import (
    BrokenMessage,
    ChatRow,
    count_unknown,
    each_object,
    first_object,
    list_of,
    object_of,
    of_today,
    role_of,
    text_of,
    told_by,
    words,
)
from turntree.traces.schema import MESSAGE_KEYS


@needs("verifiers", "verifiers")
def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    load: Mapping[str, Any] | None = None,
    seconds: float = 120.0,
) -> list[Any]:
    """At most `count` rows, drawn by `seed`, of the environment's data set ("train") or of its evaluation set ("dev"
    and "test", a half each); where it has none, the one data set is split by a hash of the row.

    Args:
        load: Arguments of `load_environment`; since 0.4 the configuration of the environment (`verifiers_episode`).
        seconds: Time limit of one answer of the environment, since 0.4 of an episode.
    """
    name = named(argument, "verifiers:ID")
    if not hasattr(package("verifiers", "verifiers"), "load_environment"):  # since 0.4
        from turntree_interop import verifiers_episode

        return verifiers_episode.tasks(name, split, count, seed=seed, load=dict(load or {}), seconds=seconds)
    environment = loaded(name, dict(load or {}))
    if getattr(environment.rubric, "has_group_rewards", False):
        raise InputError(f"{name!r} scores whole groups at once", field="environment", hint="score episodes one by one")
    if not hasattr(environment, "env_response"):
        raise InputError(f"{name!r} is not a MultiTurnEnv", field="environment", hint="only those play turn by turn")
    rows = environment.get_dataset() if environment.build_dataset() is not None else None
    kept = environment.get_eval_dataset() if environment.build_eval_dataset() is not None else None
    if rows is not None and kept is not None:
        found = held_apart(_plain(rows), _plain(kept), split, count, seed=seed, where=name, where_held=name)
    else:
        found = of_split(_plain(kept if rows is None else rows), split, count, seed=seed, where=name)
    return [
        AdaptedEnvironment(
            partial(VerifiersGame, environment, row, seconds),
            task_id=f"{name}/{key}",
            tools=_tools(environment, row),
            task_type=name,
        )
        for key, row in found
    ]


def _plain(rows: Any) -> list[dict[str, Any]]:
    """Rows without their number: two equal questions are one."""
    return [{key: value for key, value in row.items() if key != "example_id"} for row in rows]


def loaded(name: str, arguments: dict[str, Any]) -> Any:
    """The environment. Its constructor replaces the signal handlers of the process; they are restored."""
    verifiers = package("verifiers", "verifiers")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if ":" in name:
            return parts.load("environments", name).target(**arguments)
        return verifiers.load_environment(name, **arguments)
    except InputError:
        raise
    except BaseException as error:
        problem, hint = f"{name!r} was not loaded ({reason_of(error)})", "install it, or write module:function"
        raise InputError(problem, field="environment", hint=hint) from error
    finally:
        for number, handler in before.items():
            with contextlib.suppress(ValueError, TypeError):  # not the main thread
                signal.signal(number, handler)


class VerifiersGame:
    def __init__(self, environment: Any, row: dict[str, Any], seconds: float) -> None:
        self._environment, self._row, self._seconds = environment, row, seconds
        self._unclean = False  # whether `cleanup` is due; never of a copy, which shares what its state names
        self._state: Any = None
        self._prompt: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> VerifiersGame:
        twin = VerifiersGame(self._environment, self._row, self._seconds)
        memo[id(self._state.get("client"))] = self._state.get("client")
        twin._state, twin._prompt = copy.deepcopy((self._state, self._prompt), memo)
        return twin

    def begin(self) -> tuple[Message, ...]:
        return run(self._begin(), self._seconds)

    def act(self, action: Message) -> Observation:
        return run(self._act(action), self._seconds)

    def close(self) -> None:
        """Clean up after an episode that was not scored (a limit, a fault), without waiting for it."""
        if self._unclean:
            start(self._cleaned())

    async def _cleaned(self) -> None:
        self._unclean = False
        await self._environment.cleanup(self._state)

    async def _begin(self) -> tuple[Message, ...]:
        environment = self._environment
        row = {"example_id": 0, **self._row}
        state = await environment.init_state(row, _no_client(), "turntree", {})
        self._state, self._unclean = state, True
        self._state = await environment.setup_state(state) or state
        self._prompt = _normal(await environment.get_prompt_messages(self._state))
        self._check()
        return tuple(_message(message) for message in self._prompt)

    async def _act(self, action: Message) -> Observation:
        environment, state = self._environment, self._state
        said = _assistant(action)
        step = {
            "prompt": self._prompt,
            "completion": [said],
            "response": None,
            "tokens": None,
            "reward": None,
            "advantage": None,
            "is_truncated": False,
            "trajectory_id": state["trajectory_id"],
            "extras": {},
        }
        await environment.add_trajectory_step(state, step)
        new: tuple[Message, ...] = ()
        if not given_truth("completed", await environment.is_completed(state)):
            before = len(self._prompt) + 1
            self._prompt = _normal(await environment.get_prompt_messages(state))
            new = tuple(_message(message) for message in self._prompt[before:])
            if state.get("final_env_response") is None:  # else the library asks the model once more
                self._check()
                return Observation(new or (Message("user", ""),), done=False)
            await environment.is_completed(state)
        self._check()
        final = _normal(state.get("final_env_response") or [])
        told = tuple(_message(message) for message in final) or new or (Message("user", "done"),)
        return await self._scored(told)

    async def _scored(self, told: tuple[Message, ...]) -> Observation:
        environment, state = self._environment, self._state
        await self._cleaned()
        self._check()
        with _errors() as errors:
            try:
                await environment.rubric.score_rollout(state)
            finally:
                if (cleanup := getattr(environment.rubric, "cleanup", None)) is not None:  # not of older versions
                    await cleanup(state)
        if errors:
            raise EnvironmentFault(errors[0])
        reward = given_number("reward", state["reward"])
        success = reward >= getattr(environment, "pass_threshold", 0.5)
        return Observation(told, done=True, success=success, reward=reward)

    def _check(self) -> None:
        error = self._state.get("error")
        if error is not None:
            raise EnvironmentFault(f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def _errors() -> Iterator[list[str]]:
    """Collects the errors that rubrics log: they catch every exception of a reward function and count 0. However quiet
    logging is set (VF_LOG_LEVEL, `logging.disable`), errors are logged meanwhile."""
    found: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("verifiers")
    level, disabled = logger.level, logger.manager.disable
    logger.setLevel(min(level, logging.ERROR))
    logging.disable(logging.NOTSET)
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logging.disable(disabled)
        logger.setLevel(level)


def _no_client() -> Any:
    """A client for `init_state`, which asks for one; no model is ever called through it."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]

    kind = type("NoClient", (Client,), dict.fromkeys(Client.__abstractmethods__))
    return kind(object())


def _normal(messages: Any) -> list[Any]:
    from verifiers.utils.message_utils import maybe_normalize_messages  # pyright: ignore[reportMissingImports]

    return list(maybe_normalize_messages(messages, field_name="messages"))


def _message(message: Any) -> Message:
    row = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else dict(message)
    return Message.from_chat(row)


def _assistant(action: Message) -> Any:
    from verifiers.types import AssistantMessage, ToolCall  # pyright: ignore[reportMissingImports]

    calls = [
        ToolCall(id=call.id or f"call_{index}", name=call.name, arguments=json.dumps(call.arguments))
        for index, call in enumerate(action.tool_calls)
    ]
    return AssistantMessage(content=action.content, tool_calls=calls or None)


def _tools(environment: Any, row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    info = row.get("info")
    own = info.get("tool_defs") if isinstance(info, Mapping) else None
    found = environment._normalize_tool_defs(own) if own else environment.tool_defs
    return tuple(ToolSpec(tool.name, tool.description, tool.parameters).to_chat() for tool in found or ())


_RECORD_KEYS = words(
    "example_id id prompt completion answer info task reward advantage metrics tool_defs tools error error_chain "
    "long_error_chain timing is_completed is_truncated stop_condition token_usage generation_ms scoring_ms total_ms "
    "trajectory trajectory_id env_name sampling_args temperature rollout_index group_id problem_id step"
)


def _is_record(row: dict[str, Any]) -> str:
    if "completion" not in row or "prompt" not in row:
        return "no 'prompt' beside 'completion'"
    known = isinstance(row["completion"], str) or bool(first_object(row["completion"]))
    return "" if known and "messages" not in row else "'completion' has no messages"


@told_by(_is_record)
def read_record(row: dict[str, Any]) -> ChatRow:
    """A rollout of the verifiers library. One that failed with an error is not a demonstration and is left out."""
    known, meta = _RECORD_KEYS | object_of(row, "metrics").keys(), "task env_name answer stop_condition"
    group, told = "example_id problem_id id", {"reward": row.get("reward")}
    chat = ChatRow.of(row, known, id="trajectory_id", group=group, meta=meta, told=told)
    chat.domain = text_of(row, ("env_name",)) or ""
    chat.declare(row, "tool_defs" if row.get("tool_defs") is not None else "tools")
    for part, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(part)
        if isinstance(value, str) and not value.lstrip().startswith("[{"):
            chat.messages.append({"role": role, "content": value})
            continue
        said = list_of(row, part, "text or a list of chat messages")
        chat.messages += each_object(said, lambda raw, part=part: [_said(raw, f"{part}[].", chat)])
    if row.get("error"):
        chat.drop_turns()
    if row.get("is_truncated"):  # the token limit ended a turn: the steps say which, else it may be any
        turns = [i for i, message in enumerate(chat.messages) if role_of(message) == "assistant"]
        steps = [isinstance(step, dict) and step.get("is_truncated") for step in list_of(row, "trajectory", "a list")]
        known = len(steps) == len(turns)
        for turn in (turn for place, turn in enumerate(turns) if not known or steps[place]):
            chat.messages[turn] = cast("dict[str, Any]", chat.messages[turn]) | {"weight": 0}
    return chat


def _said(raw: dict[str, Any], inside: str, chat: ChatRow) -> Any:
    if isinstance(raw := of_today(raw, chat.ignored), BrokenMessage):
        return raw
    count_unknown(raw, {*MESSAGE_KEYS, "reasoning_content", "type"}, inside, chat.ignored)
    message = {key: value for key, value in raw.items() if key in MESSAGE_KEYS and key != "cut"}
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return message


def _call(call: Any) -> Any:
    """Some versions write each call as JSON text."""
    if isinstance(call, str):
        try:
            return parse_json(call)
        except InputError:
            return {"function": {"name": "unreadable", "arguments": call}}
    return call
