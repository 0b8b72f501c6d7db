"""`turntree sft`: traces and a policy in, a fine-tuned policy out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.engines.checkpoint import save_model
from turntree.observe.run import RunDirectory, progress
from turntree.stages.policy import Device, load_policy
from turntree.traces.schema import read_traces
from turntree.training.sft import SFTConfig, example, train_sft


@dataclass(frozen=True, kw_only=True)
class SFTStageConfig:
    traces: str
    model: str = "default"
    split: str = "train"
    sft: SFTConfig = field(default_factory=SFTConfig)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        self.device.check_trainable()


def run_sft(config: SFTStageConfig, out: Path) -> dict[str, Any]:
    """Train on the assistant turns of a split; the policy lies in `out/model`."""
    found = [trace for trace in read_traces(config.traces) if config.split in ("", trace.split)]
    if not found:
        raise InputError(f"holds no trace in split {config.split!r}", path=config.traces, hint="choose another split")
    policy = load_policy(config.model, config.device)
    examples = [row for row in (example(trace, policy.renderer) for trace in found) if any(row.loss_mask)]
    if not examples:
        raise InputError("holds no turn to learn from", path=config.traces, hint="see skip_turns in docs/traces.md")
    run = RunDirectory(out)
    run.start("sft", to_mapping(config))
    started = time.perf_counter()
    steps = -(-len(examples) // config.sft.batch) * config.sft.epochs
    with progress((), "sft", total=steps) as bar:

        def log(row: dict[str, float]) -> None:
            run.log(row)
            bar.update()
            bar.set_postfix(loss=f"{row['loss']:.3f}")

        cost = train_sft(policy.model, examples, config.sft, log)
    cost = replace(cost, training_seconds=time.perf_counter() - started)
    run.write_cost(cost)
    save_model(policy.model, policy.tokenizer, run.path / "model")
    last = run.metrics()[-1]
    return {
        "model": str(run.path / "model"),
        "traces": len(examples),
        "left_out": len(found) - len(examples),
        "steps": steps,
        "loss": last["loss"],
    }
