"""Golden runs: short trainings of the embedded household policy, and one hash of the weights of each.

`python tests/golden.py` prints, for each run, the hash of its final weights and that of its metrics (but for
`UNCOMPARED`), as JSON. With `--against OTHER_CHECKOUT` it runs both checkouts on this machine and exits with 1 where
they differ. No hash is stored: they differ between processors.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]


def keys(**values):
    return [word for key, value in values.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]


GROUPS = keys(train__groups=6, train__group_size=4)
EPISODES = (
    *("--iterations", 3, "--groups", 4, "--group-size", 4, "--max-turns", 8, "--max-tokens", 24, "--count", 12),
    *("--learning-rate", 3e-4, *keys(train__check_every=2, check__tasks=3, checkpoints__every=2)),
)
# times, and figures that not every version has
UNCOMPARED = {
    "gate_alarm",
    "held_out_actions",
    "held_out_turns_per_episode",
    "timing",
    "local",
    "saved",
    "branching",
    "retired_pivots",
    "replaced_groups",
    "replaced_turns",
    "mixed_groups_trained",
    "live_pass_rate",
    "weights",
}
RUNS = {
    "pivot": (
        *("train", "pivot", "pivots.jsonl", "--steps", 3, "--max-tokens", 24, "--learning-rate", 3e-4, *GROUPS),
        *keys(train__check_every=2, check__states=6, check__tasks=2, check__max_turns=8),
    ),
    "own": (
        *("train", "pivot", "pivots.jsonl", "--states", "mixed", "--environment", "household", "--teacher"),
        *("household", "--steps", 3, "--max-tokens", 24, "--learning-rate", 3e-4, *GROUPS),
        *keys(own__tasks=3, own__count=8, own__max_turns=6, own__rollouts=4, own__refresh=2, own__candidates=10),
        *keys(own__keep=0.3, own__select__max_per_kind=1.0, own__select__anchor_share=0.0, check__tasks=0),
    ),
    "online": ("train", "online", *EPISODES, "--filter", "dapo", "--filter", "greso"),
    "forks": (
        *("train", "online", *EPISODES, "--brancher", "entropy", "--probe-tokens", 1, "--gate", "divergence"),
        *("--gate-turn", 3, "--gate-threshold", 0.9, "--audit", 0.5),
    ),
    "verdicts": (
        *("train", "online", *EPISODES, "--teacher", "household", "--verifier", "household"),
        *keys(train__verdicts=1.0),
    ),
    "sft": ("sft", "--traces", "traces.jsonl", "--epochs", 1, "--learning-rate", 3e-4, *keys(sft__batch=6)),
}
BEFORE = (
    ("traces", "household", "--count", 16, "--out", "traces.jsonl"),
    (
        *("profile", "--traces", "traces.jsonl", "--limit", 40, "--rollouts", 4, "--max-tokens", 24),
        *("--out", "profile.jsonl"),
    ),
    ("select", "profile.jsonl", "--max-per-kind", 1.0, "--anchor-share", 0.0, "--out", "pivots.jsonl"),
)


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def metrics(path: Path) -> list[dict]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]  # not every version checks what SFT begins with
    if "epoch" in rows[0]:
        rows = [{key: value for key, value in row.items() if not key.startswith("held_out")} for row in rows]
    return [{key: value for key, value in row.items() if key not in UNCOMPARED} for row in rows]


def hashes(folder: Path, names) -> dict[str, dict[str, str]]:
    """Run the commands in `folder`, in this process."""
    from turntree.cli.main import main

    os.chdir(folder)
    for words in (*BEFORE, *([*RUNS[name], "--out", name] for name in names)):
        try:
            main([str(word) for word in words])
        except SystemExit as ended:
            if ended.code:
                raise
    return {
        name: {
            "weights": digest((folder / name / "model" / "model.safetensors").read_bytes()),
            "metrics": digest(json.dumps(metrics(folder / name / "metrics.jsonl"), sort_keys=True).encode()),
        }
        for name in names
    }


def of_checkout(checkout: Path, folder: Path, names) -> dict[str, dict[str, str]]:
    """The hashes of a checkout, by this file in a process that imports from it."""
    environment = {**os.environ, "PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--in", str(folder), *names]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*RUNS, []], help="runs (default: all)")
    parser.add_argument("--against", type=Path, help="another checkout, which is run too")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    names = asked.names or list(RUNS)
    if asked.folder is not None:
        print(json.dumps(hashes(asked.folder, names)))
        return
    with tempfile.TemporaryDirectory() as place:
        checkouts = [HERE] if asked.against is None else [HERE, asked.against.resolve()]
        found = []
        for number, checkout in enumerate(checkouts):
            folder = Path(place) / str(number)
            folder.mkdir()
            found.append(of_checkout(checkout, folder, names))
    print(json.dumps(found[0], indent=1))
    if asked.against is not None:
        differing = {
            name: [what for what in values if values[what] != found[1][name][what]] for name, values in found[0].items()
        }
        differing = {name: what for name, what in differing.items() if what}
        print(f"differs from {asked.against}: {differing}" if differing else f"equal to {asked.against}")
        sys.exit(bool(differing))


if __name__ == "__main__":
    main()
