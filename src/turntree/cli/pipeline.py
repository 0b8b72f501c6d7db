"""`turntree sft | profile | rescore | select | train | plan | export`: from traces to a trained policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from turntree.cli.common import KEEP_TREES, censored, dropped, environment_for, finish, out_option, overwrite_option
from turntree.cli.options import Read, StageCommand, short
from turntree.core import parts
from turntree.core.errors import InputError

_CONFIG = "turntree.stages.config:"


@click.command(
    cls=StageCommand,
    config=_CONFIG + "SFTStageConfig",
    options=short(
        "traces model carrier=device.carrier device.renderer split sft.epochs sft.max_tokens "
        "sft.optimizer.learning_rate sft.seed log=loggers"
    ),
    short_help="Fine-tune on traces: the baseline.",
)
@out_option("The run directory to write.", folder=True)
@overwrite_option("Start over where a run exists already.")
def sft(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Supervised fine-tuning on the assistant turns of traces: the baseline on the same data.

    Run the same command again to continue an interrupted run.

    \b
    Example: turntree sft --traces runs/traces.jsonl --out runs/sft
    """
    from turntree.report.wording import plural
    from turntree.stages.sft import run_sft

    result = run_sft(config, out, overwrite=overwrite)
    trained = f"{plural(result['steps'], 'step')}, loss {result['loss']:.3f} -> {result['model']}"
    finish(result, json_path, [*_success(result), trained])


