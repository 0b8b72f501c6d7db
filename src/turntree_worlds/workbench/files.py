"""Tasks from files: your own, and those of AgentBench (OS) and InterCode (bash) as they are published.

One object is one task. Its keys decide the format:

| format | keys |
|---|---|
| your own | `instruction`; of `id`, `kind`, `files`, `setup`, `gold`, `answer`, `check` what there is |
| AgentBench | `description`, `create.init`, `evaluation.example` (the answer is what it prints) |
| InterCode | `query`, `gold`; the files are an archive, whose folders lie at the root of the file system there |

`setup` is run once, when the file is read. A task with neither `answer` nor `check` is judged by what its `gold` does:
the files that it changes, or, where it changes none, what its last command prints. A task whose setup or gold does not
work in the sandbox, or that the file has already, is left out and counted by reason. Without `id`, a task is named by
what it says, so it has one name in all files.
"""

from __future__ import annotations

import base64
import binascii
import posixpath
import re
import shlex
import tarfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.run.jsonl import located
from turntree.run.opening import members_of
from turntree.traces.formats.row import fingerprint
from turntree.traces.sources import source_rows
from turntree_worlds.sandboxes.limits import File, Files
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.tasks import BASH, Task, alike, commands, run

_KEYS = {
    "id": str, "kind": str, "instruction": str, "files": dict, "setup": str, "gold": list, "answer": str, "check": str,
}  # fmt: skip
_HOME = "/tmp"
_NUMBER = "number"  # AgentBench's kind of task that is judged by a number; 0 would mean that nothing was set up


class _Unusable(Exception):
    """A task that cannot be played here. The text is the reason."""


@dataclass
class TaskFile:
    """The tasks, and what reading counted: rows = tasks + all dropped."""

    tasks: list[Task] = field(default_factory=list[Task])
    rows: int = 0
    dropped: Counter[str] = field(default_factory=Counter[str])

    def to_json(self) -> dict[str, Any]:
        return {"rows": self.rows, "kept": len(self.tasks), "dropped": dict(sorted(self.dropped.items()))}


def read_tasks(
    path: str, sandbox: Sandbox, most: int, archive: str | None = None, *, seed: int | None = None
) -> TaskFile:
    """At most `most` tasks of a file, drawn by `seed` (None: the first ones): JSON or JSON lines (also .gz, .xz). Every
    task begins with the files of `archive` beside its own. Raises `InputError` with file, line and field."""
    found, common = TaskFile(), {} if archive is None else _archived(archive)
    names = set[str]()
    rows = enumerate(source_rows(path))
    for number, row in rows if seed is None else seeds.shuffled(seed, rows, lambda one: repr(one[1].value)):
        if len(found.tasks) == most:
            break
        found.rows += 1
        try:
            if isinstance(row.value, InputError):
                raise row.value
            name = f"task-{fingerprint(row.value)}"  # by content: two tasks are two, one is the same in every file
            if name in names:
                raise _Unusable("is in the file already")
            names.add(name)
            found.tasks.append(_task(_own(row.value, common), name, common, sandbox))
        except InputError as error:
            raise located(error, path=path, line=row.line or number + 1) from error
        except _Unusable as reason:
            found.dropped[str(reason)] += 1
    if not found.tasks:
        raise InputError(f"holds no task that can be played here ({dict(found.dropped)})", path=path)
    return found


