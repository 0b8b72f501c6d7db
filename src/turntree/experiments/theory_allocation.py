"""The variance of a batch's gradient when rollouts are shared out among states in different ways, for `theory`.

A  actions of a state     D  drawn groups     G  rollouts of a group
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.advantages.comparisons import Advantages, grpo_advantages, rloo
from turntree.experiments.config import TheoryConfig
from turntree.experiments.theory_finite import slope_of_groups
from turntree.experiments.theory_spaces import Floats, Space, inner_products


def allocation(
    studied: Sequence[Space], sure: Sequence[Space], generator: np.random.Generator, config: TheoryConfig
) -> dict[str, Any]:
    """The variance of the gradient of mean success (RLOO, which is unbiased) at equal tokens, under rules that give
    states groups of different sizes; states without variance are part of the mean, and of the cost where a rule plays
    them. A rule that leaves nothing of the gradient is left out. `scale` and `bias` of what a rule estimates as in
    docs/design/credit.md."""
    budget = config.group_size * sum(space.tokens for space in (*studied, *sure))
    moments = [_moments(space) for space in studied]
    deviations = [math.sqrt(space.variance / space.tokens) for space in studied]
    spread = [
        math.sqrt(max(0.0, m["own"] - m["square"]) / space.tokens) for m, space in zip(moments, studied, strict=True)
    ]
    hard = [float(space.mean < 0.6) for space in studied]
    lost = config.group_size * sum(space.tokens for space in sure)
    rules: dict[str, tuple[Sequence[float], float]] = {
        "equal": ([1.0] * len(studied), budget - lost),
        "variance above zero": ([1.0] * len(studied), budget),
        "by deviation of the reward": (deviations, budget),
        "by deviation of the gradient": (spread, budget),
        "variance above zero, mean below 0.6": (hard, budget),
    }
    gradients = diagonal([(s.chances * (s.rewards - s.mean))[None] for s in studied])
    inner = (
        gradients
        @ inner_products(np.concatenate([s.scores_AP for s in studied if s.scores_AP is not None]))
        @ gradients.T
    )
    rows: list[dict[str, Any]] = []
    for name, (weights, tokens) in rules.items():
        sizes = _sizes(weights, [space.tokens for space in studied], tokens)
        kept = np.array([size > 0 for size in sizes], dtype=float)
        scale = float(kept @ inner.sum(axis=1) / inner.sum())
        if scale <= 0:  # no state is left, or those left point the other way
            continue
        found = _rule(studied, moments, sizes, generator, config.draws)
        across = math.sqrt(max(0.0, float(kept @ inner @ kept) / inner.sum() - scale**2)) / scale
        played = sum(size * space.tokens for size, space in zip(sizes, studied, strict=True)) + budget - tokens
        unit = played / (scale**2 * inner.sum())
        rows.append(
            {
                "rule": name,
                "sizes": sizes,
                "tokens": played,
                "scale": scale,
                "bias": across,
                **{key: value * unit for key, value in found.items()},
            }
        )
    tilted = np.array([slope_of_groups(space.mean, config.group_size) for space in studied])
    cosine = tilted @ inner.sum(axis=1) / math.sqrt(float(tilted @ inner @ tilted) * inner.sum())
    return {"rules": rows, "cosine_of_grpo": float(cosine)}


def _moments(space: Space) -> dict[str, float]:
    """Of one sample: E[(r - q)^2 |s|^2], |g|^2 and Var(r) E|s|^2."""
    assert space.scores_AP is not None
    inner, centred = inner_products(space.scores_AP), space.rewards - space.mean
    lengths, gradient = np.diag(inner), space.chances * centred
    return {
        "own": float(space.chances @ (centred**2 * lengths)),
        "square": float(gradient @ inner @ gradient),
        "apart": space.variance * float(space.chances @ lengths),
    }


def _sizes(weights: Sequence[float], lengths: Sequence[float], tokens: float) -> list[int]:
    """Whole group sizes, at least 2 where the weight is above 0, of about as many tokens."""
    least = np.array([2.0 if weight > 0 else 0.0 for weight in weights])
    low, high = 0.0, 1e6
    for _ in range(100):
        middle = (low + high) / 2
        found = np.maximum(least, middle * np.array(weights))
        low, high = (middle, high) if found @ np.array(lengths) < tokens else (low, middle)
    return [round(each) for each in np.maximum(least, low * np.array(weights))]


def _rule(
    studied: Sequence[Space], moments: Sequence[dict[str, float]], sizes: Sequence[int], generator: Any, draws: int
) -> dict[str, float]:
    """The summed variance of the states' gradients: by the variance of a sample covariance, and of drawn groups."""
    predicted = measured = 0.0
    for space, of, size in zip(studied, moments, sizes, strict=True):
        if size < 2:
            continue
        assert space.scores_AP is not None
        predicted += (of["own"] - of["square"]) / size + (of["apart"] + of["square"]) / (size * (size - 1))
        drawn = generator.choice(len(space.chances), size=(draws, size), p=space.chances)
        off = coefficients(space, drawn, rloo) - (space.chances * (space.rewards - space.mean))[None]
        measured += float(np.einsum("da,ab,db->d", off, inner_products(space.scores_AP), off).mean())
    return {"predicted": predicted, "measured": measured}


def coefficients(space: Space, drawn_DG: NDArray[np.int64], advantages: Advantages = grpo_advantages) -> Floats:
    """[D, A]: the gradient of each group as weights of the scores, (1/G) sum of advantages."""
    found = np.zeros((len(drawn_DG), len(space.chances)))
    for row, drawn in zip(found, drawn_DG, strict=True):
        np.add.at(row, drawn, np.array(advantages(list(space.rewards[drawn]))) / len(drawn))
    return found


def diagonal(blocks: Sequence[Floats]) -> Floats:
    """The blocks along the diagonal of a matrix of zeros."""
    found = np.zeros((sum(len(b) for b in blocks), sum(b.shape[1] for b in blocks)))
    row = column = 0
    for block in blocks:
        found[row : row + len(block), column : column + block.shape[1]] = block
        row, column = row + len(block), column + block.shape[1]
    return found
