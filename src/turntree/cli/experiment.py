"""`turntree experiment`: what the methods are worth, over matched seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import configured, finish, json_option, set_option
from turntree.core.config import Part

if TYPE_CHECKING:
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages.train_online import TrainOnlineConfig


@click.group(short_help="What a method is worth: matched arms, intervals.")
def experiment() -> None:
    """Comparisons over seeds. An interrupted experiment goes on where it stopped; finished runs are not run again."""


def _online_arm(
    iterations: int, groups: int, difficulty: str, check_every: int, episodes: EpisodeConfig, rate: float, loss: Any
) -> TrainOnlineConfig:
    """GRPO on generated games, as far as both experiments agree; `loss` are its settings beside the KL term."""
    from turntree.rollouts.scheduler import SchedulerConfig
    from turntree.stages.train_online import TrainOnlineConfig
    from turntree.training.losses import LossConfig
    from turntree.training.online import OnlineConfig
    from turntree.training.optimizer import OptimizerConfig

    return TrainOnlineConfig(
        environment=Part("household", {"difficulty": difficulty}),
        train=OnlineConfig(
            iterations=iterations,
            groups=groups,
            check_every=check_every,
            rollouts=SchedulerConfig(episodes=episodes, group_size=8, max_live_rollouts=8 * groups),
            loss=LossConfig(kl_coefficient=0.02, temperature=episodes.sampling.temperature, **loss),
            optimizer=OptimizerConfig(learning_rate=rate, warmup_steps=3),
        ),
    )


@experiment.command("gate", short_help="The gate against none and against cutting at random.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The experiment's folder.")
@click.option("--seeds", default="0,1,2,3", show_default=True, help="Comma-separated.")
@click.option("--iterations", default=16, show_default=True)
@click.option("--groups", default=8, show_default=True, help="Games an iteration.")
@click.option("--difficulty", default="easy", show_default=True)
@click.option("--gate-turn", default=8, show_default=True)
@click.option("--gate-threshold", default=0.64, show_default=True, help="Calibrated for the embedded policy.")
@click.option("--constant", default=5500.0, show_default=True, help="The loss divides by this many trained tokens.")
@set_option
@json_option
def gate_experiment(
    out: Path,
    seeds: str,
    iterations: int,
    groups: int,
    difficulty: str,
    gate_turn: int,
    gate_threshold: float,
    constant: float,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Matched seeds, three arms: no gate, the gate, and cutting as large a share at random.

    \b
    Example: turntree experiment gate --out runs/gate --seeds 0,1,2,3
    """
    from dataclasses import replace

    from turntree.core.completion import Sampling
    from turntree.gates.config import CheckpointConfig, GateConfig
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages.experiment_gate import GateExperimentConfig, run_gate_experiment

    gate = GateConfig(checkpoints=(CheckpointConfig(turn=gate_turn, threshold=gate_threshold),))
    # temperature 0.5: at 1 so small a policy is so uncertain that its rollouts hardly ever converge
    episodes = EpisodeConfig(max_turns=24, sampling=Sampling(temperature=0.5, max_tokens=24))
    normalizer = {"normalizer": "constant", "constant": constant}
    online = _online_arm(iterations, groups, difficulty, 8, episodes, 2e-4, normalizer)
    base = replace(online, gate=gate)
    config = configured(GateExperimentConfig(online=base, seeds=_seeds(seeds)), overrides)
    summary = run_gate_experiment(config, out)
    finish(summary, json_path, list(_gate_lines(summary)))


def _gate_lines(summary: dict[str, Any]) -> Iterator[str]:
    for arm, totals in summary["arms"].items():
        yield (
            f"{arm:7s} held-out success {totals['held_out_success']:.1%}, {sum(totals['turns']):,} turns, "
            f"{totals['groups_cut']} of {totals['groups']} groups cut"
        )
    for arm, row in summary["differences"].items():
        saved, success = row["saved"]["turns"], row["held_out_difference"]
        yield (
            f"{arm} - none: {_edges(saved, '{:.1%}')} of the turns saved; success {_points(row['by_seed'])} for other "
            f"seeds and tasks, {_points(success)} for these policies (p = {success['p_value']:.2f})"
        )


