"""Containers that fork, over Docker's API: a host of containers, and a shell that persists in one of them.

A shell is two values: an image, which holds the files, and its state (working folder, variables, functions, options),
which every command gets and gives back as a text. A container is a cache of them. So a fork is a commit of the changed
layer with a copy of the text, shared by all forks of one moment; a container that is in the way of the budget is
committed and removed until its next command. Processes are in neither: a shell with some in the background is not
forked, and the episode is replayed.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from turntree.core.config import at_least
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone
from turntree.core.progress import notice
from turntree.env.adapted import package

T = TypeVar("T")

LABEL = "turntree.owner"  # of every container and image that a run makes: who may remove it
DEEPEST = 60  # layers of forks on an image: Docker mounts at most 127
_FLOOD = 8 << 20  # bytes of output after which a command is stopped
_AWAY_SECONDS = 60.0  # until a daemon that does not answer is taken for gone
_KILL_SECONDS = 5.0  # until a command that was killed has ended
_STATE_CHARS, _ARGUMENT = 1_000_000, 100_000  # of a shell; the kernel takes 128 KiB an argument
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
# The first process adopts and reaps what others leave behind; it waits for a pipe that nobody writes to.
_FIRST = ["bash", "-c", "exec 3<> <(:); while :; do read -ru 3; done"]

# Runs $1 in the state $2 (a script, in pieces), and writes the state afterwards to what was its standard error. The
# state is saved at an `exit`, too. What is saved is quoted by bash itself.
_WRAPPER = r"""
exec 199>&2 2>&1 </dev/null
printf '%s\n' "$$" >&199
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
  builtin printf "#%d %s" "$__turntree_code" "$$"
  builtin printf " %s" /proc/[0-9]*
  builtin printf "\n"
} >&199 2>/dev/null'
trap "$__turntree_save" EXIT
__turntree_command=$1
shift
printf -v __turntree_state %s "$@"
eval "$__turntree_state" >/dev/null 2>&1
eval "$__turntree_command"
{ eval "$__turntree_save"; } 2>/dev/null
exit "$__turntree_code"
"""


@dataclass(frozen=True, kw_only=True)
class ContainerLimits:
    """What a container may use."""

    seconds: float = 60.0
    """Time of one command; what it runs then is killed."""
    memory_mb: int = 2048
    """Memory of a container."""
    processes: int = 256
    """Processes and threads of a container."""
    disk_mb: int = 4096
    """What may be written to a container's own layer; also the largest file."""
    output_chars: int = 8000
    """Most characters of an answer."""
    network: bool = False
    """Whether it reaches the network."""
    mounts: tuple[str, ...] = ()
    """Folders that every container sees and cannot write to, each HOST:CONTAINER."""
    alive: int = 32
    """Containers that run at once. One that has to make room is kept as an image until its next command."""

    def __post_init__(self) -> None:
        at_least(self, memory_mb=16, processes=16, disk_mb=1, output_chars=100, alive=1)
        if self.seconds <= 0:
            raise ConfigError("must be above 0", field="seconds")
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:]*:/[^:]+", mount):
                raise ConfigError(f"is not HOST:CONTAINER ({mount!r})", field="mounts", hint="write two whole paths")


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


@dataclass(eq=False)
class Snapshot:
    """An image; with a `parent` one that a fork committed, which is removed when nobody holds it any more."""

    image: str
    depth: int = 0
    parent: Snapshot | None = None  # held, so that images are removed from the last to the first


