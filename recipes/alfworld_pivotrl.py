"""PivotRL on the real ALFWorld games: base, SFT and five kinds of turn-level RL, side by side on both validation sets.

    python recipes/alfworld_pivotrl.py --games GAMES --base runs/alfworld/base --out runs/alfworld --seeds 0 1 2
    python recipes/alfworld_pivotrl.py --games GAMES --base runs/alfworld/base --out runs/alfworld --table

GAMES is the folder json_2.1.1 that `alfworld-download` leaves, or one of packed files (train.jsonl.xz, ...);
docs/results/alfworld-pivotrl.md says how the base policy is made. Every step leaves an artifact and is skipped where
that is there, so an interrupted run goes on where it stopped. `--arms` chooses; `--develop` plays training-room games
instead of validation games, which is where the settings were chosen.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.experiments.paired import paired_outcomes, task_matrix
from turntree.observe.files import read_json, read_table
from turntree.observe.statistics import clustered_wilson
from turntree.profiling import profile as profiling
from turntree.profiling.profile import ProfileConfig
from turntree.profiling.select import SelectConfig
from turntree.stages import evaluate, profile, select, sft, train_pivot
from turntree.stages.demonstrate import demonstrate
from turntree.stages.evaluate import EvaluateConfig
from turntree.stages.profile import ProfileStageConfig
from turntree.stages.sft import SFTStageConfig
from turntree.stages.train_pivot import TrainPivotConfig
from turntree.training.losses import LossConfig
from turntree.training.optimizer import OptimizerConfig
from turntree.training.pivot import PivotConfig
from turntree.training.sft import SFTConfig

COMMAND = Sampling(temperature=1.0, max_tokens=24)
SELECTIONS = {
    "pivots": SelectConfig(threshold=0.6, per_duplicate=0),  # the paper's filter
    "balanced": SelectConfig(
        threshold=1.0, max_per_kind=0.25, per_duplicate=0
    ),  # every mixed turn, no kind above a quarter
    "random": SelectConfig(
        threshold=1.0, max_per_kind=0.25, per_duplicate=0, rule="random"
    ),  # as many as `balanced`, drawn blindly
}
# arm -> (selection, verifier; None: the functional one of the profile)
ARMS = {
    "pivotrl": ("balanced", None),
    "random": ("random", None),
    "strict": ("balanced", "strict"),
    "filter": ("pivots", None),
}
TITLES = {
    "base": "base",
    "sft": "SFT, same data",
    "pivotrl": "PivotRL (lambda 1, no kind above a quarter)",
    "random": "without filtering (random turns)",
    "strict": "without functional reward (strict)",
    "filter": "PivotRL, the paper's filter (lambda 0.6)",
}
TRAIN = PivotConfig(
    steps=40,
    states=32,
    group_size=8,
    sampling=COMMAND,
    loss=LossConfig(kl_coefficient=0.1),
    optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=3),
)
FINE_TUNE = SFTConfig(epochs=3, optimizer=OptimizerConfig(learning_rate=3e-4))
PLAY = EvaluateConfig(max_turns=30, max_tokens=24, samples=2, skills_per_kind=100)


def games_of(options: argparse.Namespace, name: str) -> str:
    """Where these games are."""
    packed = options.games / f"{name}.jsonl.xz"
    return str(packed if packed.exists() else options.games / name)


def traces(options: argparse.Namespace) -> Path:
    """Exploring expert play on the first training games, 20% stumbles."""
    path = options.out / "traces.jsonl"
    if not path.exists():
        games = {"source": games_of(options, "train"), "count": options.train_games}
        demonstrate(Part("household", {"games": games, "slips": 0.2, "max_turns": 30}), path)
    return path


def selections(options: argparse.Namespace, seed: int) -> Path:
    """Profile with the base policy; one pivot file for each selection."""
    folder = options.out / f"seed{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    measured = folder / "profile.jsonl"
    if not measured.exists():
        stage = ProfileStageConfig(
            traces=str(traces(options)),
            model=str(options.base),
            limit=options.candidates,
            profile=ProfileConfig(sampling=COMMAND, seed=seed),
        )
        profile.run_profile(stage, measured)
    for name, rule in SELECTIONS.items():
        if not (folder / f"{name}.jsonl").exists():
            select.run_select(measured, replace(rule, seed=seed), folder / f"{name}.jsonl")
    return folder


def train(options: argparse.Namespace, arm: str, seed: int) -> Path:
    """The folder of the arm's policy."""
    if arm == "base":
        return options.base
    out = options.out / f"seed{seed}" / arm
    if (out / "model").exists():
        return out / "model"
    if arm == "sft":
        stage = SFTStageConfig(traces=str(traces(options)), model=str(options.base), sft=replace(FINE_TUNE, seed=seed))
        sft.run_sft(stage, out)
    else:
        selection, verifier = ARMS[arm]
        folder = selections(options, seed)
        rl = TrainPivotConfig(
            pivots=str(folder / f"{selection}.jsonl"),
            model=str(options.base),
            verifier=None if verifier is None else Part(verifier),
            train=replace(TRAIN, seed=seed),
        )
        train_pivot.run_train_pivot(rl, out)
    return out / "model"


