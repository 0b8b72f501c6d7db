"""`turntree sft | profile | select | train`: from traces to a trained policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from turntree.cli.common import (
    configured,
    endpoint_of,
    engine_option,
    finish,
    json_option,
    keep_trees_option,
    log_option,
    set_option,
    with_engine,
)
from turntree.core.config import Part
from turntree.core.errors import InputError

MODEL_HELP = "A folder in Hugging Face format, or an embedded tiny policy: 'default', 'qa'."
VERIFIER_HELP = "household, tool_call, strict, executed, or module:function. Options: --set verifier.KEY=VALUE."
ENVIRONMENT_HELP = "Where the traces were played, as they name it: for --verifier executed."


@click.command(short_help="Fine-tune on traces: the baseline.")
@click.option("--traces", required=True, help="A traces file.")
@click.option("--model", default="default", show_default=True, help=MODEL_HELP)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run directory to write.")
@click.option("--split", default="train", show_default=True, help="Which traces ('' for all).")
@click.option("--epochs", default=2, show_default=True)
@click.option("--learning-rate", default=1e-5, show_default=True, help="The embedded tiny policy wants 3e-4.")
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Start anew where a run lies already.")
@log_option
@set_option
@json_option
def sft(
    traces: str,
    model: str,
    out: Path,
    split: str,
    epochs: int,
    learning_rate: float,
    seed: int,
    overwrite: bool,
    loggers: tuple[str, ...],
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Supervised fine-tuning on the assistant turns of traces: the baseline on the same data.

    The same command again goes on with a run that was interrupted.

    \b
    Example: turntree sft --traces runs/traces.jsonl --out runs/sft
    """
    from turntree.stages.sft import SFTStageConfig, run_sft
    from turntree.training.optimizer import OptimizerConfig
    from turntree.training.sft import SFTConfig

    training = SFTConfig(epochs=epochs, seed=seed, optimizer=OptimizerConfig(learning_rate=learning_rate))
    named = tuple(map(Part, loggers))
    config = configured(SFTStageConfig(traces=traces, model=model, split=split, sft=training, loggers=named), overrides)
    result = run_sft(config, out, overwrite=overwrite)
    finish(result, json_path, [f"{result['steps']} steps, loss {result['loss']:.3f} -> {result['model']}"])


