"""Sessions on disk: one append-only JSONL file each, from which a gateway that was killed goes on.

`open/ID.jsonl` grows while the session lives and is moved to `closed/` when it is over. Each row is written with one
call of the system before the agent gets its answer, so that a killed process loses no answer that was given; a row that
was cut off is dropped. Rows refer to earlier ones (`lineage.Kept`). Keys are stored as digests.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.completion import Completion
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.gateway.lineage import Kept
from turntree.observe.files import json_line, parse_line, writing

SCHEMA = "turntree.session/1"
OPEN, CLOSED = "open", "closed"


class SessionStore:
    """The folder of a gateway's sessions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in (OPEN, CLOSED):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def path(self, session_id: str, where: str = OPEN) -> Path:
        return self.folder / where / f"{session_id}.jsonl"

    def has(self, session_id: str) -> bool:
        return any(self.path(session_id, where).exists() for where in (OPEN, CLOSED))

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

    def rows(self, session_id: str) -> list[dict[str, Any]]:
        """The rows of a session, the last one dropped from the file where it was cut off. Raises `InputError` for
        damage anywhere else."""
        path = self.path(session_id)
        path = path if path.exists() else self.path(session_id, CLOSED)
        return _rows(path)

    def open_sessions(self) -> Iterator[str]:
        yield from sorted(path.stem for path in (self.folder / OPEN).glob("*.jsonl"))


def _rows(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if whole < len(data):
        os.truncate(path, whole)
    rows = [parse_line(line, path, number) for number, line in enumerate(data[:whole].splitlines(), start=1)]
    if rows and rows[0].get("schema") != SCHEMA:
        problem = f"is {rows[0].get('schema')!r}, not {SCHEMA!r}"
        raise InputError(problem, path=path, line=1, field="schema", hint="move the file away")
    return rows


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


def call_from_json(row: dict[str, Any], earlier: dict[str, Kept]) -> Kept:
    """Inverse of `call_to_json`; `earlier` are the session's calls so far, by id."""
    base = earlier[row["base"]] if "base" in row else None
    sampled = row.get("completion")
    completion = None
    if sampled is not None:
        listed = {name: tuple(sampled[name]) for name in ("token_ids", "logprobs", "entropies")}
        completion = Completion(**{**sampled, **listed, "cost": Cost(**sampled["cost"])})
    return Kept(
        call_id=row["id"],
        index=row["index"],
        request_id=row["request"],
        cause=row["cause"],
        added_ids=tuple(row["ids"]),
        added=tuple(Message.from_chat(message) for message in row["messages"]),
        tools=tuple(row["tools"]) if "tools" in row else () if base is None else base.tools,
        base=base,
        base_tokens=row.get("base_tokens", 0),
        base_messages=row.get("base_messages", 0),
        completion=completion,
        answer=Message.from_chat(row["answer"]) if "answer" in row else None,
        status=row.get("status", "kept"),
        error=row.get("error", ""),
        cost=Cost(**row.get("cost", {})),
        meta=row.get("meta", {}),
    )
