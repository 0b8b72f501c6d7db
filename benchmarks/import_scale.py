"""Import of a large file of trajectories: seconds and peak memory.

    python benchmarks/import_scale.py [--megabytes 1000] [--quick] [--json PATH]

Writes one JSON document of tau2-bench results (conversations with tool calls, every one another) of that size, and runs
`turntree traces import` on it in a process of its own. The turns that were kept and dropped must add up to those that
were written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from turntree.cli.common import finish

TURNS = 10  # of a conversation
COMMAND = (sys.executable, "-m", "turntree.cli.main", "traces", "import")


def simulation(number: int) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"I am customer {number}. Where is order {number}?"}]
    for turn in range(TURNS):
        call = {"id": f"c{turn}", "name": "find_order", "arguments": {"order_id": f"#W{number}", "page": turn}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = json.dumps({"order": number, "items": [{"id": item, "price": item * 1.5} for item in range(30)]})
        messages.append({"role": "tool", "id": f"c{turn}", "content": text, "requestor": "assistant", "error": False})
    messages.append({"role": "assistant", "content": f"It was sent on day {number}."})
    told = {"id": f"s{number}", "task_id": str(number), "trial": 0, "termination_reason": "agent_stop"}
    return {**told, "reward_info": {"reward": 1.0}, "messages": messages}


def write(path: Path, size: int) -> int:
    """One document of `size` bytes; how many assistant turns it has."""
    count = 0
    with path.open("w") as file:
        file.write('{"info": {"environment_info": {"domain_name": "retail", "policy": "Be fair."}}, "simulations": [')
        while file.tell() < size:
            file.write(("" if count == 0 else ", ") + json.dumps(simulation(count)))
            count += 1
        file.write("]}")
    return count * (TURNS + 1)


def imported(source: Path, out: Path, told: Path) -> dict[str, Any]:
    """The import in a process of its own; peak memory in MB."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [*COMMAND, str(source), "--out", str(out), "--json", str(told)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu = used.ru_utime + used.ru_stime
    seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": cpu}
    return {**seconds, "peak_mb": used.ru_maxrss / 1024, "exit_code": process.returncode}


def measured(megabytes: float, folder: Path) -> dict[str, Any]:
    source = folder / "results.json"
    turns = write(source, int(megabytes * 1e6))
    whole = imported(source, folder / "whole.jsonl", folder / "whole.json")
    report = json.loads((folder / "whole.json").read_text())
    return {
        "megabytes": source.stat().st_size / 1e6,
        "turns": turns,
        "report": {key: value for key, value in report.items() if isinstance(value, int)},
        "whole": whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--quick", action="store_true", help="4 MB, to see that it runs")
    parser.add_argument("--json", type=str)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(4 if given.quick else given.megabytes, Path(folder))
    finish({"cases": [found]}, given.json, [json.dumps(found, indent=1)])


if __name__ == "__main__":
    main()
