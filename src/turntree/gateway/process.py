"""Run an agent: a program in a folder and a process group of its own, with a limit of time and of output."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turntree.core.errors import InputError

_MOST_OUTPUT = 64_000_000  # bytes on standard output and error; a program that writes more is stopped
_TAIL = 65_536
_LOOK = 0.02  # seconds between two looks at a program, at first
_PROXIES = ("NO_PROXY", "no_proxy")
_MARK = "TURNTREE_REWARD_KEY"  # drawn anew for every agent; another run may have a session of the same name
_GUARD = 'read -r group && read -r _; kill -s KILL -- "-$group"'  # its input ends when the process that holds it does


@dataclass(frozen=True, kw_only=True)
class Exit:
    """How a program ended. `stopped` says why it was killed by us."""

    code: int
    stopped: str | None = None
    last_line: str = ""  # of standard output
    last_error: str = ""  # the last line on standard error

    @property
    def problem(self) -> str | None:
        """Why nothing can be made of it; None for a program that ended by itself with code 0."""
        if self.stopped is not None:
            return self.stopped
        if self.code == 0:
            return None
        said = f": {self.last_error}" if self.last_error else ""
        how = f"was killed by {_signal(-self.code)}" if self.code < 0 else f"ended with code {self.code}"
        return f"the agent {how}{said}"


def _signal(number: int) -> str:
    named = number in {one.value for one in signal.Signals}  # most real-time signals have no name
    return signal.Signals(number).name if named else f"signal {number}"


def command_of(text: str) -> list[str]:
    """The words of a command, those that name files made absolute: the agent runs in a folder of its own. `python` is
    the interpreter of this process. Raises `InputError` where there is no such program."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InputError(f"{text!r} cannot be split into words ({error})", field="environment") from error
    if words and words[0] == "python":
        words[0] = sys.executable
    words = [str(Path(word).absolute()) if Path(word).is_file() else word for word in words]
    if not words or shutil.which(words[0]) is None:
        problem = f"there is no program {words[0]!r}" if words else "names no command"
        raise InputError(problem, field="environment", hint="write gateway:COMMAND, e.g. 'gateway:python agent.py'")
    return words


@contextlib.contextmanager
def _guard() -> Iterator[Callable[[int], None]]:
    """Names a process group that is killed should this process end inside the block, even by SIGKILL: nobody else would
    ever end it. A process of its own watches; the death signal of Linux would spare what an agent has started."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", _GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert guard.stdin is not None
    watched = guard.stdin

    def guarded(group: int) -> None:
        with contextlib.suppress(OSError):  # a guard that was itself killed is no reason to end the agent
            watched.write(f"{group}\n".encode())

    try:
        yield guarded
    finally:
        guard.kill()  # before its input ends, or it would kill a group whose number may be another's by now
        guard.wait()
        watched.close()


def run_agent(
    command: Sequence[str], folder: Path, variables: Mapping[str, str], seconds: float, stop: threading.Event
) -> Exit:
    """Run `command` in `folder` to its end; `stdout.txt` and `stderr.txt` there hold what it wrote. Its whole process
    group is killed when it ends, takes too long, writes too much, `stop` is set, or this process ends; unless this
    process ends, also what it started in other groups (on Linux, by the key in the environment)."""
    started, reason = time.monotonic(), None
    paths = folder / "stdout.txt", folder / "stderr.txt"
    with contextlib.ExitStack() as held:
        out, err = (held.enter_context(path.open("wb")) for path in paths)
        try:
            guarded = held.enter_context(_guard())
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environment_with(variables),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        except OSError as error:
            return Exit(code=127, stopped=f"the agent cannot be started ({error})")
        try:
            guarded(process.pid)
            wait = _LOOK
            while reason is None:
                try:
                    process.wait(wait)
                    break
                except subprocess.TimeoutExpired:
                    wait = min(2 * wait, 0.5)
                reason = _overdue(time.monotonic() - started, seconds, paths, stop)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _kill_marked(variables.get(_MARK))
    return Exit(
        code=process.returncode, stopped=reason, last_line=_last_line(paths[0]), last_error=_last_line(paths[1])[:300]
    )


def _kill_marked(key: str | None) -> None:
    """Kill the processes that have this key in their environment, as far as Linux tells it."""
    mark = f"{_MARK}={key}".encode()
    for folder in Path("/proc").glob("[0-9]*") if key else ():
        with contextlib.suppress(OSError):  # ended, or another user's
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                os.kill(int(folder.name), signal.SIGKILL)


def variables_of(url: str, session: str, keys: Mapping[str, str], model: str) -> dict[str, str]:
    """Where the clients of OpenAI, Anthropic and LiteLLM look for their server, key and model; and where to reward."""
    return {
        "OPENAI_BASE_URL": f"{url}/v1",
        "OPENAI_API_BASE": f"{url}/v1",
        "OPENAI_API_KEY": keys["ask"],
        "OPENAI_MODEL": model,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_BASE": url,
        "ANTHROPIC_API_KEY": keys["ask"],
        "ANTHROPIC_AUTH_TOKEN": keys["ask"],  # before the login of whoever runs Claude Code
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # it would differ in every request
        "TURNTREE_SESSION": session,
        "TURNTREE_REWARD_URL": f"{url}/sessions/{session}/reward",
        _MARK: keys["reward"],
    }


def run_in_front(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command at this terminal, in this folder, to its end; returns its exit code. An interrupt is the command's
    to handle; what else ends this process ends it too, and what it started (on Linux). Raises `InputError` where it
    cannot be started."""
    try:
        process = subprocess.Popen(command, env=environment_with(variables))
    except OSError as error:
        raise InputError(f"cannot be started ({error.strerror})", field="exec", hint="name a program") from error
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5.0)
        process.kill()
        _kill_marked(variables.get(_MARK))
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def _overdue(taken: float, seconds: float, paths: Sequence[Path], stop: threading.Event) -> str | None:
    if stop.is_set():
        return "the run was stopped"
    if taken > seconds:
        return f"the agent took longer than {seconds:g} seconds"
    if sum(path.stat().st_size for path in paths) > _MOST_OUTPUT:
        return f"the agent wrote more than {_MOST_OUTPUT:,} bytes to its standard output and error"
    return None


def environment_with(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's variables with those of the agent. No proxy may stand between the agent and its gateway."""
    found = {**os.environ, **variables}
    here = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    local = {name: ",".join(filter(None, [os.environ.get(name), "127.0.0.1", "localhost"])) for name in _PROXIES}
    return {**found, **local, "PYTHONPATH": here}


def _last_line(path: Path) -> str:
    with path.open("rb") as handle:
        handle.seek(max(0, path.stat().st_size - _TAIL))
        lines = handle.read().split(b"\n")  # of bytes: text would be split at U+2028 too, which JSON may hold as it is
    return next((line.decode("utf-8", "replace").strip() for line in reversed(lines) if line.strip()), "")
