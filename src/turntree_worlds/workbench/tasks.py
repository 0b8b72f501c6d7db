"""A task at a shell, and how its outcome is judged.

A task is judged by the files that are there at the end, by the answer that was submitted, or by a check. Expected files
and values never enter the sandbox before the judgement, so no command of a policy can read or change them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from turntree.core.foreign import EnvironmentFault
from turntree.core.messages import Message, ToolCall
from turntree_worlds.sandboxes.box import SandboxLost
from turntree_worlds.sandboxes.limits import EPOCH, Execution, File, Files, Language
from turntree_worlds.sandboxes.sandbox import Sandbox

_EXECUTABLE = 0o100
_LONGEST = 100_000  # characters of a command: the kernel takes 128 KiB
BASH = "unset PYTHONSAFEPATH; exec bash -c "  # modules of the folder can be imported
_CHECK = "export HOME=/; "  # settings that a policy left in its home folder must not reach the check


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
        due = {} if self.expected is None else {**self.files, **self.expected}
        if not all(alike(file, now.get(path)) for path, file in due.items()):
            return False
        if self.check is not None and _whole(run(sandbox, _CHECK + self.check, now)).failed:
            return False
        return all(_whole(run(sandbox, source, now, "python")).value == value for source, value in self.values)


def _whole(ran: Execution) -> Execution:
    if ran.exit_code is None:
        raise EnvironmentFault("the check was stopped: it took too long or wrote too much")
    return ran


def alike(due: File | None, found: File | None) -> bool:
    """Whether kind, contents and the right to execute agree; other rights depend on how a file was made."""
    if due is None or found is None:
        return due is found
    executable = due.kind != "file" or (due.mode ^ found.mode) & _EXECUTABLE == 0
    return executable and (due.kind, due.data) == (found.kind, found.data)


def run(sandbox: Sandbox, source: str, files: Files, language: Language = "shell", clock: int = EPOCH) -> Execution:
    """Raises `EnvironmentFault` where no box works."""
    try:
        return sandbox.run(source, language=language, files=files, clock=clock)
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
