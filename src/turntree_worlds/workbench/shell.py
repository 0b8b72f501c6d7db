"""The tools of a shell task: a plain class for `ToolEnvironment`.

The home folder is a value (`sandboxes.limits.Files`): a command takes it into a box and brings what became of it back.
So a fork shares it and costs no copy, a replay gives the same, and nothing of one command runs on in the next.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from turntree_worlds.sandboxes.limits import EPOCH, Files
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
