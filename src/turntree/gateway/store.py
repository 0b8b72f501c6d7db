"""Sessions on disk: one append-only JSONL file each, from which a gateway that was killed goes on.

`open/ID.jsonl` grows while the session lives and is moved to `closed/` when it is over. Each row is written with one
call of the system before the agent gets its answer, so that a killed process loses no answer that was given; a row that
was cut off is dropped. Rows refer to earlier ones (`lineage.Kept`). Keys are stored as digests. Reading is strict: a
row is one of the dataclasses below, and only what could have been written is read (`StoredSession`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from turntree.core.completion import Completion
from turntree.core.config import Between, from_mapping
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.scalars import number
from turntree.core.tree import StopReason
from turntree.gateway.calls import Cause, Session, Status
from turntree.gateway.lineage import Kept
from turntree.observe.files import json_line, parse_line, writing
from turntree.observe.jsonl import read_lines

SCHEMA = "turntree.session/1"
OPEN, CLOSED, DAMAGED = "open", "closed", "damaged"
_DIGEST = re.compile("[0-9a-f]{64}")
_AWAY = "move the file away"

Count = Annotated[int, Between(0)]


@dataclass(frozen=True, kw_only=True)
class _Head:
    schema: Literal["turntree.session/1"]
    session: str
    task: str
    sample: Count
    seed: Count
    opened: float
    keys: dict[str, str]
    meta: dict[str, Any]

    def __post_init__(self) -> None:
        if self.keys.keys() != {"ask", "reward"} or not all(map(_DIGEST.fullmatch, self.keys.values())):
            raise ValueError("keys are not the digests of the keys ask and reward")


@dataclass(frozen=True, kw_only=True)
class _Reward:
    reward: float | None
    success: bool | None = None
    reason: str = ""
    call_rewards: dict[str, float] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for value in (*self.call_rewards.values(), *(() if self.reward is None else (self.reward,))):
            number(value)


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
    request: str
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

    head: _Head
    calls: list[Kept]
    reward: dict[str, Any]
    end: _End | None

    def value(self) -> Session:
        head = self.head
        said = {name: value for name, value in self.reward.items() if name != "reason"}
        return Session(
            session_id=head.session,
            task_id=head.task,
            sample=head.sample,
            calls=tuple(kept.call(head.session, head.task) for kept in sorted(self.calls, key=lambda one: one.index)),
            reason=self.reward.get("reason") or ("" if self.end is None else self.end.closed),
            stop=StopReason.COMPLETED if self.end is None else self.end.stop,
            **said,
        )


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
        path = self.path(session_id)
        data = json_line(row, allow_nan=False).encode("utf-8")
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
        head, calls, numbers, reward, end = None, dict[str, Kept](), set[int](), dict[str, Any](), None
        for place, line in read_lines(path):
            if live and not line.endswith(b"\n"):
                os.truncate(path, path.stat().st_size - len(line))
                break
            try:
                row = parse_line(line, path, place)
                if head is None:
                    head = _head(row, session_id)
                elif row.keys() == {"call"}:
                    kept = call_from_json(row["call"], calls)
                    if kept.index in numbers:
                        raise InputError(f"{kept.index} is there twice", field="call.index")
                    calls[kept.call_id] = kept
                    numbers.add(kept.index)
                elif row.keys() == {"reward"} and not reward:
                    given = from_mapping(_Reward, row["reward"])
                    reward = {name: getattr(given, name) for name in row["reward"]}
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


def call_to_json(kept: Kept) -> dict[str, Any]:
    """A call as a row; the prompt and the messages are what it adds to its base."""
    row: dict[str, Any] = {
        "id": kept.call_id,
        "index": kept.index,
        "request": kept.request_id,
        "cause": kept.cause,
        "ids": list(kept.added_ids),
        "messages": [message.to_chat() for message in kept.added],
    }
    if kept.base is not None:
        row |= {"base": kept.base.call_id, "base_tokens": kept.base_tokens, "base_messages": kept.base_messages}
    if kept.tools and (kept.base is None or kept.tools != kept.base.tools):
        row["tools"] = list(kept.tools)
    if kept.completion is not None:
        row["completion"] = dataclasses.asdict(kept.completion)
    if kept.answer is not None:
        row["answer"] = kept.answer.to_chat()
    if kept.status != "kept":
        row |= {"status": kept.status, "error": kept.error, "cost": dataclasses.asdict(kept.cost)}
    return row | ({"meta": kept.meta} if kept.meta else {})


def call_from_json(row: Any, earlier: dict[str, Kept]) -> Kept:
    """Inverse of `call_to_json`; `earlier` are the session's calls so far, by id. Raises `InputError` for a call that
    does not fit them."""
    call = from_mapping(_Call, row)
    base = None if call.base is None else earlier.get(call.base)
    if (base is None) != (call.base is None):
        raise InputError(f"there is no earlier call {call.base!r}", field="call.base")
    tokens, messages = (0, 0) if base is None else (base.total_tokens, base.message_count + (base.answer is not None))
    if call.base_tokens > tokens or call.base_messages > messages:
        raise InputError("is more than the call that it goes on from holds", field="call.base_tokens")
    if call.id in earlier:
        raise InputError(f"{call.id!r} is there twice", field="call.id")
    return Kept(
        call_id=call.id,
        index=call.index,
        request_id=call.request,
        cause=call.cause,
        added_ids=call.ids,
        added=tuple(map(_message, call.messages)),
        tools=tuple(call.tools) if call.tools is not None else () if base is None else base.tools,
        base=base,
        base_tokens=call.base_tokens,
        base_messages=call.base_messages,
        completion=call.completion,
        answer=None if call.answer is None else _message(call.answer, "assistant"),
        status=call.status,
        error=call.error,
        cost=call.cost,
        meta=call.meta,
    )


def _head(row: dict[str, Any], session_id: str) -> _Head:
    head = from_mapping(_Head, row)
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
