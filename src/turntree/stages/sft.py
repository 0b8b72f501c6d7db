"""`turntree sft`: traces and a policy in, a fine-tuned policy out."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from turntree.core.completion import Sampling
from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.core.protocols import Renderer
from turntree.rollout.live import EpisodeConfig
from turntree.run import loggers
from turntree.run.files import file_hash
from turntree.run.folder import HELD_OUT, open_run
from turntree.stages.config import SFTStageConfig
from turntree.stages.held_out import SuccessCheck, TrainedOn, open_held_out
from turntree.stages.policy import Policy, load_policy
from turntree.stages.training import on_ranks, run_algorithm
from turntree.traces.schema import Trace, read_traces
from turntree.train.loop import Checked, Row
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.sft import Example, examples


@on_ranks
def run_sft(
    config: SFTStageConfig, out: Path, *, overwrite: bool = False, group: ProcessGroup = SINGLE
) -> dict[str, Any]:
    """Train on the assistant turns of a split; the policy is written to `out/model`. An unfinished run of the same
    configuration and contents in `out` is resumed; any other is refused unless `overwrite`."""
    loggers.check(config.loggers)
    found = list(read_traces(config.traces, config.split))
    if not found:
        raise InputError(f"holds no trace in split {config.split!r}", path=config.traces, hint="choose another split")
    policy = load_policy(config.model, config.device)
    limits = _Limits(config.sft.max_tokens, policy.reads(config.sft.max_tokens), policy.vocabulary)
    learned, left_out, unfit = _learned(found, policy.renderer, limits)
    if not learned:
        raise InputError("holds no turn to learn from", path=config.traces, hint="see skip_turns in docs/traces.md")
    inputs = {**policy.identity, "traces_hash": file_hash(Path(config.traces))}
    config.sft.optimizer.require_steps(config.sft.steps(len(learned)), "sft.optimizer.schedule")
    episodes = EpisodeConfig(sampling=Sampling(max_tokens=config.check.max_tokens), max_context=config.sft.max_tokens)
    trained_on = TrainedOn(episodes, traces=lambda: found, task_seed=config.task_seed)
    with contextlib.ExitStack() as stack:
        tasks = stack.enter_context(open_held_out(config.check, trained_on, policy))
        if tasks is not None:
            inputs |= {"check": tasks.identity}
        run = stack.enter_context(
            open_run(out, "sft", to_mapping(config), inputs, overwrite=overwrite, logs=(HELD_OUT,))
        )
        algorithm = policy.imitation(learned, config.sft, group)
        success = None if tasks is None else SuccessCheck(run, policy, tasks, algorithm)
        check = None if success is None else partial(_check, policy, success)
        trained = run_algorithm(run, policy, algorithm, config, shown={"loss": "loss"}, check=check)
        last = run.metrics()[-1]
    return {
        "model": str(run.model),
        "traces": len(found) - left_out,
        "left_out": left_out,
        "dropped": {reason: len(sizes) for reason, sizes in sorted(unfit.items())},
        "steps": last["step"],
        "loss": last["loss"],
        "success": None if success is None else success.result(config.model),
        "stopped": trained.stopped,
    }


def _check(policy: Policy, success: SuccessCheck, step: int, row: Row) -> Checked:
    """The engine, which SFT does not sample from, gets the weights of now."""
    policy.engine.update_weights(policy.model, step)
    checked = success(step, row)
    policy.engine.clear_cache()  # what it keeps is memory that training needs
    return checked


_FOREIGN = "example_outside_vocabulary"


@dataclass(frozen=True)
class _Limits:
    """The longest example, in tokens: of one forward pass, and of the model; and how many tokens the model knows."""

    max_tokens: int
    positions: int
    vocabulary: int

    def against(self, row: Example) -> str | None:
        """Why the example cannot be learned."""
        if max(row.token_ids) >= self.vocabulary:
            return _FOREIGN
        if len(row.token_ids) > self.positions:
            return "example_above_model_positions"
        return "example_above_sft_max_tokens" if len(row.token_ids) > self.max_tokens else None


def _learned(
    traces: Sequence[Trace], renderer: Renderer, limits: _Limits
) -> tuple[list[Example], int, dict[str, list[int]]]:
    """The examples that are learned, the number of traces that give none, and the sizes of the other examples, which
    are too long or have tokens that the model lacks, by reason. Traces that the renderer refuses give none, either. An
    error if no example is left."""
    found: list[Example] = []
    unfit: dict[str, list[int]] = {}
    refused: list[InputError] = []
    left_out = 0
    for trace in traces:
        try:
            rows = [row for row in examples(trace, renderer) if any(row.loss_mask)]
        except InputError as error:
            refused.append(error)
            rows = []
        before = len(found)
        for row in rows:
            if (reason := limits.against(row)) is None:
                found.append(row)
            else:
                unfit.setdefault(reason, []).append(len(row.token_ids))
        left_out += len(found) == before
    _say_unfit(unfit, len(found), limits)
    if refused:
        if not found:
            raise refused[0]
        notice(f"{len(refused)} of {len(traces)} traces cannot be rendered and are left out; the first: {refused[0]}")
    return found, left_out, unfit


def _say_unfit(unfit: Mapping[str, Sequence[int]], kept: int, limits: _Limits) -> None:
    """Say how many examples cannot be learned. Raises `InputError` where no other is left."""
    sizes = sorted(size for reason, found in unfit.items() if reason != _FOREIGN for size in found)
    foreign = len(unfit.get(_FOREIGN, ()))
    whole, said = f"of {len(sizes) + foreign + kept} examples have", list[tuple[str, str, str]]()
    if foreign:
        what = f"{foreign} {whole} tokens above the {limits.vocabulary} that the model knows"
        said.append((what, "model", "resize_token_embeddings, or use the tokenizer that came with it"))
    if sizes and sizes[0] > limits.positions:
        field, hint = "model", f"it has {limits.positions} positions: use one with more, or shorter traces"
    else:
        reached = max((size for size in sizes if size <= limits.positions), default=0)
        field, hint = "sft.max_tokens", f"--max-tokens {reached} takes all that the model can, and more memory"
    if sizes:
        most = min(limits.max_tokens, limits.positions)
        said.append((f"{len(sizes)} {whole} more than {most} tokens (up to {sizes[-1]})", field, hint))
    for what, field, hint in said:
        if not kept:
            raise InputError(what, field=field, hint=hint)
        notice(f"{what} and are left out; {hint}")