@experiment.command("cost", short_help="PivotRL against end-to-end GRPO, success over what was spent.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The experiment's folder.")
@click.option("--seeds", default="0,1,2", show_default=True, help="Comma-separated.")
@click.option("--iterations", default=20, show_default=True, help="Of the GRPO arm.")
@click.option("--steps", default=60, show_default=True, help="Of the PivotRL arm.")
@click.option("--groups", default=8, show_default=True, help="Games an iteration of the GRPO arm.")
@click.option("--difficulty", default="easy", show_default=True)
@set_option
@json_option
def cost_experiment(
    out: Path,
    seeds: str,
    iterations: int,
    steps: int,
    groups: int,
    difficulty: str,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Success on held-out games over cumulative turns, tokens and seconds; ratios at matched success.

    \b
    Example: turntree experiment cost --out runs/cost --seeds 0,1,2
    """
    from turntree.core.completion import Sampling
    from turntree.profiling.profile import ProfileConfig
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages.experiment_cost import CostExperimentConfig, run_cost_experiment
    from turntree.training.losses import LossConfig
    from turntree.training.optimizer import OptimizerConfig
    from turntree.training.pivot import PivotConfig

    command = Sampling(temperature=1.0, max_tokens=24)
    episodes = EpisodeConfig(max_turns=16, sampling=command)
    pivot = PivotConfig(
        steps=steps,
        check_every=5,
        sampling=command,
        loss=LossConfig(kl_coefficient=0.02),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=3),
    )
    base = CostExperimentConfig(
        seeds=_seeds(seeds),
        online=_online_arm(iterations, groups, difficulty, 2, episodes, 5e-4, {}),
        profile=ProfileConfig(sampling=command),
        train=pivot,
    )
    summary = run_cost_experiment(configured(base, overrides), out)
    finish(summary, json_path, list(_cost_lines(summary)))


def _cost_lines(summary: dict[str, Any]) -> Iterator[str]:
    for seed, row in zip(summary["seeds"], summary["matched"], strict=True):
        if row["ratios"] is None:
            yield f"seed {seed}: an arm never rises above its start, so there is no matched success"
            continue
        yield f"seed {seed}: at {row['success']:.1%}, GRPO spent per unit of PivotRL"
        for name, what in (("ratios", "with the profile"), ("ratios_in_training", "in training alone")):
            yield f"  {what}: " + ", ".join(f"{unit} {value:.2f}" for unit, value in row[name].items())
    for name, what in (("ratios", "with the profile"), ("ratios_in_training", "in training alone")):
        if row := summary["ratios"][name]:
            count = len(row["turns"]["values"])
            told = ", ".join(f"{unit} {_edges(found, '{:.2f}')}" for unit, found in row.items())
            yield f"over {count} seeds, geometric mean [95%], {what}: {told}"
    ends = summary["ends"]
    for method in ("pivotrl", "grpo"):
        last, best = (_edges(ends[method][which], "{:.1%}") for which in ("last", "best"))
        yield f"{method} ends at {last}, best check {best}"
    yield f"pivotrl - grpo at the end: {_points(ends['pivotrl - grpo']['by_seed'])}"


@experiment.command("branching", short_help="Forks where entropy rises, against random ones and none.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The experiment's folder.")
@click.option("--seeds", default="0,1,2,3", show_default=True, help="Comma-separated.")
@click.option("--arms", default="grpo,entropy,random,entropy_starts,entropy_paths,grpo_calls", show_default=True)
@click.option("--iterations", default=40, show_default=True)
@click.option("--groups", default=8, show_default=True, help="Questions an iteration.")
@click.option("--group-size", default=8, show_default=True, help="Leaves of a tree (M); half begin independently (N).")
@click.option("--probe-tokens", default=2, show_default=True, help="Tokens whose entropy is looked at.")
@click.option("--learning-rate", default=5e-4, show_default=True)
@click.option("--constant", default=2000.0, show_default=True, help="The loss divides by this many trained tokens.")
@set_option
@json_option
def branching_experiment(
    out: Path, seeds: str, arms: str, overrides: tuple[str, ...], json_path: str | None, **chosen: Any
) -> None:
    """Matched seeds on generated questions; arms: grpo, grpo_half, grpo_calls (as many tool calls as entropy), entropy,
    random (as often as entropy, turn by turn), entropy_starts (baseline of initial starts), entropy_paths and
    random_paths (the same with path weights), arpo_released, tree_grpo.

    \b
    Example: turntree experiment branching --out runs/branching --seeds 0,1,2,3
    """
    from turntree.stages.experiment_branching import BranchingExperimentConfig, run_branching_experiment

    named: Any = tuple(part.strip() for part in arms.split(","))
    wanted = BranchingExperimentConfig(online=_branching_arm(**chosen), arms=named, seeds=_seeds(seeds))
    summary = run_branching_experiment(configured(wanted, overrides), out)
    finish(summary, json_path, list(_branching_lines(summary)))


def _branching_arm(
    iterations: int, groups: int, group_size: int, probe_tokens: int, learning_rate: float, constant: float
) -> TrainOnlineConfig:
    from turntree.branching.config import BranchConfig
    from turntree.core.completion import Sampling
    from turntree.rollouts.live import EpisodeConfig
    from turntree.rollouts.scheduler import SchedulerConfig
    from turntree.stages.train_online import TrainOnlineConfig
    from turntree.training.losses import LossConfig
    from turntree.training.online import OnlineConfig
    from turntree.training.optimizer import OptimizerConfig

    episodes = EpisodeConfig(max_turns=10, max_context=1024, sampling=Sampling(temperature=1.0, max_tokens=48))
    rollouts = SchedulerConfig(
        episodes=episodes,
        group_size=group_size,
        initial_rollouts=(group_size + 1) // 2,
        max_live_rollouts=groups * group_size,
    )
    return TrainOnlineConfig(
        environment=Part("qa"),
        held_out_count=300,
        held_out_temperature=1.0,
        held_out_samples=2,
        branching=BranchConfig(rule="entropy", probe_tokens=probe_tokens),
        train=OnlineConfig(
            iterations=iterations,
            groups=groups,
            check_every=10,
            rollouts=rollouts,
            loss=LossConfig(kl_coefficient=0.02, normalizer="constant", constant=constant),
            optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=3),
        ),
    )


@experiment.command("premise", short_help="Does entropy rise after tool results, and do forks there differ more?")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The JSON file to write.")
@click.option("--environment", default="qa", show_default=True, metavar="SPEC", help="Whose tasks to play.")
@click.option("--model", default="default", show_default=True, help="[default: the one of the environment]")
@click.option("--count", default=150, show_default=True, help="Tasks.")
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def premise_experiment(
    out: Path, environment: str, model: str, count: int, seed: int, overrides: tuple[str, ...], json_path: str | None
) -> None:
    """What branching by entropy could exploit, measured on a frozen policy.

    \b
    Example: turntree experiment premise --out runs/premise.json
    """
    from turntree.core.completion import Sampling
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages import premise

    config = premise.PremiseConfig(
        environment=Part(environment),
        model=model,
        count=count,
        episodes=EpisodeConfig(max_turns=10, max_context=1024, sampling=Sampling(temperature=1.0, max_tokens=48)),
        seed=seed,
    )
    result = premise.run_premise(configured(config, overrides), out)
    finish(result, json_path, list(premise.lines(result)))


def _branching_lines(summary: dict[str, Any]) -> Iterator[str]:
    for arm, row in summary["arms"].items():
        yield (
            f"{arm:14s} held-out {row['held_out_success']['mean']:.1%} ({_points(row['gain']['by_seed'])} over the "
            f"start), {row['calls']:,.0f} calls, structural saving {row['structural_saving']:.1%}"
        )
    for pair, row in summary["differences"].items():
        steps, matched = row["matched_steps"]["by_seed"], row["matched_calls"]
        yield f"{pair}: {_points(steps)} at matched steps, {_points(matched)} at matched calls"


def _points(row: dict[str, Any]) -> str:
    edges = {key: None if row[key] is None else 100 * row[key] for key in ("mean", "low", "high")}
    told, _, interval = _edges(edges, "{:+.1f}").partition(" ")
    return f"{told} points {interval}".rstrip()


def _edges(row: dict[str, Any], form: str) -> str:
    """The mean and its interval, where there is one."""
    told = form.format(row["mean"])
    return told if row["low"] is None else f"{told} [{form.format(row['low'])}, {form.format(row['high'])}]"


def _seeds(text: str) -> tuple[int, ...]:
    from turntree.core.errors import InputError

    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is no list of numbers", field="--seeds", hint="write --seeds 0,1,2") from None
    if len(set(seeds)) < len(seeds):
        raise InputError(f"{text!r} names a seed twice, which would narrow intervals", field="--seeds")
    return seeds
