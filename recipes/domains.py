"""Four real domains, from files to trained adapters: conversational tool use, software engineering, terminal, search.

    python recipes/domains.py --data ../shared/data --out runs/domains            # a tiny policy
    python recipes/domains.py --data ../shared/data --out runs/smollm2 --model ./smollm2 --domains tau2 --traces 8

For every domain: import, a warm start on a part of the training traces (a policy that never succeeds has no pivot),
profile, select, then supervised fine-tuning and three kinds of reinforcement on LoRA adapters (pivots, random states,
exact match), and the acceptance of all at turns of held-out traces. Every step is a command of the tutorial; what is
done already is not done again, so an interrupted recipe is continued by the same command.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.cli.main import main as turntree
from turntree.core.errors import TurntreeError
from turntree.observe.artifacts import PROFILE
from turntree.observe.statistics import wilson
from turntree.stages.policy import resolve
from turntree.traces.schema import read_traces, write_traces

DOMAINS = {
    "tau2": "tau2/trajectories",
    "swe": "swe_agent/demonstrations.tar.xz",
    "terminal": "intercode/trajectories",
    "search": "hotpot_react/100_questions_5_trials.txt.xz",
}
ARMS = ("warm", "sft", "random", "strict", "pivot")
Run = Callable[..., bool]


@dataclass(frozen=True)
class Sizes:
    """What keeps a run small."""

    traces: int
    states: int
    rollouts: int
    held_out: int
    steps: int
    epochs: int
    tokens: int
    path: int


def main() -> None:
    settings = _arguments()
    sizes = Sizes(**{name: getattr(settings, name) for name in Sizes.__dataclass_fields__})
    table: list[dict[str, Any]] = []
    for domain in settings.domains.split(","):
        folder = Path(settings.out) / domain
        folder.mkdir(parents=True, exist_ok=True)
        table.append(_domain(domain, Path(settings.data), folder, settings.model, sizes, settings.threshold))
        _write(table, Path(settings.page), settings, sizes)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--model", default="", help="default: the tiny policy of the questions, with a longer context")
    parser.add_argument("--domains", default=",".join(DOMAINS))
    parser.add_argument("--page", default="runs/domains.md", help="the page of tables to write")
    parser.add_argument("--threshold", type=float, default=0.6, help="lambda: keep reward means below this")
    defaults = Sizes(traces=24, states=48, rollouts=8, held_out=24, steps=10, epochs=20, tokens=128, path=8192)
    for name in Sizes.__dataclass_fields__:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    return parser.parse_args()


def _domain(domain: str, data: Path, folder: Path, model: str, sizes: Sizes, threshold: float) -> dict[str, Any]:
    """All stages of one domain; its row of the page."""
    source = DOMAINS[domain]
    given = model or str(_tiny(folder.parent / "tiny"))

    def run(out: str, *command: object) -> bool:
        """The command, unless `out` is there already; whether it made its result."""
        done = folder / out / "cost.json" if (folder / out).is_dir() else folder / out
        if not done.exists():
            try:
                turntree([str(word) for word in (*command, "--out", folder / out)])
            except SystemExit as stopped:
                if stopped.code == 130:
                    raise
        return done.exists()

    known = ["--success-only"] if domain in ("tau2", "search") else []  # the others do not say what succeeded
    run("imported.jsonl", "traces", "import", data / source, *known)
    counts = _cut(folder / "imported.jsonl", folder / "traces.jsonl", sizes)
    row: dict[str, Any] = {"domain": domain, **counts, "arms": {}}
    traces, rate = folder / "traces.jsonl", ("--learning-rate", "1e-4" if model else "2e-3")
    sampling = ("--max-tokens", sizes.tokens)
    run("warm", "sft", "--traces", traces, "--model", given, "--epochs", sizes.epochs, "--set", "sft.batch=1", *rate)
    warm = folder / "warm" / "model"
    profiled = ("--traces", traces, "--model", warm, "--verifier", "recommended", *sampling)
    limited = ("--set", f"profile.max_path={sizes.path}", "--rollouts", sizes.rollouts)
    run("profile.jsonl", "profile", *profiled, *limited, "--limit", sizes.states)
    row["profile"] = _summary(folder / "profile.jsonl")
    below = ("--threshold", threshold)
    run("pivots.jsonl", "select", folder / "profile.jsonl", *below)
    run("random.jsonl", "select", folder / "profile.jsonl", *below, "--rule", "random")
    train = ("--model", warm, *sampling, *rate, "--steps", sizes.steps, "--set", "device.lora.rank=8")
    train += ("--set", "train.states=8", "--set", f"train.max_tokens={sizes.path}", "--keep-trees", "none")
    if not model:
        train += ("--set", "device.lora.alpha=16")
    run("sft", "sft", "--traces", traces, "--model", warm, "--epochs", 1, *rate, "--set", "device.lora.rank=8")
    for arm, pivots in (("pivot", "pivots"), ("strict", "pivots"), ("random", "random")):
        if (folder / f"{pivots}.jsonl").exists():
            run(arm, "train", "pivot", folder / f"{pivots}.jsonl", *train, *(["--strict"] if arm == "strict" else []))
    for arm in ARMS:
        if (folder / arm / "model").exists():
            held = ("--traces", traces, "--model", folder / arm / "model", "--verifier", "recommended", *sampling)
            run(f"{arm}.held_out.jsonl", "profile", *held, *limited, "--split", "dev", "--limit", sizes.held_out)
            row["arms"][arm] = _acceptance(folder / f"{arm}.held_out.jsonl")
    if (folder / "pivot").exists():
        run("report.html", "report", folder / "pivot")
    return row


def _tiny(folder: Path) -> Path:
    """The embedded policy whose template shows tools, with room for long prompts (its positions are rotary)."""
    if not folder.exists():
        shutil.copytree(resolve("qa"), folder)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 32_768
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def _cut(imported: Path, out: Path, sizes: Sizes) -> dict[str, int]:
    """The shortest traces of both splits, for a policy of a short memory: `sizes.traces` to train on, half as many held
    out."""
    traces = sorted(read_traces(imported), key=lambda trace: sum(len(m.content) for m in trace.messages))
    kept = {split: [trace for trace in traces if trace.split == split] for split in ("train", "dev")}
    chosen = [*kept["train"][: sizes.traces], *kept["dev"][: max(4, sizes.traces // 2)]]
    if not out.exists():
        write_traces(out, chosen)
    return {"imported": len(traces), "used": len(chosen)}


def _summary(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"candidates": 0, "classes": {}, "skipped_turns": {}}
    return PROFILE.read(path)[0]["summary"]


def _acceptance(path: Path) -> dict[str, Any]:
    """Accepted rollouts at held-out turns, with an interval over turns (samples at one turn are not independent)."""
    if not path.exists():
        return {"turns": 0}
    means = [row["reward_mean"] for row in PROFILE.read(path)[1] if row["reward_mean"] is not None]
    if not means:
        return {"turns": 0}
    mean = math.fsum(means) / len(means)
    low, high = wilson(math.fsum(means), len(means))
    return {"turns": len(means), "mean": mean, "low": low, "high": high}


# the page


def _write(table: Sequence[dict[str, Any]], page: Path, settings: argparse.Namespace, sizes: Sizes) -> None:
    policy = settings.model or "the tiny policy of the questions (1 M parameters), its context set to 32,768"
    lines = [
        "# Four real domains",
        "",
        f"Policy: {policy}. Sizes: {vars(sizes)}.",
        "",
        *_data(table),
        "",
        *_arms(table),
    ]
    page.parent.mkdir(parents=True, exist_ok=True)
    page.with_suffix(".part").write_text("\n".join(lines) + "\n")
    page.with_suffix(".part").replace(page)


def _data(table: Sequence[dict[str, Any]]) -> list[str]:
    lines = ["| domain | traces imported | used | candidates profiled | classes | left out |"]
    lines.append("|---|---|---|---|---|---|")
    for row in table:
        told = row["profile"]
        counts = [row["imported"], row["used"], told["candidates"]]
        classes, skipped = (", ".join(f"{n} {k}" for k, n in told[key].items()) for key in ("classes", "skipped_turns"))
        lines.append(f"| {row['domain']} | {' | '.join(map(str, counts))} | {classes} | {skipped} |")
    return lines


def _arms(table: Sequence[dict[str, Any]]) -> list[str]:
    lines = [f"| acceptance at held-out turns | {' | '.join(ARMS)} |", "|---" * (len(ARMS) + 1) + "|"]
    for row in table:
        cells = [_cell(row["arms"].get(arm, {"turns": 0})) for arm in ARMS]
        lines.append(f"| {row['domain']} | {' | '.join(cells)} |")
    return lines


def _cell(found: dict[str, Any]) -> str:
    if not found["turns"]:
        return "none"
    return f"{found['mean']:.1%} [{found['low']:.1%}, {found['high']:.1%}] of {found['turns']}"


if __name__ == "__main__":
    try:
        main()
    except TurntreeError as error:
        raise SystemExit(str(error)) from error
