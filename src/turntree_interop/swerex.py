"""Containers of services, by SWE-ReX (`environment.provider=swerex`): Modal, Daytona, Fargate, Docker.

Every shell is a deployment. SWE-ReX keeps no images, so nothing forks: episodes are replayed. Memory, disk and network
are the service's to limit; time and output are limited here. What a killed run leaves, the service ends after its own
time limit.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import tempfile
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import EnvironmentFault, call_foreign, package
from turntree.env.container import ContainerLimits, ContainerProvider, Snapshot
from turntree.env.container_shell import LOUD, SLOW, ContainerShell, Heard
from turntree.env.loop import run

_KINDS = ("Modal", "Daytona", "Fargate", "Docker")  # what begins anew for every shell
_START_SECONDS, _ANSWER_SECONDS, _DISK_SECONDS = 600.0, 60.0, 600.0  # the last: no command's limit bounds our own work
_MOST = 8 << 20  # bytes of an output that are sent
_ROOT = {"", *(f"{user}{group}" for user in ("0", "root") for group in ("", ":0", ":root"))}
# What a program leaves running must not hold the pipes that the server reads to their end: they are nameless files.
_RUN = r"""
cd / && d=$(mktemp -d) && exec 3>"$d/1" 4>"$d/2" 5<"$d/1" 6<"$d/2" && rm -r "$d" || exit
timeout -s KILL "$1" "${@:3}" >&3 2>&4 </dev/null 3>&- 4>&- 5<&- 6<&-
code=$?
stat -Lc %s /dev/fd/5
head -c "$2" <&5
cat <&6 >&2
exit "$code"
"""
# Signals everything but what ran when the shell was begun, and this script.
_SIGNAL = r"""
for p in /proc/[0-9]*; do
  case " $1 /proc/$$ /proc/self " in *" $p "*) ;; *) kill -"$2" "${p#/proc/}" 2>/dev/null ;; esac
done
true
"""
# What of a system is in an image. A disk of layers gives what is changed a birth of its own.
_SYSTEM = ("/usr/", "/bin/", "/sbin/", "/lib")
_LISTED = "find / -maxdepth 1 -name 'lib*' -print0 | xargs -0 sh -c 'find /usr /bin /sbin \"$@\" -print0' sh | gzip"
# What was changed since a time, each with the time of its birth (0: the disk does not tell).
_CHANGED = r"""
find / \( -path /proc -o -path /sys -o -path /dev \) -prune -o -newerct "@$1" -print0 |
  xargs -0r stat --printf '%W %n\0' -- || true
"""


class SwerexContainers(ContainerProvider):
    """Deployments of SWE-ReX.

    Args:
        deployment: Modal, Daytona, Fargate or Docker.
        options: Of its configuration, as SWE-ReX has them: {"deployment_timeout": 7200}.
    """

    def __init__(self, *, limits: ContainerLimits, deployment: str = "Modal", options: Mapping[str, Any] | None = None):
        super().__init__(limits)
        if deployment not in _KINDS:
            raise ConfigError(f"is none ({deployment!r})", field="deployment", hint=f"write one of {', '.join(_KINDS)}")
        self._make: Any = getattr(package("swerex.deployment.config", "swerex"), f"{deployment}DeploymentConfig")
        self._options = dict(options or {})
        self._shells: dict[int, SwerexShell] = {}
        self._systems: dict[str, frozenset[str]] = {}
        self._config("debian")

    def _config(self, image: str) -> Any:
        try:
            return self._make(**{**self._options, "image": image})
        except ValueError as error:
            raise ConfigError(f"SWE-ReX refuses them: {' '.join(str(error).split())}", field="options") from error

    def __exit__(self, *_: object) -> None:
        for shell in list(self._shells.values()):
            shell.close()

    def image(self, name: str) -> str:
        return name

    def build(self, folder: Path, tag: str) -> str:
        hint = "name an image that the service can pull (docker_image in task.toml)"
        raise InputError("cannot be built by SWE-ReX", path=str(folder / "Dockerfile"), hint=hint)

    def shell(self, base: Snapshot, *, folder: str, user: str, environment: Mapping[str, str]) -> ContainerShell:
        host: Any = self  # of all that it has for a daemon, nothing is used
        return SwerexShell(host, base, folder=folder, user=user, environment=environment)

    def ahead(self, shell: ContainerShell) -> None:
        """It is begun with its first command."""

    def begun(self, shell: SwerexShell, image: str) -> Any:
        """A deployment for a shell, which is not started."""
        self._shells[id(shell)] = shell
        self.count("started")
        return self._config(image).get_deployment()

    def system(self, image: str, listed: Callable[[], bytes]) -> frozenset[str]:
        """The paths of an image's programs and libraries; `listed` asks a shell that has just begun."""
        if image not in self._systems:
            paths = gzip.decompress(listed()).decode("utf-8", "surrogateescape")
            self._systems[image] = frozenset(paths.split("\0"))
        return self._systems[image]

    def ended(self, shell: SwerexShell) -> None:
        self._shells.pop(id(shell), None)


