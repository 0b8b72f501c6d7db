"""`turntree evaluate | report | quickstart`: what a person looks at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from turntree.cli.common import configured, dropped, finish, instructions_for, json_option, refuse, set_option, share
from turntree.cli.pipeline import MODEL_HELP
from turntree.core.errors import InputError
from turntree.observe.run import notice

if TYPE_CHECKING:
    from turntree.stages.evaluate import EvaluateConfig


@click.command(short_help="Success on held-out games or questions, and retention.")
@click.option(
    "--environment",
    default=None,
    type=click.Choice(["household", "qa"]),
    help="What to play [default: what --games or --questions say, or what an embedded policy was made for].",
)
@click.option("--model", default=None, help=f"{MODEL_HELP} [default: the one of the environment]")
@click.option("--games", default="generated", show_default=True, help="'generated', a packed games file, or a folder.")
@click.option("--questions", default="generated", show_default=True, help="Of qa: 'generated', or a file of questions.")
@click.option("--index", default=None, help="Of qa with a file: what `turntree index build` made of your documents.")
@click.option("--split", default="test", show_default=True, help="Which generated tasks: train, dev or test.")
@click.option("--count", default=200, show_default=True, help="How many games or questions.")
@click.option("--difficulty", default="easy", show_default=True, help="Of generated games: easy, medium or hard.")
@click.option("--samples", default=1, show_default=True, help="Sampled episodes a task.")
@click.option("--temperature", default=1.0, show_default=True, help="Of the sampled episodes.")
@click.option("--max-turns", default=16, show_default=True)
@click.option("--out", default=None, type=click.Path(path_type=Path), help="Write every outcome here (JSON).")
@click.option(
    "--keep-trees", is_flag=True, help="Write the episodes beside it (NAME.trees.jsonl), all tokens included."
)
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def evaluate(
    out: Path | None, overrides: tuple[str, ...], json_path: str | None, temperature: float, **chosen: Any
) -> None:
    """Success on held-out tasks, sampled and greedy, by their type; of household policies also what they kept of
    unrelated skills.

    \b
    Example: turntree evaluate --environment household --model runs/pivotrl/model --count 200
             turntree evaluate --environment qa --model runs/qa/model
    """
    from turntree.stages.evaluate import evaluate as run

    base = _config(temperature=temperature, **{**chosen, "environment": _environment(**chosen)})
    config = configured(base, overrides)
    notice(f"evaluates {config.model!r} on {_played(config)}")
    result = run(config, out)
    lines = [f"sampled at {temperature}: {share(result['sampled'])}, {result['sampled']['invalid_share']:.1%} invalid"]
    lines += [f"  {kind}: {share(row)}" for kind, row in result["sampled"]["by_task_type"].items()]
    if "greedy" in result:
        lines.append(f"greedy: {share(result['greedy'])}, {result['greedy']['invalid_share']:.1%} invalid")
    if "retention" in result:
        kept = result["retention"]
        skills = ", ".join(f"{name} {row['accuracy']:.0%}" for name, row in kept["by_skill"].items())
        lines.append(f"retention: {kept['accuracy']:.1%} (chance {kept['chance']:.1%}): {skills}")
    finish(result, json_path, [*lines, *dropped(result.get("questions", []))])


def _environment(environment: str | None, model: str | None, games: str, questions: str, **_: Any) -> str:
    """What is played. A model of the user's own says nothing about that, so the options have to."""
    if environment is not None:
        return environment
    if games != "generated":
        return "household"
    if questions != "generated" or model == "qa":
        return "qa"
    if model in (None, "default"):
        return "household"
    hint = "say --environment household or qa, or name --games or --questions"
    raise InputError(f"{model!r} does not say what it was made to play", field="--environment", hint=hint)


def _played(config: EvaluateConfig) -> str:
    """What is played, for a person."""
    if config.questions is not None:
        asked = config.questions
        source = f"of split {asked.held_out_split!r}" if asked.source == "generated" else f"of {asked.held_out}"
        return f"up to {asked.held_out_count} questions {source} (environment 'qa')"
    games = config.games
    source = f"{games.difficulty} ones of split {games.split!r}" if games.source == "generated" else games.source
    return f"up to {games.count} household games: {source} (environment 'household')"


def _config(
    environment: str,
    model: str | None,
    games: str,
    questions: str,
    index: str | None,
    split: Any,
    count: int,
    difficulty: str,
    samples: int,
    temperature: float,
    max_turns: int,
    seed: int,
    keep_trees: bool,
) -> EvaluateConfig:
    from turntree.domains.qa.environment import QaConfig
    from turntree.stages.evaluate import EvaluateConfig
    from turntree.stages.questions import QuestionsConfig
    from turntree.stages.tasks import GamesConfig

    played = {"samples": samples, "temperature": temperature, "max_turns": max_turns, "seed": seed}
    played["keep_trees"] = keep_trees
    if environment == "qa":
        refuse(environment, games=(games, "generated"), difficulty=(difficulty, "easy"))
        asked = QuestionsConfig(
            source=questions,
            index=index,
            held_out=None if questions == "generated" else questions,
            held_out_count=count,
            held_out_split=split,
            episodes=QaConfig(instructions=instructions_for(model)),
        )
        return EvaluateConfig(model=model or "qa", questions=asked, max_tokens=48, skills_per_kind=0, **played)
    refuse(environment, questions=(questions, "generated"), index=(index, None))
    tasks = GamesConfig(source=games, split=split, count=count, difficulty=difficulty)
    return EvaluateConfig(model=model or "default", games=tasks, **played)


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
