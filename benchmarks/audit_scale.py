"""How long `turntree audit` takes, and how much memory, on a log of a given size.

    python benchmarks/audit_scale.py 300          # megabytes; one line of JSON at the end

Eight rollouts a group, ten turns each, with observations: about 2.4 kB a line. The rollouts of four groups that run at
the same time are interleaved, as asynchronous frameworks write them.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

GROUP_SIZE, TURNS, TASKS, GROUPS_PER_ITERATION = 8, 10, 2000, 64
COMMAND = "from turntree.cli.main import main; import sys; main(sys.argv[1:])"


def rows(seed: int = 0) -> Iterator[dict[str, object]]:
    """An endless training log: a third of the tasks never succeeds, a third always does."""
    draw, started = random.Random(seed), 0
    while True:
        groups = [(started + i, draw.randrange(TASKS)) for i in range(4)]
        started += len(groups)
        flight = [group for group in groups for _ in range(GROUP_SIZE)]
        draw.shuffle(flight)
        for number, task in flight:
            turns = draw.randint(2, TURNS)
            yield {
                "group": f"{number}/task-{task}",
                "task": f"task-{task}",
                "iteration": number // GROUPS_PER_ITERATION,
                "reward": float(task % 3 == 2 or (task % 3 == 1 and draw.random() < 0.5)),
                "actions": [f"go to shelf {draw.randrange(9)} and look for item {task}" for _ in range(turns)],
                "observations": [f"You see {draw.getrandbits(800):x}." for _ in range(turns)],
                "turn_tokens": [draw.randint(5, 40) for _ in range(turns)],
            }


def write_log(path: Path, megabytes: float) -> None:
    written = 0
    with path.open("w", encoding="utf-8") as log:
        for row in rows():
            written += log.write(json.dumps(row) + "\n")
            if written >= megabytes * 1e6:
                return


def main() -> None:
    megabytes = float(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        log, page = Path(folder) / "log.jsonl", Path(folder) / "audit.html"
        write_log(log, megabytes)
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", COMMAND, "audit", str(log), "--out", str(page)], check=True, stdout=sys.stderr
        )
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(
            json.dumps(
                {
                    "megabytes": megabytes,
                    "seconds": round(time.perf_counter() - started, 1),
                    "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
                    "peak_megabytes": round(used.ru_maxrss * 1024 / 1e6),
                }
            )
        )


if __name__ == "__main__":
    main()