class SwerexShell(ContainerShell):
    """A shell in a deployment of its own. `background` is true after every command: the server's own processes are not
    told from those of the episode."""

    _host: SwerexContainers

    def ready(self) -> None:
        with self._lock:
            if self._container is not None:
                return
            self._container = self._host.begun(self, self._base.image)
            try:
                self._asked(self._container.start(), _START_SECONDS)
                begun = self._told(["bash", "-c", "date +%s.%N; printf '%s ' /proc/[0-9]*; pwd"]).decode()
                if self._user not in _ROOT:  # whom runuser refuses could not be told from a command that fails
                    self._told(["runuser", "-u", self._user, "--", "true"])
                self._system = self._host.system(self._base.image, lambda: self._told(["bash", "-c", _LISTED]))
            except EnvironmentFault:
                self.close()
                raise
            self._begun, _, rest = begun.partition("\n")
            self._processes, _, folder = rest.rpartition(" ")
            self._folder = self._folder or folder.removesuffix("\n")

    def _asked(self, answer: Coroutine[Any, Any, Any], seconds: float) -> Any:
        return call_foreign(partial(run, answer, seconds))

    def _executed(self, words: Sequence[str], seconds: float) -> Any:
        asked = package("swerex.runtime.abstract", "swerex").Command(command=list(words), timeout=seconds + 10)
        return self._asked(self._container.runtime.execute(asked), seconds + _ANSWER_SECONDS)

    def _told(self, words: Sequence[str]) -> bytes:
        """What a program of ours says, which may be no text. Raises `EnvironmentFault` where it fails."""
        script = 'set -o pipefail; "$@" | base64 -w 0'
        said = self._executed(["bash", "-c", script, "bash", *words], _DISK_SECONDS)
        if said.exit_code != 0:
            raise EnvironmentFault(f"the container failed: {said.stderr[-200:]}")
        return base64.b64decode(said.stdout)

    def _watched(
        self, words: Sequence[str], user: str, seconds: float | None, environment: Mapping[str, str]
    ) -> tuple[Heard, str | None, int | None]:
        most = seconds or self.limits.seconds
        pairs = [f"{name}={value}" for name, value in {**self._environment, **environment}.items()]
        other = [] if user in _ROOT else ["runuser", "-u", user, "--"]
        started = time.monotonic()
        program = ["env", *pairs, *other, *words]
        said = self._executed(["bash", "-c", _RUN, "bash", f"{most:g}", str(_MOST), *program], most)
        taken = time.monotonic() - started
        self._host.count("seconds", taken)
        size, _, output = said.stdout.partition("\n")
        if not size.isdigit():
            raise EnvironmentFault(f"the container failed: {said.stderr[-200:]}")
        heard = Heard(self.limits.output_chars)
        heard.take(output.encode(), is_error=False)
        heard.take(said.stderr.encode(), is_error=True)
        stopped = LOUD if int(size) > _MOST else SLOW if said.exit_code in (137, -9) and taken >= most else None
        code = 137 if said.exit_code == -9 else said.exit_code
        return heard, stopped, None if stopped else code

    def put(self, archive: bytes, folder: str) -> None:
        with self._lock, tempfile.NamedTemporaryFile() as file:
            self.ready()
            file.write(archive)
            file.flush()
            there = f"/tmp/.{uuid.uuid4().hex}"
            requests = package("swerex.runtime.abstract", "swerex")
            sent = requests.UploadRequest(source_path=file.name, target_path=there)
            self._asked(self._container.runtime.upload(sent), _DISK_SECONDS)
            self._told(["bash", "-c", 'tar -C "$1" --no-same-owner -xf "$2" && rm "$2"', "bash", folder, there])

    def get(self, path: str) -> bytes | None:
        with self._lock:
            self.ready()
            if self._executed(["test", "-e", path], _DISK_SECONDS).exit_code != 0:
                return None
            parent, _, name = path.rstrip("/").rpartition("/")
            return self._told(["tar", "-C", parent or "/", "-cf", "-", name])

    def changed(self) -> dict[str, int]:
        """A file that was deleted shows as a change of its folder alone."""
        with self._lock:
            self.ready()
            told = self._told(["bash", "-c", _CHANGED, "bash", self._begun]).decode("utf-8", "surrogateescape")
            rows = (row.split(" ", 1) for row in told.split("\0") if row)
            return {path: self._kind(path, int(born)) for born, path in rows}

    def _kind(self, path: str, born: int) -> int:
        return int(path not in self._system if path.startswith(_SYSTEM) else born >= int(float(self._begun)))

    def state(self) -> dict[str, Any]:
        folders = 'for path; do [ -d "$path" ] && printf "%s:" "$path" && ls -A "$path"; done; true'
        found = super().state()
        return {**found, "folders": self._told(["bash", "-c", folders, "bash", *found["paths"]]).decode()}

    def signal(self, name: str) -> None:
        with self._lock:
            self.ready()
            self._executed(["bash", "-c", _SIGNAL, "bash", self._processes, name], _DISK_SECONDS)

    def restart(self) -> None:
        self.signal("KILL")
        self.background = False

    def fork(self) -> None:
        """There is none: the episode is replayed."""

    def base(self) -> None:
        """No image is kept."""

    def suspend(self) -> bool:
        return False

    def close(self) -> None:
        deployment, self._container = self._container, None
        if deployment is not None:
            self._host.ended(self)
            with contextlib.suppress(EnvironmentFault):  # the service ends it
                self._asked(deployment.stop(), _ANSWER_SECONDS)