def play(options: argparse.Namespace, arm: str, seed: int) -> None:
    """Sampled and greedy episodes on each set of games, retention with the first."""
    model = str(train(options, arm, seed))
    for number, (name, count) in enumerate(options.sets.items()):
        path = options.out / f"seed{seed}" / "evaluation" / f"{arm}-{name}.json"
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        played = Part("household", {"games": games_of(options, name)})
        skills = PLAY.skills_per_kind if number == 0 else 0
        asked = replace(PLAY, model=model, environment=played, count=count, skills_per_kind=skills, seed=seed)
        evaluate.evaluate(asked, path)


def shares(evaluation: dict, key: str) -> dict[str, float]:
    """Success of every game, as the mean over its episodes; games without an episode are left out."""
    rows = evaluation[key]["outcomes"]
    return {row["task"]: sum(row["rewards"]) / len(row["rewards"]) for row in rows if row["rewards"]}


def table(options: argparse.Namespace) -> None:
    """Per arm and set: success over all seeds with its interval over games, and the differences to base and to SFT."""
    for name in options.sets:
        loaded = {
            arm: [read_json(options.out / f"seed{s}" / "evaluation" / f"{arm}-{name}.json") for s in options.seeds]
            for arm in options.arms
        }
        first = name == next(iter(options.sets))
        print(f"\n**{name}**, {len(options.seeds)} seeds\n")
        print("| policy | sampled | greedy | minus base | minus SFT | impossible |" + (" retention |" if first else ""))
        print("|---|---|---|---|---|---|" + ("---|" if first else ""))
        for arm, runs in loaded.items():
            sampled, greedy = (task_matrix([shares(run, key) for run in runs])[0][0] for key in ("sampled", "greedy"))
            episodes = [len(runs) * PLAY.samples] * sampled.shape[1]
            low, high = clustered_wilson((sampled.sum(0) * PLAY.samples).tolist(), episodes)
            cells = [
                f"{sampled.mean():.1%} [{low:.1%}, {high:.1%}]",
                f"{greedy.mean():.1%}",
                *(difference(runs, loaded.get(other)) if arm != other else "" for other in ("base", "sft")),
                f"{sum(run['sampled']['invalid_share'] for run in runs) / len(runs):.1%}",
            ]
            if first:
                cells.append(f"{sum(run['retention']['accuracy'] for run in runs) / len(runs):.1%}")
            print(f"| {TITLES[arm]} | " + " | ".join(cells) + " |")
    for seed in options.seeds:
        header, _ = read_table(options.out / f"seed{seed}" / "profile.jsonl", profiling.SCHEMA)
        print(f"\nseed {seed}: {header['summary']['classes']}, miss rate {header['summary']['miss_rate']:.1%}")


def difference(runs: list[dict], others: list[dict] | None) -> str:
    """In points: [for these policies on other games], and (for other seeds and other games)."""
    if others is None:
        return ""
    found = paired_outcomes([shares(run, "sampled") for run in runs], [shares(run, "sampled") for run in others])
    row, training = (
        {k: 100 * v for k, v in found[name].items() if k in ("mean", "low", "high") and v is not None}
        for name in ("held_out_difference", "by_seed")
    )
    told = f"{row['mean']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]"
    return told + (f" ({training['low']:+.1f}, {training['high']:+.1f})" if "low" in training else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=Path, required=True)
    parser.add_argument("--base", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/alfworld"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", default=["base", "sft", *ARMS], choices=["base", "sft", *ARMS])
    parser.add_argument("--train-games", type=int, default=1200)
    parser.add_argument("--candidates", type=int, default=6000)
    parser.add_argument("--develop", action="store_true", help="play 100 games of training rooms instead")
    parser.add_argument("--table", action="store_true", help="only print the comparison")
    options = parser.parse_args()
    options.sets = {"valid_train": 100} if options.develop else {"valid_seen": 140, "valid_unseen": 134}
    if not options.table:
        for seed in options.seeds:
            for arm in options.arms:
                play(options, arm, seed)
    table(options)


if __name__ == "__main__":
    main()
