"""Scoring: the log-probability of every trained slot, from one pass over unique tokens.

Shape suffixes as in `pack.packing`; U is the number of distinct hidden states that predict a trained slot, D their
width.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.engine.routes import again, replayed, routes_of
from turntree.engine.teacher import ServedPolicy
from turntree.pack.attention import Layout, decoder_inputs
from turntree.pack.carried import carried_states, is_carried
from turntree.pack.head import decoder_of, head_logits, token_scores, vocabulary_size
from turntree.pack.packing import PackedBatch
from turntree.pack.rows import rows
from turntree.train.lora import Reference, reference_model
from turntree.train.sharded import in_pass

# Above this many logits the head runs in chunks that are computed again in the backward pass (256 MiB in float32);
# below it, a second head pass would cost more than the memory it saves.
CHUNK_LOGITS = 1 << 26


@dataclass(frozen=True)
class SlotScores:
    """Of the tempered distribution softmax(logits / temperature) at each trained slot, in nats. `entropies_S` carries
    no gradient."""

    logprobs_S: Tensor
    entropies_S: Tensor


def slot_scores(
    model: PreTrainedModel, batch: PackedBatch, *, temperature: float = 1.0, layout: Layout | None = None
) -> SlotScores:
    """Scores of the trained slots.

    The decoder runs once over the packed rows; hidden states are gathered at the *path* predecessors of trained
    slots, each once though all first tokens of a fork share one, and only those go through the head. Raises
    `InputError` for an attention backend that would misread the mask; `layout` as in `attention.decoder_inputs`.
    """
    return SlotScores(*in_pass(model, _slot_scores, model, batch, temperature, layout))


def _slot_scores(
    model: PreTrainedModel, batch: PackedBatch, temperature: float, layout: Layout | None
) -> tuple[Tensor, Tensor]:
    predecessor_U, row_S = torch.unique(batch.predecessor_S, return_inverse=True)
    hidden_UD = _hidden(model, batch, layout).flatten(0, 1).index_select(0, predecessor_U)
    return head_scores(model, hidden_UD, row_S, batch.target_S, temperature)


def _hidden(model: PreTrainedModel, batch: PackedBatch, layout: Layout | None) -> Tensor:
    """The last hidden states, [B, L, D]."""
    decoder, routes = decoder_of(model), routes_of(model, batch.routes_BLR)
    if is_carried(model) and not batch.is_flat:
        return carried_states(decoder, batch, routes)
    inputs = decoder_inputs(model, batch, layout)
    with _checkpointing(model), replayed(routes):
        return decoder(input_ids=batch.tokens_BL, use_cache=False, **inputs).last_hidden_state


def head_scores(
    model: PreTrainedModel, hidden_UD: Tensor, row_S: Tensor, target_S: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """`token_scores` of the head's logits, in chunks where there are many of them, so that memory stays bounded."""
    chunk = max(1, CHUNK_LOGITS // vocabulary_size(model))
    if len(hidden_UD) <= chunk:
        return _scores(model, hidden_UD, row_S, target_S, temperature)
    order_S = torch.argsort(row_S, stable=True)
    starts = range(0, len(hidden_UD), chunk)
    sizes = [int(((row_S >= start) & (row_S < start + chunk)).sum()) for start in starts]
    parts: list[tuple[Tensor, Tensor]] = [
        checkpoint(_scores, model, hidden, row_S[own] - start, target_S[own], temperature, use_reentrant=False)
        for start, hidden, own in zip(starts, hidden_UD.split(chunk), order_S.split(sizes), strict=True)
    ]
    back_S = torch.argsort(order_S)
    logprobs, entropies = (torch.cat(kind)[back_S] for kind in zip(*parts, strict=True))
    return logprobs, entropies


@torch.no_grad()
def with_old_logprobs(
    model: PreTrainedModel, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> list[PackedBatch]:
    """The batches with `old_logprobs` recomputed by the trainer with the current model (at the start of an update).

    Needed when the engine's numbers differ from the trainer's, or when its weights were older; the sampling
    log-probabilities stay, for the truncated importance weight.
    """
    moved = [batch.to(model.device) for batch in batches]
    scored = ((batch, slot_scores(model, batch, temperature=temperature).logprobs_S) for batch in moved)
    return [dataclasses.replace(batch, old_logprobs_T=logprobs_S[batch.slot_T]) for batch, logprobs_S in scored]


@torch.no_grad()
def with_reference_logprobs(
    reference: Reference, batches: Sequence[PackedBatch], *, temperature: float = 1.0
) -> list[PackedBatch]:
    """The batches with the frozen reference's log-probabilities, computed once for all epochs over them."""
    with reference_model(reference) as model:
        moved = [batch.to(model.device) for batch in batches]
        scored = ((batch, slot_scores(model, batch, temperature=temperature).logprobs_S) for batch in moved)
        return [dataclasses.replace(batch, reference_logprobs_S=logprobs_S) for batch, logprobs_S in scored]


def with_served_logprobs(
    policy: ServedPolicy,
    dealt: Sequence[Sequence[PackedBatch]],
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
) -> tuple[list[list[PackedBatch]], int]:
    """The batches of each rank with the log-probabilities of a reference that scores whole sequences, and how many
    tokens it was sent: a sequence for each rollout, equal ones once. What only fills up a rank's passes has 0."""
    sent = rows(trees, credits, clipped=False)
    paths = list(dict.fromkeys(row.tokens for row in sent))
    scored = dict(zip(paths, policy.logprobs(paths), strict=True))
    found: dict[tuple[int, int], list[float]] = defaultdict(list)  # by tree and node
    for row in sent:
        for node, trained, logprob in zip(row.nodes[1:], row.mask[1:], scored[row.tokens], strict=True):
            found[row.tree, node] += [logprob] if trained else []

    def scores(batch: PackedBatch) -> Tensor:
        nodes = zip(batch.tree_A.tolist(), batch.node_A.tolist(), strict=True)
        logprobs_S = torch.zeros(len(batch.target_S), dtype=torch.float64)
        logprobs_S[batch.slot_T] = torch.tensor([lp for n in nodes for lp in found.get(n, (0.0,))], dtype=torch.float64)
        return logprobs_S

    taught = [[dataclasses.replace(b, reference_logprobs_S=scores(b)) for b in batches] for batches in dealt]
    return taught, sum(map(len, paths))


def set_checkpointing(model: PreTrainedModel) -> None:
    """Gradient checkpointing: keep only the inputs of the layers and recompute the rest in the backward pass, for a
    third more time and the memory of one layer. Works in evaluation mode too, because the same model also samples."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # name before 5.20
    enable({"use_reentrant": False, "context_fn": again})
    model.disable_input_require_grads()  # what only the other kind needs, and cannot be sent to another rank


@contextmanager
def _checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Transformers checkpoints layers in training mode only, but a policy that also samples stays in evaluation
    mode."""
    layers: list[Any] = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    waking = [layer for layer in layers if not layer.training] if torch.is_grad_enabled() else []
    for layer in waking:
        layer.training = True
    try:
        yield
    finally:
        for layer in waking:
            layer.training = False


def _scores(
    model: PreTrainedModel, hidden_UD: Tensor, row_S: Tensor, target_S: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    return token_scores(head_logits(model, hidden_UD), row_S, target_S, temperature)
