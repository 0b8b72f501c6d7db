"""Settings of a gateway, the errors that it answers with, and what a session is worth."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core import scalars
from turntree.core.completion import Sampling
from turntree.core.config import UNKNOWN, Above0, Bounded, Positive, from_mapping
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.gateway.calls import Thoughts
from turntree.run.jsonl import parse_json

_NAMES = re.compile(r"^(chatcmpl-|resp_|msg_)")  # what the dialects put before the id of a call
_LONGEST = 500  # characters of an error
_QUOTED = 80  # characters of a last line
_FORM = 'a number, or {"reward": a number or null, "success": ..., "reason": ..., "call_rewards": ...}'

CONTEXT = "context_length_exceeded"  # OpenAI's code, which agents look for before they compact
WAITING = 4096  # calls of all sessions that are sampled or wait in line; a quarter of them may be of one session


@dataclass(frozen=True, kw_only=True)
class GatewayLimits(Bounded):
    """What sessions may use. Whoever asks for more gets an error in OpenAI's form that says which limit it is."""

    sessions: Positive = 1024
    """Open sessions."""
    calls: Positive = 512
    """Calls of one session."""
    tokens: Positive = 1_000_000
    """New tokens of one session: those of prompts that no earlier call had, and sampled ones."""
    seconds: Above0 = 3600.0
    """A session that is open for longer is closed without a reward."""
    body_bytes: Positive = 8_000_000
    """The largest request."""

    @property
    def connections(self) -> int:
        """Connections at once: one for every call, and one that every session may keep."""
        return WAITING + self.sessions


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """How a gateway samples and what it accepts."""

    sampling: Sampling = field(default_factory=lambda: Sampling(max_tokens=1024))
    """The distribution to sample from, whatever temperature a request asks for: training needs samples of the policy
    itself. `max_tokens` is the longest answer; a request may ask for a shorter one."""
    thoughts: Thoughts = "fork"
    """An answer that an agent sends back without its reasoning is a fork, rendered without it; or keep the sampled
    thoughts in the context."""
    max_context: int | None = None
    """Longest prompt plus answer, in tokens, beside the engine's own limit."""
    retries: int = 2
    """How often a failed generation is asked again, with the same draws."""
    limits: GatewayLimits = field(default_factory=GatewayLimits)


class Refused(TurntreeError):
    """A request that is answered with an error in OpenAI's form: HTTP status, type, code, the parameter at fault.
    `limit` tells the one of the session that it ran into, if that is why."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None, limit: str = ""
    ) -> None:
        super().__init__(message[:_LONGEST])  # it may quote what an agent sent
        self.status, self.code, self.param, self.limit = status, code, param and param[:_LONGEST], limit

    @property
    def kind(self) -> str:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        return kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def bad_request(error: InputError) -> Refused:
    """Without the file that an error names: it is one of this machine."""
    code = "unknown_parameter" if error.problem == UNKNOWN else None
    message = str(InputError(error.problem, field=error.field, hint=error.hint))
    return Refused(400, message, code=code, param=error.field)


@dataclass(frozen=True, kw_only=True)
class Reward:
    """What a session is worth, as it is posted, printed by an agent, and kept. A session without a reward (null) is
    censored, for the reason that must then be given."""

    reward: Any  # a float or None: any number that float32 holds
    success: bool | None = None
    reason: str | None = None
    call_rewards: dict[str, Any] | None = None
    """By the ids of calls."""

    def __post_init__(self) -> None:
        if self.reward is not None:
            object.__setattr__(self, "reward", _number(self.reward, "reward"))
        elif not self.reason:
            raise ConfigError("a session without a reward needs a reason", field="reason")
        by_call = {name: _number(value, "call_rewards") for name, value in (self.call_rewards or {}).items()}
        object.__setattr__(self, "call_rewards", by_call)

    @property
    def worth(self) -> tuple[Any, ...]:
        """All but the reason: a client whose answer was lost posts the same again."""
        return self.reward, self.success, self.call_rewards

    def to_json(self) -> dict[str, Any]:
        """Only what was given."""
        return {name: value for name, value in vars(self).items() if name == "reward" or value not in (None, {}, "")}


def read_reward(body: dict[str, Any], known: Collection[str]) -> Reward:
    """A reward as it was posted; `known` are the ids of the session's calls. Raises `InputError` naming the field."""
    calls = body.get("call_rewards")
    if isinstance(calls, dict):  # under the names that the answers have
        named = {_NAMES.sub("", name): value for name, value in calls.items()}
        if len(named) < len(calls):
            raise InputError("names a call twice", field="call_rewards")
        body = {**body, "call_rewards": named}
    given = from_mapping(Reward, body)
    if strange := sorted(set(given.call_rewards or ()) - set(known)):
        raise InputError(f"the session has no call {strange[0]!r}", field="call_rewards")
    return given


def last_words(line: str, known: Collection[str]) -> Reward:
    """The reward in an agent's last line. Raises `InputError`, which quotes the line."""
    try:
        value = parse_json(line)
        return read_reward(cast("dict[str, Any]", value) if isinstance(value, dict) else {"reward": value}, known)
    except InputError as error:
        problem = str(InputError(error.problem, field=error.field))
    if not line:
        raise InputError(f"it printed no line; print {_FORM}")
    quoted = line if len(line) <= _QUOTED else f"{line[: _QUOTED - 1]}…"
    raise InputError(f"its last line, {quoted!r}, holds none ({problem}); print {_FORM}")


def _number(value: Any, field: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return scalars.number(value)
    except ValueError:
        told = json.dumps(value)
        told = told if len(told) <= _QUOTED else f"{told[: _QUOTED - 1]}…"
        raise ConfigError(f"{told} is neither a number that float32 holds nor null", field=field) from None
