"""What a training run will need on every GPU, from the model's config.json alone (`turntree plan`, `--dry-run`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.core import parts
from turntree.core.config import from_mapping, is_url
from turntree.core.errors import InputError, first_line
from turntree.engine.limits import EngineConfig
from turntree.run.files import read_json
from turntree.stages.config import HF, SFTStageConfig, TrainOnlineConfig, TrainPivotConfig
from turntree.train.config import LoRAConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from turntree.train.plan import Memory, Planned

GB = 10**9
FREE = 0.08  # of a card: the libraries, and what torch's allocator cannot use between its blocks


def read_config(model: str) -> PreTrainedConfig:
    """The config.json of a folder, or of a model on the Hub. Raises `InputError`."""
    from transformers import AutoConfig

    from turntree.engine.tokenizer import ADAPTER, base_of, checked_folder, quiet
    from turntree.stages.policy import resolve

    folder = checked_folder(resolve(model, weights=False))
    if (folder / ADAPTER).is_file():
        folder = Path(base_of(folder))
    if not (folder / "config.json").is_file():
        raise InputError("has no config.json", path=folder, hint="give a folder in Hugging Face format")
    try:
        with quiet():
            return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the boundary to foreign files
        raise InputError(f"cannot be read ({first_line(error)})", path=folder / "config.json") from error


def asked(config: Any, ranks: int, saved: str) -> Planned:
    """The sizes of a run on so many ranks, of a model that is `saved` in a dtype."""
    from turntree.train.plan import Planned

    device, imitates = config.device, isinstance(config, SFTStageConfig)
    train = config.sft if imitates else config.train
    served = not imitates and is_url(config.reference or "")
    rows, context, branches = (0, 1, 1) if imitates else _sampled(config)
    masked = device.prefixes != "repeated" and device.attention != "flex_attention"  # else as for one long path
    return Planned(
        ranks=ranks,
        bfloat16="bfloat16" in (saved if device.dtype == "auto" else device.dtype),
        frozen=device.frozen,
        lora=device.lora or _adapter(config.model),
        checkpointing=device.gradient_checkpointing,
        dense=device.name.startswith("cuda") and device.attention == "sdpa",
        referred=not imitates and train.loss.needs_reference_logprobs and not served,
        reference=None if imitates or served or config.reference is None else read_config(config.reference),
        tokens=train.max_tokens,
        rows=rows,
        context=context,
        branches=branches if masked else 1,
    )


def _adapter(model: str) -> LoRAConfig | None:
    """That of a folder which holds one."""
    from turntree.engine.tokenizer import ADAPTER
    from turntree.stages.policy import resolve

    path = resolve(model, weights=False) / ADAPTER
    if not path.is_file():
        return None
    held = read_json(path)
    targets = held.get("target_modules") or "all-linear"
    return LoRAConfig(rank=held["r"], targets=(targets,) if isinstance(targets, str) else tuple(targets))


def _sampled(config: Any) -> tuple[int, int, int]:
    """Sequences that the embedded engine holds at once, of what length, and how many of them share a prompt."""
    train, alive = config.train, config.train.step_rollouts
    context = train.max_tokens
    if isinstance(config, TrainOnlineConfig):
        context, alive = train.max_context, train.max_live_rollouts or alive
    if config.device.engine.name != HF.name:
        return 0, context, train.group_size
    engine = from_mapping(EngineConfig, config.device.engine.options)
    return min(alive, engine.max_batch_rows), context, train.group_size


# what could be changed where it does not fit, the cheapest first: the key, and the plan with it


def _knobs(plan: Planned, context: int) -> Iterator[tuple[str, Planned]]:
    if not plan.bfloat16:
        yield "device.dtype=bfloat16", (plan := replace(plan, bfloat16=True))
    if plan.dense:
        yield "device.attention=flex_attention", (plan := replace(plan, dense=False))
    if not plan.checkpointing:
        yield "device.gradient_checkpointing=true", (plan := replace(plan, checkpointing=True))
    if plan.rows:
        yield "device.engine=vllm, on GPUs of its own", (plan := replace(plan, rows=0))
    if plan.tokens > context > 1:
        yield f"train.max_tokens={context}", (plan := replace(plan, tokens=context))
    if plan.lora is None:
        yield 'device.lora={"rank": 16}', (plan := replace(plan, lora=LoRAConfig()))
    for ranks in (2 * plan.ranks, 4 * plan.ranks):
        yield f"{ranks} GPUs", replace(plan, ranks=ranks)


def told(config: Any) -> list[str]:
    """The plan under --dry-run, which a config that cannot be read does not end."""
    try:
        return plan_lines(config)
    except InputError as error:
        return [f"memory is not planned: {error}"]


def plan_lines(config: Any, ranks: int | None = None, gigabytes: float | None = None) -> list[str]:
    """The plan of a run as lines; none where no model is named. Without `ranks` they are those of the launcher."""
    if not isinstance(config, SFTStageConfig | TrainOnlineConfig | TrainPivotConfig):
        return []
    model = config.model
    if model in (parts.DEFAULT.name, *parts.names("policies")) or config.device.carrier is not None:
        return []
    from turntree.train.plan import memory

    ranks = ranks or int(os.environ.get("WORLD_SIZE") or 1)
    found = read_config(model)
    plan = asked(config, ranks, str(found.dtype))
    try:
        need = memory(found, plan)
    except ValueError as error:  # no causal language model
        raise InputError(first_line(error), field="model", hint="its memory cannot be planned here") from error
    lines = [*shown(need, plan), *_tokens(config, plan)]
    if gigabytes is not None:
        lines += advice(plan, need, gigabytes, lambda other: memory(found, other))
    return lines


def shown(need: Memory, plan: Planned) -> Iterator[str]:
    kind = f"LoRA of rank {plan.lora.rank}" if plan.lora else "all weights"
    ranks = f"{plan.ranks} ranks" if plan.ranks > 1 else "one process"
    yield f"{need.parameters / 1e6:,.1f} M parameters, {kind}, {ranks}, passes of {plan.tokens:,} tokens; GB on each:"
    names = ("weights", "masters", "moments", "gradients", "reference", "passes")
    yield "  " + ", ".join(f"{name} {getattr(need, name) / GB:.2f}" for name in names)
    yield f"  together {need.peak / GB:.2f}"
    if plan.rows:
        sampled = f"{plan.rows} sequences of {plan.context:,} tokens {need.caches / GB:.2f} (freed before a pass)"
        first = f"; all weights {need.whole / GB:.2f}, to sample with" if need.whole else ""
        yield f"  rank 0 samples: {sampled}{first}; together {_first(need, plan) / GB:.2f}"
    elif plan.ranks > 1:
        yield "  rank 0 reads the model; its whole weights are then in its main memory"


def _first(need: Memory, plan: Planned) -> int:
    """Of rank 0; where a server samples, its whole weights are in main memory."""
    return need.first if plan.rows else need.peak


def _tokens(config: Any, plan: Planned) -> Iterator[str]:
    if isinstance(config, SFTStageConfig):
        return
    rollouts, together = config.train.step_rollouts, max(1, plan.tokens // plan.context)
    most, window = rollouts * plan.context, (config.train.minibatch or config.train.groups) * config.train.group_size
    passes = -(-rollouts // window) * -(-window // (plan.ranks * together))
    yield f"  a step: {rollouts:,} rollouts, at most {most:,} tokens without sharing, {passes:,} passes a rank"


def advice(plan: Planned, need: Memory, gigabytes: float, measure: Callable[[Planned], Memory]) -> Iterator[str]:
    room = gigabytes * GB * (1 - FREE)
    if _first(need, plan) <= room:
        yield f"  fits on {plan.ranks} x {gigabytes:g} GB ({FREE:.0%} left free)"
        return
    yield f"  does not fit on {plan.ranks} x {gigabytes:g} GB ({FREE:.0%} left free)"
    tried: list[str] = []
    for key, other in _knobs(plan, plan.context):
        tried = [each for each in tried if not each.endswith(" GPUs")] + [key]
        found = measure(other)
        if _first(found, other) <= room:
            yield f"  fits with {', '.join(tried)}: {_first(found, other) / GB:.2f} GB"
            return
    yield f"  nor with {', '.join(tried)}: use a carrier (docs/scale.md), or a smaller model"
