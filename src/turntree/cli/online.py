"""`turntree train online`: training on whole episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import dropped, environment_for, finish, out_option, overwrite_option
from turntree.cli.options import StageCommand


@click.command(
    cls=StageCommand,
    config="turntree.stages.config:TrainOnlineConfig",
    stage="train online",
    part="environment",
    named=environment_for,
    options={
        "--environment": "environment",
        "--model": "model",
        "--count": "count",
        "--held-out-count": "held_out_count",
        "--iterations": "train.iterations",
        "--groups": "train.groups",
        "--group-size": "train.rollouts.group_size",
        "--brancher": "branching.rule",
        "--probe-tokens": "branching.probe_tokens",
        "--initial": "train.rollouts.initial_rollouts",
        "--max-turns": "train.rollouts.episodes.max_turns",
        "--max-tokens": "train.rollouts.episodes.sampling.max_tokens",
        "--learning-rate": "train.optimizer.learning_rate",
        "--kl": "train.loss.kl_coefficient",
        "--gate-turn": "gate.checkpoints.0.turn",
        "--gate-threshold": "gate.checkpoints.0.threshold",
        "--audit": "gate.audit",
        "--dapo": "train.dapo",
        "--greso": "train.greso",
        "--seed": "train.seed",
    },
    short_help="End-to-end GRPO on whole episodes.",
)
@out_option("The run directory to write.")
@overwrite_option("Start anew where a run lies already.")
def online(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """GRPO on whole episodes: sample groups, learn from those that differ, again.

    The same command again goes on with a run that was interrupted.

    \b
    Example: turntree train online --out runs/online --learning-rate 3e-4 --max-tokens 24 --gate-turn 6

    \b
    Example: turntree train online --environment qa --brancher entropy --probe-tokens 2 --out runs/qa \\
        --learning-rate 3e-4 --max-tokens 48

    \b
    Example: turntree train online --environment my_game:tasks --model models/mine --out runs/mine
    """
    from turntree.stages.train_online import run_train_online

    result = run_train_online(config, out, overwrite=overwrite)
    success = result["held_out_success"]
    how = "greedy" if config.held_out_temperature == 0 else f"at temperature {config.held_out_temperature:g}"
    lines = [
        f"{result['iterations']} iterations, {result['cost']['turns']:,} turns, held-out success ({how}) "
        f"{'unknown' if success is None else f'{success:.1%}'} -> {result['model']}"
    ]
    if config.branching is not None and not result["forks"]:
        probe = config.branching.probe_tokens
        lines.append(f"no rollout forked: turns that end within branching.probe_tokens ({probe}) cannot")
    finish(result, json_path, [*lines, *dropped(result["read"])])
