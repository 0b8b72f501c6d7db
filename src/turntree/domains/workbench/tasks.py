"""A task at a shell, how its outcome is judged, and tasks from a file of your own.

A task is judged by the files that are there at the end, by the answer that was submitted, or by a check. Expected files
and values never enter the sandbox before the judgement, so no command of a policy can read or change them.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.environments.pool import EnvironmentFault
from turntree.observe.jsonl import located
from turntree.sandboxes.host import SandboxLost
from turntree.sandboxes.limits import Execution, File, Files, Language
from turntree.sandboxes.sandbox import Sandbox
from turntree.traces.sources import source_rows

_EXECUTABLE = 0o100
_LONGEST = 100_000  # characters of a command: the kernel takes 128 KiB
_CHECK = "export HOME=/; "  # settings that a policy left in its home folder must not reach the check
_KEYS = {"id": str, "kind": str, "instruction": str, "files": dict, "setup": str, "gold": list, "answer": str, "check": str}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Task:
    """`files` are those of the home folder at the start. `gold` are calls that solve the task.

    The task is solved when everything that it states holds at the end: `answer` was submitted (word by word);
    `expected` files are as given (None: absent) and no other file of the start was changed (new ones are ignored);
    `check`, a shell script run among the files, ends with exit code 0; each program of `values`, Python run among the
    files, has a last line of that value.
    """

    id: str
    instruction: str
    files: Files
    gold: tuple[ToolCall, ...] = ()
    kind: str | None = None
    answer: str | None = None
    expected: Mapping[str, File | None] | None = None
    check: str | None = None
    values: tuple[tuple[str, str], ...] = ()

    def solved(self, now: Files, answer: str, sandbox: Sandbox) -> bool:
        """Raises `EnvironmentFault` where the sandbox does not work: that is not the policy's failure."""
        if self.answer is not None and self.answer.split() != answer.split():
            return False
        if self.expected is not None and not self._as_expected(now, self.expected):
            return False
        if self.check is not None and run(sandbox, _CHECK + self.check, now).failed:
            return False
        return all(run(sandbox, source, now, "python").value == value for source, value in self.values)

    def _as_expected(self, now: Files, expected: Mapping[str, File | None]) -> bool:
        due = {**self.files, **expected}
        return all(_alike(file, now.get(path)) for path, file in due.items())


def _alike(due: File | None, found: File | None) -> bool:
    """Whether kind, contents and the right to execute agree; other rights depend on how a file was made."""
    if due is None or found is None:
        return due is found
    executable = due.kind != "file" or (due.mode ^ found.mode) & _EXECUTABLE == 0
    return executable and (due.kind, due.data) == (found.kind, found.data)


def run(sandbox: Sandbox, source: str, files: Files, language: Language = "shell", clock: int | None = None) -> Execution:
    """Raises `EnvironmentFault` where no box works."""
    try:
        more = {} if clock is None else {"clock": clock}
        return sandbox.run(source, language=language, files=files, **more)
    except SandboxLost as error:
        raise EnvironmentFault(f"the sandbox does not work: {error}") from error


def unfit(command: str) -> str | None:
    """Why the kernel would not take a command."""
    if "\0" in command:
        return "a command cannot hold the character NUL"
    if not command.isprintable() and any("\ud800" <= letter <= "\udfff" for letter in command):
        return "a command cannot hold half a character"
    return f"a command has at most {_LONGEST} characters" if len(command) > _LONGEST else None


def texts(files: Mapping[str, str]) -> dict[str, File]:
    """Files with these texts."""
    return {path: File(text.encode()) for path, text in files.items()}


def commands(*lines: str, answer: str = "") -> tuple[ToolCall, ...]:
    """The calls of an expert that runs `lines` and submits."""
    return (*(ToolCall("bash", {"command": line}) for line in lines), ToolCall("submit", {"answer": answer}))


def messages(calls: Sequence[ToolCall]) -> tuple[Message, ...]:
    """One message for each call, as an expert would say them."""
    return tuple(
        Message("assistant", "", (replace(call, id=f"call_{number}"),)) for number, call in enumerate(calls, start=1)
    )


def read_tasks(path: str, sandbox: Sandbox, most: int) -> list[Task]:
    """The first tasks of a file: JSON or JSON lines (also .gz, .xz), one object a task (docs/environments.md).

    `setup` is run once, here. A task with neither `answer` nor `check` is judged by what its `gold` does: the files
    that it changes, or, where it changes none, what its last command prints. Raises `InputError` with file and field.
    """
    found: list[Task] = []
    for number, row in enumerate(itertools.islice(source_rows(path), most)):
        try:
            if isinstance(row.value, InputError):
                raise row.value
            found.append(_task(row.value, f"{Path(path).name.split('.')[0]}-{number}", sandbox))
        except InputError as error:
            raise located(error, path=path, line=row.line or number + 1) from error
    return found


def _task(row: dict[str, Any], default_id: str, sandbox: Sandbox) -> Task:
    for key, held in row.items():
        if key not in _KEYS:
            raise InputError("is not known", field=key, hint=f"a task has {', '.join(_KEYS)}")
        if not isinstance(held, _KEYS[key]):
            raise InputError(f"is not {_KEYS[key].__name__}", field=key)
    if not row.get("instruction"):
        raise InputError("is missing", field="instruction", hint="say what is to be done")
    files: Files = {name: _file(name, held) for name, held in row.get("files", {}).items()}
    if row.get("setup"):
        files = _after(sandbox, row["setup"], files, "setup")[0]
    gold, answer, expected = [str(line) for line in row.get("gold", [])], row.get("answer"), None
    if answer is None and row.get("check") is None:
        answer, expected = _effect(sandbox, gold, files)
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
        given = dict(held)
        made = File(base64.b64decode(given.pop("base64"), validate=True), mode=int(given.pop("mode", 0o644)))
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        hint = 'give a text, or {"base64": "...", "mode": 493}'
        raise InputError("is not a file", field=f"files.{name}", hint=hint) from error
    return made


def _effect(sandbox: Sandbox, gold: Sequence[str], start: Files) -> tuple[str | None, dict[str, File | None] | None]:
    """What `gold` leads to: an answer, or files."""
    if not gold:
        raise InputError("says nothing to judge by", hint="give an answer, a check, or gold commands")
    files, said = start, ""
    for line in gold:
        files, said = _after(sandbox, line, files, "gold")
    changed = {path: files.get(path) for path in {*start, *files} if not _alike(start.get(path), files.get(path))}
    if changed:
        return None, changed
    if not said.strip():
        raise InputError("changes no file and prints nothing", field="gold", hint="give an answer or a check")
    return said.strip(), None


def _after(sandbox: Sandbox, source: str, files: Files, field: str) -> tuple[Files, str]:
    done = run(sandbox, source, files)
    if done.failed or done.files is None:
        said = done.not_kept or done.stderr.strip()[-200:] or f"exit code {done.exit_code}"
        raise InputError(f"fails in the sandbox: {said}", field=field)
    return done.files, done.stdout
