"""`openenv:URL`: an environment behind an OpenEnv server.

Every episode is a separate session (a WebSocket), so the server must allow one per rollout at a time
(`max_concurrent_envs`). A fork is a replay in a new session: the server must give equal answers to equal actions after
an equal seed, otherwise the environment trains without branching. An action that the server does not take is answered
with its words; any other error of the server censors the rollout.

The action schema of the server (`/schema`) decides how the policy acts: the tools of an MCP environment are its tools;
an action of one required text field is the message itself; any other action is a call of the tool `act`. Observations
are shown as JSON, or the field `show` alone. The reward of an episode is the sum of the rewards, and none where no step
had one. Success is a sum of at least `success`.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, needs, package, reason_of
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number, given_truth
from turntree.core.seeds import derive
from turntree.env.adapted import AdaptedEnvironment, named
from turntree.env.loop import run, start
from turntree.env.tools.tool import ToolSpec

_REFUSED = "(code: VALIDATION_ERROR)"  # the server's word on an action that it does not take, in the client's error
ABOUT = ("done", "reward", "metadata")  # of an observation, what is not for the policy


@needs("openenv.core", "openenv")
def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    prompt: str = "",
    reset: Mapping[str, Any] | None = None,
    show: str | None = None,
    success: float = 1.0,
    seconds: float = 60.0,
) -> list[AdaptedEnvironment]:
    """`count` episodes that differ in the seed of their `reset`.

    Args:
        prompt: What the policy is told before the first observation.
        reset: Further arguments of `reset`.
        show: The field of an observation that the policy sees (default: all of them, as JSON).
        success: Sum of rewards from which an episode is a success.
        seconds: A server that answers nothing for this long censors the rollout.
    """
    url = named(argument, "openenv:URL").rstrip("/")
    kind, tools = _actions(url, seconds)
    game = partial(OpenEnvGame, url, kind=kind, prompt=prompt, show=show, success=success, seconds=seconds)
    return [
        AdaptedEnvironment(
            partial(game, {**(reset or {}), "seed": derive(seed, "openenv", split, i) % 2**31}),
            task_id=f"{url}/{split}/{i}",
            tools=tools,
            task_type=url,
            can_copy=False,
        )
        for i in range(count)
    ]


@dataclass(eq=False)
class OpenEnvGame:
    url: str
    arguments: Mapping[str, Any]
    kind: str
    prompt: str = ""
    show: str | None = None
    success: float = 1.0
    seconds: float = 60.0

    def __post_init__(self) -> None:
        self.client: Any = package("openenv.core", "openenv").GenericEnvClient(
            base_url=self.url, connect_timeout_s=min(self.seconds, 30.0), message_timeout_s=self.seconds
        )
        self._total: float | None = None

    def begin(self) -> tuple[Message, ...]:
        told = self._text(self._ask(self.client.reset, **self.arguments).observation)
        return (Message("user", f"{self.prompt}\n{told}" if self.prompt else told),)

    def act(self, action: Message) -> Observation:
        if self.kind in ("act", "tools") and not action.tool_calls:
            self.close()
            return self._observed((Message("user", "done"),), done=True)
        if self.kind not in ("act", "tools"):
            return self._step([({self.kind: answer_text(action)}, Message("user"))])
        asked: list[tuple[dict[str, Any], Message]] = []
        for call in action.tool_calls:
            payload = dict(call.arguments)
            if self.kind == "tools":
                payload = {"type": "call_tool", "tool_name": call.name, "arguments": payload}
            asked.append((payload, Message("tool", "", (), call.id, call.name)))
        return self._step(asked)

    def _step(self, asked: list[tuple[dict[str, Any], Message]]) -> Observation:
        messages, done = [], False
        for payload, answer in asked:
            try:
                result = self._ask(self.client.step, payload)
            except RuntimeError as error:
                if _REFUSED not in str(error):
                    raise EnvironmentFault(f"the server failed: {reason_of(error)}") from error
                text = f"error: {error}"
            else:
                text, done = self._text(result.observation), given_truth("done", result.done)
                if result.reward is not None:  # the protocol's way to say nothing
                    self._total = (self._total or 0.0) + given_number("reward", result.reward)
            messages.append(Message(answer.role, text, (), answer.tool_call_id, answer.name))
            if done:
                self.close()
                break
        return self._observed(tuple(messages), done)

    def _observed(self, messages: tuple[Message, ...], done: bool) -> Observation:
        """With the sum of the rewards; where there was none, with neither reward nor success."""
        success = self._total >= self.success if done and self._total is not None else None
        return Observation(messages, done, success=success, reward=self._total)

    def _text(self, observation: Mapping[str, Any]) -> str:
        if self.show is not None:
            return str(observation.get(self.show, ""))
        return json.dumps({key: value for key, value in observation.items() if key not in ABOUT}, ensure_ascii=False)

    def _ask(self, method: Any, *values: Any, **named: Any) -> Any:
        async def asked() -> Any:
            return await method(*values, **named)

        try:
            return run(asked(), self.seconds + 10)
        except (OSError, ConnectionError, TimeoutError) as error:
            raise EnvironmentFault(f"the server does not answer: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        """End the session, without waiting for it: the server has room for a few."""
        client, self.client = self.client, None
        if client is not None:
            start(_closed(client))


async def _closed(client: Any) -> None:
    with contextlib.suppress(Exception):
        await client.close()


def _actions(url: str, seconds: float) -> tuple[str, tuple[dict[str, Any], ...]]:
    """How an action is said: "tools", "act" or the name of the text field; and the tools that it takes."""
    try:
        with urllib.request.urlopen(f"{url}/schema", timeout=seconds) as answer:
            schema = cast("dict[str, Any]", json.loads(answer.read()))["action"]
    except Exception as error:
        problem = f"no OpenEnv server answers at {url} ({type(error).__name__}: {error})"
        raise InputError(problem, field="environment", hint="start it, and write openenv:http://HOST:PORT") from error
    if "CallToolAction" in json.dumps(schema):
        return "tools", _listed(url, seconds)
    fields = {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}
    required = [name for name in schema.get("required", []) if name in fields]
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return required[0], ()
    return "act", (ToolSpec("act", str(schema.get("description", "")), {**schema, "properties": fields}).to_chat(),)


def _listed(url: str, seconds: float) -> tuple[dict[str, Any], ...]:
    game = OpenEnvGame(url, {}, "tools", seconds=seconds)
    with contextlib.closing(game):
        game.begin()
        found = game._ask(game.client.step, {"type": "list_tools"}).observation["tools"]
    specs = (ToolSpec(each["name"], each.get("description") or "", each["input_schema"]) for each in found)
    return tuple(spec.to_chat() for spec in specs)