@click.command(short_help="K rollouts at every turn of the traces.")
@click.option("--traces", required=True, help="A traces file.")
@click.option("--model", default="default", show_default=True, help=MODEL_HELP)
@click.option("--verifier", default="household", show_default=True, help=VERIFIER_HELP)
@click.option("--environment", default=None, help=ENVIRONMENT_HELP)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The profile to write (JSONL).")
@click.option("--rollouts", default=16, show_default=True, help="K local rollouts of every candidate.")
@click.option("--adaptive", is_flag=True, help="Stop a candidate early where K rollouts would select no differently.")
@click.option("--threshold", default=0.6, show_default=True, help="lambda_diff, which --adaptive settles.")
@click.option("--max-tokens", default=256, show_default=True, help="Longest completion; longer ones are cut.")
@click.option("--split", default="train", show_default=True, help="Which traces ('' for all).")
@click.option("--limit", default=0, show_default=True, help="Profile only the first so many candidates.")
@click.option("--reuse", default=None, help="An earlier profile of this policy: what it holds is not sampled again.")
@click.option("--endpoint", default=None, metavar="URL", help="Sample from a server of --model, such as vLLM.")
@click.option("--tokenizer", default=None, help="With --endpoint: a folder with the tokenizer of that model.")
@engine_option
@click.option("--seed", default=0, show_default=True)
@click.option("--overwrite", is_flag=True, help="Start anew where another profile was interrupted.")
@set_option
@json_option
def profile(
    traces: str,
    model: str,
    verifier: str,
    environment: str | None,
    out: Path,
    rollouts: int,
    adaptive: bool,
    threshold: float,
    max_tokens: int,
    split: str,
    limit: int,
    reuse: str | None,
    endpoint: str | None,
    tokenizer: str | None,
    engine: str | None,
    seed: int,
    overwrite: bool,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """K local rollouts of the frozen policy at every assistant turn: which turns could teach?

    A profile that was interrupted goes on when the same command is run again.

    \b
    Example: turntree profile --traces runs/traces.jsonl --out runs/profile.jsonl
             turntree profile --traces runs/traces.jsonl --out runs/profile.jsonl --endpoint http://localhost:8000/v1
             --model my-model --tokenizer models/my-model
    """
    from turntree.core.completion import Sampling
    from turntree.profiling.profile import ProfileConfig
    from turntree.profiling.settle import AdaptiveConfig
    from turntree.stages.profile import ProfileStageConfig, run_profile

    settled = AdaptiveConfig(threshold=threshold) if adaptive else None
    profiling = ProfileConfig(rollouts=rollouts, sampling=Sampling(max_tokens=max_tokens), seed=seed, adaptive=settled)
    base = ProfileStageConfig(
        traces=traces,
        model=model,
        verifier=Part(verifier),
        environment=_part(environment),
        split=split,
        limit=limit,
        reuse=reuse,
        profile=profiling,
        endpoint=endpoint_of(endpoint, tokenizer),
    )
    result = run_profile(configured(base, with_engine(engine, overrides)), out, overwrite=overwrite)
    finish(result, json_path, _profile_lines(result, out))


@click.command(short_help="Judge a profile anew: another verifier, the same samples.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--verifier", required=True, help=VERIFIER_HELP)
@click.option("--environment", default=None, help=ENVIRONMENT_HELP)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The profile to write (JSONL).")
@click.option("--traces", default=None, help="Where the traces are now, if not where the profile says.")
@click.option("--overwrite", is_flag=True, help="Start anew where another re-scoring was interrupted.")
@set_option
@json_option
def rescore(
    profile: Path,
    verifier: str,
    environment: str | None,
    out: Path,
    traces: str | None,
    overwrite: bool,
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Judge the samples of a profile with another verifier: what profiling with it would have found, for free.

    \b
    Example: turntree rescore runs/profile.jsonl --verifier my_rules:judge --out runs/rescored.jsonl
    """
    from turntree.stages.rescore import RescoreConfig, run_rescore

    base = RescoreConfig(profile=str(profile), verifier=Part(verifier), environment=_part(environment), traces=traces)
    result = run_rescore(configured(base, overrides), out, overwrite=overwrite)
    finish(result, json_path, _profile_lines(result, out))


def _part(name: str | None) -> Part | None:
    return None if name is None else Part(name)


def _profile_lines(result: dict[str, Any], out: Path) -> list[str]:
    faults = {key: result[key] for key in ("truncated", "faults", "gold_refused", "gold_unjudged") if result[key]}
    missed = "none acceptable" if result["miss_rate"] is None else f"{result['miss_rate']:.1%}"
    classes = ", ".join(f"{count} {name}" for name, count in sorted(result["classes"].items()))
    lines = [
        f"{result['candidates']} candidates at lambda {result['threshold']:g}: {classes}",
        f"exact matching would miss {missed} of the acceptable actions -> {out}",
    ]
    if "adaptive" in result:
        found = result["adaptive"]
        lines.append(
            f"{result['rollouts']:,} rollouts, {found['saved']:.1%} saved; {found['expected_disagreement']:.1%} of the "
            f"candidates may be decided wrongly (audit: {found['audit_disagreed']} of {found['audited']})"
        )
    return [*lines, *([f"look at this first: {faults}; not candidates: {result['skipped_turns']}"] if faults else [])]


@click.command(short_help="Keep the pivots of a profile.")
@click.argument("profile", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The pivots file to write (JSONL).")
@click.option("--threshold", default=0.6, show_default=True, help="lambda_diff: keep reward means below this.")
@click.option("--rule", type=click.Choice(["pivots", "random"]), default="pivots", show_default=True)
@click.option("--anchor-share", default=0.0, show_default=True, help="Share of mastered turns kept in the mix.")
@click.option("--max-per-kind", default=1.0, show_default=True, help="Largest share of one action kind among pivots.")
@click.option("--quota", multiple=True, metavar="KIND=N", help="Most pivots of one action kind ('*': of any other).")
@click.option("--per-trajectory", default=0, help="Most pivots of one trace (0: no limit).")
@click.option("--per-action", default=0, help="Most pivots that demonstrate the same action (0: no limit).")
@click.option("--per-duplicate", default=1, show_default=True, help="... at the same state.")
@click.option("--seed", default=0, show_default=True)
@json_option
def select(
    profile: Path,
    out: Path,
    threshold: float,
    rule: Any,
    anchor_share: float,
    max_per_kind: float,
    quota: tuple[str, ...],
    per_trajectory: int,
    per_action: int,
    per_duplicate: int,
    seed: int,
    json_path: str | None,
) -> None:
    """Keep the pivots: reward variance above zero, mean below lambda. Prints what every lambda would keep.

    \b
    Example: turntree select runs/profile.jsonl --out runs/pivots.jsonl
    """
    from turntree.profiling.select import SelectConfig
    from turntree.stages.select import run_select

    config = SelectConfig(
        rule=rule,
        threshold=threshold,
        anchor_share=anchor_share,
        max_per_kind=max_per_kind,
        quota=dict(map(_quota, quota)),
        per_trajectory=per_trajectory,
        per_action=per_action,
        per_duplicate=per_duplicate,
        seed=seed,
    )
    result = run_select(profile, config, out)
    lines = [f"lambda {row['threshold']:.2f}: {row['pivots']:5d} pivots  {row['kinds']}" for row in result["preview"]]
    lines.append(f"selected {result['selected']} {result['roles']} -> {out}; of all candidates: {result['classes']}")
    finish(result, json_path, lines)


def _quota(text: str) -> tuple[str, int]:
    kind, _, number = text.rpartition("=")
    if not kind or not number.isdecimal():
        raise InputError(f"{text!r} is no quota", field="--quota", hint="write KIND=N, as in take=200 or '*=50'")
    return kind, int(number)


@click.group(short_help="Reinforcement learning at the pivots.")
def train() -> None:
    """Reinforcement learning."""


@train.command(short_help="PivotRL: GRPO on one-turn groups.")
@click.argument("pivots")
@click.option("--model", default="default", show_default=True, help=MODEL_HELP)
@click.option("--verifier", default=None, help="Default: that of the profile; code of your own is named again.")
@click.option("--environment", default=None, help=ENVIRONMENT_HELP)
@click.option("--strict", is_flag=True, help="Baseline: reward only the demonstrated action (Eq. 2).")
@click.option("--traces", default=None, help="Where the traces are now, if not where the profile says.")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run directory to write.")
@click.option("--steps", default=40, show_default=True)
@click.option("--learning-rate", default=1e-5, show_default=True, help="The embedded tiny policy wants 5e-4.")
@click.option("--kl", default=0.02, show_default=True, help="Coefficient of the KL penalty to the frozen start.")
@click.option("--max-tokens", default=256, show_default=True, help="Longest completion; longer ones are cut.")
@engine_option
@keep_trees_option
@click.option("--seed", default=0, show_default=True)
@click.option("--allow-stale", is_flag=True, help="Accept pivots of another policy, sampling or verifier.")
@click.option("--overwrite", is_flag=True, help="Start anew where a run lies already.")
@log_option
@set_option
@json_option
def pivot(
    pivots: str,
    model: str,
    verifier: str | None,
    environment: str | None,
    strict: bool,
    traces: str | None,
    out: Path,
    steps: int,
    learning_rate: float,
    kl: float,
    max_tokens: int,
    engine: str | None,
    keep_trees: int | None,
    seed: int,
    allow_stale: bool,
    overwrite: bool,
    loggers: tuple[str, ...],
    overrides: tuple[str, ...],
    json_path: str | None,
) -> None:
    """PivotRL, Algorithm 1: GRPO with a KL penalty on one-turn rollouts at the selected states.

    The same command again goes on with a run that was interrupted.

    \b
    Example: turntree train pivot runs/pivots.jsonl --out runs/pivotrl
    """
    from turntree.core.completion import Sampling
    from turntree.stages.train_pivot import TrainPivotConfig, run_train_pivot
    from turntree.training.losses import LossConfig
    from turntree.training.optimizer import OptimizerConfig
    from turntree.training.pivot import PivotConfig

    training = PivotConfig(
        steps=steps,
        seed=seed,
        sampling=Sampling(max_tokens=max_tokens),
        loss=LossConfig(kl_coefficient=kl),
        optimizer=OptimizerConfig(learning_rate=learning_rate),
    )
    base = TrainPivotConfig(
        pivots=pivots,
        model=model,
        traces=traces,
        verifier=_part("strict" if strict else verifier),
        environment=_part(environment),
        allow_stale=allow_stale,
        keep_trees=keep_trees,
        train=training,
        loggers=tuple(map(Part, loggers)),
    )
    config = configured(base, with_engine(engine, overrides))
    result = run_train_pivot(config, out, overwrite=overwrite)
    divergence = result["kl"] if config.train.loss.kl_coefficient > 0 else None  # None too where all was censored
    figures = [("reward", result["reward_mean"], ".2f"), ("KL", divergence, ".3f")]
    told = [f"{name} not measured" if value is None else f"{name} {value:{form}}" for name, value, form in figures]
    line = f"{', '.join(told)} on {result['states']} states -> {result['model']}"
    finish(result, json_path, [line])
