"""The reference of the engine tests: a plain call of the stock model, one row at a time."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from turntree.core.completion import Completion, GenerationRequest, Sampling


def plain_statistics(
    model: PreTrainedModel, request: GenerationRequest, token_ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of `token_ids` after the prompt, from `model(input_ids)`."""
    ids = torch.tensor([[*request.prompt_ids, *token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(request.prompt_ids) - 1 : -1].float()
    logprobs = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


def worst_error(
    model: PreTrainedModel, requests: Sequence[GenerationRequest], completions: Sequence[Completion]
) -> float:
    """The largest difference of a log-probability or entropy to the plain model, over a whole wave."""
    worst = 0.0
    for request, completion in zip(requests, completions, strict=True):
        logprobs, entropies = plain_statistics(model, request, completion.token_ids)
        worst = max(
            worst,
            float((logprobs - torch.tensor(completion.logprobs)).abs().max()),
            float((entropies - torch.tensor(completion.entropies)).abs().max()),
        )
    return worst


def prompt(length: int, seed: int, vocab_size: int = 384) -> tuple[int, ...]:
    """Random token ids."""
    generator = random.Random(seed)
    return tuple(generator.randrange(vocab_size) for _ in range(length))


def ask(
    prompt_ids: tuple[int, ...],
    seed: int = 0,
    *,
    max_tokens: int = 6,
    temperature: float = 1.0,
    retain: bool = False,
) -> GenerationRequest:
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens)
    return GenerationRequest(prompt_ids=prompt_ids, sampling=sampling, seed=seed, retain=retain)


def prefilled(completions: Sequence[Completion]) -> int:
    return sum(completion.cost.prefilled_tokens for completion in completions)


def reused(completions: Sequence[Completion]) -> int:
    return sum(completion.cost.reused_tokens for completion in completions)
