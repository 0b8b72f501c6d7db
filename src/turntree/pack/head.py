"""The output head: log-probability and entropy of chosen tokens, in one pass over the logits and one back.

Shape suffixes: U rows (distinct hidden states), S scored tokens, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

from turntree.core.errors import InputError

# Logits of one tile on a CPU (1 MiB in float32): the passes over it stay in cache. A GPU takes all rows in one: a tile
# a row was 1.2 of the 1.4 seconds of an update at 4,096 rows of Qwen3's vocabulary on an H200. So does a plan of its
# memory (`train.plan`), whose tensors have no values.
_TILE = 1 << 18


def head_logits(model: PreTrainedModel, hidden_UD: Tensor) -> Tensor:
    """The model's own head with its own scaling and soft-cap, on gathered hidden states.

    Cohere and Falcon-H1 multiply, Granite divides, Gemma soft-caps. Other heads are caught at load by
    `train.isolation.check_path_isolation`.
    """
    config = model.config.get_text_config()
    logits_UV: Tensor = _head(model)(hidden_UD)
    for multiplier in ("logit_scale", "lm_head_multiplier"):
        if isinstance(getattr(config, multiplier, None), int | float):
            logits_UV = logits_UV * getattr(config, multiplier)
    if isinstance(getattr(config, "logits_scaling", None), int | float):
        logits_UV = logits_UV / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):
        cap = config.final_logit_softcapping
        logits_UV = cap * torch.tanh(logits_UV / cap)
    return logits_UV


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The layers below the output head. Transformers gives the whole model for Llama 4, and for ModernBERT's decoder
    the head itself. Raises `InputError` for a model that names none."""
    head, named = _head(model), model.get_decoder()
    for found in (named, getattr(named, "model", None), getattr(model, "model", None)):
        if isinstance(found, PreTrainedModel) and found.get_output_embeddings() is not head:
            return found
    raise InputError(f"{type(model).__name__} names no layers below its head", hint="use another decoder")


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the output head (at least the tokenizer's size)."""
    return int(_head(model).weight.shape[0])


def token_scores(logits_UV: Tensor, row_S: Tensor, target_S: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """log softmax(logits / temperature)[row, target] and the entropy of that row, both [S] in nats (float32 at least).

    The entropy carries no gradient. Can be differentiated once: the backward pass overwrites what was saved.
    """
    return _TokenScores.apply(logits_UV, row_S, target_S, temperature)  # pyright: ignore[reportReturnType]


class _TokenScores(torch.autograd.Function):
    """Keeps exp(logits - max), the only [U, V] tensor, and turns it into the gradient in place."""

    @staticmethod
    def forward(
        ctx: Any, logits_UV: Tensor, row_S: Tensor, target_S: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits_UV.dtype, torch.float32)
        rows, vocabulary = logits_UV.shape
        kept_UV = logits_UV.new_empty((rows, vocabulary) if ctx.needs_input_grad[0] else (0, vocabulary), dtype=wide)
        top_U, total_U, mean_U = (logits_UV.new_empty(rows, dtype=wide) for _ in range(3))
        cached = logits_UV.device.type == "cpu" and not isinstance(logits_UV, FakeTensor)
        tile = max(1, _TILE // vocabulary if cached else rows)
        for start in range(0, rows, tile):
            here = slice(start, start + tile)
            scaled = logits_UV[here].to(wide)
            top_U[here] = scaled.amax(-1)
            scaled = scaled - top_U[here, None]
            if temperature != 1.0:
                scaled /= temperature
            weights = torch.exp(scaled, out=kept_UV[here]) if len(kept_UV) else scaled.exp()
            total_U[here] = weights.sum(-1)
            mean_U[here] = torch.linalg.vecdot(weights, scaled) / total_U[here]
        log_total_U = total_U.log()
        logprobs_S = (logits_UV[row_S, target_S].to(wide) - top_U[row_S]) / temperature - log_total_U[row_S]
        entropies_S = (log_total_U - mean_U)[row_S]
        ctx.save_for_backward(kept_UV, total_U, row_S, target_S)
        ctx.temperature, ctx.dtype = temperature, logits_UV.dtype
        ctx.mark_non_differentiable(entropies_S)
        return logprobs_S, entropies_S

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, None, None, None]:
        kept_UV, total_U, row_S, target_S = ctx.saved_tensors
        gradient_S = gradients[0] / ctx.temperature
        gradient_U = torch.zeros_like(total_U).index_add_(0, row_S, gradient_S)
        kept_UV *= (-gradient_U / total_U)[:, None]
        kept_UV.index_put_((row_S, target_S), gradient_S, accumulate=True)
        return kept_UV.to(ctx.dtype), None, None, None


def _head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"{type(model).__name__} has no language-model head", hint="load it as a causal LM")
    return cast(torch.nn.Linear, head)
