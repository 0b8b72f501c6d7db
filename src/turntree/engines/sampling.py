"""Drawing tokens from logits, and what was the chance of it.

Every draw of a request is a function of its seed and the token's position in the completion: the uniforms are drawn
ahead from a counter-based generator keyed by the seed, and turned into tokens by inverting the distribution function.

Shape suffixes: N requests, T completion positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turntree.core.completion import GenerationRequest


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` float32 draws in [0, 1); the first k do not depend on `count`."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count, dtype=np.float32)


@dataclass(frozen=True)
class Laws:
    """The sampling laws of N requests as tensors, plus one harmless last row that padding points to."""

    temperature_N: Tensor  # 1 where greedy
    greedy_N: Tensor
    top_p_N: Tensor
    top_k_N: Tensor
    limit_N: Tensor  # tokens at most
    uniform_NT: Tensor
    truncates: bool

    @classmethod
    def of(cls, requests: Sequence[GenerationRequest], limits: Sequence[int], device: torch.device) -> Laws:
        laws = [request.sampling for request in requests]
        uniform_NT = np.zeros((len(laws) + 1, max(limits)), dtype=np.float32)
        for row, request, limit in zip(uniform_NT, requests, limits, strict=False):
            if request.sampling.temperature > 0:
                row[:limit] = uniforms(request.seed, limit)

        def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            temperature_N=column([law.temperature or 1.0 for law in laws] + [1.0], torch.float32),
            greedy_N=column([law.temperature == 0 for law in laws] + [True], torch.bool),
            top_p_N=column([law.top_p for law in laws] + [1.0], torch.float32),
            top_k_N=column([law.top_k for law in laws] + [0], torch.long),
            limit_N=column([*limits, 0], torch.long),
            uniform_NT=torch.from_numpy(uniform_NT).to(device),
            truncates=any(law.temperature > 0 and (law.top_p < 1 or law.top_k) for law in laws),
        )


@dataclass(frozen=True)
class Draw:
    """One sampled token per row, its log-probability and the entropy of its distribution (nats), each [rows]."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def draw(logits_RV: Tensor, laws: Laws, request_R: Tensor, position: int) -> Draw:
    """Sample completion position `position` of the requests `request_R` from their next-token logits.

    Statistics are float32 over the full vocabulary: of softmax(logits / temperature), at temperature 1 for greedy
    rows. Where top-k or top-p truncates, they are those of the truncated, renormalised distribution.
    """
    logits_RV = logits_RV.float() / laws.temperature_N[request_R, None]
    greedy_R = laws.greedy_N[request_R]
    if laws.truncates:
        kept_RV = nucleus(logits_RV, laws.top_p_N[request_R], laws.top_k_N[request_R])
        logits_RV = logits_RV.masked_fill(~(kept_RV | greedy_R[:, None]), float("-inf"))
    logprobs_RV = torch.log_softmax(logits_RV, dim=-1)
    probs_RV = logprobs_RV.exp()
    tokens_R = torch.where(greedy_R, logits_RV.argmax(-1), invert(probs_RV, laws.uniform_NT[request_R, position]))
    entropies_R = -(probs_RV * logprobs_RV.clamp_min(torch.finfo(torch.float32).min)).sum(-1)  # 0 log 0 = 0
    return Draw(tokens_R, logprobs_RV.gather(-1, tokens_R[:, None])[:, 0], entropies_R)


def invert(probs_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token whose slice of the distribution function holds the uniform; never one of probability zero."""
    cumulative_RV = probs_RV.cumsum(-1)
    total_R1 = cumulative_RV[:, -1:]
    # below the total even after rounding, so that the search ends at a token with mass
    below_R1 = torch.minimum(uniform_R[:, None] * total_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RV, below_R1, right=True)[:, 0].clamp_max(probs_RV.shape[-1] - 1)


def nucleus(logits_RV: Tensor, top_p_R: Tensor, top_k_R: Tensor) -> Tensor:
    """Which tokens stay: the `top_k` likeliest (0: all), of these the fewest whose mass reaches `top_p`."""
    sorted_RV, order_RV = logits_RV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logits_RV.shape[-1], device=logits_RV.device)
    in_k_RV = (rank_V < top_k_R[:, None]) | (top_k_R[:, None] == 0)
    probs_RV = sorted_RV.masked_fill(~in_k_RV, float("-inf")).softmax(-1)
    mass_before_RV = probs_RV.cumsum(-1) - probs_RV
    kept_RV = in_k_RV & ((mass_before_RV < top_p_R[:, None]) | (top_p_R[:, None] >= 1))
    return torch.zeros_like(kept_RV).scatter_(-1, order_RV, kept_RV)
