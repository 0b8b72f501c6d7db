"""A shell that persists in a container: every command runs with the folder, variables, functions and options that the
one before left, as text that is handed to it. No process of the shell outlives a command."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core.foreign import EnvironmentFault, EnvironmentGone
from turntree.core.progress import notice
from turntree.env.container import DEEPEST, ContainerHost, ContainerLimits, Snapshot

_FLOOD = 8 << 20  # bytes of output after which a command is stopped
_KILL_SECONDS = 5.0  # until a command that was killed has ended
_COUNTS = 3  # of a layer's bytes, where files vanish while the daemon counts them
KILLED = 128 + 9  # the exit code of what the kernel killed, as for memory
_STATE_BYTES, _ARGUMENT = 1_000_000, 25_000  # of a shell; characters: the kernel takes 128 KiB an argument
# Runs a program between its process group's id and its exit code, without which whoever listens to standard error has
# not heard all. Bash would read BASH_ENV once more.
_FRAMED = r"""echo "$$" >&2; "$@"; printf '\n#%d\n' "$?" >&2"""
_SIGNAL = 'kill -"$1" -1; kill -CONT "$PPID"'  # its parent, which frames it, goes on
# Runs $1 in the state $2 (a script, in pieces), and writes the state afterwards to what was its standard error. The
# state is saved at an `exit`, too. What is saved is quoted by bash itself.
_WRAPPER = r"""
exec 199>&2 2>&1 </dev/null
__turntree_save='{ __turntree_code=$? __turntree_set=$(builtin set +o); builtin set +xveuf; } 2>/dev/null
builtin trap - EXIT
{
  builtin printf "cd -- %q\n" "$PWD"
  builtin umask -p
  builtin shopt -p
  builtin declare -f
  builtin declare -F
  builtin alias -p
  builtin compgen -v | while IFS= builtin read -r __turntree_name; do
    case $__turntree_name in
      __turntree*|BASH|BASH_*|BASHOPTS|BASHPID|COMP_*|DIRSTACK|EPOCH*|EUID|FUNCNAME|GROUPS|LINENO) ;;
      PIPESTATUS|PPID|RANDOM|SECONDS|SHELLOPTS|SRANDOM|UID|_) ;;
      *) builtin declare -p "$__turntree_name" ;;
    esac
  done
  builtin printf "%s\n" "$__turntree_set"
  case $__turntree_set in *-o\ errexit*) ;; *) builtin printf "(exit %d)\n" "$__turntree_code" ;; esac
  builtin printf "#%d %s %s" "$__turntree_code" "$PPID" "$$"
  builtin printf " %s" /proc/[0-9]*
  builtin printf "\n"
} >&199 2>/dev/null'
trap "$__turntree_save" EXIT
__turntree_command=$1
shift
printf -v __turntree_state %s "$@"
set --
eval "$__turntree_state" >/dev/null 2>&1
eval "$__turntree_command"
{ eval "$__turntree_save"; } 2>/dev/null
exit "$__turntree_code"
"""


@dataclass(frozen=True)
class Ran:
    """How a command ended. `stopped`: which limit ended it; `code` is None then, and where its shell was killed."""

    output: str
    code: int | None
    stopped: str | None = None

    def __str__(self) -> str:
        """As a policy is shown it."""
        code = None if self.code == 0 or self.stopped else f"[exit code {self.code}]"
        parts = [self.output.rstrip("\n"), code, f"[stopped: it {self.stopped}]" if self.stopped else None]
        return "\n".join(part for part in parts if part) or "[no output]"


class ContainerShell:
    """A bash that persists in a container: its files are an image, `_base`, and what a container changed since; all
    else is `_state`. It is used by one thread at a time."""

    def __init__(
        self,
        host: ContainerHost,
        base: Snapshot,
        *,
        folder: str = "",
        user: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._host, self._base, self._folder, self._user = host, base, folder, user
        self._environment = dict(environment or {})
        self._state = ""  # a script that brings a new bash to where this one stands
        self._paths: dict[str, int] = {}  # what was changed before `_base`
        self._container: Any = None
        self._changed = False  # since `_base`
        self._lock = threading.RLock()
        self.background = False  # whether processes ran on after the last command

    @property
    def limits(self) -> ContainerLimits:
        return self._host.limits

    @property
    def alive(self) -> bool:
        return self._container is not None

    def ready(self) -> None:
        """Start the container, where it does not run."""
        with self._lock:
            if self._container is None:
                self._container = self._host.start(self._base, self._environment)
                self._folder = self._folder or self._container.attrs["Config"].get("WorkingDir") or "/"
                self._host.room(self)

    def run(self, command: str, *, seconds: float | None = None) -> Ran:
        """Run a command in the shell, for at most `seconds` (default: the limit).

        A command that exceeds time, output or disk is killed, with its process group; where that does not end it, the
        container is restarted, which keeps the files. Raises `EnvironmentFault` where the container is lost."""
        with self._lock:
            self.ready()
            state = self._state or f"cd -- {shlex.quote(self._folder)}"
            pieces = [state[at : at + _ARGUMENT] for at in range(0, len(state), _ARGUMENT)]
            words = ["bash", "--norc", "--noprofile", "-c", _WRAPPER, "bash", command, *pieces]
            heard, stopped, code = self._watched(words, self._user, seconds, {})
            found = _SAVED.fullmatch(heard.error.decode("utf-8", "replace"))
            stopped = _TOO_LARGE if len(heard.error) > _STATE_BYTES else stopped
            if found is None or stopped:
                self.background = stopped != _RESTARTED
            else:
                self._state = found[1]
                self.background = not {"/proc/1", *(f"/proc/{found[n]}" for n in (2, 3))} >= {*found[4].split(" ")}
            return Ran(heard.text(), code, stopped)

    def script(
        self, words: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None, user: str = "0"
    ) -> Ran:
        """Run a program in the container, outside the shell's state."""
        with self._lock:
            self.ready()
            start = ["bash", "-c", 'exec 2>&1; cd -- "$1"; shift; exec "$@"', "bash", self._folder, *words]
            heard, stopped, code = self._watched(start, user, seconds, environment or {})
            return Ran(heard.text(), code, stopped)

    def signal(self, name: str) -> None:
        """Send a signal to every process that the episode's commands left running."""
        if self.background:
            self.script(["bash", "-c", _SIGNAL, "bash", name], seconds=60.0)

    def _watched(
        self, words: Sequence[str], user: str, seconds: float | None, environment: Mapping[str, str]
    ) -> tuple[Heard, str | None, int | None]:
        """What a program wrote, which limit it exceeded, and its exit code where it exceeded none."""
        self._changed, host, api = True, self._host, self._host.client.api
        given = {"user": user, "environment": dict(environment), "workdir": "/"}  # one that is gone starts nothing
        words = ["sh", "-c", _FRAMED, "sh", *words]
        made: str = host.call(lambda: api.exec_create(self._container.id, words, **given)["Id"])
        heard = Heard(host.limits.output_chars)
        started = time.monotonic()
        with _Watch(host, self, heard, seconds or host.limits.seconds) as watch:
            host.call(lambda: self._listen(made, heard))
        host.count("seconds", time.monotonic() - started)
        if watch.problem is not None:
            raise watch.problem
        return heard, watch.stopped, None if watch.stopped else self._code(made, heard)

    def _listen(self, made: str, heard: Heard) -> None:
        """Start a program and listen until it ends. The client's own streams would leave their sockets open, and miss
        what comes in one piece with the head of the answer: that is in the buffer of the head's reader."""
        api = self._host.client.api
        listening = api.exec_start(made, socket=True)
        answer = listening._response
        try:
            api._disable_socket_timeout(listening)
            reader = answer.raw._fp.fp
            while len(head := reader.read(8)) == 8:
                heard.take(reader.read(int.from_bytes(head[4:], "big")), head[0] == 2)
        finally:
            answer.close()

    def _code(self, made: str, heard: Heard) -> int:
        """The exit code of a program. Raises `EnvironmentFault` where not all was heard of it: its container ended, or
        the daemon did, which knows nothing of it afterwards or calls it a success."""
        if framed := _FRAME.search(heard.error[-16:]):
            return int(framed[1])
        code: int | None = self._host.call(lambda: self._host.client.api.exec_inspect(made)["ExitCode"])
        runs = self._host.call(lambda: self._container.exec_run(["sh", "-c", ":"], user="0").exit_code == 0)
        if code is None or code <= 128 or not runs:  # above 128: a signal ended the frame, too
            raise EnvironmentFault("the container or its daemon was lost during a command")
        return code

    def stop(self, heard: Heard, ended: threading.Event) -> bool:
        """End a command; whether that took a restart, which ends what runs in the background, too."""
        pid = heard.error.partition(b"\n")[0].decode("ascii", "replace")
        with contextlib.suppress(EnvironmentFault):
            if pid.isdigit():
                kill = ["bash", "-c", f"kill -KILL -- -{pid}"]
                self._host.call(lambda: self._container.exec_run(kill, user="0", detach=True))
                if ended.wait(_KILL_SECONDS):
                    return False
        self._host.call(lambda: self._container.restart(timeout=0))
        return True

    def written(self) -> int | None:
        """Bytes in the container's own layer; None where its files vanish while they are counted, time after time."""
        listed = self._host.client.api.containers
        for _ in range(_COUNTS):
            try:
                found = self._host.call(lambda: listed(size=True, filters={"id": self._container.id}))
                return int(found[0].get("SizeRw") or 0) if found else 0
            except EnvironmentFault as fault:
                if "no such file" not in str(fault):
                    raise
        return None

    def put(self, archive: bytes, folder: str) -> None:
        """Unpack a tar archive into a folder, which exists."""
        with self._lock:
            self.ready()
            self._changed = True
            self._host.call(lambda: self._container.put_archive(folder, archive))

    def get(self, path: str) -> bytes | None:
        """A file or folder as a tar archive; None where there is none."""
        with self._lock:
            self.ready()
            try:
                archive = self._host.call(lambda: b"".join(self._container.get_archive(path)[0]))
            except EnvironmentFault as fault:
                if isinstance(fault.__cause__, self._host.docker.errors.NotFound):
                    return None
                raise
        if not archive.endswith(bytes(1024)):  # as every whole one does
            raise EnvironmentFault(f"the daemon broke off in the middle of {path}")
        return archive

    def changed(self) -> dict[str, int]:
        """Paths that were changed (0), added (1) and deleted (2) since the first image of the shell."""
        with self._lock:
            found = self._host.call(self._container.diff) if self._container is not None else None
            paths = dict(self._paths)
            for path, kind in ((each["Path"], int(each["Kind"])) for each in found or ()):
                before = paths.pop(path, None)  # in the layers below
                if kind == _DELETED:  # with all that was in it
                    paths = {name: known for name, known in paths.items() if not name.startswith(f"{path}/")}
                if kind != _DELETED or before != _ADDED:
                    paths[path] = before if before == _ADDED else 0 if before == _DELETED != kind else kind
            return paths

    def restart(self) -> None:
        """End every process, and keep the files."""
        with self._lock:
            self.ready()
            self._host.call(lambda: self._container.restart(timeout=0))
            self.background = False

    def state(self) -> dict[str, Any]:
        """What the shell's commands left: changed files by a digest of their kinds, rights, owners and contents (no
        times, no bytecode), working folder, exported variables. Equal for shells from one image in equal states."""
        with self._lock:
            kinds = {path: kind for path, kind in sorted(self.changed().items()) if "/__pycache__" not in path}
            ran = self._ran_on(list(kinds), _DIGEST)
            if any(each.code != 0 for each in ran):
                raise EnvironmentFault(f"the files cannot be compared: {'; '.join(map(str, ran))}")
            paths = [path for path, kind in kinds.items() if kind != _ADDED]  # what was added and is gone left nothing
            lines = [line for line in self._state.splitlines() if line.startswith(("cd -- ", "declare -x "))]
            known = [line for line in lines if not line.startswith(("declare -x OLDPWD", "declare -x SHLVL"))]
            found: dict[str, Any] = {"paths": paths, "files": [each.output for each in ran]}
            return found | {"shell": known, "background": self.background}

    def _ran_on(self, paths: Sequence[str], script: str) -> list[Ran]:
        """Run a script on paths, as many at a time as a command line takes."""
        parts = (paths[at : at + 500] for at in range(0, len(paths), 500))
        return [self.script(["bash", "-c", script, "bash", *part], seconds=self.limits.seconds) for part in parts]

    # forks

    def fork(self) -> ContainerShell | None:
        """A second shell that stands where this one stands; None where background processes run, a changed file has
        several names, there are too many layers, or the daemon refuses the commit: the episode is replayed then."""
        with self._lock:
            if not self._kept():
                return None
            twin = ContainerShell(
                self._host, self._base, folder=self._folder, user=self._user, environment=self._environment
            )
            twin._state, twin._paths = self._state, dict(self._paths)
        return twin

    def _kept(self) -> bool:
        """Whether `_base` and `_state` are all that there is to keep, after a commit where it is due."""
        if self.background or (self._changed and self._base.depth >= DEEPEST):
            return False
        if self._changed:
            try:
                changed = self.changed()
                if any(ran.code != 0 for ran in self._ran_on(list(changed), _LINKED)):
                    return False
                self._paths, self._base = changed, self._host.commit(self._container, self._base)
            except EnvironmentFault as fault:
                notice(f"warning: a container was not committed ({fault})")
                return False
            self._changed = False
        return True

    def base(self) -> Snapshot | None:
        """The image of this moment, for other shells to start from."""
        with self._lock:
            return self._base if self._kept() else None

    def suspend(self) -> bool:
        """Keep the shell without a container, until its next command; False where it is at work or cannot be."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if kept := self._container is not None and self._kept():
                self.close()
            return kept
        except EnvironmentFault:
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Remove the container: nobody else holds it."""
        self._container = None


