"""One optimizer step over a window of packed batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.errors import ConfigError, TurntreeError
from turntree.training.config import LossConfig
from turntree.training.forward import SlotScores, slot_scores, with_reference_logprobs
from turntree.training.lora import Reference, reference_model
from turntree.training.losses import LossSums, exact_kl, loss_normalizer, policy_loss, window_stats
from turntree.training.optimizer import Optimizer
from turntree.training.packing import PackedBatch, PackingStats
from turntree.training.sharded import ALONE, Alone


def update_step(
    model: PreTrainedModel,
    reference: Reference | None,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    config: LossConfig,
    *,
    group: Alone = ALONE,
) -> dict[str, float]:
    """Accumulate the gradient of all `batches` under one normaliser, step once, return the metrics. In a group, all
    ranks call it together with as many batches each, and get the same metrics.

    Call it again with the same batches for another epoch: old log-probabilities stay as they are. Batches without
    reference log-probabilities get them from `reference`; attach them once with `with_reference_logprobs`
    when there are several epochs. Raises `TurntreeError` on a loss or gradient that is not finite, and leaves the
    weights as they were.
    """
    normalizer = loss_normalizer(batches, config, group)
    sums = LossSums()
    optimizer.zero_grad()
    for number, batch in enumerate(batches):
        loss, parts = batch_loss(model, reference, batch.to(model.device), config, normalizer)
        (found,) = group.sums([parts.loss])
        if not math.isfinite(found):
            optimizer.zero_grad()
            raise TurntreeError(
                f"optimizer step {optimizer.steps}: the loss of batch {number + 1} of {len(batches)} is {found}; "
                "the weights are unchanged"
            )
        optimizer.backward(loss)
        sums += parts
    metrics = sums.over(group).metrics()
    if not config.kl_coefficient:
        del metrics["kl"]  # it was not measured, which is not zero
    return metrics | optimizer.step() | packing_metrics(window_stats(batches, group))


def batch_loss(
    model: PreTrainedModel,
    reference: Reference | None,
    batch: PackedBatch,
    config: LossConfig,
    normalizer: float,
) -> tuple[Tensor, LossSums]:
    """Forward pass, reference where the KL term wants one, and loss of one batch."""
    wants_kl = config.kl_coefficient > 0
    full = wants_kl and config.kl == "full"
    if wants_kl and not full and batch.reference_logprobs_S is None and reference is not None:
        batch = with_reference_logprobs(reference, [batch], temperature=config.temperature)[0]
    scores = slot_scores(model, batch, temperature=config.temperature, full=full)
    return policy_loss(
        scores.logprobs_S,
        batch,
        config,
        normalizer=normalizer,
        exact_kl_S=_exact_kl(scores, reference, batch, config) if full else None,
        entropies_S=scores.entropies_S,
    )


def packing_metrics(stats: PackingStats) -> dict[str, float]:
    """Counts of the window. `trained_tokens` are unique token positions in the backward pass (`core.cost.Cost`)."""
    return {
        "trained_tokens": float(stats.unique_tokens),
        "padding_tokens": float(stats.padding),
        "recomputed_tokens": float(stats.recomputed_tokens),
        "rho": stats.rho,
        "trees": stats.trees,
        "zero_variance_fraction": stats.zero_variance_trees / max(stats.trees, 1e-30),
        "untrained_trees": float(stats.untrained_trees),
        "cut_trees": float(stats.cut_trees),
    }


def _exact_kl(scores: SlotScores, reference: Reference | None, batch: PackedBatch, config: LossConfig) -> Tensor:
    if reference is None or scores.log_softmax_SV is None:
        raise ConfigError("'full' needs a reference policy", field="kl", hint="pass one, or set kl_coefficient to 0")
    with reference_model(reference) as base, torch.no_grad():
        frozen = slot_scores(base, batch, temperature=config.temperature, full=True)
    assert frozen.log_softmax_SV is not None  # asked for with full=True
    return exact_kl(scores.log_softmax_SV, frozen.log_softmax_SV)
