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
    engine_option,
    environment_of,
    environment_option,
    finish,
    json_option,
    keep_trees_option,
    log_option,
    set_option,
    with_engine,
)
from turntree.cli.pipeline import MODEL_HELP
from turntree.core import parts
from turntree.core.config import Part

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
    metavar="SPEC",
    help="Fork episodes after tool results: entropy, random, fixed, arpo_released, posthoc, or module:object of your "
    "own; --set brancher.KEY=VALUE for its options.",
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
@click.option("--gate", default=None, metavar="SPEC", help="A gate by name or module:object [default: none].")
@click.option("--gate-turn", default=None, type=int, help="Stop converged groups at this turn (default: never).")
@click.option("--gate-threshold", default=0.12, show_default=True, help="... when their divergence is below this.")
@click.option("--audit", default=0.0, show_default=True, help="Share of would-be cuts that runs on all the same.")
@click.option("--estimator", default=None, metavar="SPEC", help="Credit by module:object [default: train.credit].")
@click.option("--dapo", is_flag=True, help="Keep groups without reward variance out of the update.")
@click.option("--greso", is_flag=True, help="Skip tasks that are predicted to give no variance.")
@click.option(
    "--reward",
    "rewards",
    multiple=True,
    metavar="NAME[=WEIGHT]",
    help="A function that judges episodes, as module:function=0.5 (repeatable). Their sum replaces the reward of the "
    "environment, which is the reward 'environment'.",
)
@engine_option
@keep_trees_option
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Start anew where a run lies already.")
@log_option
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

    config = configured(_config(SimpleNamespace(**chosen)), with_engine(chosen["engine"], overrides))
    result = run_train_online(config, out, overwrite=overwrite)
    success = result["held_out_success"]
    how = "greedy" if config.held_out_temperature == 0 else f"at temperature {config.held_out_temperature:g}"
    lines = [
        f"{result['iterations']} iterations, {result['cost']['turns']:,} turns, held-out success ({how}) "
        f"{'unknown' if success is None else f'{success:.1%}'} -> {result['model']}"
    ]
    if config.brancher is not None and not result["forks"]:
        probe = config.brancher.options.get("probe_tokens")
        why = f": turns that end within brancher.probe_tokens ({probe}) cannot" if probe else ""
        lines.append(f"no rollout forked{why}")
    finish(result, json_path, [*lines, *dropped(result["read"])])


def _config(chosen: Any) -> TrainOnlineConfig:
    """The options as a configuration; `chosen` has one attribute an option."""
    from turntree.rollouts.rewards import parse_reward
    from turntree.stages.train_online import TrainOnlineConfig

    return TrainOnlineConfig(
        model=chosen.model or "default",
        environment=environment_of(chosen.environment, chosen.environment_options, chosen.model),
        count=chosen.count,
        held_out_count=chosen.held_out_count,
        train=_training(chosen),
        gate=_gate(chosen),
        brancher=_brancher(chosen),
        estimator=None if chosen.estimator is None else Part(chosen.estimator),
        rewards=tuple(map(parse_reward, chosen.rewards)),
        loggers=tuple(map(Part, chosen.loggers)),
        keep_trees=chosen.keep_trees,
    )


def _gate(chosen: Any) -> Part | None:
    if chosen.gate_turn is not None:
        look = {"turn": chosen.gate_turn, "threshold": chosen.gate_threshold}
        return Part("divergence", {"checkpoints": [look], "audit": chosen.audit})
    return None if chosen.gate is None else Part(chosen.gate)


def _brancher(chosen: Any) -> Part | None:
    """`--probe-tokens` is for those that look at entropies."""
    if chosen.brancher == "none":
        return None
    looks = "probe_tokens" in parts.load("branchers", chosen.brancher).options()
    return Part(chosen.brancher, {"probe_tokens": chosen.probe_tokens} if looks else {})


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