_ADDED, _DELETED = 1, 2
# git's index holds times
_DIGEST = r"""
for path; do
  if [ -L "$path" ]; then stat -c "%n %F %u %g" -- "$path"; readlink -- "$path"
  elif [ -e "$path" ]; then stat -c "%n %F %a %u %g" -- "$path"; fi
  case $path in */.git/index) git -c core.fsmonitor=false --git-dir="${path%/index}" ls-files --stage && continue; esac
  if [ -f "$path" ] && [ ! -L "$path" ]; then sha256sum <"$path"; fi
done | sha256sum"""
# whether no path is a file with several names (hard links), which a layer parts where one of them changes
_LINKED = '! stat -c "%h %F" -- "$@" 2>/dev/null | grep -qvE "^1 | directory$"'
_SAVED = re.compile(r"(?:\d+\n)?(.*)#\d+ (\d+) (\d+) ([^\n]*)\n(?:\n#\d+\n)?", re.DOTALL)  # in its frame, or without
_FRAME = re.compile(rb"\n#(\d+)\n\Z")
SLOW, LOUD, _LARGE = "took too long", "wrote too much", "filled its disk"
_RESTARTED = "did not end, and every process was ended"
_TOO_LARGE = f"left variables and functions of more than {_STATE_BYTES:,} bytes, and the shell's are those before it"


