"""`turntree sft`: traces and a policy in, a fine-tuned policy out."""

from __future__ import annotations

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
from turntree.stages.config import SFTStageConfig
from turntree.stages.policy import Policy, load_policy
from turntree.traces.schema import Trace, read_traces
from turntree.training.checkpoints import extent, resume
from turntree.training.sft import Example, check_head, example, train_sft


def run_sft(config: SFTStageConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Train on the assistant turns of a split; the policy is written to `out/model`. An unfinished run of the same
    configuration and contents in `out` is resumed; any other is refused unless `overwrite`."""
    loggers.check(config.loggers)
    found = [trace for trace in read_traces(config.traces) if config.split in ("", trace.split)]
    if not found:
        raise InputError(f"holds no trace in split {config.split!r}", path=config.traces, hint="choose another split")
    policy = load_policy(config.model, config.device)
    check_head(policy.model)
    examples = _examples(found, policy.renderer)
    if not examples:
        raise InputError("holds no turn to learn from", path=config.traces, hint="see skip_turns in docs/traces.md")
    inputs = {**policy.identity, "traces_hash": file_hash(Path(config.traces))}
    steps = config.sft.steps(len(examples))
    length = extent("sft.epochs", config.sft.epochs, config.sft.optimizer, steps=steps)
    with open_run(out, "sft", to_mapping(config), inputs, overwrite=overwrite, extent=length) as run:
        _train(run, policy, examples, config)
        last = run.metrics()[-1]
    return {
        "model": str(run.model),
        "traces": len(examples),
        "left_out": len(found) - len(examples),
        "steps": last["step"],
        "loss": last["loss"],
    }


def _examples(traces: Sequence[Trace], renderer: Renderer) -> list[Example]:
    """The traces that hold a turn to learn from. One that the renderer refuses is left out; an error if all are."""
    examples: list[Example] = []
    refused: list[InputError] = []
    for trace in traces:
        try:
            row = example(trace, renderer)
        except InputError as error:
            refused.append(error)
            continue
        examples += [row] if any(row.loss_mask) else []
    if refused:
        if not examples:
            raise refused[0]
        notice(f"{len(refused)} of {len(traces)} traces cannot be rendered and are left out; the first: {refused[0]}")
    return examples


def _train(run: RunDirectory, policy: Policy, examples: list[Example], config: SFTStageConfig) -> None:
    checkpoints, done = resume(run, config.checkpoints)
    with (
        loggers.following(run, config.loggers),
        progress((), "sft", total=config.sft.steps(len(examples)), initial=done) as bar,
    ):

        def log(row: dict[str, Any]) -> None:
            run.log(row)
            bar.update()
            bar.set_postfix(loss=f"{row['loss']:.3f}")

        cost = train_sft(policy.model, examples, config.sft, log, checkpoints=checkpoints)
    save_model(policy.model, policy.tokenizer, run.model)
    run.write_cost(cost)
    checkpoints.finish()
