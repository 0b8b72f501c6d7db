"""Loss and gradient of packed batches as the library computes them, for tests that hold them against other layouts.

>>> from packed_gradient import gradient, library_gradient, relative_error
"""

from __future__ import annotations

import torch

from turntree.pack.packing import PackedBatch
from turntree.train.losses import LossConfig, loss_normalizer
from turntree.train.update import batch_loss


def library_gradient(model, reference, batches: list[PackedBatch], config: LossConfig) -> tuple[float, torch.Tensor]:
    model.zero_grad()
    normalizer = loss_normalizer(batches, config)
    total = 0.0
    for batch in batches:
        loss, _ = batch_loss(model, reference, batch, config, normalizer)
        loss.backward()
        total += float(loss.detach())
    return total, gradient(model)


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
