"""What a fork of a container costs beside a replay: seconds (median, 90th percentile), and disk.

    python benchmarks/containers.py [--repeats 20] [--many 16 64] [--image NAME]

It needs Docker or podman, and the image of `python recipes/container_tasks.py image`. A turn is a command that appends
to a file and reads it. A fork is ready when it has answered its first command.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from turntree.env.container import ContainerHost, ContainerLimits, Snapshot
from turntree.env.container_shell import ContainerShell

TURN = "echo turn >> /log; wc -l < /log"


def timed(act: Callable[[], Any]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def row(name: str, seconds: list[float]) -> None:
    ninth = sorted(seconds)[min(len(seconds) - 1, round(0.9 * len(seconds)))]
    print(f"| {name} | {statistics.median(seconds):.2f} | {ninth:.2f} | {len(seconds)} |", flush=True)


def played(host: ContainerHost, base: Snapshot, turns: int) -> ContainerShell:
    shell = ContainerShell(host, base)
    for _ in range(turns):
        shell.run(TURN)
    return shell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--many", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--image", default="localhost/turntree-debian:latest")
    given = parser.parse_args()
    print(f"load {Path('/proc/loadavg').read_text().split()[0]}\n\n| | median s | 90% s | n |\n|---|---|---|---|")
    with ContainerHost(ContainerLimits(alive=128)) as host:
        base, times = Snapshot(host.image(given.image)), range(given.repeats)
        shell = played(host, base, 1)
        row("a command", [timed(lambda: shell.run(TURN)) for _ in times])
        starts = [ContainerShell(host, base) for _ in times]
        row("a new container and its first command", [timed(lambda each=each: each.run(TURN)) for each in starts])
        for each in starts:
            each.close()
        commits: list[float] = []
        firsts: list[float] = []
        for _ in times:
            shell.run(TURN)
            held: list[ContainerShell] = []
            commits.append(timed(lambda held=held: held.append(shell.fork() or shell)))
            firsts.append(timed(lambda held=held: held[0].run(TURN)))
            held[0].close()
        row("a fork: the commit, for which its parent waits", commits)
        row("a fork: a container of it and its first command", firsts)
        row("a fork, together", [commit + first for commit, first in zip(commits, firsts, strict=True)])
        for turns in (1, 5, 20):
            count = max(3, given.repeats // turns)
            row(f"a replay of {turns} turns and the next command",
                [timed(lambda turns=turns: played(host, base, turns + 1).close()) for _ in range(count)])  # fmt: skip
        for many in given.many:
            shell.run(TURN)
            twins: list[ContainerShell] = []
            with ThreadPoolExecutor(16) as pool:

                def all_at_once(many: int = many, twins: list[ContainerShell] = twins) -> None:
                    twins += [twin for _ in range(many) if (twin := shell.fork()) is not None]
                    list(pool.map(lambda twin: twin.run(TURN), twins))

                row(f"{many} forks of one moment, all ready", [timed(all_at_once)])
            sizes = [twin.written() or 0 for twin in twins[:8]]
            print(f"\n{many} forks: {statistics.mean(sizes) / 1024:.0f} KiB a fork in its own layer\n")
            for twin in twins:
                twin.close()


if __name__ == "__main__":
    main()