class ContainerHost:
    """A daemon (Docker, or podman's service), and what one run makes there. A context manager: at its end, nothing that
    it made is left. What an earlier run on this machine left behind because it was killed is removed at the start.

    Without a daemon's socket, podman is started as a service for the time of the run, where it is installed.
    """

    def __init__(self, limits: ContainerLimits | None = None) -> None:
        """Raises `InputError` where no daemon answers."""
        self.limits = limits if limits is not None else ContainerLimits()
        self.docker = package("docker", "container")
        self._service: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="turntree-")
        self.owner = f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())} {uuid.uuid4().hex[:8]}"
        self.url = _socket() or f"unix://{self._folder.name}/podman.sock"
        self.client: Any = None
        self._helpers = ThreadPoolExecutor(8, "container")
        self._living: dict[int, weakref.ref[ContainerShell]] = {}  # shells that have a container, longest idle first
        self._lock = threading.RLock()
        self.counts: dict[str, float] = {"started": 0, "committed": 0, "suspended": 0, "seconds": 0.0}

    def __enter__(self) -> ContainerHost:
        try:
            self._answers(20.0)
        except EnvironmentGone as gone:
            hint = "start Docker or `podman system service`, set DOCKER_HOST, or install podman and runc"
            raise InputError(f"no container daemon answers ({gone})", field="environment", hint=hint) from gone
        self.sweep()
        return self

    def __exit__(self, *_: object) -> None:
        self._helpers.shutdown()
        with contextlib.suppress(EnvironmentFault, EnvironmentGone):  # a daemon that is away: the next run sweeps
            self.sweep(own=True)
        self.client.close()
        if self._service is not None:
            self._service.terminate()
            self._service.wait()
        self._folder.cleanup()

    def call(self, act: Callable[[], T]) -> T:
        """What the daemon answers. An error is an `EnvironmentFault`; a daemon that restarts is waited for, but the
        call is not repeated, because it may have been made. Raises `EnvironmentGone` where none comes back."""
        try:
            if self._service is not None and self._service.poll() is not None:
                self._answers(_AWAY_SECONDS)
            return act()
        except (OSError, self.docker.errors.DockerException, ValueError, KeyError) as error:
            said = " ".join(str(error).split())[-300:]
            if not isinstance(error, self.docker.errors.DockerException):
                self._answers(_AWAY_SECONDS)
            raise EnvironmentFault(f"the container daemon failed: {said}") from error

    def _answers(self, seconds: float) -> None:
        """Wait for the daemon."""
        until, said = time.monotonic() + seconds, "there is no socket"
        path = self.url.removeprefix("unix://")
        while time.monotonic() < until:
            self._serve()
            if os.path.exists(path) or path == self.url:
                try:
                    if self.client is None:
                        self.client = self.docker.DockerClient(base_url=self.url, timeout=120, max_pool_size=64)
                    self.client.ping()
                    return
                except (OSError, self.docker.errors.DockerException) as error:
                    said = " ".join(str(error).split())[-200:]
            elif self.client is None and self._service is None:
                break
            time.sleep(0.2)
        raise EnvironmentGone(f"the container daemon at {self.url} does not answer: {said}")

    def _serve(self) -> None:
        """Start podman's service, where it is ours and does not run. It ends by itself when nobody asks it."""
        podman = shutil.which("podman")
        with self._lock:
            if not self.url.startswith(f"unix://{self._folder.name}") or podman is None:
                return
            if self._service is None or self._service.poll() is not None:
                options = [] if os.path.isdir("/run/systemd/system") else ["--cgroup-manager", "cgroupfs"]
                options += ["--runtime", "runc"] if shutil.which("runc") else []
                command = [podman, *options, "system", "service", "--time", "600", self.url]
                quiet = subprocess.DEVNULL
                self._service = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet, process_group=0)

    # images

    def image(self, name: str) -> str:
        """The id of an image by name, which is pulled where the daemon lacks it. Raises `InputError`."""
        try:
            return self.client.images.get(name).id
        except self.docker.errors.ImageNotFound:
            notice(f"pulling the image {name}")
        try:
            return self.client.images.pull(name).id
        except self.docker.errors.DockerException as error:
            said = " ".join(str(error).split())[-200:]
            raise InputError(f"cannot be pulled: {said}", field="image", hint=f"check the name {name!r}") from error

    def build(self, folder: Path, tag: str) -> str:
        """The id of the image of a folder with a Dockerfile, which is built where the daemon has no image `tag` (name
        it by the folder's contents). Raises `InputError` with the end of its log."""
        with contextlib.suppress(self.docker.errors.ImageNotFound):
            return self.client.images.get(tag).id
        notice(f"building the image of {folder}")
        try:
            return self.client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, nocache=True)[0].id
        except (self.docker.errors.DockerException, TypeError) as error:
            said = " ".join(str(error).split())[-300:]
            raise InputError(f"cannot be built: {said}", path=str(folder / "Dockerfile")) from error

    # containers

    def start(self, image: str, environment: Mapping[str, str]) -> Any:
        """A new container of an image, with the limits."""
        limits, make = self.limits, self.docker.types
        self.count("started")
        bounds = {"nofile": 1024, "fsize": limits.disk_mb << 20, "core": 0}
        # podman asks for more than a user in a container may have, unless it is told
        bounds["nproc"] = min(4096, *(each for each in resource.getrlimit(resource.RLIMIT_NPROC) if each > 0))
        pairs = [mount.split(":") for mount in limits.mounts]
        container = self.call(
            lambda: self.client.containers.create(
                image,
                _FIRST,
                entrypoint=[],
                hostname="container",  # the same in all forks
                environment=dict(environment),
                labels={LABEL: self.owner},
                mem_limit=f"{limits.memory_mb}m",
                memswap_limit=f"{limits.memory_mb}m",
                pids_limit=limits.processes,
                ulimits=[make.Ulimit(name=name, soft=most, hard=most) for name, most in bounds.items()],
                mounts=[make.Mount(there, here, type="bind", read_only=True) for here, there in pairs],
                network_mode="bridge" if limits.network else "none",
                security_opt=["no-new-privileges"],
                cap_drop=["MKNOD", "NET_RAW", "AUDIT_WRITE"],
                user="0",
            )
        )
        try:
            self.call(container.start)
        except EnvironmentFault:
            self.remove(container)
            raise
        return container

    def commit(self, container: Any, parent: Snapshot) -> Snapshot:
        """The files of a container as an image, that is removed when nobody holds it any more."""
        self.count("committed")
        image: str = self.call(lambda: container.commit(conf={"Labels": {LABEL: self.owner}}).id)
        made = Snapshot(image, parent.depth + 1, parent)
        weakref.finalize(made, self._later, self._forget, image).atexit = False
        return made

    def _forget(self, image: str) -> None:
        for wait in (0.1, 0.2, 0.5, 1.0, 2.0, 4.0):  # until its containers and the images on it are gone
            try:
                return self.client.images.remove(image, force=False, noprune=True)
            except self.docker.errors.ImageNotFound:
                return
            except self.docker.errors.APIError:
                time.sleep(wait)

    def remove(self, container: Any) -> None:
        """Remove a container and its processes, soon."""
        self._later(lambda: container.remove(force=True, v=True))

    def _later(self, act: Callable[..., Any], *arguments: Any) -> None:
        def quietly() -> None:
            with contextlib.suppress(self.docker.errors.DockerException, OSError, EnvironmentFault, EnvironmentGone):
                act(*arguments)

        with contextlib.suppress(RuntimeError):  # the host has ended, and swept
            self._helpers.submit(quietly)

    def ahead(self, shell: ContainerShell) -> None:
        """Start a shell's container while the policy samples, where there is room."""
        if len(self._living) < self.limits.alive:
            self._later(shell.ready)

    def room(self, shell: ContainerShell) -> None:
        """Make room for the container of a shell: those longest idle are suspended. Where all are at work, or have
        processes in the background, there are more for a while."""
        with self._lock:
            self._living.pop(id(shell), None)
            self._living[id(shell)] = weakref.ref(shell)
            self._living = {key: each for key, each in self._living.items() if (held := each()) and held.alive}
            idle = [each() for each in list(self._living.values())[:-1]]
        over = len(idle) + 1 - self.limits.alive
        for other in idle:
            if over > 0 and other is not None and other.suspend():
                over -= 1
                self.count("suspended")

    def count(self, what: str, amount: float = 1) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + amount

    def sweep(self, own: bool = False) -> None:
        """Remove the containers and images of runs on this machine that are dead; of this run, too, with `own`."""

        def dead(labels: Mapping[str, str] | None) -> bool:
            host, pid, started, _ = ((labels or {}).get(LABEL) or "? 0 0 0").split(" ")
            mine = (labels or {}).get(LABEL) == self.owner
            return (own and mine) or (host == socket.gethostname() and _started(int(pid)) != started)

        filters = {"label": LABEL}
        for container in self.call(lambda: self.client.api.containers(all=True, filters=filters)):
            if dead(container["Labels"]):
                with contextlib.suppress(self.docker.errors.APIError):
                    self.client.api.remove_container(container["Id"], force=True, v=True)
        images = self.call(lambda: self.client.api.images(all=True, filters=filters))
        for image in sorted(images, key=lambda each: -each["Created"]):  # a fork of a fork before its parent
            if dead(image["Labels"]):
                with contextlib.suppress(self.docker.errors.APIError):
                    self.client.api.remove_image(image["Id"], force=True)


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
                self._container = self._host.start(self._base.image, self._environment)
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
            heard, stopped, made = self._watched(words, self._user, seconds, {})
            found = _SAVED.fullmatch(heard.error.decode("utf-8", "replace"))
            if found is None or stopped:
                self.background = stopped != _RESTARTED
                return Ran(heard.text(), None if stopped else self._code(made), stopped)
            self._state = found[1] if len(found[1]) <= _STATE_CHARS else self._state
            self.background = not {"/proc/1", f"/proc/{found[3]}"}.issuperset(found[4].split(" "))
            return Ran(heard.text(), int(found[2]))

    def script(
        self, words: Sequence[str], *, seconds: float, environment: Mapping[str, str] | None = None, user: str = "0"
    ) -> Ran:
        """Run a program in the container, outside the shell's state."""
        with self._lock:
            self.ready()
            start = [
                "bash",
                "-c",
                'echo "$$" >&2; exec 2>&1; cd -- "$1"; shift; exec "$@"',
                "bash",
                self._folder,
                *words,
            ]
            heard, stopped, made = self._watched(start, user, seconds, environment or {})
            return Ran(heard.text(), None if stopped else self._code(made), stopped)

    def _watched(
        self, words: Sequence[str], user: str, seconds: float | None, environment: Mapping[str, str]
    ) -> tuple[_Heard, str | None, str]:
        """Run a program that first writes its process id to its standard error: what it wrote, which limit it exceeded,
        and the daemon's id of it."""
        self._changed, host, api = True, self._host, self._host.client.api
        given = {"user": user, "environment": dict(environment), "workdir": "/"}  # one that is gone starts nothing
        made: str = host.call(lambda: api.exec_create(self._container.id, list(words), **given)["Id"])
        heard = _Heard(host.limits.output_chars)
        started = time.monotonic()
        with _Watch(self, heard, seconds or host.limits.seconds) as watch:
            host.call(lambda: self._listen(made, heard))
        host.count("seconds", time.monotonic() - started)
        if watch.problem is not None:
            raise watch.problem
        return heard, watch.stopped, made

    def _listen(self, made: str, heard: _Heard) -> None:
        """Start a program and listen until it ends. The client's own streams would leave their sockets open."""
        frames = self._host.docker.utils.socket.frames_iter
        listening = self._host.client.api.exec_start(made, socket=True)
        try:
            for channel, data in frames(listening, tty=False):
                heard.take(data, channel == 2)
        finally:
            listening._response.close()

    def _code(self, made: str) -> int | None:
        """The exit code of a program that did not say it: it was killed, unless the whole container was."""
        code = self._host.call(lambda: self._host.client.api.exec_inspect(made)["ExitCode"])
        if code != 0:
            self._host.call(self._container.reload)
            if self._container.status != "running":
                raise EnvironmentFault("the container was lost during a command")
        return code

    def stop(self, heard: _Heard, ended: threading.Event) -> bool:
        """End a command; whether that took a restart, which ends what runs in the background, too."""
        pid = heard.error.partition(b"\n")[0].decode("ascii", "replace")
        with contextlib.suppress(self._host.docker.errors.DockerException, OSError):
            if pid.isdigit():
                self._container.exec_run(["bash", "-c", f"kill -KILL -- -{pid}"], user="0", detach=True)
                if ended.wait(_KILL_SECONDS):
                    return False
        self._host.call(lambda: self._container.restart(timeout=0))
        return True

    def written(self) -> int:
        """Bytes in the container's own layer."""
        found = self._host.client.api.containers(size=True, filters={"id": self._container.id})
        return int(found[0].get("SizeRw") or 0) if found else 0

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
                return self._host.call(lambda: b"".join(self._container.get_archive(path)[0]))
            except EnvironmentFault as fault:
                if isinstance(fault.__cause__, self._host.docker.errors.NotFound):
                    return None
                raise

    def changed(self) -> dict[str, int]:
        """Paths that were changed (0), added (1) and deleted (2) since the first image of the shell."""
        with self._lock:
            found = self._host.call(self._container.diff) if self._container is not None else None
            return self._paths | {each["Path"]: int(each["Kind"]) for each in found or ()}

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
            paths = sorted(path for path in self.changed() if "/__pycache__" not in path)
            digests = [self._digest(paths[at : at + 500]) for at in range(0, len(paths), 500)]
            lines = [line for line in self._state.splitlines() if line.startswith(("cd -- ", "declare -x "))]
            known = [line for line in lines if not line.startswith(("declare -x OLDPWD", "declare -x SHLVL"))]
            return {"paths": paths, "files": digests, "shell": known, "background": self.background}

    def _digest(self, paths: Sequence[str]) -> str:
        ran = self.script(["bash", "-c", _DIGEST, "bash", *paths], seconds=self._host.limits.seconds)
        if ran.code != 0:
            raise EnvironmentFault(f"the files cannot be compared: {ran}")
        return ran.output

    # forks

    def fork(self) -> ContainerShell | None:
        """A second shell that stands where this one stands; None where background processes run, there are too many
        layers, or the daemon refuses the commit: the episode is replayed then."""
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
                self._paths = self.changed()
                self._base = self._host.commit(self._container, self._base)
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
            if self._container is None or not self._kept():
                return False
            self.close()
            return True
        except EnvironmentFault:
            return False
        finally:
            self._lock.release()

    def close(self) -> None:
        """Remove the container."""
        container, self._container = self._container, None
        if container is not None:
            self._host.remove(container)