class Heard:
    """What a program wrote; of its output the beginning and the end."""

    def __init__(self, most: int) -> None:
        self._half, self._first, self._last = most // 2, bytearray(), bytearray()
        self.total, self.error = 0, bytearray()

    def take(self, data: bytes, is_error: bool) -> None:
        if is_error:
            self.error += data
            del self.error[2 * _STATE_BYTES : -16]
            return
        self.total += len(data)
        room = 4 * self._half - len(self._first)  # bytes, of which a character has at most four
        self._first += data[:room]
        self._last = (self._last + data[room:])[-4 * self._half :]

    def text(self) -> str:
        whole = (self._first + self._last).decode("utf-8", "replace")
        between = self.total - len(self._first) - len(self._last)
        if not between and len(whole) <= 2 * self._half:
            return whole
        first, last = whole[: self._half], whole[-self._half :]
        left_out = f"{between} more bytes" if between else f"{len(whole) - 2 * self._half} more characters"
        return f"{first}\n[{left_out}]\n{last}"


class _Watch:
    """Stops a command at a limit, in a thread of its own, while another one listens to it."""

    def __init__(self, host: ContainerHost, shell: ContainerShell, heard: Heard, seconds: float) -> None:
        self._host, self._shell, self._heard, self._seconds = host, shell, heard, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="container", daemon=True)
        self.stopped: str | None = None
        self.problem: BaseException | None = None

    def __enter__(self) -> _Watch:
        self._see_room()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        self._see_room()

    def _see_room(self) -> None:
        if self._host.full():
            self.problem = EnvironmentFault("the disk of the container store is full")

    def _look(self) -> None:
        limits, until = self._shell.limits, time.monotonic() + self._seconds
        while not self._ended.wait(min(1.0, max(0.0, until - time.monotonic()))):
            try:
                self._see_room()
                if time.monotonic() >= until:
                    self.stopped = SLOW
                elif self._heard.total > _FLOOD:
                    self.stopped = LOUD
                elif (self._shell.written() or 0) > limits.disk_mb << 20:
                    self.stopped = _LARGE
                if self.stopped is not None:
                    self.stopped = _RESTARTED if self._shell.stop(self._heard, self._ended) else self.stopped
                    return
            except BaseException as error:
                self.problem = error if isinstance(error, EnvironmentGone) else EnvironmentFault(str(error))
                return
