"""`turntree train online`: training on whole episodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import (
    PASS_ON,
    configured,
    dropped,
    environment_of,
    environment_option,
    finish,
    json_option,
    set_option,
)
from turntree.cli.pipeline import MODEL_HELP

if TYPE_CHECKING:
    from turntree.stages.train_online import TrainOnlineConfig
    from turntree.training.online import OnlineConfig


@click.command(short_help="End-to-end GRPO on whole episodes.", context_settings=PASS_ON)
@environment_option
@click.option("--model", default=None, help=f"{MODEL_HELP} [default: the one of the environment]")
@click.option("--count", default=400, show_default=True, help="How many tasks to train on.")
@click.option("--held-out-count", default=100, show_default=True, help="How many tasks of another split to check on.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run directory to write.")
@click.option("--iterations", default=40, show_default=True)
@click.option("--groups", default=16, show_default=True, help="Tasks an iteration.")
@click.option("--group-size", default=8, show_default=True, help="Episodes of each.")
@click.option(
    "--brancher",
    default="none",
    show_default=True,
    type=click.Choice(["none", "entropy", "random", "fixed", "arpo_released", "posthoc"]),
    help="Fork episodes after tool results; --set branching.KEY=VALUE for its settings.",
)
@click.option(
    "--probe-tokens", default=20, show_default=True, help="Entropies to look at; a fork needs longer turns than that."
)
@click.option(
    "--initial", default=None, type=int, help="Independent episodes of a group [default: half, if branching]."
)
@click.option("--max-turns", default=16, show_default=True)
@click.option("--max-tokens", default=256, show_default=True, help="Longest completion of one turn.")
@click.option("--learning-rate", default=1e-5, show_default=True, help="The embedded tiny policy wants 3e-4.")
@click.option("--kl", default=0.01, show_default=True, help="Weight of the KL term towards the starting policy.")
@click.option("--gate-turn", default=None, type=int, help="Stop converged groups at this turn (default: never).")
@click.option("--gate-threshold", default=0.12, show_default=True, help="... when their divergence is below this.")
@click.option("--audit", default=0.0, show_default=True, help="Share of would-be cuts that runs on all the same.")
@click.option("--dapo", is_flag=True, help="Keep groups without reward variance out of the update.")
@click.option("--greso", is_flag=True, help="Skip tasks that are predicted to give no variance.")
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Start anew where a run lies already.")
@set_option
@json_option
def online(out: Path, overwrite: bool, overrides: tuple[str, ...], json_path: str | None, **chosen: Any) -> None:
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

    config = configured(_config(SimpleNamespace(**chosen)), overrides)
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


def _config(chosen: Any) -> TrainOnlineConfig:
    """The options as a configuration; `chosen` has one attribute an option."""
    from turntree.branching.config import BranchConfig
    from turntree.gates.config import CheckpointConfig as GateCheckpoint
    from turntree.gates.config import GateConfig
    from turntree.stages.train_online import TrainOnlineConfig

    decided: dict[str, Any] = {}
    if chosen.brancher != "none":
        decided["branching"] = BranchConfig(rule=chosen.brancher, probe_tokens=chosen.probe_tokens)
    if chosen.gate_turn is not None:
        look = GateCheckpoint(turn=chosen.gate_turn, threshold=chosen.gate_threshold)
        decided["gate"] = GateConfig(checkpoints=(look,), audit=chosen.audit)
    return TrainOnlineConfig(
        model=chosen.model or "default",
        environment=environment_of(chosen.environment, chosen.environment_options, chosen.model),
        count=chosen.count,
        held_out_count=chosen.held_out_count,
        train=_training(chosen),
        **decided,
    )


def _training(chosen: Any) -> OnlineConfig:
    from turntree.core.completion import Sampling
    from turntree.filters.dapo import DapoFilter
    from turntree.filters.greso import GresoConfig
    from turntree.rollouts.live import EpisodeConfig
    from turntree.rollouts.scheduler import SchedulerConfig
    from turntree.training.losses import LossConfig
    from turntree.training.online import OnlineConfig
    from turntree.training.optimizer import OptimizerConfig

    size, initial = chosen.group_size, chosen.initial
    sampling = Sampling(temperature=1.0, max_tokens=chosen.max_tokens)
    return OnlineConfig(
        iterations=chosen.iterations,
        groups=chosen.groups,
        seed=chosen.seed,
        rollouts=SchedulerConfig(
            episodes=EpisodeConfig(max_turns=chosen.max_turns, sampling=sampling),
            group_size=size,
            initial_rollouts=(size + 1) // 2 if initial is None and chosen.brancher != "none" else initial,
            max_live_rollouts=chosen.groups * size,
        ),
        dapo=DapoFilter() if chosen.dapo else None,
        greso=GresoConfig(seed=chosen.seed) if chosen.greso else None,
        loss=LossConfig(kl_coefficient=chosen.kl),
        optimizer=OptimizerConfig(learning_rate=chosen.learning_rate),
    )
