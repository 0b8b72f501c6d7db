"""The gradient of a batch as an update computes it, as one vector, without a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.labels import Credit
from turntree.core.tree import RolloutTree
from turntree.training.config import LossConfig
from turntree.training.lora import Reference
from turntree.training.losses import loss_normalizer
from turntree.training.packing import pack
from turntree.training.update import batch_loss


def gradient(
    model: PreTrainedModel,
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    loss: LossConfig,
    *,
    max_tokens: int,
    reference: Reference | None = None,
) -> tuple[Tensor, int]:
    """Of minus the loss, [P] in float32, and how many tokens its passes computed; without a `reference` the KL term is
    left out."""
    if reference is None:
        loss = replace(loss, kl_coefficient=0.0)
    batches = [batch.to(model.device) for batch in pack(trees, credits, max_tokens=max_tokens)]
    normalizer = loss_normalizer(batches, loss)
    for batch in batches:
        batch_loss(model, reference, batch, loss, normalizer)[0].backward()
    return -taken(model), sum(batch.stats.unique_tokens for batch in batches)


def taken(model: PreTrainedModel) -> Tensor:
    """The gradients of all trained parameters, [P] in float32; the model then has none."""
    parts = [
        (torch.zeros_like(each) if each.grad is None else each.grad).flatten().float()
        for each in model.parameters()
        if each.requires_grad
    ]
    model.zero_grad(set_to_none=True)
    return torch.cat(parts)
