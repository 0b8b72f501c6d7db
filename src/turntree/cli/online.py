"""`turntree train online` and `turntree experiment`: training on whole episodes, and what the filters are worth."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import configured, finish, json_option, set_option
from turntree.cli.pipeline import MODEL_HELP

if TYPE_CHECKING:
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages.train_online import TrainOnlineConfig


@click.command(short_help="End-to-end GRPO on whole episodes.")
@click.option("--model", default="default", show_default=True, help=MODEL_HELP)
@click.option("--games", default="generated", show_default=True, help="'generated', a packed games file, or a folder.")
@click.option("--count", default=400, show_default=True, help="How many games to train on.")
@click.option("--held-out", default=None, help="Games to check on: a file or folder [default: the split 'dev'].")
@click.option("--difficulty", default="easy", show_default=True, help="Of generated games: easy, medium or hard.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run directory to write.")
@click.option("--iterations", default=40, show_default=True)
@click.option("--groups", default=16, show_default=True, help="Games an iteration.")
@click.option("--group-size", default=8, show_default=True, help="Episodes of every game.")
@click.option("--max-turns", default=16, show_default=True)
@click.option("--max-tokens", default=256, show_default=True, help="Longest completion of one turn.")
@click.option("--learning-rate", default=1e-5, show_default=True, help="The embedded tiny policy wants 3e-4.")
@click.option("--kl", default=0.01, show_default=True, help="Weight of the KL term towards the starting policy.")
@click.option("--gate-turn", default=None, type=int, help="Stop converged groups at this turn (default: never).")
@click.option("--gate-threshold", default=0.12, show_default=True, help="... when their divergence is below this.")
@click.option("--audit", default=0.0, show_default=True, help="Share of would-be cuts that runs on all the same.")
@click.option("--dapo", is_flag=True, help="Keep groups without reward variance out of the update.")
@click.option("--greso", is_flag=True, help="Skip games that are predicted to give no variance.")
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Start anew where a run lies already.")
@set_option
@json_option
def online(
    model: str,
    games: str,
    count: int,
    held_out: str | None,
    difficulty: str,
    out: Path,
    iterations: int,
    groups: int,
    group_size: int,
    max_turns: int,
    max_tokens: int,
    learning_rate: float,
    kl: float,
    gate_turn: int | None,
    gate_threshold: float,
    audit: float,
    dapo: bool,
    greso: bool,
    seed: int,
    overwrite: bool,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """GRPO on whole episodes: sample groups, learn from those that differ, again.

    The same command again goes on with a run that was interrupted.

    \b
    Example: turntree train online --out runs/online --learning-rate 3e-4 --max-tokens 24 --gate-turn 6
    """
    from turntree.core.completion import Sampling
    from turntree.filters.dapo import DapoFilter
    from turntree.filters.greso import GresoConfig
    from turntree.gates.config import CheckpointConfig as GateCheckpoint
    from turntree.gates.config import GateConfig
    from turntree.rollouts.live import EpisodeConfig
    from turntree.rollouts.scheduler import SchedulerConfig
    from turntree.stages.tasks import GamesConfig
    from turntree.stages.train_online import TrainOnlineConfig, run_train_online
    from turntree.training.losses import LossConfig
    from turntree.training.online import OnlineConfig
    from turntree.training.optimizer import OptimizerConfig

    episodes = EpisodeConfig(max_turns=max_turns, sampling=Sampling(temperature=1.0, max_tokens=max_tokens))
    training = OnlineConfig(
        iterations=iterations,
        groups=groups,
        seed=seed,
        rollouts=SchedulerConfig(episodes=episodes, group_size=group_size, max_live_rollouts=groups * group_size),
        dapo=DapoFilter() if dapo else None,
        greso=GresoConfig(seed=seed) if greso else None,
        loss=LossConfig(kl_coefficient=kl),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
    )
    look = None if gate_turn is None else GateCheckpoint(turn=gate_turn, threshold=gate_threshold)
    config = configured(
        TrainOnlineConfig(
            model=model,
            games=GamesConfig(source=games, split="train", count=count, difficulty=difficulty),
            held_out=GamesConfig(source=held_out or "generated", split="dev", count=100, difficulty=difficulty),
            train=training,
            gate=None if look is None else GateConfig(checkpoints=(look,), audit=audit),
        ),
        overrides,
    )
    result = run_train_online(config, out, overwrite=overwrite)
    success = result["held_out_success"]
    lines = [
        f"{result['iterations']} iterations, {result['cost']['turns']:,} turns, "
        f"held-out success {'unknown' if success is None else f'{success:.1%}'} -> {result['model']}"
    ]
    finish(result, json_path, lines)


@click.group(short_help="What a method is worth: matched arms, intervals.")
def experiment() -> None:
    """Comparisons over seeds. An interrupted experiment goes on where it stopped; finished runs are not run again."""


def _online_arm(
    iterations: int, groups: int, difficulty: str, check_every: int, episodes: EpisodeConfig, rate: float, loss: Any
) -> TrainOnlineConfig:
    """GRPO on generated games, as far as both experiments agree; `loss` are its settings beside the KL term."""
    from turntree.rollouts.scheduler import SchedulerConfig
    from turntree.stages.tasks import GamesConfig
    from turntree.stages.train_online import TrainOnlineConfig
    from turntree.training.losses import LossConfig
    from turntree.training.online import OnlineConfig
    from turntree.training.optimizer import OptimizerConfig

    return TrainOnlineConfig(
        games=GamesConfig(split="train", count=400, difficulty=difficulty),
        held_out=GamesConfig(split="dev", count=100, difficulty=difficulty),
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
            f"{arm} - none: {saved['mean']:.1%} [{saved['low']:.1%}, {saved['high']:.1%}] of the turns saved, success "
            f"{success['mean'] * 100:+.1f} points [{success['low'] * 100:+.1f}, {success['high'] * 100:+.1f}] "
            f"(McNemar p = {row['mcnemar']:.2f}, detectable {row['minimum_detectable_effect'] * 100:.1f})"
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


def _seeds(text: str) -> tuple[int, ...]:
    from turntree.core.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{text!r} is no list of numbers", field="--seeds", hint="write --seeds 0,1,2") from None
