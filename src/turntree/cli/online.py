"""`turntree train online`: training on whole episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import KEEP_TREES, censored, dropped, environment_for, finish, out_option, overwrite_option
from turntree.cli.options import Read, StageCommand, short


def _reward(text: str) -> Any:
    from turntree.rollouts.rewards import parse_reward

    return parse_reward(text)


REWARD = Read("rewards", _reward, "NAME[=WEIGHT]", repeated=True)


def _brancher(text: str) -> str | None:
    return None if text == "none" else text


@click.command(
    cls=StageCommand,
    config="turntree.stages.config:TrainOnlineConfig",
    stage="train online",
    part="environment",
    named=environment_for,
    options={
        **short("environment model count held_out_count train.iterations train.groups train.rollouts.group_size"),
        "--brancher": Read("brancher", _brancher, "SPEC"),
        **short(
            "brancher.probe_tokens initial=train.rollouts.initial_rollouts train.rollouts.episodes.max_turns "
            "train.rollouts.episodes.sampling.max_tokens train.rollouts.episodes.sampling.temperature "
            "train.optimizer.learning_rate kl=train.loss.kl_coefficient gate gate-turn=gate.checkpoints.0.turn "
            "gate-threshold=gate.checkpoints.0.threshold gate.audit estimator filter=filters train.dapo train.greso "
            "train.allocation"
        ),
        "--reward": REWARD,
        **short("local-states=train.local.states teacher verifier device.engine device.renderer"),
        "--keep-trees": KEEP_TREES,
        **short("cluster=cluster.address train.seed log=loggers"),
    },
    short_help="End-to-end GRPO on whole episodes.",
)
@out_option("The run directory to write.", folder=True)
@overwrite_option("Start over where a run exists already.")
def online(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """GRPO on whole episodes: sample groups, learn from those whose rewards differ, repeat.

    Run the same command again to continue an interrupted run.

    \b
    Example: turntree train online --out runs/online --learning-rate 3e-4 --max-tokens 24 --gate-turn 6

    \b
    Example: turntree train online --environment qa --brancher entropy --probe-tokens 2 --out runs/qa \\
        --learning-rate 3e-4 --max-tokens 48

    \b
    Example: turntree train online --environment my_game:tasks --model models/mine --out runs/mine
    """
    from turntree.report.wording import plural
    from turntree.stages.train_online import run_train_online

    result = run_train_online(config, out, overwrite=overwrite)
    success = result["held_out_success"]
    how = "greedy" if config.held_out_temperature == 0 else f"at temperature {config.held_out_temperature:g}"
    played = f"{plural(result['iterations'], 'iteration')}, {plural(result['cost']['turns'], 'turn')}"
    lines = [
        f"{played}, held-out success ({how}) {'unknown' if success is None else f'{success:.1%}'} -> {result['model']}"
    ]
    if config.brancher is not None and not result["forks"]:
        probe = config.brancher.options.get("probe_tokens")
        why = f": turns that end within brancher.probe_tokens ({probe}) cannot" if probe else ""
        lines.append(f"no rollout forked{why}")
    lines += censored("rollouts", result["censored"], result["rollouts"])
    finish(result, json_path, [*lines, *dropped(result["read"])])
