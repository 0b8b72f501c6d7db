"""Checks before sampling: whether a decoder can be run with keys and values addressed by position, and whether what it
samples has the log-probabilities of plain calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from transformers import PreTrainedModel

from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.errors import InputError

Generate = Callable[[Sequence[GenerationRequest]], list[Completion]]

_STANDARD = "use a decoder with rotary or absolute positions and a standard cache"


def positions_of(model: PreTrainedModel) -> int | None:
    """The positions that the model has; None for one that counts none (Mamba, BLOOM, MPT)."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def context_of(model: PreTrainedModel) -> int:
    """As `positions_of`. Raises `InputError` for a model that counts none."""
    own = positions_of(model)
    if own is None:
        raise InputError(f"the config of {type(model).__name__} has no max_position_embeddings", hint=_STANDARD)
    return own


@torch.inference_mode()
def score(
    model: PreTrainedModel, prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0
) -> tuple[list[float], list[float]]:
    """The log-probabilities of `ids` behind `prompt` and those of the likeliest tokens in their places, in nats, by a
    plain call of the model."""
    row = torch.tensor([[*prompt, *ids]], device=model.device)
    logits = model(input_ids=row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    scores = (logits / temperature).log_softmax(-1)
    return scores.gather(1, row[0, len(prompt) :, None])[:, 0].tolist(), scores.max(-1).values.tolist()


def check_attention(model: PreTrainedModel, max_context: int) -> None:
    """Raise `InputError` unless every layer is full attention over `max_context` tokens, computed by an implementation
    that takes a 4-D mask."""
    check_window(model, max_context, field="max_context")
    if (implementation := model.config._attn_implementation) not in ("sdpa", "eager"):
        raise InputError(
            f"attention implementation {implementation!r} takes no 4-D mask", hint="load the model with sdpa or eager"
        )


def check_window(model: PreTrainedModel, tokens: int, *, field: str) -> None:
    """Raise `InputError` unless every layer is full attention over `tokens` tokens (a wider sliding window is). `field`
    is the setting that bounds them."""
    config = model.config.get_text_config()
    name, window = type(model).__name__, getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    slides = "sliding_attention" in kinds or not hasattr(config, "layer_types")
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise InputError(f"{name} has layers of {', '.join(sorted(unknown))}", hint="use a decoder with full attention")
    if slides and window is not None and window < tokens:
        raise InputError(f"{name} attends to the last {window} tokens only", field=field, hint=f"use at most {window}")
    check_positions(model, tokens, field=field)


def check_positions(model: PreTrainedModel, tokens: int, *, field: str) -> None:
    """Raise `InputError` where rows of up to `tokens` tokens could change each other's positions: LongRoPE and dynamic
    scaling choose the frequencies of a whole batch by its longest row, beyond a length that they name."""
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    for rope in [given, *(each for each in given.values() if isinstance(each, dict))]:
        if (kind := rope.get("rope_type")) not in ("longrope", "dynamic"):
            continue
        own = getattr(config, "original_max_position_embeddings", None) or config.max_position_embeddings
        limit = int(rope.get("original_max_position_embeddings") or own)
        if limit < tokens:
            problem = f"{type(model).__name__} has other positions in batches with more than {limit} tokens in a row"
            raise InputError(f"{problem} ({kind})", field=field, hint=f"use at most {limit}")


def check_generation(model: PreTrainedModel, generate: Generate, *, how: str) -> None:
    """Compare two small waves (siblings, mixed lengths, a prefix, an extension) with plain calls of the model.

    Raises `InputError` with the measured error and `how` requests are computed together. This catches any model that
    computes positions from slots (ALiBi), keeps other state or ignores the mask.
    """
    vocabulary = model.config.get_text_config().vocab_size
    long = tuple((7 * k + 3) % vocabulary for k in range(24))
    first = [_request(ids, seed) for seed, ids in enumerate((long, long, long[:5], long[3:9]))]
    try:
        answers = generate(first)
        second = [
            _request(request.prompt_ids + answer.token_ids + long[:2], seed)
            for seed, (request, answer) in enumerate(zip(first, answers, strict=True))
        ]
        errors = [
            error
            for request, answer in zip(first + second, answers + generate(second), strict=True)
            for error in _errors(model, request, answer)
        ]
    except (ValueError, IndexError, TypeError, RuntimeError, AttributeError) as error:
        raise InputError(f"{type(model).__name__} cannot be run {how} ({error})", hint=_STANDARD) from error
    # Rounding to bfloat16 can move one log-probability by 0.6 (a SmolLM2 after SFT: mean 0.07, 0 in float32); positions
    # by slot move them by 1.4 to 2.0 on average.
    exact = model.dtype == torch.float32
    error, tolerance = (max(errors), 1e-3) if exact else (sum(errors) / len(errors), 0.3)
    if not error < tolerance:
        raise InputError(
            f"{type(model).__name__}: log-probabilities {how} are off by {error:.2g}",
            hint="use a decoder with full attention and positions given by position_ids",
        )


def _request(ids: tuple[int, ...], seed: int) -> GenerationRequest:
    return GenerationRequest(prompt_ids=ids, sampling=Sampling(max_tokens=3), seed=seed, retain=True)


def _errors(model: PreTrainedModel, request: GenerationRequest, answer: Completion) -> list[float]:
    """The differences to the log-probabilities of a plain call."""
    plain, _ = score(model, request.prompt_ids, answer.token_ids)
    return [abs(theirs - ours) for theirs, ours in zip(plain, answer.logprobs, strict=True)]
