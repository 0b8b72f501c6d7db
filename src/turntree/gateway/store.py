"""Sessions on disk: one append-only JSONL file each, from which a gateway that was killed goes on.

`open/ID.jsonl` grows while the session lives and is moved to `closed/` when it is over. Each row is written with one
call of the system before the agent gets its answer, so that a killed process loses no answer that was given; a row that
was cut off is dropped. Rows refer to earlier ones (`Call.base`). Keys are stored as digests. Reading is strict: a
row is one of the dataclasses below, and only what could have been written is read (`StoredSession`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turntree.core.completion import Completion
from turntree.core.config import Count, from_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.tree import StopReason
from turntree.gateway.calls import Call, Cause, Session, Status
from turntree.gateway.config import Reward
from turntree.run.files import parse_line, writing
from turntree.run.jsonl import json_line, read_lines

SCHEMA = "turntree.session/1"
OPEN, CLOSED, DAMAGED = "open", "closed", "damaged"
_DIGEST = re.compile("[0-9a-f]{64}")
_AWAY = "move the file away"


@dataclass(frozen=True, kw_only=True)
class Head:
    """How a session begins. `keys` are digests of its keys, by what they allow ("ask", "reward")."""

    schema: Literal["turntree.session/1"]
    session: str
    task: str
    sample: Count
    seed: Count
    opened: float  # wall-clock time, which goes on while a gateway is down
    keys: dict[str, str]
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        if self.keys.keys() != {"ask", "reward"} or not all(map(_DIGEST.fullmatch, self.keys.values())):
            raise ValueError("keys are not the digests of the keys ask and reward")

    def value(self, calls: Iterable[Call], given: Reward | None, reason: str, stop: StopReason) -> Session:
        """The session as a value. `reason` is why it ended without a reward."""
        worth = {} if given is None else given.to_json()
        return Session(
            session_id=self.session,
            task_id=self.task,
            sample=self.sample,
            calls=tuple(sorted(calls, key=lambda call: call.index)),
            stop=stop,
            **{**worth, "reason": worth.get("reason") or reason},
        )


@dataclass(frozen=True, kw_only=True)
class _End:
    closed: str
    stop: StopReason = StopReason.COMPLETED

    def __post_init__(self) -> None:
        if self.stop.censors:
            raise ValueError(f"stop is {self.stop.value!r}, with which no session ends")


@dataclass(frozen=True, kw_only=True)
class _Call:
    """What a call adds to the call `base`."""

    id: str
    index: Count
    cause: Cause
    ids: tuple[int, ...]
    messages: list[dict[str, Any]]
    base: str | None = None
    base_tokens: Count = 0
    base_messages: Count = 0
    tools: list[dict[str, Any]] | None = None
    completion: Completion | None = None
    answer: dict[str, Any] | None = None
    status: Status = "kept"
    error: str = ""
    cost: Cost = NO_COST
    stop: str | None = None
    draw: Count = 0
    constrained: bool = False
    meta: dict[str, Any] = field(default_factory=dict[str, Any])

    def __post_init__(self) -> None:
        if (self.status == "kept") != (self.answer is not None) or (self.answer and self.completion is None):
            raise ValueError("a call that was kept, and no other, has a completion and an answer")
        sampled = () if self.completion is None else self.completion.token_ids
        if min((*self.ids, *sampled), default=0) < 0:
            raise ValueError("a token id is below 0")


@dataclass(frozen=True)
class StoredSession:
    """A session's file: its head, its calls in the order in which they ended, its reward and its end, if it has them.
    The calls have names and numbers of their own, and each fits the earlier one that it goes on from."""

    head: Head
    calls: list[Call]
    reward: Reward | None
    end: _End | None

    def value(self) -> Session:
        end = self.end or _End(closed="")
        return self.head.value(self.calls, self.reward, end.closed, end.stop)


class SessionStore:
    """The folder of a gateway's sessions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (OPEN, CLOSED):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, session_id: str, where: str = OPEN) -> Path:
        return self.folder / where / f"{session_id}.jsonl"

    def has(self, session_id: str) -> bool:
        return any(self.path(session_id, where).exists() for where in (OPEN, CLOSED, DAMAGED))

    def append(self, session_id: str, row: dict[str, Any], *, sync: bool = False) -> None:
        append_row(self.path(session_id), row, sync=sync)

    def close(self, session_id: str) -> None:
        self.path(session_id).replace(self.path(session_id, CLOSED))

    def set_aside(self, session_id: str) -> Path:
        """Move the file of an open session that cannot be read to where no gateway looks for it."""
        away = self.path(session_id, DAMAGED)
        away.parent.mkdir(exist_ok=True)
        return self.path(session_id).replace(away)

    def read(self, session_id: str) -> StoredSession | None:
        """A session, open or closed; None for an open one without a row. The last row of an open one is dropped from
        the file where it was cut off. Raises `InputError` for any other damage, with the line."""
        path, live = self.path(session_id), True
        if not path.exists():
            path, live = self.path(session_id, CLOSED), False
        head, calls, numbers, reward, end = None, dict[str, Call](), set[int](), None, None
        for place, line in read_lines(path):
            if live and not line.endswith(b"\n"):
                os.truncate(path, path.stat().st_size - len(line))
                break
            try:
                row = parse_line(line, path, place)
                if head is None:
                    head = _head(row, session_id)
                elif row.keys() == {"call"}:
                    call = call_from_json(row["call"], calls)
                    if call.index in numbers:
                        raise InputError(f"{call.index} is there twice", field="call.index")
                    calls[call.call_id] = call
                    numbers.add(call.index)
                elif row.keys() == {"reward"} and reward is None:
                    reward = from_mapping(Reward, row["reward"])
                else:
                    ended = from_mapping(_End, row)
                    end = end or ended
            except TurntreeError as error:
                raise _located(error, path, place) from error
        if not live and (head is None or end is None):
            raise InputError("is cut off: it has no end", path=path, hint=_AWAY)
        return None if head is None else StoredSession(head, list(calls.values()), reward, end)

    def task_of(self, session_id: str) -> str:
        """The task of a closed session."""
        path = self.path(session_id, CLOSED)
        for place, line in read_lines(path):
            try:
                return _head(parse_line(line, path, place), session_id).task
            except InputError as error:
                raise _located(error, path, place) from error
        raise InputError("is empty", path=path, hint=_AWAY)

    def sessions(self, where: str = OPEN) -> list[str]:
        return sorted(path.stem for path in (self.folder / where).glob("*.jsonl"))