@click.command(
    cls=StageCommand,
    config=_CONFIG + "ProfileStageConfig",
    options=short(
        "traces model verifier environment profile.rollouts profile.adaptive profile.adaptive.threshold "
        "profile.sampling.max_tokens split limit reuse published endpoint=endpoint.url endpoint.tokenizer "
        "carrier=device.carrier device.engine device.renderer profile.seed"
    ),
    short_help="K rollouts at every turn of the traces.",
)
@out_option("The profile to write (JSONL).")
@overwrite_option("Start over where another profile was interrupted, or replace it.")
def profile(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """K local rollouts of the frozen policy at every assistant turn: which turns could teach?

    Run the same command again to continue an interrupted profile.

    \b
    Example: turntree profile --traces runs/traces.jsonl --out runs/profile.jsonl
             turntree profile --traces runs/traces.jsonl --out profile.jsonl \\
                 --endpoint http://localhost:8000/v1 --model my-model \\
                 --tokenizer models/my-model
    """
    from turntree.stages.profile import run_profile

    result = run_profile(config, out, overwrite=overwrite)
    finish(result, json_path, _profile_lines(result, out))


@click.command(
    cls=StageCommand,
    config=_CONFIG + "RescoreConfig",
    options=short("PROFILE=profile verifier environment traces"),
    short_help="Judge the samples of a profile with another verifier.",
)
@out_option("The profile to write (JSONL).")
@overwrite_option("Start over where another re-scoring was interrupted, or replace it.")
def rescore(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """Judge the samples of a profile with another verifier. The result is that of profiling with it, without sampling.

    \b
    Example: turntree rescore profile.jsonl --verifier strict --out strict.jsonl
    """
    from turntree.stages.rescore import run_rescore

    result = run_rescore(config, out, overwrite=overwrite)
    finish(result, json_path, _profile_lines(result, out))


_FAULTS = {
    "truncated": "samples cut by the token limit",
    "unjudged": "samples that the verifier did not judge",
    "gold_refused": "demonstrations that the verifier refuses",
    "gold_unjudged": "demonstrations that it did not judge",
}


def _profile_lines(result: dict[str, Any], out: Path) -> list[str]:
    told = result | {"unjudged": result["unjudged"] - sum(result["faults"].values())}  # by the verifier
    faults = [f"{told[key]} {what}" for key, what in _FAULTS.items() if told[key]]
    faults += [f"{count} {why}" for why, count in told["faults"].items()]
    missed = "no sample was accepted, so exact matching has no miss rate"
    if result["miss_rate"] is not None:
        missed = f"exact matching would miss {result['miss_rate']:.1%} of the acceptable actions"
    classes = ", ".join(f"{count} {name}" for name, count in sorted(result["classes"].items()))
    counted = f"{result['candidates']} candidates at lambda {result['threshold']:g}: {classes}"
    lines = [counted, f"{missed} -> {out}"]
    if "adaptive" in result:
        found = result["adaptive"]
        lines.append(
            f"{result['rollouts']:,} rollouts, {found['saved']:.1%} saved; {found['expected_disagreement']:.1%} of the "
            f"candidates may be decided wrongly (audit: {found['audit_disagreed']} of {found['audited']})"
        )
    if result["classes"].get("all succeed") == result["candidates"]:
        lines.append("the policy has mastered every turn: none is a pivot. Take harder traces, or fewer epochs of SFT")
    lines += [f"look at this first: {', '.join(faults)}"] if faults else []
    return [*lines, *([f"not candidates: {_counts(result['skipped_turns'])}"] if result["skipped_turns"] else [])]


@click.command(
    cls=StageCommand,
    config="turntree.pivots.select:SelectConfig",
    options=short("threshold rule anchor_share max_per_kind per_duplicate weight seed"),
    short_help="Keep the pivots of a profile.",
)
@click.argument("profile", type=click.Path(path_type=Path))
@out_option("The pivots file to write (JSONL).")
def select(config: Any, profile: Path, out: Path, json_path: str | None) -> None:
    """Keep the pivots: reward variance above zero, mean below lambda. Prints what every lambda would keep.

    \b
    Example: turntree select runs/profile.jsonl --out runs/pivots.jsonl
    """
    from turntree.stages.select import previewed, run_select

    result = run_select(profile, config, out)
    lines = [*previewed(result["preview"])]
    lines.append(f"selected {result['selected']} ({_counts(result['roles'])}) -> {out}")
    lines.append(f"all candidates: {_counts(result['classes'])}")
    if result["unsettled"]:
        told = "`turntree profile --adaptive --reuse` settles them"
        lines.append(f"{result['unsettled']} candidates were judged again and may change their class: {told}")
    finish(result, json_path, lines)


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items())


@click.group(short_help="GRPO at pivots, or on whole episodes.")
def train() -> None:
    """Reinforcement learning."""


@train.command(
    cls=StageCommand,
    config=_CONFIG + "TrainPivotConfig",
    stage="train pivot",
    options={
        **short(
            "PIVOTS=pivots states own.refresh teacher model reference verifier environment "
            "traces train.steps train.optimizer.learning_rate kl=train.loss.kl_coefficient train.sampling.max_tokens "
            "train.sampling.temperature carrier=device.carrier device.engine device.renderer"
        ),
        "--keep-trees": KEEP_TREES,
        **short("cluster=cluster.address train.seed allow_stale log=loggers"),
    },
    short_help="PivotRL: GRPO on one-turn groups.",
)
@out_option("The run directory to write.", folder=True)
@overwrite_option("Start over where a run exists already.")
def pivot(config: Any, out: Path, overwrite: bool, json_path: str | None) -> None:
    """PivotRL, Algorithm 1: GRPO with a KL penalty on one-turn rollouts at the selected states.

    Run the same command again to continue an interrupted run.

    \b
    Example: turntree train pivot runs/pivots.jsonl --out runs/pivotrl
             turntree train pivot --states own --environment household \\
                 --teacher household --verifier household --out runs/own
    """
    from turntree.stages.train_pivot import run_train_pivot

    result = run_train_pivot(config, out, overwrite=overwrite)
    figures = [("reward", result["reward_mean"], ".2f"), ("KL", result["kl"], ".3f")]
    told = [f"{name} not measured" if value is None else f"{name} {value:{form}}" for name, value, form in figures]
    lines = [f"{', '.join(told)} on {result['states']} states -> {result['model']}"]
    if searches := result["searches"]:
        keys = ("successes", "tasks", "pivots", "profiled")
        won, played, kept, seen = (sum(search[key] for search in searches) for key in keys)
        lines.append(f"own states: {played} episodes, {won} with success; {kept} of {seen} profiled states are pivots")
    lines += censored("rollouts", result["censored"], result["rollouts"])
    finish(result, json_path, [*_success(result), *lines])


def _success(result: dict[str, Any]) -> list[str]:
    """What a training says first."""
    success = result["success"]
    if success is None:
        told = ["held-out success was not measured: check.tasks is 0, or no --environment says where to play"]
        moved = [f"{kind} {was:.2f} -> {now:.2f}" for kind, (was, now) in result.get("kinds", {}).items() if now != was]
        if moved:
            told.append(f"accepted at the start and at the end, by kind of action: {', '.join(moved)}")
        return told
    start, end, highest = (
        "unknown" if success[name] is None else f"{success[name]:.1%}" for name in ("start", "end", "best")
    )
    told = f"success {start} -> {end} of {success['tasks']} held-out tasks"
    if success["change"] is not None:
        from turntree.train.success import signed

        told += f" ({signed(success['change'])})"
    if success["best"] not in (None, success["end"]):
        where = success["best_model"] or "its weights were lost"
        told += f"; the highest of {success['looks']} looks is {highest} after step {success['best_step']}: {where}"
    return [*([f"stopped early: {result['stopped']}"] if result["stopped"] else []), told]


# training on whole episodes


def _reward(text: str) -> Any:
    from turntree.rollout.rewards import parse_reward

    part = parse_reward(text)
    parts.load("rewards", part.name)  # a name that there is not is refused before a model is loaded
    return part


REWARD = Read("rewards", _reward, "NAME[=WEIGHT]", repeated=True)


@train.command(
    cls=StageCommand,
    config=_CONFIG + "TrainOnlineConfig",
    stage="train online",
    part="environment",
    named=environment_for,
    options={
        **short("environment model reference count held-out-count=check.tasks train.iterations train.groups"),
        **short("train.group_size"),
        "--brancher": Read("brancher", lambda text: None if text == "none" else text, "SPEC"),
        **short(
            "brancher.probe_tokens initial=train.initial_rollouts train.max_turns "
            "train.sampling.max_tokens train.sampling.temperature "
            "train.optimizer.learning_rate kl=train.loss.kl_coefficient gate gate-turn=gate.turn "
            "gate-threshold=gate.threshold gate.audit estimator filter=filters"
        ),
        "--reward": REWARD,
        **short("carrier=device.carrier device.engine device.renderer"),
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
    Example: turntree train online --out runs/online --learning-rate 3e-4 \\
                 --max-tokens 24 --gate-turn 6
             turntree train online --environment qa --out runs/qa \\
                 --brancher entropy --probe-tokens 2 --max-tokens 48 \\
                 --learning-rate 3e-4
             turntree train online --environment my_game:tasks --out runs/mine \\
                 --model models/mine
    """
    from turntree.report.wording import plural
    from turntree.stages.train_online import run_train_online

    result = run_train_online(config, out, overwrite=overwrite)
    played = f"{plural(result['iterations'], 'iteration')}, {plural(result['cost']['turns'], 'turn')}"
    lines = [*_success(result), f"{played} -> {result['model']}", *_decided(config, result)]
    lines += censored("rollouts", result["censored"], result["rollouts"])
    finish(result, json_path, [*lines, *dropped(result["read"])])


def _decided(config: Any, result: dict[str, Any]) -> Iterator[str]:
    """What the gate, the brancher and the filters did, each in one line."""
    if config.gate is not None:
        right = result["gate_precision"]
        said = right and f", precision {right['value']:.0%} [{right['low']:.0%}, {right['high']:.0%}] by audits"
        yield f"gate: {result['groups_cut']} of {result['groups']} groups cut{said or ''}"
    if config.brancher is not None:
        probe = config.brancher.options.get("probe_tokens")
        why = f": turns that end within brancher.probe_tokens ({probe}) cannot" if probe else ""
        forked = f"{result['forks']} forks, {result['structural_saving']:.0%} of the calls shared"
        yield f"brancher: {forked if result['forks'] else f'no rollout forked{why}'}"
    if config.filters:
        done = {f"of {result['groups']} groups dropped": "groups_dropped", "tasks skipped": "prompts_skipped"}
        told = [f"{sum(why.values())} {what} ({_counts(why)})" for what, key in done.items() if (why := result[key])]
        yield f"filters: {', '.join(told) or 'no group dropped, no task skipped'}"


@click.command(
    cls=StageCommand,
    config=_CONFIG + "TrainOnlineConfig",
    stage="train online",  # whose files it reads
    options=short("MODEL=model groups=train.groups max-context=train.max_context"),
    short_help="The memory that a run needs on every GPU.",
)
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Ranks that train, a GPU each.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GB",
    help="Of one GPU: does it fit, and what would?",
)
def plan(config: Any, gpus: int, memory: float | None, json_path: str | None) -> None:
    """Say what `train online` would need on every GPU, from the model's config.json alone: no weights are read.

    The keys are those of `train online`; `--dry-run` of the commands that train says the same of theirs.

    Example: turntree plan models/my-model --gpus 8 --memory 80
    """
    from turntree.stages.plan import plan_lines

    lines = plan_lines(config, gpus, memory)
    if not lines:
        raise InputError("names no model whose config.json can be read", field="MODEL", hint="give a folder")
    finish({"model": config.model, "gpus": gpus, "lines": lines}, json_path, lines)


@click.group(short_help="Pivots in the formats of other trainers.")
def export() -> None:
    """Use what turntree found with another trainer (docs/pivots.md)."""


@export.command(
    "pivots",
    cls=StageCommand,
    config="turntree.stages.export:ExportConfig",
    stage="export pivots",
    options=short("PIVOTS=pivots to=pivot_format traces verifier model"),
    short_help="Pivots and their verifier for nemo-gym, trl, verl, skyrl.",
)
@out_option("The folder to write.", folder=True)
def pivots(config: Any, out: Path, json_path: str | None) -> None:
    """Write PIVOTS as a data set of another trainer, with their pass rates and, where it takes one, a reward function
    that is our verifier.

    \b
    Example: turntree export pivots pivots.jsonl --to trl --model mine --out trl
    """
    from turntree.report.wording import plural
    from turntree.stages.export import run_export

    result = run_export(config, out)
    left_out = ", ".join(f"{count} {reason}" for reason, count in result["dropped"].items())
    lines = [f"{plural(result['pivots'], 'pivot')} -> {out} ({', '.join(result['files'])})"]
    lines += [f"left out: {left_out}"] if left_out else []
    finish(result, json_path, [*lines, *(f"note: {note}" for note in result["notes"])])
