"""`turntree experiment`: compare methods over matched seeds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import StageCommand, short


@click.group(short_help="Compare methods: matched arms, intervals.")
def experiment() -> None:
    """Comparisons over seeds. An interrupted experiment goes on where it stopped; finished runs are not run again."""


@experiment.command(
    "gate",
    cls=StageCommand,
    config="turntree.experiments.config:GateExperimentConfig",
    stage="experiment gate",
    options=short(
        "seeds online.train.iterations online.train.groups online.environment.difficulty "
        "gate-turn=online.gate.checkpoints.0.turn gate-threshold=online.gate.checkpoints.0.threshold "
        "online.train.loss.constant"
    ),
    short_help="Compare the gate with no gate and with random cuts.",
)
@out_option("The experiment's folder.", folder=True)
def gate_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Matched seeds, three arms: no gate, the gate, and cutting as large a share at random.

    \b
    Example: turntree experiment gate --out runs/gate --seeds 0,1,2,3
    """
    from turntree.experiments.gate import run_gate_experiment

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


@experiment.command(
    "compose",
    cls=StageCommand,
    config="turntree.experiments.config:ComposeConfig",
    stage="experiment compose",
    options=short("seeds arms online.train.iterations online.train.groups pivot.steps online.environment.difficulty"),
    short_help="GRPO, PivotRL and their parts, alone and together, on one bill.",
)
@out_option("The experiment's folder.", folder=True)
def compose_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Success on held-out tasks over everything that was spent, for chains of stages: grpo (with dapo, greso,
    gate, branching, local), pivot (on an expert's states), own (on the policy's own states).

    \b
    Example: turntree experiment compose --out runs/compose --arms grpo,pivot/grpo,own/grpo+greso --seeds 0,1,2
    """
    from turntree.experiments.compose import run_compose

    summary = run_compose(config, out)
    finish(summary, json_path, list(_compose_lines(summary)))


def _compose_lines(summary: dict[str, Any]) -> Iterator[str]:
    first, count = summary["first"], len(summary["seeds"])
    yield f"target: the last check of {first}, {summary['target']:.1%}; shares are of what {first} spent to reach it"
    for arm, row in summary["arms"].items():
        yield f"{arm}: ends at {_edges(row['last'], '{:.1%}')}, best check {_edges(row['best'], '{:.1%}')}"
        yield "  spent " + ", ".join(f"{unit} {found['mean']:,.0f}" for unit, found in row["spent"].items())
        for unit in ("decoded_tokens", "seconds"):
            found = row["to_target"][unit]
            share, mean = found["share_of_first"], found["share_of_mean"]
            told = [] if share is None else [f"{_edges(share, '{:.2f}')} of the {unit}"]
            told += [] if mean is None else [f"{mean:.2f} of the {unit} on the mean curves"]
            yield ", ".join([f"  reaches the target in {found['reached']} of {count} seeds", *told])
        if arm != first:
            yield f"  minus {first}: {_points(row['minus_first']['by_seed'])} at the end"
            for unit, found in row["at_equal_cost"].items():
                yield f"  minus {first} at equal {unit}: {_points(found)}"


@experiment.command(
    "branching",
    cls=StageCommand,
    config="turntree.experiments.config:BranchingExperimentConfig",
    stage="experiment branching",
    options=short(
        "seeds arms online.train.iterations online.train.groups online.train.rollouts.group_size "
        "online.brancher.probe_tokens online.train.optimizer.learning_rate online.train.loss.constant"
    ),
    short_help="Forks where entropy rises, against random ones and none.",
)
@out_option("The experiment's folder.", folder=True)
def branching_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Matched seeds on generated questions; arms: grpo, grpo_half, grpo_calls (as many tool calls as entropy), entropy,
    random (as often as entropy, turn by turn), entropy_starts (baseline of initial starts), entropy_paths and
    random_paths (the same with path weights), arpo_released, tree_grpo.

    \b
    Example: turntree experiment branching --out runs/branching --seeds 0,1,2,3
    """
    from turntree.experiments.branching import run_branching_experiment

    summary = run_branching_experiment(config, out)
    finish(summary, json_path, list(_branching_lines(summary)))


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