def read_session(store: SessionStore, session_id: str) -> Session:
    """The value of a session, open or closed. Raises `InputError` where its file is damaged."""
    held = store.read(session_id)
    if held is None:
        raise InputError("is empty", path=store.path(session_id), hint=_AWAY)
    return held.value()


def append_row(path: Path, row: dict[str, Any], *, sync: bool = False) -> None:
    """Write a whole row or nothing, with one call of the system."""
    data = json_line(row).encode("utf-8")
    with writing(path):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            written = os.write(handle, data)
            if written < len(data):
                os.ftruncate(handle, os.fstat(handle).st_size - written)
                raise OSError(28, "the disk is full")
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)


def call_to_json(call: Call) -> dict[str, Any]:
    """A call as a row; the prompt and the messages are what it adds to its base."""
    row: dict[str, Any] = {
        "id": call.call_id,
        "index": call.index,
        "cause": call.cause,
        "ids": list(call.added_ids),
        "messages": [message.to_chat() for message in call.added],
    }
    if call.base is not None:
        row |= {"base": call.base.call_id, "base_tokens": call.base_tokens, "base_messages": call.base_messages}
    if call.tools and (call.base is None or call.tools != call.base.tools):
        row["tools"] = list(call.tools)
    if call.completion is not None:
        row["completion"] = dataclasses.asdict(call.completion)
    if call.answer is not None:
        row["answer"] = call.answer.to_chat()
    if call.status != "kept":
        row |= {"status": call.status, "error": call.error, "cost": dataclasses.asdict(call.cost)}
    row |= {"stop": call.stop} if call.stop is not None else {}
    row |= {"draw": call.draw} if call.draw else {}
    row |= {"constrained": True} if call.constrained else {}
    return row | ({"meta": call.meta} if call.meta else {})


def call_from_json(row: Any, earlier: dict[str, Call]) -> Call:
    """Inverse of `call_to_json`; `earlier` are the session's calls so far, by id. Raises `InputError` for a call that
    does not fit them."""
    read = from_mapping(_Call, row)
    base = None if read.base is None else earlier.get(read.base)
    if (base is None) != (read.base is None):
        raise InputError(f"there is no earlier call {read.base!r}", field="call.base")
    tokens = 0 if base is None else base.prompt_tokens + len(base.sampled_ids)
    messages = 0 if base is None else base.message_count + (base.answer is not None)
    if read.base_tokens > tokens or read.base_messages > messages:
        raise InputError("is more than the call that it goes on from holds", field="call.base_tokens")
    if read.id in earlier:
        raise InputError(f"{read.id!r} is there twice", field="call.id")
    return Call(
        call_id=read.id,
        index=read.index,
        cause=read.cause,
        added_ids=read.ids,
        added=tuple(map(_message, read.messages)),
        tools=tuple(read.tools) if read.tools is not None else () if base is None else base.tools,
        base=base,
        base_tokens=read.base_tokens,
        base_messages=read.base_messages,
        completion=read.completion,
        answer=None if read.answer is None else _message(read.answer, "assistant"),
        status=read.status,
        error=read.error,
        cost=read.cost,
        stop=read.stop,
        draw=read.draw,
        constrained=read.constrained,
        meta=read.meta,
    )


def _head(row: dict[str, Any], session_id: str) -> Head:
    head = from_mapping(Head, row)
    if head.session != session_id:
        raise InputError(f"is {head.session!r}, not the name of the file", field="session")
    return head


def _message(row: dict[str, Any], role: str | None = None) -> Message:
    """A message as `to_chat` wrote it; any other one was changed."""
    found = Message.from_chat(row)
    texts = (found.name, found.tool_call_id, *(call.id for call in found.tool_calls))
    if (
        found.to_chat() != row
        or found.role != (role or found.role)
        or not all(isinstance(t, str | None) for t in texts)
    ):
        raise InputError("is not a message as it is written here", field="call.messages")
    return found


def _located(error: TurntreeError, path: Path, line: int) -> InputError:
    known = error if isinstance(error, InputError) else InputError(str(error))
    return InputError(known.problem, path=path, line=line, field=known.field, hint=known.hint or _AWAY)
