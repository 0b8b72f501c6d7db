"""`turntree evaluate | report | quickstart`: what a person looks at."""

from __future__ import annotations

from pathlib import Path
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
    set_option,
    share,
    with_engine,
)
from turntree.cli.pipeline import MODEL_HELP
from turntree.observe.run import notice

if TYPE_CHECKING:
    from turntree.stages.evaluate import EvaluateConfig


@click.command(short_help="Success on the tasks of an environment.", context_settings=PASS_ON)
@environment_option
@click.option("--model", default=None, help=f"{MODEL_HELP} [default: the one of the environment]")
@click.option("--split", default="test", show_default=True, help="Which tasks: train, dev or test.")
@click.option("--count", default=200, show_default=True, help="How many tasks.")
@click.option("--samples", default=1, show_default=True, help="Sampled episodes a task.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the sampled episodes.")
@click.option("--max-turns", default=16, show_default=True)
@click.option("--max-tokens", default=48, show_default=True, help="Longest completion of one turn.")
@click.option("--skills", "skills_per_kind", default=0, show_default=True, help="Questions of each unrelated skill.")
@engine_option
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Write every outcome here (JSON).")
@click.option(
    "--keep-trees", is_flag=True, help="Write the episodes beside it (NAME.trees.jsonl), all tokens included."
)
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def evaluate(
    out: Path | None,
    environment: str | None,
    environment_options: tuple[str, ...],
    model: str | None,
    engine: str | None,
    overrides: tuple[str, ...],
    json_path: str | None,
    **chosen: Any,
) -> None:
    """Success on tasks that were not trained on, sampled and greedy, by their type. `--skills N` asks an embedded
    policy what it kept of unrelated skills.

    \b
    Example: turntree evaluate --environment household --model runs/pivotrl/model --count 200 --difficulty easy
             turntree evaluate --environment qa --model runs/qa/model
             turntree evaluate --environment my_game:tasks --model runs/mine/model
    """
    from turntree.stages.evaluate import EvaluateConfig
    from turntree.stages.evaluate import evaluate as run

    played = environment_of(environment, environment_options, model)
    base = EvaluateConfig(model=model or "default", environment=played, **chosen)
    config = configured(base, with_engine(engine, overrides))
    notice(f"evaluates {config.model!r} on up to {config.count} tasks of split {config.split!r} of {_shown(config)}")
    result = run(config, out)
    lines = [f"sampled at {config.temperature:g}: {_told(result['sampled'])}"]
    lines += [f"  {kind}: {share(row)}" for kind, row in result["sampled"]["by_task_type"].items() if kind]
    if "greedy" in result:
        lines.append(f"greedy: {_told(result['greedy'])}")
    if "retention" in result:
        kept = result["retention"]
        skills = ", ".join(f"{name} {row['accuracy']:.0%}" for name, row in kept["by_skill"].items())
        lines.append(f"retention: {kept['accuracy']:.1%} (chance {kept['chance']:.1%}): {skills}")
    finish(result, json_path, [*lines, *dropped(result.get("read", []))])


def _told(row: dict[str, Any]) -> str:
    """Success, and what the domain counted for itself."""
    counted = [f"{value:.1%} {name.removesuffix('_share')}" for name, value in row.items() if name.endswith("_share")]
    return ", ".join([share(row), *counted])


def _shown(config: EvaluateConfig) -> str:
    """The environment and those of its options that fit into a line, for a person."""
    plain = {key: value for key, value in config.environment.options.items() if isinstance(value, str)}
    return " ".join([repr(config.environment.name), *(f"{key}={value}" for key, value in plain.items())])


@click.command(short_help="What the policy kept outside its domain, by lm-eval.")
@click.option("--model", required=True, help=MODEL_HELP)
@click.option("--base", default="default", show_default=True, help="The policy before post-training.")
@click.option("--tasks", required=True, metavar="NAME,...", help="lm-eval's names, e.g. hellaswag,arc_easy,ifeval.")
@click.option("--include", default=None, metavar="FOLDER", help="YAML files of tasks of your own.")
@click.option("--limit", default=0, show_default=True, help="Ask only the first so many questions of each (0: all).")
@click.option("--chat", is_flag=True, help="Render the questions with the chat template.")
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Write the comparison here (JSON).")
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def retention(
    model: str,
    base: str,
    tasks: str,
    include: str | None,
    limit: int,
    chat: bool,
    out: Path | None,
    seed: int,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Base against post-trained policy on tasks of EleutherAI's lm-eval (pip install 'turntree[lm-eval]').

    \b
    Example: turntree retention --model runs/pivotrl/model --base models/my-model --tasks hellaswag,arc_easy
    """
    from turntree.stages.retention import RetentionConfig, run_retention

    names = tuple(name for name in tasks.split(",") if name)
    config = RetentionConfig(model=model, base=base, tasks=names, include=include, limit=limit, chat=chat, seed=seed)
    result = run_retention(configured(config, overrides), out)
    lines = [f"{'task':30s} {'metric':20s} {'base':>8s} {'policy':>8s}   change"]
    for row in result["tasks"]:
        interval = "" if row["low"] is None else f" [{row['low']:+.4f}, {row['high']:+.4f}] of {row['questions']}"
        named = row["metric"] if row["filter"] == "none" else f"{row['metric']} ({row['filter']})"
        numbers = f"{row['base']:8.4f} {row['policy']:8.4f}  {row['change']:+.4f}"
        lines.append(f"{row['task']:30s} {named:20s} {numbers}{interval}")
    finish(result, json_path, lines)


@click.command(short_help="One static page of a run directory.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Default: RUN/report.html.")
@json_option
def report(run: Path, out: Path | None, json_path: str | None) -> None:
    """One static page of a run directory: table, curves, the selected region, a rollout tree, the ledger. Beside every
    run that kept its trees a page to read them all (trees.html); of a file of trees only that.

    \b
    Example: turntree report runs/quickstart
             turntree report runs/evaluation/qa.trees.jsonl
    """
    from turntree.report.browser import build_browser
    from turntree.report.html import build_report

    page = build_browser(run, out) if run.is_file() else build_report(run, out)
    finish({"report": str(page)}, json_path, [str(page)])


@click.command(short_help="The whole comparison, end to end.")
@click.option("--out", default=Path("runs/quickstart"), show_default=True, type=click.Path(path_type=Path))
@click.option("--seed", default=0, show_default=True)
@click.option("--workers", default=2, show_default=True, help="Stages that may run at the same time.")
@click.option("--overwrite", is_flag=True, help="Start anew where other settings were run.")
@set_option
@json_option
def quickstart(
    out: Path, seed: int, workers: int, overwrite: bool, overrides: tuple[str, ...], json_path: str | None
) -> None:
    """The main job end to end on the embedded policy: base, SFT, random pivots and PivotRL side by side.

    \b
    Example: turntree quickstart --out runs/quickstart
    """
    from turntree.report.html import build_report
    from turntree.stages.quickstart import QuickstartConfig, run_quickstart, table

    config = configured(QuickstartConfig(seed=seed, workers=workers), overrides)
    summary = run_quickstart(config, out, overwrite=overwrite)
    build_report(out)
    finish(summary, json_path, table(summary))
