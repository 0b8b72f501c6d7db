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
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import uuid
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

from turntree.core.config import Above0, Between, Bounded, Positive
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone, package
from turntree.core.progress import notice

if TYPE_CHECKING:
    from turntree.env.container_shell import ContainerShell

T = TypeVar("T")

LABEL = "turntree.owner"  # of every container and image that a run makes: who may remove it
DEEPEST = 60  # layers of forks on an image: Docker mounts at most 127
_FULL = 64 << 20  # bytes free in the store, below which what a container writes may have failed
_AWAY_SECONDS = 60.0  # until a daemon that does not answer is taken for gone
# A process of podman waits on the host after every command, for as many seconds (by default 300); then its exit code is
# no longer told.
_SETTINGS = "[engine]\nexit_command_delay = 60\n"
_SOCKETS = ("/var/run/docker.sock", "/run/podman/podman.sock")
# The first process adopts and reaps what others leave behind; it waits for a pipe that nobody writes to.
_FIRST = ["bash", "-c", "exec 3<> <(:); while :; do read -ru 3; done"]


@dataclass(frozen=True, kw_only=True)
class ContainerLimits(Bounded):
    """What a container may use."""

    seconds: Above0 = 60.0
    """Time of one command; what it runs then is killed."""
    memory_mb: Annotated[int, Between(16)] = 2048
    """Memory of a container."""
    processes: Annotated[int, Between(16)] = 256
    """Processes and threads of a container."""
    disk_mb: Positive = 4096
    """What may be written to a container's own layer; also the largest file."""
    output_chars: Annotated[int, Between(100)] = 8000
    """Most characters of an answer."""
    network: bool = False
    """Whether it reaches the network."""
    mounts: tuple[str, ...] = ()
    """Folders that every container sees and cannot write to, each HOST:CONTAINER."""
    alive: Positive = 32
    """Containers that run at once. One that has to make room is kept as an image until its next command."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for mount in self.mounts:
            if not re.fullmatch(r"/[^:]*:/[^:]+", mount):
                raise ConfigError(f"is not HOST:CONTAINER ({mount!r})", field="mounts", hint="write two whole paths")


@dataclass(eq=False)
class Snapshot:
    """An image; with a `parent` one that a fork committed. It is removed when nobody holds it any more: no shell, and
    neither a container nor an image on it, until that is removed itself."""

    image: str
    depth: int = 0
    parent: Snapshot | None = None


class ContainerProvider(ABC):
    """Where the containers of one run come from, and the shells in them. A context manager: at its end, nothing that it
    made is left. A provider of your own gives shells (`ContainerShell`, of which it may redefine what talks to a
    daemon); where they cannot fork, episodes are replayed."""

    def __init__(self, limits: ContainerLimits) -> None:
        self.limits = limits
        self.counts: dict[str, float] = {"started": 0, "committed": 0, "suspended": 0, "seconds": 0.0}
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *_: object) -> None: ...

    @abstractmethod
    def image(self, name: str) -> str:
        """What a `Snapshot` of an image by name holds. Raises `InputError` where there is none."""

    @abstractmethod
    def build(self, folder: Path, tag: str) -> str:
        """The same of an image that is built of a folder with a Dockerfile."""

    @abstractmethod
    def shell(self, base: Snapshot, *, folder: str, user: str, environment: Mapping[str, str]) -> ContainerShell: ...

    @abstractmethod
    def ahead(self, shell: ContainerShell) -> None:
        """The shell is used soon."""

    def count(self, what: str, amount: float = 1) -> None:
        with self._lock:
            self.counts[what] = self.counts.get(what, 0) + amount


class ContainerHost(ContainerProvider):
    """A daemon (Docker, or podman's service), and what one run makes there. What an earlier run on this machine left
    behind because it was killed is removed at the start.

    Without a daemon's socket, podman is started as a service for the time of the run, where it is installed.
    """

    def __init__(self, limits: ContainerLimits | None = None) -> None:
        """Raises `InputError` where no daemon answers."""
        super().__init__(limits if limits is not None else ContainerLimits())
        self.docker = package("docker", "container")
        self._service: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="turntree-")
        self.owner = f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())} {uuid.uuid4().hex[:8]}"
        self.url = _socket() or f"unix://{self._folder.name}/podman.sock"
        self.client: Any = None
        self._store = ""  # the daemon's folder
        self._helpers = ThreadPoolExecutor(8, "container")
        self._living: dict[int, weakref.ref[ContainerShell]] = {}  # shells that have a container, longest idle first

    def __enter__(self) -> Self:
        try:
            self._answers()
        except EnvironmentGone as gone:
            hint = "start Docker or `podman system service`, set DOCKER_HOST, or install podman and runc"
            raise InputError(f"no container daemon answers ({gone})", field="environment", hint=hint) from gone
        self.sweep()
        self._store = str(self.call(self.client.info).get("DockerRootDir") or "")
        return self

    def __exit__(self, *_: object) -> None:
        self._helpers.shutdown(cancel_futures=not _listens(self.url))
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
            if not _listens(self.url):
                self._answers()
            return act()
        except (OSError, self.docker.errors.DockerException, ValueError, KeyError) as error:
            said = " ".join(str(error).split())[-300:]
            if not isinstance(error, self.docker.errors.DockerException):
                self._answers()
            raise EnvironmentFault(f"the container daemon failed: {said}") from error

    def _answers(self) -> None:
        """Wait for the daemon."""
        until, said = time.monotonic() + _AWAY_SECONDS, "nobody listens"
        while time.monotonic() < until:
            self._serve()
            if _listens(self.url):
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

    def full(self) -> bool:
        """Whether the disk of the daemon's store is full. Programs of every container fail then, which is no act of a
        policy. False where the store is not on this machine."""
        try:
            found = os.statvfs(self._store)
        except OSError:
            return False
        return found.f_bavail * found.f_frsize < _FULL

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
                settings = Path(self._folder.name, "containers.conf")
                settings.write_text(_SETTINGS)
                own = not os.path.exists("/etc/containers/containers.conf")  # those of the machine would not be read
                self._service = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    process_group=0,
                    cwd=self._folder.name,  # conmon leaves files where it was started
                    env=({"CONTAINERS_CONF": str(settings)} if own else {}) | os.environ,
                )

    # images

    def image(self, name: str) -> str:
        """The id of an image by name, which is pulled where the daemon lacks it. Raises `InputError`."""
        try:
            with contextlib.suppress(self.docker.errors.ImageNotFound):
                return self.client.images.get(name).id
            notice(f"pulling the image {name}")
            return self.client.images.pull(name).id
        except self.docker.errors.DockerException as error:
            said = " ".join(str(error).split())[-200:]
            raise InputError(f"cannot be had: {said}", field="image", hint=f"check the name {name!r}") from error

    def build(self, folder: Path, tag: str) -> str:
        """The id of the image of a folder with a Dockerfile, which is built where the daemon has no image `tag` (name
        it by the folder's contents). Raises `InputError` with the end of its log."""
        with contextlib.suppress(self.docker.errors.ImageNotFound):
            return self.client.images.get(tag).id
        notice(f"building the image of {folder}")
        try:
            return self.client.images.build(path=str(folder), tag=tag, rm=True, forcerm=True, nocache=True)[0].id
        except self.docker.errors.BuildError as error:  # its log is read to the end, or the connection stays open
            said = "".join(str(line.get("stream", "")) for line in error.build_log) + str(error)
        except (self.docker.errors.DockerException, TypeError) as error:
            said = str(error)
        raise InputError(f"cannot be built: {' '.join(said.split())[-300:]}", path=str(folder / "Dockerfile"))

    # containers

    def shell(self, base: Snapshot, *, folder: str, user: str, environment: Mapping[str, str]) -> ContainerShell:
        from turntree.env.container_shell import ContainerShell

        return ContainerShell(self, base, folder=folder, user=user, environment=environment)

    def start(self, base: Snapshot, environment: Mapping[str, str]) -> Any:
        """A new container of an image, with the limits. It is removed, with its processes, when nobody holds it."""
        limits, make = self.limits, self.docker.types
        self.count("started")
        bounds = {"nofile": 1024, "fsize": limits.disk_mb << 20, "core": 0}
        # podman asks for more than a user in a container may have, unless it is told
        bounds["nproc"] = min(4096, *(each for each in resource.getrlimit(resource.RLIMIT_NPROC) if each > 0))
        pairs = [mount.split(":") for mount in limits.mounts]
        container = self.call(
            lambda: self.client.containers.create(
                base.image,
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
        remove = partial(self.client.api.remove_container, container.id, force=True, v=True)
        weakref.finalize(container, self._later, remove, base).atexit = False
        self.call(container.start)
        return container

    def commit(self, container: Any, parent: Snapshot) -> Snapshot:
        """The files of a container as an image, that is removed when nobody holds it any more."""
        self.count("committed")
        image: str = self.call(lambda: container.commit(conf={"Labels": {LABEL: self.owner}}).id)
        made = Snapshot(image, parent.depth + 1, parent)
        remove = partial(self.client.images.remove, image, force=False, noprune=True)
        weakref.finalize(made, self._later, remove, parent).atexit = False
        return made

    def _later(self, act: Callable[[], Any], needed: Snapshot | None = None) -> None:
        """`needed` is kept until then."""

        def quietly(_: Snapshot | None) -> None:
            with contextlib.suppress(EnvironmentFault, EnvironmentGone):
                self.call(act)

        with contextlib.suppress(RuntimeError):  # the host has ended, and swept
            self._helpers.submit(quietly, needed)

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

    def sweep(self, own: bool = False) -> None:
        """Remove the containers and images of runs on this machine that are dead; of this run, too, with `own`."""

        def dead(labels: Mapping[str, str] | None) -> bool:
            host, pid, started, _ = ((labels or {}).get(LABEL) or "? 0 0 0").split(" ")
            mine = (labels or {}).get(LABEL) == self.owner
            return (own and mine) or (host == socket.gethostname() and _started(int(pid)) != started)

        containers, images = self.made()
        for container in containers:
            if dead(container["Labels"]):
                self._gone(self.client.api.remove_container, container["Id"], v=True)
        left = [image["Id"] for image in images if dead(image["Labels"])]
        while left:  # a fork of a fork before its parent
            kept = [image for image in left if not self._gone(self.client.api.remove_image, image)]
            left = kept if len(kept) < len(left) else []

    def made(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The containers and the images that runs made, of whatever machine uses this daemon, as it describes them."""

        def listed() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
            api, asked = self.client.api, {"all": True, "filters": {"label": LABEL}}
            return self.call(lambda: api.containers(**asked)), self.call(lambda: api.images(**asked))

        for _ in range(50):  # podman fails where an image is removed while it lists them
            with contextlib.suppress(EnvironmentFault):
                return listed()
        return listed()

    def _gone(self, remove: Callable[..., Any], name: str, **options: Any) -> bool:
        try:
            remove(name, force=True, **options)
            return True
        except self.docker.errors.APIError as error:
            return isinstance(error, self.docker.errors.NotFound)


def _listens(url: str) -> bool:
    """Whether a daemon takes connections. Asked first, because the client leaves the socket of a refused connection
    open."""
    path = url.removeprefix("unix://")
    if path == url:
        return True  # not on this machine
    with socket.socket(socket.AF_UNIX) as tried:
        tried.settimeout(_AWAY_SECONDS)
        return tried.connect_ex(path) == 0


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
