"""A server with prices as the carrier of a run, and what a run comes to there before it begins: the most tokens that
its configuration allows."""

from __future__ import annotations

import math
from typing import Any

from turntree.core.config import Part
from turntree.core.cost import Cost
from turntree.engine.limits import Prices, TinkerConfig
from turntree.stages.config import Device, EvaluateConfig, ProfileStageConfig, TrainOnlineConfig, TrainPivotConfig
from turntree.train.config import ReinforcedConfig


def most(config: Any) -> Cost | None:
    """The most tokens of a run, without its held-out checks; None where they depend on files, or on what searches find.
    A run stays far below it where its prompts are shorter than the longest that it allows."""
    if isinstance(config, TrainPivotConfig) and config.states == "expert":
        train = config.train
        rollouts, new, longest = train.steps * train.step_rollouts, train.sampling.max_tokens, train.max_tokens
        sampled = Cost(prefilled_tokens=rollouts * (longest - new), decoded_tokens=rollouts * new)
        return sampled + _trained(train, rollouts * longest)
    if isinstance(config, TrainOnlineConfig):
        train = config.train
        refilled = 1 + max((part.refill_cap for part in config.build_filters()), default=0)
        rollouts = math.ceil(train.iterations * train.step_rollouts * refilled)
        turns, new, longest = rollouts * train.max_turns, train.sampling.max_tokens, train.max_context
        sampled = Cost(prefilled_tokens=turns * longest, decoded_tokens=turns * new)
        return sampled + _trained(train, rollouts * longest)
    if isinstance(config, EvaluateConfig):
        turns = config.count * (config.samples + config.greedy) * config.max_turns
        return Cost(prefilled_tokens=turns * config.max_context, decoded_tokens=turns * config.max_tokens)
    if isinstance(config, ProfileStageConfig) and config.limit:
        rollouts, new = config.limit * config.profile.rollouts, config.profile.sampling.max_tokens
        return Cost(prefilled_tokens=rollouts * (config.profile.max_path - new), decoded_tokens=rollouts * new)
    return None


def _trained(train: ReinforcedConfig, tokens: int) -> Cost:
    """What training on so many tokens sends. With a KL term of one's own every row is sent twice where there are
    several steps: for its log-probabilities of now, and to be trained on."""
    kl = bool(train.loss.kl_coefficient)
    twice = 1 + (kl and (train.updates > 1 or train.minibatch is not None))
    return Cost(trained_tokens=tokens * train.updates * twice, scored_tokens=tokens * kl)


def told(config: Any) -> list[str]:
    """The estimate of a configuration with a carrier that has prices, in a line; nothing for others."""
    carrier: Part | None = getattr(getattr(config, "device", None), "carrier", None)
    asked = carrier.options.get("prices") if carrier is not None else None
    if not asked or not any(asked.values()):
        return []
    cost = most(config)
    if cost is None:
        return ["the bill depends on what it reads or searches, and is not estimated"]
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
