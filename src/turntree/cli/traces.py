"""`turntree traces`: make or import demonstrations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import (
    configured,
    endpoint_of,
    engine_option,
    finish,
    json_option,
    set_option,
    with_engine,
)
from turntree.core.config import Part

FORMAT_HELP = "auto, chat, responses, tau2, or module:function of your own; --set format.KEY=VALUE for its options."


@click.group(short_help="Make or import expert traces.")
def traces() -> None:
    """Expert traces in one documented schema (docs/traces.md)."""


@traces.command("household", short_help="Expert play on household games.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The traces file to write (JSONL).")
@click.option("--games", default="generated", show_default=True, help="'generated', a packed games file, or a folder.")
@click.option("--split", default="train", show_default=True, help="Which generated games: train, dev or test.")
@click.option("--count", default=200, show_default=True, help="How many games.")
@click.option("--difficulty", default="easy", show_default=True, help="Of generated games: easy, medium or hard.")
@click.option("--expert", type=click.Choice(["explore", "shortest"]), default="explore", show_default=True)
@click.option("--slips", default=0.0, show_default=True, help="Chance of a turn at which the player errs first.")
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def household(
    out: Path,
    games: str,
    split: str,
    count: int,
    difficulty: str,
    expert: Any,
    slips: float,
    seed: int,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Expert play on household games (ALFWorld's games, or generated ones in their format).

    \b
    Example: turntree traces household --count 300 --out runs/traces.jsonl
             turntree traces household --games $ALFWORLD_DATA/json_2.1.1/train --count 500 --out runs/real.jsonl
    """
    from turntree.domains.household.door import GamesConfig
    from turntree.stages.household_traces import HouseholdTracesConfig, make_traces

    chosen = GamesConfig(source=games, split=split, count=count, difficulty=difficulty)
    config = configured(HouseholdTracesConfig(games=chosen, expert=expert, slips=slips, seed=seed), overrides)
    result = make_traces(config, out)
    dropped = {key: value for key, value in result.items() if key.startswith("dropped")}
    finish(result, json_path, [f"{result.get('traces', 0)} traces, {result.get('turns', 0)} turns -> {out}; {dropped}"])


@traces.command("qa", short_help="Expert answers to generated questions, with search and Python.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The traces file to write (JSONL).")
@click.option("--count", default=200, show_default=True, help="How many questions.")
@click.option("--slips", default=0.0, show_default=True, help="Chance of a look-up before which the expert errs.")
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def qa(out: Path, count: int, slips: float, seed: int, overrides: tuple[str, ...], json_path: str | None) -> None:
    """An expert looks up, computes and answers: an SFT start for a policy of your own.

    \b
    Example: turntree traces qa --count 500 --slips 0.2 --out runs/qa.jsonl
    """
    from turntree.stages.qa_traces import QaTracesConfig, make_traces

    config = configured(QaTracesConfig(count=count, slips=slips, seed=seed), overrides)
    result = make_traces(config, out)
    finish(result, json_path, [f"{result.get('traces', 0)} traces, {result.get('turns', 0)} turns -> {out}"])