_DIGEST = r"""
for path; do
  if [ -L "$path" ]; then stat -c "%n %F %u %g" -- "$path"; readlink -- "$path"
  elif [ -e "$path" ]; then stat -c "%n %F %a %u %g" -- "$path"; fi
  if [ -f "$path" ] && [ ! -L "$path" ]; then sha256sum <"$path"; fi
done | sha256sum"""
_SAVED = re.compile(r"\d+\n(.*)#(\d+) (\d+) ([^\n]*)\n", re.DOTALL)
_SLOW, _LOUD, _LARGE = "took too long", "wrote too much", "filled its disk"
_RESTARTED = "did not end, and every process was ended"


class _Heard:
    """What a program wrote; of its output the beginning and the end."""

    def __init__(self, most: int) -> None:
        self._half, self._first, self._last = most // 2, bytearray(), bytearray()
        self.total, self.error = 0, bytearray()

    def take(self, data: bytes, is_error: bool) -> None:
        if is_error:
            self.error += data if len(self.error) <= 4 * _STATE_CHARS else b""
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

    def __init__(self, shell: ContainerShell, heard: _Heard, seconds: float) -> None:
        self._shell, self._heard, self._seconds = shell, heard, seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="container", daemon=True)
        self.stopped: str | None = None
        self.problem: BaseException | None = None

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        limits, until = self._shell.limits, time.monotonic() + self._seconds
        while not self._ended.wait(min(1.0, max(0.0, until - time.monotonic()))):
            try:
                if time.monotonic() >= until:
                    self.stopped = _SLOW
                elif self._heard.total > _FLOOD:
                    self.stopped = _LOUD
                elif self._shell.written() > limits.disk_mb << 20:
                    self.stopped = _LARGE
                if self.stopped is not None:
                    self.stopped = _RESTARTED if self._shell.stop(self._heard, self._ended) else self.stopped
                    return
            except BaseException as error:
                self.problem = error if isinstance(error, EnvironmentGone) else EnvironmentFault(str(error))
                return


def _socket() -> str | None:
    """Where a daemon listens; None where none is known."""
    if given := os.environ.get("DOCKER_HOST") or os.environ.get("CONTAINER_HOST"):
        return given
    own = Path(os.environ.get("XDG_RUNTIME_DIR", "/nonexistent"))
    places = (*_SOCKETS, str(own / "docker.sock"), str(own / "podman/podman.sock"))
    return next((f"unix://{place}" for place in places if os.path.exists(place)), None)


def _started(pid: int) -> str:
    """When a process of this machine began, in ticks of its clock; empty where there is none. It tells a process from
    a later one with its number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
