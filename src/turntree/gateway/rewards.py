"""What a session is worth: one reader for what is posted and for what an agent prints in its last line."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any, cast

from turntree.core import scalars
from turntree.gateway.config import Refused

_QUOTED = 80  # characters of a last line
_FORM = 'a number, or {"reward": a number or null, "success": ..., "reason": ..., "call_rewards": ...}'


def only(body: dict[str, Any], *names: str) -> dict[str, Any]:
    """The body. Raises `Refused` for a field of another name: a misspelled task would be the default one."""
    if unknown := sorted(set(body) - set(names)):
        message = f"unknown parameter {unknown[0]!r}; known are {', '.join(names)}"
        raise Refused(400, message, code="unknown_parameter", param=unknown[0])
    return body


def read_reward(body: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """A reward as it is kept; `known` are the ids of the session's calls. A session without one (null) is censored, for
    the reason that must then be given. Raises `Refused` naming the field."""
    if "reward" not in only(body, "reward", "success", "reason", "call_rewards"):
        raise Refused(400, "give reward, and where you like success, reason, call_rewards", param="reward")
    reward = None if body["reward"] is None else _number(body["reward"], "reward")
    if not isinstance(body.get("success"), bool | None) or not isinstance(body.get("reason", ""), str):
        raise Refused(400, "success is true or false, reason is a text")
    if reward is None and not body.get("reason"):
        raise Refused(400, "a session without a reward needs a reason", param="reason")
    calls: Any = body.get("call_rewards") or {}
    if not isinstance(calls, dict):
        raise Refused(400, "is not an object of numbers by call id", param="call_rewards")
    named = {
        name.removeprefix("chatcmpl-").removeprefix("resp_"): _number(value, "call_rewards")
        for name, value in cast("dict[str, Any]", calls).items()
    }
    if strange := sorted(set(named) - set(known)):
        raise Refused(400, f"the session has no call {strange[0]!r}", param="call_rewards")
    given = {name: body[name] for name in ("success", "reason") if body.get(name) is not None}
    return {"reward": reward, **given} | ({"call_rewards": named} if named else {})


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rewards say the same, whatever their reasons: a client whose answer was lost posts again."""
    return all(one.get(name) == other.get(name) for name in ("reward", "success", "call_rewards"))


def last_words(line: str, known: Collection[str]) -> dict[str, Any]:
    """The reward in an agent's last line. Raises `Refused`, which quotes the line."""
    try:
        value: Any = json.loads(line)
        return read_reward(cast("dict[str, Any]", value) if isinstance(value, dict) else {"reward": value}, known)
    except (ValueError, RecursionError):
        problem = "is no JSON"
    except Refused as error:
        problem = f"{error.param}: {error}" if error.param else str(error)
    if not line:
        raise Refused(400, f"it printed no line; print {_FORM}")
    quoted = line if len(line) <= _QUOTED else f"{line[: _QUOTED - 1]}…"
    raise Refused(400, f"its last line, {quoted!r}, holds none ({problem}); print {_FORM}")


def _number(value: Any, field: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        return scalars.number(value)
    except ValueError:
        told = json.dumps(value)
        told = told if len(told) <= _QUOTED else f"{told[: _QUOTED - 1]}…"
        raise Refused(400, f"{told} is neither a number that float32 holds nor null", param=field) from None
