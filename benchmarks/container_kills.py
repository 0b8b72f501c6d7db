"""Kills in the middle of episodes in containers: does a run resume to the same counts, with nothing left behind and no
false reward?

    python benchmarks/container_kills.py [--kills 40] [--tasks 12] [--seed 0] [--kinds client daemon container disk]

A run plays the solution and every mutant of the tasks of recipes/container_tasks.py, in a fork each, and writes a row
an episode. Its daemon is podman on a store of its own, a file system of 512 MiB in a file (needs root), which reads the
images of the usual store. At random moments the client, the daemon or a container is killed, or the store's disk is
filled for some seconds. A run that ended early is started again and goes on after its last row; one that is done before
enough was killed is played again. In the end there has to be one row an episode (and round); every solution has reward
1 and no mutant has.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import EnvironmentFault, EnvironmentGone
from turntree.env.container import LABEL, ContainerHost, ContainerLimits
from turntree_interop.harbor import HarborTasks

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import container_tasks

KINDS = ("client", "daemon", "container", "disk")
USUAL = "/var/lib/containers/storage"
TRIES = 20  # of an episode, until it is left to the next start of the run


def episodes(folder: Path) -> dict[str, str]:
    """The commands of every episode of a task, by its name."""
    mutants = sorted((folder / "mutants").glob("*.sh"))
    told = {f"{folder.name}/{path.stem}": path.read_text() for path in mutants}
    return {f"{folder.name}/solution": (folder / "solution/solve.sh").read_text()} | told


def run(root: Path, out: Path) -> None:
    """Play what has no row yet."""
    known = {row["episode"] for row in rows(out)}
    with ContainerHost(ContainerLimits(seconds=60, memory_mb=256, alive=2)) as host, out.open("a") as file:
        for folder in sorted(root.iterdir()):
            task = HarborTasks(argument=str(folder), held_out="none").of_split("train", 1, 0)[0]
            for name, commands in episodes(folder).items():
                faults = 0
                while name not in known and faults < TRIES:
                    try:
                        start = task.shell(host)
                        fork = start.fork() or start
                        fork.run(commands)
                        reward = task.judge(fork).reward
                    except EnvironmentFault:
                        faults += 1
                        time.sleep(0.5)
                        continue
                    file.write(json.dumps({"episode": name, "reward": reward, "faults": faults}) + "\n")
                    file.flush()
                    known.add(name)


def rows(path: Path) -> list[dict[str, Any]]:
    """All whole lines: a killed run may have written half of its last one."""
    text = path.read_text() if path.exists() else ""
    path.write_text(text[: text.rfind("\n") + 1])
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


@contextlib.contextmanager
def small_store(size_mb: int = 512) -> Iterator[Path]:
    """A folder on a file system of its own."""
    with tempfile.TemporaryDirectory() as folder:
        disk, store = Path(folder, "disk"), Path(folder, "store")
        store.mkdir()
        with disk.open("wb") as file:
            file.truncate(size_mb << 20)
        subprocess.run(["mkfs.ext4", "-q", "-F", disk], check=True)
        subprocess.run(["mount", "-o", "loop", disk, store], check=True)
        try:
            yield store
        finally:
            subprocess.run(["umount", "-R", "-l", store], check=True)


def podman(store: Path, *words: str | Path) -> subprocess.Popen[bytes]:
    """Podman on a store, with the images of the usual one; its locks are files there, because those in shared memory
    are all other stores', too."""
    settings = store / "containers.conf"
    settings.write_text('[engine]\nlock_type = "file"\nexit_command_delay = 20\n')
    places = ["--root", store / "root", "--runroot", store / "run", "--tmpdir", store / "tmp"]
    places += ["--storage-driver", "overlay", "--storage-opt", f"additionalimagestore={USUAL}"]
    command = ["podman", *places, "--runtime", "runc", "--cgroup-manager", "cgroupfs", *words]
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        process_group=0,
        env=os.environ | {"CONTAINERS_CONF": str(settings)},
    )


