"""Studies of single claims, with the commands of their pages: python studies/run.py NAME --help

They are outside the library and its suite. A page names the commit that its figures were made at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import finish, out_option
from turntree.cli.options import StageCommand, short


@click.group()
def studies() -> None:
    """Each measures one claim on a frozen policy."""


@studies.command(
    "premise",
    cls=StageCommand,
    config="configs:PremiseConfig",
    stage="study premise",
    part="environment",
    options=short("environment model count seed"),
    short_help="Does entropy rise after tool results, and do forks there differ more?",
)
@out_option("The JSON file to write.")
def premise_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Measure on a frozen policy whether there is something for branching by entropy to exploit.

    \b
    Example: python studies/run.py premise --out runs/premise.json
    """
    import premise

    result = premise.run_premise(config, out)
    finish(result, json_path, list(premise.lines(result)))


@studies.command(
    "theory",
    cls=StageCommand,
    config="configs:TheoryConfig",
    stage="study theory",
    options=short("instances states=mixed model seed"),
    short_help="The papers' statements about groups, on finite spaces and on a policy.",
)
@out_option("The JSON file to write.")
def theory_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Check PivotRL's Proposition 3.1 and Theorems 3.2 and 3.3 exactly on finite action spaces and on a trained policy,
    Selective Rollout's dilution, and the variance of the gradient under allocations of rollouts.

    \b
    Example: python studies/run.py theory --out runs/theory.json
    """
    import theory

    result = theory.run_theory(config, out)
    finish(result, json_path, list(theory.lines(result)))


@studies.command(
    "ladder",
    cls=StageCommand,
    config="configs:LadderConfig",
    stage="study ladder",
    part="environment",
    options=short("seeds arms environment model iterations groups children"),
    short_help="What an oracle wins that knows where to fork.",
)
@out_option("The experiment's folder.", folder=True)
def ladder_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """One step of a frozen policy at equal pace and budget: forks by a coin, by entropy, and by an oracle that knows
    each moment's variance from rollouts that are not billed.

    \b
    Example: python studies/run.py ladder --out runs/ladder
    """
    import ladder

    summary = ladder.run_ladder(config, out)
    finish(summary, json_path, list(ladder.lines(summary)))


@studies.command(
    "compose",
    cls=StageCommand,
    config="configs:ComposeConfig",
    stage="study compose",
    options=short("seeds arms online.train.iterations online.train.groups pivot.steps online.environment.difficulty"),
    short_help="GRPO, PivotRL and their parts, alone and together, on one bill.",
)
@out_option("The experiment's folder.", folder=True)
def compose_experiment(config: Any, out: Path, json_path: str | None) -> None:
    """Success on held-out tasks over everything that was spent, for chains of stages: grpo (with dapo, greso,
    gate, branching), pivot (on an expert's states), own (on the policy's own states).

    \b
    Example: python studies/run.py compose --out runs/compose --arms grpo,pivot/grpo,own/grpo+greso --seeds 0,1,2
    """
    import compose

    summary = compose.run_compose(config, out)
    finish(summary, json_path, list(compose.lines(summary)))


if __name__ == "__main__":
    studies()
