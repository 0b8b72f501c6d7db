"""How a profile of many candidates grows: time, memory, and what two kills cost.

    python benchmarks/profile_scale.py 100000 [--workers N] [--json PATH]

Traces of ten turns, two rollouts a candidate, an engine that answers from a script (so that nothing but turntree is
measured), the strict verifier. The command is killed (SIGKILL) at a third and at two thirds of the candidates and
started again. The engine writes down the seed of every request, so what was sampled twice is counted, not assumed.

After each tenth of the candidates it looks at the CPU seconds of all processes so far (starts after kills included) and
at their resident memory.
"""

from __future__ import annotations

import argparse
import array
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from scripted_engine import ScriptedEngine
from turntree.cli.common import finish
from turntree.core.messages import Message

TURNS, ROLLOUTS, WAVE = 10, 2, 32
SEEDS = "TURNTREE_BENCHMARK_SEEDS"  # the folder in which every process of the engine writes down the seeds it was given
ENTRY = "from turntree.cli.main import main; import sys; main(sys.argv[1:])"


def engine(policy: Any) -> Any:
    """An engine part: every request is answered with one of two commands, by its seed."""
    said = [tuple(policy.renderer.completion(Message("assistant", text))) for text in ("go to shelf 1", "look")]
    log = (Path(os.environ[SEEDS]) / f"{os.getpid()}.seeds").open("ab", buffering=0)

    def answer(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
        log.write(array.array("Q", [seed]).tobytes())
        return said[seed % 2]

    vocabulary = policy.model.config.get_text_config().vocab_size
    return ScriptedEngine(answer, policy.renderer.stop_ids, vocab_size=vocabulary)


def write_traces(path: Path, candidates: int) -> None:
    with path.open("w", encoding="utf-8") as out:
        out.write(json.dumps({"schema": "turntree.traces/1"}) + "\n")
        for number in range(candidates // TURNS):
            messages: list[dict[str, str]] = [{"role": "user", "content": f"Task {number}: look around."}]
            for turn in range(TURNS):
                messages += [{"role": "assistant", "content": f"go to shelf {turn % 4}"}]
                messages += [{"role": "user", "content": "You see nothing special."}]
            row = {"schema": "turntree.trace/1", "id": f"t{number}", "split": "train"}
            out.write(json.dumps({**row, "messages": messages[:-1]}) + "\n")


def command(folder: Path, workers: int) -> list[str]:
    made = [sys.executable, "-c", ENTRY, "profile", "--traces", str(folder / "traces.jsonl")]
    made += ["--out", str(folder / "profile.jsonl"), "--model", "household", "--verifier", "strict"]
    made += ["--engine", "profile_scale:engine", "--rollouts", str(ROLLOUTS), "--set", f"profile.wave={WAVE}"]
    return made + (["--cluster", "local", "--set", f"cluster.workers={workers}"] if workers else [])


def used(pid: int) -> tuple[float, float]:
    """CPU seconds and resident megabytes of a process and those below it."""
    ticks = pages = 0
    for each in [pid, *below(pid)]:
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        ticks += int(fields[11]) + int(fields[12])
        pages += int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def below(pid: int) -> list[int]:
    try:
        own = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
    return [each for child in own for each in (child, *below(child))]


def measure(candidates: int, workers: int, folder: Path) -> dict[str, Any]:
    write_traces(folder / "traces.jsonl", candidates)
    log = folder / "profile.jsonl.waves"
    (folder / "seeds").mkdir()
    environment = {**os.environ, SEEDS: str(folder / "seeds")}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    kills = [candidates // 3, 2 * candidates // 3]
    tenths: list[tuple[float, float]] = []
    seconds = 0.0
    started = time.perf_counter()
    while True:
        process = subprocess.Popen(command(folder, workers), env=environment, stdout=subprocess.DEVNULL)
        before = seconds
        while process.poll() is None:
            time.sleep(0.2)
            done = _lines(log) * WAVE
            cpu, resident = used(process.pid)
            seconds = max(seconds, before + cpu)
            if done >= (len(tenths) + 1) * candidates // 10:
                tenths.append((seconds, resident))
            if kills and done >= kills[0]:
                kills.pop(0)
                process.send_signal(signal.SIGKILL)
                process.wait()
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, "the profile failed on its own"
    if len(tenths) < 10:  # the last waves were written, and the log removed, between two looks
        tenths.append((seconds, tenths[-1][1]))
    drawn = Counter[int]()
    for path in (folder / "seeds").iterdir():
        drawn.update(array.array("Q", path.read_bytes()))
    rows = (folder / "profile.jsonl").read_text(encoding="utf-8").splitlines()
    ids = Counter((row["trace_id"], row["turn"]) for row in map(json.loads, rows[1:]))
    return {
        "candidates": len(ids),
        "rows_of_one_candidate": max(ids.values()),
        "rollouts_in_profile": len(ids) * ROLLOUTS,
        "rollouts_sampled": drawn.total(),
        "sampled_again_after_kills": drawn.total() - len(drawn),
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds_until_each_tenth": [round(cpu, 1) for cpu, _ in tenths],
        "resident_megabytes": [round(resident) for _, resident in tenths],
        "workers": workers,
    }


def _lines(log: Path) -> int:
    """Waves in the log, whose first line is its header."""
    try:
        with log.open("rb") as handle:
            return max(0, sum(block.count(b"\n") for block in iter(lambda: handle.read(2**20), b"")) - 1)
    except FileNotFoundError:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("candidates", type=int)
    parser.add_argument("--workers", type=int, default=0, help="rollout workers on a local Ray cluster")
    parser.add_argument("--json", metavar="PATH")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(given.candidates, given.workers, Path(folder))
    finish(result, given.json, [json.dumps(result, indent=2)])


if __name__ == "__main__":
    main()