def _object(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """A part of a published row, which may be left out or null."""
    held = row.get(key) or {}
    if not isinstance(held, Mapping):
        raise InputError(f"is {type(held).__name__}, not an object", field=key)
    return cast("Mapping[str, Any]", held)


def _archived(path: str) -> dict[str, File]:
    """The files, folders and links of a tar archive. Raises `InputError`."""
    named = ((posixpath.normpath(entry.name), entry, pieces) for entry, pieces in members_of(path))
    return {name: _member(entry, pieces()) for name, entry, pieces in named if name != "."}  # `tar -C FOLDER .`


def _member(entry: tarfile.TarInfo, pieces: Iterable[bytes]) -> File:
    when = int(entry.mtime)
    if entry.isdir():
        return File(kind="folder", mode=entry.mode, time=when)
    if entry.issym():
        return File(entry.linkname.encode(), "link", time=when)
    return File(b"".join(pieces), mode=entry.mode, time=when)


def _own(row: dict[str, Any], common: Files) -> dict[str, Any]:
    """A published row in the form of one's own."""
    if "description" in row and "evaluation" in row:
        example = _object(row, "evaluation").get("example")
        if not isinstance(example, str):
            raise _Unusable("has no gold command")
        made = _object(row, "create").get("init") or ""
        return {
            "kind": _NUMBER,
            "instruction": f"{row['description']} Submit the number.",
            "setup": made,
            "gold": [example],
        }
    if set(row) == {"query", "gold"}:
        roots = "|".join(sorted({re.escape(path.split("/")[0]) for path in common}))
        moved = re.compile(rf"(?<![\w./~])/({roots})\b") if roots else None
        query, gold = (moved.sub(rf"{_HOME}/\1", row[key]) if moved else row[key] for key in ("query", "gold"))
        return {"instruction": f"{query} If something is to be found out, submit it.", "gold": [gold]}
    return row


def _task(row: dict[str, Any], default_id: str, common: Files, sandbox: Sandbox) -> Task:
    for key, held in row.items():
        if key not in _KEYS:
            raise InputError("is not known", field=key, hint=f"a task has {', '.join(_KEYS)}")
        if not isinstance(held, _KEYS[key]):
            raise InputError(f"is not {_KEYS[key].__name__}", field=key)
    if not row.get("instruction"):
        raise InputError("is missing", field="instruction", hint="say what is to be done")
    files: Files = {**common, **{name: _file(name, held) for name, held in row.get("files", {}).items()}}
    if row.get("setup"):
        files = _after(sandbox, row["setup"], files, "setup")[0]
    gold, answer, expected = [str(line) for line in row.get("gold", [])], row.get("answer"), None
    if answer is None and row.get("check") is None:
        answer, expected = _effect(sandbox, gold, files, row.get("kind"))
    return Task(
        id=row.get("id", default_id),
        instruction=row["instruction"],
        files=files,
        gold=commands(*gold, answer=answer or "") if gold else (),
        kind=row.get("kind"),
        answer=answer,
        expected=expected,
        check=row.get("check"),
    )


def _file(name: str, held: Any) -> File:
    """A text, or {"base64": ..., "mode": 493}."""
    if isinstance(held, str):
        return File(held.encode())
    try:
        return File(base64.b64decode(held["base64"], validate=True), mode=int(held.get("mode", 0o644)))
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        hint = 'give a text, or {"base64": "...", "mode": 493}'
        raise InputError("is not a file", field=f"files.{name}", hint=hint) from error


def _effect(
    sandbox: Sandbox, gold: Sequence[str], start: Files, kind: str | None
) -> tuple[str | None, Mapping[str, File | None] | None]:
    """What `gold` leads to: an answer, or files."""
    if not gold:
        raise InputError("says nothing to judge by", hint="give an answer, a check, or gold commands")
    once, again = (_played(sandbox, gold, start) for _ in range(2))
    if once != again:
        raise _Unusable("its gold does something else when it is run again")
    files, said = once
    changed = {path: files.get(path) for path in {*start, *files} if not alike(start.get(path), files.get(path))}
    if changed:
        return None, changed
    if not said.strip():
        raise _Unusable("its gold changes no file and prints nothing")
    if kind == _NUMBER and not re.fullmatch(r"\s*[1-9]\d*\s*", said):
        raise _Unusable("its gold finds nothing here")
    return said.strip(), None


def _played(sandbox: Sandbox, gold: Sequence[str], files: Files) -> tuple[Files, str]:
    said = ""
    for line in gold:
        files, said = _after(sandbox, line, files, "gold")
    return files, said


def _after(sandbox: Sandbox, source: str, files: Files, what: str) -> tuple[Files, str]:
    done = run(sandbox, BASH + shlex.quote(source), files)
    if done.failed or done.files is None or done.truncated:
        raise _Unusable(f"its {what} fails in the sandbox")
    return done.files, done.stdout
