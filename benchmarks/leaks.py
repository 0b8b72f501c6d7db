"""What NVIDIA's released servers pay and should not: the leaks of benchmarks/leaks, under `nemo` and `recommended`.

    python benchmarks/leaks.py [--json PATH]

Line by line, `gold.jsonl` has the demonstrated action, the server and what it pays, `candidate.jsonl` the action that
is tried; `turntree verifier score --verifier V --gold benchmarks/leaks/gold.jsonl --candidate
benchmarks/leaks/candidate.jsonl` judges them by any verifier. Prints the table of docs/results/verifiers.md. The exit
code is 1 where `nemo` does not pay what the server pays, or `recommended` pays anything. (What `swe_pivot` pays was
measured at commit aaab5c6e; `nemo` does not have it.)
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, get_args

from turntree.cli.common import finish
from turntree.core.config import Part
from turntree.stages.score import ScoreConfig, score
from turntree_interop.nemo_gym import Domain

LEAKS = Path(__file__).resolve().parent / "leaks"


def verdicts(verifier: Part) -> list[dict[str, Any]]:
    files = {name: str(LEAKS / f"{name}.jsonl") for name in ("gold", "candidate")}
    return score(ScoreConfig(verifier=verifier, **files))["verdicts"]


def rows() -> list[dict[str, Any]]:
    """A leak a row: what the server pays, and what `nemo` in its mode (where it has it) and `recommended` say."""
    told = [json.loads(line) for line in (LEAKS / "gold.jsonl").read_text().splitlines()]
    servers = {row["server"] for row in told} & set(get_args(Domain))
    by_server = {server: verdicts(Part("nemo", {"domain": server})) for server in servers}
    ours = verdicts(Part("recommended"))
    return [
        {key: row[key] for key in ("leak", "server", "released")}
        | {"nemo": by_server[row["server"]][n]["reward"] if row["server"] in servers else None}
        | {"recommended": ours[n]["reward"], "says": ours[n]["reason"]}
        for n, row in enumerate(told)
    ]


def table(found: list[dict[str, Any]]) -> list[str]:
    head = ["| what is tried | server | released | `recommended` | `recommended` says |", "|---|---|---|---|---|"]
    told = ["leak", "server", "released", "recommended", "says"]
    return head + [
        "| " + " | ".join(f"{row[key]:g}" if isinstance(row[key], float) else row[key] for key in told) + " |"
        for row in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=str)
    found = rows()
    finish({"leaks": found}, parser.parse_args().json, table(found))
    if any(row["nemo"] not in (None, row["released"]) or row["recommended"] != 0 for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