@traces.command("record", short_help="A policy's own episodes in an environment.")
@click.option("--environment", required=True, help="A registered environment, or module:object of your own.")
@click.option("--model", default="default", show_default=True, help="A folder in Hugging Face format, or embedded.")
@click.option("--endpoint", default=None, metavar="URL", help="Sample from a server of --model, such as vLLM.")
@click.option("--tokenizer", default=None, help="With --endpoint: a folder with the tokenizer of that model.")
@engine_option
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The traces file to write (JSONL).")
@click.option("--split", type=click.Choice(["train", "dev", "test"]), default="train", show_default=True)
@click.option("--count", default=100, show_default=True, help="How many tasks of the split.")
@click.option("--samples", default=1, show_default=True, help="Episodes of each task.")
@click.option("--only", type=click.Choice(["all", "successes"]), default="all", show_default=True)
@click.option("--max-turns", default=30, show_default=True)
@click.option("--max-tokens", default=256, show_default=True, help="Longest turn; longer ones are cut.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--task-seed", default=0, show_default=True, help="Draws the tasks.")
@click.option("--seed", default=0, show_default=True, help="Draws the episodes.")
@click.option("--overwrite", is_flag=True, help="Start anew where another recording was interrupted.")
@set_option
@json_option
def record(
    environment: str,
    model: str,
    endpoint: str | None,
    tokenizer: str | None,
    engine: str | None,
    out: Path,
    split: str,
    count: int,
    samples: int,
    only: Any,
    max_turns: int,
    max_tokens: int,
    temperature: float,
    task_seed: int,
    seed: int,
    overwrite: bool,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Play tasks of an environment and keep the episodes as traces, with rewards, success and tool errors.

    A recording that was interrupted goes on when the same command is run again.

    \b
    Example: turntree traces record --environment my_game:tasks --count 200 --out runs/traces.jsonl
             turntree traces record --environment my_game:tasks --endpoint http://localhost:8000/v1
             --model my-model --tokenizer models/my-model --only successes --out runs/traces.jsonl
    """
    from turntree.core.completion import Sampling
    from turntree.rollouts.live import EpisodeConfig
    from turntree.stages.record import RecordConfig, record_traces

    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    base = RecordConfig(
        environment=Part(environment),
        model=model,
        endpoint=endpoint_of(endpoint, tokenizer),
        split=split,
        count=count,
        task_seed=task_seed,
        samples=samples,
        only=only,
        episodes=EpisodeConfig(max_turns=max_turns, sampling=sampling),
        seed=seed,
    )
    result = record_traces(configured(base, with_engine(engine, overrides)), out, overwrite=overwrite)
    dropped = {key: value for key, value in result.items() if key.startswith("dropped")}
    line = (
        f"{result['traces']} traces of {result['tasks']} tasks, {result['successes']} successes, "
        f"{result['tool_errors']} tool errors -> {out}"
    )
    finish(result, json_path, [line, *([f"left out: {dropped}"] if dropped else [])])


@dataclass(frozen=True)
class _Import:
    """What `--set` may change of an import."""

    format: Part


@traces.command("import", short_help="Chat-format JSONL and other logs.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The traces file to write (JSONL).")
@click.option("--format", "form", default="auto", show_default=True, metavar="SPEC", help=FORMAT_HELP)
@click.option("--on-error", type=click.Choice(["stop", "drop"]), default="stop", show_default=True)
@click.option(
    "--unknown-keys",
    type=click.Choice(["stop", "keep"]),
    default="stop",
    show_default=True,
    help="Keys of a row that the format does not know: an error, or kept in the trace's meta.",
)
@click.option("--success-only", is_flag=True, help="Keep only the traces that their source calls a success.")
@click.option("--dev", default=0.1, show_default=True, help="Share of traces held out for development.")
@click.option("--seed", default=0, show_default=True)
@set_option
@json_option
def import_(
    files: tuple[Path, ...],
    out: Path,
    form: str,
    on_error: Any,
    unknown_keys: Any,
    success_only: bool,
    dev: float,
    seed: int,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Import chat-format JSONL (`messages`, `tools`) or other logs; whatever is dropped is counted by reason.

    \b
    Example: turntree traces import my_agent.jsonl --out runs/traces.jsonl
             turntree traces import my_agent.jsonl --format my_logs:read --out runs/traces.jsonl
    """
    from turntree.stages.import_traces import import_traces

    result = import_traces(
        list(files),
        out,
        form=configured(_Import(Part(form)), overrides).format,
        on_error=on_error,
        unknown_keys=unknown_keys,
        success_only=success_only,
        dev=dev,
        seed=seed,
    )
    finish(result, json_path, [f"{key}: {value}" for key, value in result.items()])
