"""A server with prices as the carrier of a run, and what a run comes to there before it begins: the most tokens that
its configuration allows."""

from __future__ import annotations

from typing import Any

from turntree.core.config import Part
from turntree.core.cost import Cost
from turntree.engine.limits import Prices, TinkerConfig
from turntree.stages.config import Device, EvaluateConfig, ProfileStageConfig, TrainOnlineConfig, TrainPivotConfig


def most(config: Any) -> Cost | None:
    """The most tokens of a run, without its held-out checks; None where they depend on files. A run stays far below it
    where its prompts are shorter than the longest that it allows."""
    if isinstance(config, TrainPivotConfig):
        train = config.train
        rollouts, new = train.steps * train.step_rollouts, train.sampling.max_tokens
        return Cost(
            prefilled_tokens=rollouts * (train.max_tokens - new),
            decoded_tokens=rollouts * new,
            trained_tokens=rollouts * train.max_tokens * train.updates,
            scored_tokens=rollouts * train.max_tokens * bool(train.loss.kl_coefficient),
        )
    if isinstance(config, TrainOnlineConfig):
        train = config.train
        rollouts = train.iterations * train.step_rollouts
        turns, new = rollouts * train.max_turns, train.sampling.max_tokens
        return Cost(
            prefilled_tokens=turns * train.max_context,
            decoded_tokens=turns * new,
            trained_tokens=rollouts * train.max_context * train.updates,
            scored_tokens=rollouts * train.max_context * bool(train.loss.kl_coefficient),
        )
    if isinstance(config, EvaluateConfig):
        turns = config.count * (config.samples + config.greedy) * config.max_turns
        return Cost(prefilled_tokens=turns * config.max_context, decoded_tokens=turns * config.max_tokens)
    if isinstance(config, ProfileStageConfig) and config.limit:
        rollouts, new = config.limit * config.profile.rollouts, config.profile.sampling.max_tokens
        return Cost(prefilled_tokens=rollouts * (config.profile.max_path - new), decoded_tokens=rollouts * new)
    return None


def told(config: Any) -> list[str]:
    """The estimate of a configuration with a carrier that has prices, in a line; nothing for others."""
    carrier: Part | None = getattr(getattr(config, "device", None), "carrier", None)
    asked = carrier.options.get("prices") if carrier is not None else None
    if not asked or not any(asked.values()):
        return []
    cost = most(config)
    if cost is None:
        return ["the bill depends on the files that it reads, and is not estimated"]
    bill = Prices(**asked).bill(cost)
    counts = {
        "prompt": cost.prefilled_tokens + cost.scored_tokens,
        "sampled": cost.decoded_tokens,
        "trained": cost.trained_tokens,
    }
    tokens = ", ".join(f"{count / 1e6:,.1f} M {name}" for name, count in counts.items() if count)
    parts = " + ".join(f"{bill[name]:,.2f}" for name in ("prefill", "sample", "train"))
    return [f"at most {tokens} tokens without checks: {parts} = {bill['total']:,.2f} by your prices"]


def tinker(model: str, device: Device, config: TinkerConfig) -> Any:
    """The policy `model` on a server of Tinker's API (kind `carriers`)."""
    from turntree.stages.tinker import open_policy

    return open_policy(model, device, config)
