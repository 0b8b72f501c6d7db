"""Sampling tokens from logits, with their log-probabilities and entropies.

Every draw of a request is a function of its seed and the token's position in the completion: the uniforms are drawn
ahead from a counter-based generator keyed by the seed, and turned into tokens by inverting the distribution function.

Shape suffixes: N requests, R rows of logits, T completion positions, V vocabulary, K chunks of it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from turntree.core.completion import GenerationRequest, Guide

_CHUNK = 256  # tokens of the vocabulary whose mass is summed before the search


def uniforms(seed: int, count: int) -> np.ndarray:
    """`count` float32 draws in [0, 1); the first k do not depend on `count`."""
    return np.random.Generator(np.random.Philox(key=seed % 2**64)).random(count, dtype=np.float32)


def uniforms_of(requests: Sequence[GenerationRequest], limits: Sequence[int]) -> Tensor:
    """[N, T] the draws of requests that sample at most `limits` tokens."""
    uniform_NT = np.zeros((len(requests), max(limits)), dtype=np.float32)
    for row, request, limit in zip(uniform_NT, requests, limits, strict=True):
        row[:limit] = uniforms(request.seed, limit)
    return torch.from_numpy(uniform_NT)


@dataclass(frozen=True)
class Draw:
    """One sampled token per row, its log-probability and the entropy of its distribution (nats), each [R]."""

    tokens: Tensor
    logprobs: Tensor
    entropies: Tensor


def draw(logits_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor, temperatures: Collection[float]) -> Draw:
    """Sample from next-token logits, row by row; temperature 0 is greedy. `temperatures` are those of all requests,
    which say what work the rows need.

    Statistics are float32 over the full vocabulary: of softmax(logits / temperature), at temperature 1 for greedy
    rows.
    """
    logits_RV, greedy_R = logits_RV.float(), temperature_R == 0
    if not {0, 1}.issuperset(temperatures):
        logits_RV = logits_RV / temperature_R.masked_fill(greedy_R, 1)[:, None]
    # Few passes over [R, V]: at small models they cost as much as the output layer. The clamp makes 0 log 0 = 0.
    shifted_RV = (logits_RV - logits_RV.amax(-1, keepdim=True)).clamp_(min=-1e4)
    mass_RV = shifted_RV.exp()
    total_R = mass_RV.sum(-1)
    tokens_R = invert(mass_RV, uniform_R)
    if 0 in temperatures:
        tokens_R = torch.where(greedy_R, logits_RV.argmax(-1), tokens_R)
    logprobs_R = shifted_RV.gather(-1, tokens_R[:, None])[:, 0] - total_R.log()
    entropies_R = total_R.log() - torch.linalg.vecdot(mass_RV, shifted_RV) / total_R
    return Draw(tokens_R, logprobs_R.clamp_max(0.0), entropies_R.clamp_min(0.0))


def restricted(logits_RV: Tensor, guides: Mapping[int, Guide]) -> Tensor:
    """The logits with those of the tokens that the guides of some rows forbid at minus infinity."""
    masks = {row: mask for row, guide in guides.items() if (mask := guide.allowed()) is not None}
    if not masks:
        return logits_RV
    logits_RV, size = logits_RV.clone(), logits_RV.shape[-1]
    for row, mask in masks.items():
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")[:size]
        forbidden_V = torch.ones(size, dtype=torch.bool)
        forbidden_V[: len(bits)] = torch.from_numpy(bits == 0)
        logits_RV[row].masked_fill_(forbidden_V.to(logits_RV.device), float("-inf"))
    return logits_RV


def ended(tokens_R: Tensor, guides: Mapping[int, Guide]) -> set[int]:
    """The rows whose guides end them with these tokens."""
    return {row for row, guide in guides.items() if guide.take(int(tokens_R[row]))}


def invert(mass_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """The token whose slice of the distribution function holds the uniform; never one of mass zero. `mass_RV` need
    not sum to one. Searched in two steps, chunk and token, so that one sum over the vocabulary does."""
    size = mass_RV.shape[-1]
    whole = size - size % _CHUNK
    chunks_RK = mass_RV[:, :whole].unflatten(1, (-1, _CHUNK)).sum(-1)
    if whole < size:
        chunks_RK = torch.cat([chunks_RK, mass_RV[:, whole:].sum(-1, keepdim=True)], dim=1)
    cumulative_RK = chunks_RK.cumsum(-1)
    chunk_R1 = _search(cumulative_RK, uniform_R[:, None] * cumulative_RK[:, -1:])
    before_R1 = (cumulative_RK - chunks_RK).gather(1, chunk_R1)
    token_RC = chunk_R1 * _CHUNK + torch.arange(_CHUNK, device=mass_RV.device)
    inside_RC = mass_RV.gather(1, token_RC.clamp_max(size - 1)).masked_fill_(token_RC >= size, 0.0).cumsum(-1)
    wanted_R1 = uniform_R[:, None] * cumulative_RK[:, -1:] - before_R1
    return (chunk_R1 * _CHUNK + _search(inside_RC, wanted_R1.clamp_min(0.0)))[:, 0].clamp_max(size - 1)


def _search(cumulative_RK: Tensor, wanted_R1: Tensor) -> Tensor:
    """The first entry above the wanted value, which is kept below the total even after rounding: the entry has mass."""
    total_R1 = cumulative_RK[:, -1:]
    below_R1 = torch.minimum(wanted_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
    return torch.searchsorted(cumulative_RK, below_R1, right=True).clamp_max(cumulative_RK.shape[1] - 1)