class Daemon:
    """A daemon on a store of its own, which can be killed and begins again."""

    def __init__(self, store: Path) -> None:
        self.store, self.url = store, f"unix://{store}/podman.sock"
        self.begin()

    def begin(self) -> None:
        self.process = podman(self.store, "system", "service", "--time", "0", self.url)

    def begin_anew(self) -> None:
        """What an operator does where podman answers nobody any more: end every process of the store."""
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(place.name) != os.getpid() and str(self.store).encode() in (place / "cmdline").read_bytes():
                    os.kill(int(place.name), signal.SIGKILL)
        self.process.wait()
        self.begin()

    def disturb(self, kind: str, client: subprocess.Popen[str], rng: random.Random) -> bool:
        """Whether there was something to disturb."""
        if kind == "client":
            client.kill()
        elif kind == "daemon":
            self.process.kill()
            self.process.wait()
            time.sleep(rng.uniform(0, 3))
            self.begin()
        elif kind == "disk":
            with contextlib.suppress(OSError), Path(self.store, "ballast").open("wb", buffering=0) as ballast:
                while True:
                    ballast.write(bytes(1 << 20))
            time.sleep(rng.uniform(2, 10))
            Path(self.store, "ballast").unlink()
        else:
            alive = answered(podman(self.store, "ps", "-q", "--filter", f"label={LABEL}")).split()
            return bool(alive and answered(podman(self.store, "kill", rng.choice(alive).decode())))
        return True


def answered(asked: subprocess.Popen[bytes]) -> bytes:
    """What podman says; nothing where it waits for a lock that a killed daemon left."""
    try:
        return asked.communicate(timeout=30)[0]
    except subprocess.TimeoutExpired:
        asked.kill()
        return asked.communicate()[0]


def drill(given: argparse.Namespace, folder: Path, daemon: Daemon) -> None:
    rng, root, out = random.Random(given.seed), folder / "tasks", folder / "rows.jsonl"
    root.mkdir()
    for number in range(given.tasks):
        container_tasks.write(number, root)
    due = {name for each in root.iterdir() for name in episodes(each)}
    done: Counter[str] = Counter()
    ended: list[dict[str, Any]] = []  # rows of rounds before the last one
    clients: list[int] = []
    unmoved = stuck = 0
    while sum(done.values()) < given.kills or len(rows(out)) < len(due):
        if len(rows(out)) >= len(due):
            ended += rows(out)
            out.unlink()
        before = sum(done.values()), len(rows(out))
        words = [sys.executable, __file__, "--play", str(root), str(out)]
        with subprocess.Popen(words, env=os.environ | {"DOCKER_HOST": daemon.url}) as client:
            clients.append(client.pid)
            while client.poll() is None and sum(done.values()) < given.kills:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    client.wait(rng.uniform(0.5, given.apart))
                kind = rng.choice(given.kinds)
                if client.poll() is None and daemon.disturb(kind, client, rng):
                    done[kind] += 1
        if client.returncode > 0:
            sys.exit("the run has failed")
        unmoved = unmoved + 1 if (sum(done.values()), len(rows(out))) == before else 0
        if unmoved == 5:
            sys.exit("five starts in a row have played nothing, and nothing was killed meanwhile")
        if unmoved:
            stuck += 1
            daemon.begin_anew()
        print(f"start {len(clients)}: {len(rows(out))} of {len(due)} episodes, {dict(done)}", flush=True)
    ended += rows(out)
    false = [row for row in ended if (row["reward"] == 1.0) != row["episode"].endswith("/solution")]
    counted = Counter(row["episode"] for row in ended)
    os.environ["DOCKER_HOST"] = daemon.url
    with ContainerHost() as host:
        containers, images = (
            [each for each in kind if int(each["Labels"][LABEL].split()[1]) in clients] for kind in host.made()
        )
    mounts = [
        line for line in Path("/proc/mounts").read_text().splitlines() if f" {daemon.store}/root/overlay/" in line
    ]
    faults, times = sum(row["faults"] for row in ended), sorted(set(counted.values()))
    print(
        f"{dict(done)} in {len(clients)} starts, {stuck} of them in vain (podman was begun anew); {faults} faults, "
        f"all repeated; {len(ended)} rows of {len(due)} episodes, each {times} times; false rewards: {false}; left: "
        f"{len(containers)} containers, {len(images)} images, {len(mounts)} mounts"
    )


def main() -> None:
    if sys.argv[1:2] == ["--play"]:
        try:
            run(*map(Path, sys.argv[2:]))
        except (EnvironmentGone, EnvironmentFault, InputError) as error:  # the daemon is away, or was at the start
            print(f"the run ends: {error}", flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--tasks", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--apart", type=float, default=20.0, help="most seconds between two kills")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    with small_store() as store, tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(store)
        try:
            drill(given, Path(folder), daemon)
        finally:
            daemon.process.terminate()
            daemon.process.wait()


if __name__ == "__main__":
    main()
