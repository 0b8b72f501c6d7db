"""`turntree sft`: traces and a policy in, a fine-tuned policy out."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.protocols import Renderer
from turntree.engines.checkpoint import save_model
from turntree.observe import loggers
from turntree.observe.files import file_hash
from turntree.observe.run import RunDirectory, notice, open_run, progress
from turntree.stages.cluster import on_ranks
from turntree.stages.config import SFTStageConfig
from turntree.stages.policy import Policy, load_policy, load_trained
from turntree.traces.schema import Trace, read_traces
from turntree.training.checkpoints import extent, resume
from turntree.training.sft import Example, check_head, examples, train_sft
from turntree.training.sharded import ALONE, Alone


@on_ranks
def run_sft(config: SFTStageConfig, out: Path, *, overwrite: bool = False, group: Alone = ALONE) -> dict[str, Any]:
    """Train on the assistant turns of a split; the policy is written to `out/model`. An unfinished run of the same
    configuration and contents in `out` is resumed; any other is refused unless `overwrite`."""
    loggers.check(config.loggers)
    found = [trace for trace in read_traces(config.traces) if config.split in ("", trace.split)]
    if not found:
        raise InputError(f"holds no trace in split {config.split!r}", path=config.traces, hint="choose another split")
    policy = load_policy(config.model, config.device)
    check_head(policy.model)
    group.load = functools.partial(load_trained, policy.source, config.device)
    learned, left_out = _examples(found, policy.renderer)
    if not learned:
        raise InputError("holds no turn to learn from", path=config.traces, hint="see skip_turns in docs/traces.md")
    inputs = {**policy.identity, "traces_hash": file_hash(Path(config.traces))}
    steps = config.sft.steps(len(learned))
    length = extent("sft.epochs", config.sft.epochs, config.sft.optimizer, steps=steps)
    with open_run(out, "sft", to_mapping(config), inputs, overwrite=overwrite, extent=length) as run:
        _train(run, policy, learned, config, group)
        last = run.metrics()[-1]
    return {
        "model": str(run.model),
        "traces": len(found) - left_out,
        "left_out": left_out,
        "steps": last["step"],
        "loss": last["loss"],
    }


def _examples(traces: Sequence[Trace], renderer: Renderer) -> tuple[list[Example], int]:
    """What is learned, and how many traces are left out: those without a turn to learn from and those that the renderer
    refuses. An error if it refuses all."""
    found: list[Example] = []
    left_out = 0
    refused: list[InputError] = []
    for trace in traces:
        try:
            learned = [row for row in examples(trace, renderer) if any(row.loss_mask)]
        except InputError as error:
            refused.append(error)
            learned = []
        found += learned
        left_out += not learned
    if refused:
        if not found:
            raise refused[0]
        notice(f"{len(refused)} of {len(traces)} traces cannot be rendered and are left out; the first: {refused[0]}")
    return found, left_out


def _train(run: RunDirectory, policy: Policy, examples: list[Example], config: SFTStageConfig, group: Alone) -> None:
    checkpoints, done = resume(run, config.checkpoints)
    with (
        loggers.following(run, config.loggers),
        progress((), "sft", total=config.sft.steps(len(examples)), initial=done) as bar,
    ):

        def log(row: dict[str, Any]) -> None:
            run.log(row)
            bar.update()
            bar.set_postfix(loss=f"{row['loss']:.3f}")

        cost = train_sft(policy.model, examples, config.sft, log, checkpoints=checkpoints, group=group)
    save_model(policy.model, policy.tokenizer, run.model)
    run.write_cost(cost)
    checkpoints.finish()
