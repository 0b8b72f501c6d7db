"""Scoring: the log-probability of every trained slot, from one pass over unique tokens.

Shape suffixes as in `training.packing`; D is the width of a hidden state, C a chunk of S.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turntree.core.errors import InputError
from turntree.training.packing import PackedBatch

# Above this many logits the head runs in chunks that are computed again in the backward pass (256 MiB in float32);
# below it, a second head pass would cost more than the memory it saves.
CHUNK_LOGITS = 1 << 26


@dataclass(frozen=True)
class SlotScores:
    """Of the tempered distribution at each trained slot. `entropies_S` (nats) carries no gradient."""

    logprobs_S: Tensor
    entropies_S: Tensor
    log_softmax_SV: Tensor | None = None


def policy_logprobs(model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[token] at every trained slot, [S], in nats."""
    return slot_scores(model, batch, temperature=temperature).logprobs_S


def slot_scores(
    model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0, full: bool = False
) -> SlotScores:
    """Scores of the trained slots; `full` also keeps all S x V log-probabilities (for the exact KL: small V only).

    The decoder runs once over the packed rows; hidden states are gathered at the *path* predecessors of trained
    slots, and only those go through the head. Raises `InputError` for an attention backend that would misread the
    mask.
    """
    hidden_SD = _hidden_states(model, batch)
    chunk = max(1, CHUNK_LOGITS // vocabulary_size(model))
    if full or len(hidden_SD) <= chunk:
        return SlotScores(*_score_chunk(model, hidden_SD, batch.target_S, temperature, full))
    parts: list[tuple[Tensor, Tensor, Tensor | None]] = [
        checkpoint(_score_chunk, model, hidden_CD, target_C, temperature, False, use_reentrant=False)
        for hidden_CD, target_C in zip(hidden_SD.split(chunk), batch.target_S.split(chunk), strict=True)
    ]
    return SlotScores(torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts]))


@torch.no_grad()
def with_old_logprobs(
    model: PreTrainedModel, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> list[PackedBatch]:
    """The batches with `old_logprobs` recomputed by the trainer, as the model is now (start of an update).

    Needed when the engine's numbers differ from the trainer's, or when its weights were older; the sampling
    log-probabilities stay, for the truncated importance weight.
    """
    moved = [batch.to(model.device) for batch in batches]
    return [
        dataclasses.replace(batch, old_logprobs_T=policy_logprobs(model, batch, temperature=temperature)[batch.slot_T])
        for batch in moved
    ]


@torch.no_grad()
def with_reference_logprobs(
    reference_model: PreTrainedModel, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> list[PackedBatch]:
    """The batches with the frozen reference's log-probabilities, computed once for all epochs over them."""
    moved = [batch.to(reference_model.device) for batch in batches]
    return [
        dataclasses.replace(
            batch, reference_logprobs_S=policy_logprobs(reference_model, batch, temperature=temperature)
        )
        for batch in moved
    ]


def _hidden_states(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Last hidden states at the predecessors of trained slots, [S, D]."""
    if batch.is_flat:
        masked: dict[str, Any] = {"attention_mask": None}
    else:
        check_attention_backend(model)
        masked = {"attention_mask": batch.attention_mask(), "position_ids": batch.positions_BL}
    output = model.get_decoder()(input_ids=batch.tokens_BL, use_cache=False, **masked)
    hidden_BLD: Tensor = output.last_hidden_state
    return hidden_BLD.flatten(0, 1)[batch.predecessor_S]


def check_attention_backend(model: PreTrainedModel) -> None:
    """Eager attention adds a boolean mask as 0 and 1 instead of masking with it: silently wrong, so refused."""
    backend = model.config._attn_implementation
    if backend != "sdpa":
        raise InputError(
            f"attention backend {backend!r} does not read the boolean tree mask",
            field="attn_implementation",
            hint='load the model with attn_implementation="sdpa"',
        )


def _score_chunk(
    model: PreTrainedModel, hidden_CD: Tensor, target_C: Tensor, temperature: float, full: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    logits_CV = head_logits(model, hidden_CD)
    if logits_CV.dtype in (torch.bfloat16, torch.float16):
        logits_CV = logits_CV.float()
    log_softmax_CV = torch.log_softmax(logits_CV / temperature, dim=-1)
    logprobs_C = log_softmax_CV.gather(1, target_C[:, None]).squeeze(1)
    with torch.no_grad():
        entropies_C = -(log_softmax_CV.exp() * log_softmax_CV).sum(-1)
    return logprobs_C, entropies_C, log_softmax_CV if full else None


def head_logits(model: PreTrainedModel, hidden_CD: Tensor) -> Tensor:
    """The model's own head with its own scaling and soft-cap, on gathered hidden states.

    Cohere and Falcon-H1 multiply, Granite divides, Gemma soft-caps. What this does not know is caught at load by
    `training.isolation.check_path_isolation`.
    """
    config = model.config.get_text_config()
    logits_CV: Tensor = _head(model)(hidden_CD)
    for multiplier in ("logit_scale", "lm_head_multiplier"):
        if isinstance(getattr(config, multiplier, None), int | float):
            logits_CV = logits_CV * getattr(config, multiplier)
    if isinstance(getattr(config, "logits_scaling", None), int | float):
        logits_CV = logits_CV / config.logits_scaling
    if getattr(config, "final_logit_softcapping", None):
        cap = config.final_logit_softcapping
        logits_CV = cap * torch.tanh(logits_CV / cap)
    return logits_CV


def vocabulary_size(model: PreTrainedModel) -> int:
    """Rows of the output head (at least the tokenizer's size)."""
    return int(_head(model).weight.shape[0])


def _head(model: PreTrainedModel) -> torch.nn.Linear:
    head = model.get_output_embeddings()
    if head is None:
        raise InputError(f"{type(model).__name__} has no language-model head", hint="load it as a causal LM")
    return cast(torch.nn.Linear, head)
