"""The tools of a shell task, and those of a repository task: plain classes for `ToolEnvironment`.

The home folder is a value (`sandboxes.limits.Files`): a command takes it into a box and brings what became of it back.
So a fork shares it and costs no copy, a replay gives the same, and nothing of one command runs on in the next.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from turntree_worlds.sandboxes.limits import EPOCH, File, Files
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.tasks import BASH, Task, run, unfit

_MINUTE = 60  # between two commands, as listings show it


class Shell:
    """One episode in a home folder."""

    def reset(self, task: Task, sandbox: Sandbox) -> str:
        self._task, self._sandbox = task, sandbox
        self.files: Files = task.files
        self.reward, self.done, self._clock = 0.0, False, EPOCH
        return task.instruction

    def bash(self, command: str) -> str:
        """Run a command with bash in the home folder. Every command begins there, in a new shell.

        Args:
            command: The command, or several lines of them.
        """
        problem = unfit(command)
        if problem is not None:
            return f"error: {problem}"
        self._clock += _MINUTE
        done = run(self._sandbox, f"{BASH}{shlex.quote(command)} 2>&1", self.files, clock=self._clock)
        said = [done.stdout.rstrip("\n")]
        if done.truncated:
            said.append("[output cut]")
        if done.exit_code is None:
            why = "took too long" if done.timed_out else "wrote too much"
            said.append(f"[stopped: it {why}; no file was changed]")
        elif done.files is None:
            said.append(f"[no file was changed: {done.not_kept}]")
        else:
            self.files = done.files
            said += [f"[exit code {done.exit_code}]"] if done.failed else []
        return "\n".join(part for part in said if part) or "[no output]"

    def submit(self, answer: str = "") -> str:
        """Say that the task is done. This ends it.

        Args:
            answer: The answer, where the task asks for one.
        """
        said: Any = answer  # a policy may write 42 for "42", or null
        if isinstance(said, bool) or not isinstance(said, str | int | float | None):
            raise ValueError(f"`answer` must be a text, not {json.dumps(said)}; nothing was submitted")
        self.reward = float(self._task.solved(self.files, "" if said is None else str(said), self._sandbox))
        self.done = True  # not before: an error in judging must not end the episode with a reward of 0
        return "submitted"

    def fork(self) -> Shell:
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin

    def __getstate__(self) -> dict[str, object]:
        """What counts as the state: the files without their times, and how it ended."""
        held = {path: (file.kind, file.data, file.mode) for path, file in self.files.items()}
        return {"files": held, "done": self.done, "reward": self.reward}


class Editor(Shell):
    """One episode in a repository: a shell, and two tools to read and edit files."""

    def view(self, path: str, first: int = 1, last: int = 200) -> str:
        """Show lines of a file, numbered.

        Args:
            path: The file, from the home folder on.
            first: The first line to show.
            last: The last line to show.
        """
        lines = self._data(path).decode("utf-8", "replace").splitlines()
        shown = range(max(first, 1), min(last, len(lines)) + 1)
        return "\n".join(f"{number:>4}  {lines[number - 1]}" for number in shown) or "[no lines]"

    def str_replace(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file.

        Args:
            path: The file, from the home folder on.
            old: The text as it is, with its spaces.
            new: The text to put in its place.
        """
        held, sought = self._data(path), old.encode("utf-8", "replace")  # a file may hold bytes that are no text
        count = held.count(sought) if old else 0
        if count != 1:
            raise ValueError(f"`old` occurs {count} times in {path}, and must occur once" if old else "`old` is empty")
        self._clock += _MINUTE  # a file that looks unchanged would keep its stale bytecode
        data = held.replace(sought, new.encode("utf-8", "replace"))
        self.files = {**self.files, path: File(data, mode=self.files[path].mode, time=self._clock)}
        return f"{path} was changed"

    def _data(self, path: str) -> bytes:
        file = self.files.get(path)
        if file is None or file.kind != "file":
            raise ValueError(f"there is no file {path!r}")
        return file.data
