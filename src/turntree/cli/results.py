"""`turntree evaluate | experiment | report | quickstart`: success rates, comparisons and reports."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import (
    censored,
    dropped,
    environment_for,
    finish,
    json_option,
    out_option,
    overwrite_option,
    share,
)
from turntree.cli.options import OutputCommand, StageCommand, short
from turntree.cli.pipeline import REWARD
from turntree.core.progress import notice

if TYPE_CHECKING:
    from turntree.stages.config import EvaluateConfig


_UNKNOWN = "the environment does not say whether a task is solved"


@click.command(
    cls=StageCommand,
    config="turntree.stages.config:EvaluateConfig",
    part="environment",
    named=environment_for,
    options={
        **short("environment model split count samples temperature max_turns max_tokens skills=skills_per_kind"),
        "--reward": REWARD,
        **short("carrier=device.carrier device.engine device.renderer keep_trees seed"),
    },
    short_help="Success on the tasks of an environment.",
)
@out_option("Write every outcome here (JSON).", required=False)
def evaluate(config: EvaluateConfig, out: Path | None, json_path: str | None) -> None:
    """Success on tasks that were not trained on, sampled and greedy, by task type. `--skills N` also measures what an
    embedded policy has kept of unrelated skills.

    \b
    Example: turntree evaluate --environment household --difficulty easy
             turntree evaluate --environment qa --model runs/qa/model
             turntree evaluate --environment my_game:tasks --model runs/mine/model
    """
    from turntree.stages.evaluate import evaluate as run

    plain = [f" {key}={value}" for key, value in config.environment.options.items() if isinstance(value, str)]
    shown = f"{config.environment.name!r}{''.join(plain)}"
    notice(f"evaluates {config.model!r} on up to {config.count} tasks of split {config.split!r} of {shown}")
    result = run(config, out)
    lines = [f"sampled at {config.temperature:g}: {_told(result['sampled'])}", *_unjudged(result["sampled"])]
    lines += [f"  {kind}: {share(row)}" for kind, row in result["sampled"]["by_task_type"].items() if kind]
    if "greedy" in result:
        lines += [f"greedy: {_told(result['greedy'])}", *_unjudged(result["greedy"])]
    if "retention" in result:
        kept = result["retention"]
        skills = ", ".join(f"{name} {row['accuracy']:.0%}" for name, row in kept["by_skill"].items())
        lines.append(f"retention: {kept['accuracy']:.1%} (chance {kept['chance']:.1%}): {skills}")
    finish(result, json_path, [*lines, *dropped(result.get("read", []))])


def _told(row: dict[str, Any]) -> str:
    """Success, and what the domain counted for itself."""
    own = {name.removesuffix("_share"): value for name, value in row.items() if name.endswith("_share")}
    counted = [
        f"{value:.1%} {name}" if 0 <= value <= 1 else f"{value:.4g} {name} a step" for name, value in own.items()
    ]
    judged = [f"{name} {value:.3f}" for name, value in row.get("rewards", {}).items() if value is not None]
    for name, key in (("pass@", "pass_at_k"), ("pass^", "pass_hat_k")):
        judged += [f"{name}{k} {value:.1%}" for k, value in row.get(key, {}).items() if k == str(len(row[key]))]
    reward = [] if not row["unknown"] else [f"mean reward {row['reward_mean']:.3f} ({_UNKNOWN} in {row['unknown']})"]
    return ", ".join([*([] if reward and row["success"] is None else [share(row)]), *reward, *counted, *judged])


def _unjudged(row: dict[str, Any]) -> list[str]:
    played = row["episodes"] + row["censored"] + row["unknown"]
    return [f"  {line}" for line in censored("episodes", row["censored_reasons"], played)]


@click.command(cls=OutputCommand, short_help="One static page of a run directory.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Default: RUN/report.html.")
@json_option
def report(run: Path, out: Path | None, json_path: str | None) -> None:
    """One static page of a run directory: table, curves, the selected region, a rollout tree, the ledger. A run that
    kept its trees also gets a page with all of them (trees.html); a file of trees, or a gateway's, gets only that.

    \b
    Example: turntree report runs/quickstart
             turntree report runs/evaluation/qa.trees.jsonl
    """
    from turntree.report.browser import build_browser
    from turntree.report.html import build_report
    from turntree.stages.gateway import SESSIONS

    trees = run.is_file() or (run / SESSIONS).is_dir()  # a gateway keeps nothing else
    page = (build_browser(run, out) if trees else None) or build_report(run, out)
    finish({"report": str(page)}, json_path, [str(page)])


@click.command(
    cls=StageCommand,
    config="turntree.experiments.quickstart:QuickstartConfig",
    options=short("seed workers"),
    short_help="The whole comparison, end to end.",
)
@out_option("The folder to write.", folder=True, required=False, default=Path("runs/quickstart"))
@overwrite_option("Start over where other settings were run.")
def quickstart(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """The main job end to end on the embedded policy: base, SFT, random turns, PivotRL and own states
    side by side.

    \b
    Example: turntree quickstart --out runs/quickstart
    """
    from turntree.experiments.quickstart import run_quickstart, table
    from turntree.report.html import build_report

    summary = run_quickstart(config, out, overwrite=overwrite)
    build_report(out)
    finish(summary, json_path, table(summary))


@click.group(short_help="Compare methods: matched arms, intervals.")
def experiment() -> None:
    """Comparisons over seeds. An interrupted experiment goes on where it stopped; finished runs are not run again."""


@experiment.command(
    "gate",
    cls=StageCommand,
    config="turntree.experiments.config:GateExperimentConfig",
    stage="experiment gate",
    options=short(
        "seeds train.iterations train.groups environment.difficulty gate-turn=gate.turn gate-threshold=gate.threshold "
        "train.loss.constant"
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
            f"{arm} - none: precision {shown(row['precision']['precision'])}, "
            f"recall {shown(row['precision']['recall'])}, {edges(saved, '{:.1%}')} of the turns saved; "
            f"success {in_points(row['by_seed'])} for other seeds and tasks, {in_points(success)} for these policies "
            f"(p = {success['p_value']:.2f})"
        )


def shown(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def in_points(row: dict[str, Any]) -> str:
    scaled = {key: None if row[key] is None else 100 * row[key] for key in ("mean", "low", "high")}
    mean, _, interval = edges(scaled, "{:+.1f}").partition(" ")
    return f"{mean} points {interval}".rstrip()


def edges(row: dict[str, Any], form: str) -> str:
    """The mean and its interval, where there is one."""
    told = form.format(row["mean"])
    return told if row["low"] is None else f"{told} [{form.format(row['low'])}, {form.format(row['high'])}]"
