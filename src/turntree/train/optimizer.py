"""AdamW, warm-up, schedule and gradient clipping in one object that takes a step and returns its metrics.

Weights narrower than float32 have *masters*: float32 copies that collect the gradients, are clipped and stepped, and
are then rounded into the weights (Micikevicius et al. 2018, "Mixed precision training", section 3.1). Without
masters, bfloat16 weights near 0.1 move in steps of 5e-4, and smaller updates are lost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from turntree.core.errors import ConfigError, TurntreeError
from turntree.train.config import OptimizerConfig
from turntree.train.sharded import whole


class Optimizer:
    """AdamW over the trainable parameters. `steps` counts the steps taken of `total_steps` (None: open-ended).

    Gradients come from `backward`. Gradients of a plain `loss.backward()` are used too, but sums of several passes are
    then rounded to the dtype of the weights.
    """

    def __init__(
        self, parameters: Iterable[Parameter], config: OptimizerConfig, total_steps: int | None = None
    ) -> None:
        config.require_steps(total_steps)
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = [p for p in parameters if p.requires_grad]
        self.masters = [_master(parameter) for parameter in self.parameters]  # float32 weights are their own masters
        self._adamw = torch.optim.AdamW(
            self.masters, lr=config.learning_rate, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )

    def zero_grad(self) -> None:
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of `loss` for the next step, in float32 or wider."""
        loss.backward()
        self._collect()

    def _collect(self) -> None:
        """Move the gradients of narrow weights to their masters."""
        for parameter, master in self._narrow():
            if (gradient := parameter.grad) is not None:
                master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    def _narrow(self) -> Iterator[tuple[Parameter, Parameter]]:
        """Pairs of narrow weights and their masters."""
        return (pair for pair in zip(self.parameters, self.masters, strict=True) if pair[0] is not pair[1])

    def step(self) -> dict[str, float]:
        """Clip to `max_grad_norm`, step, clear the gradients; returns `grad_norm` (before clipping) and
        `learning_rate`. Raises `TurntreeError`, leaving the weights as they were, when the gradient is not finite."""
        self._collect()
        norm = float(whole(clip_grad_norm_(self.masters, self.config.max_grad_norm)))
        if not math.isfinite(norm):
            self.zero_grad()
            raise TurntreeError(f"optimizer step {self.steps}: the gradient norm is {norm}; the weights are unchanged")
        rate = self.config.learning_rate * self.config.factor(self.steps, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self._round()
        self.zero_grad()
        self.steps += 1
        return {"grad_norm": norm, "learning_rate": rate}

    @torch.no_grad()
    def _round(self) -> None:
        """Round the masters into the narrow weights."""
        for parameter, master in self._narrow():
            parameter.copy_(master)

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """All that changes in training: `steps`, and for the parameter of each name `weight.NAME` (its master) and the
        moments `exp_avg.NAME`, `exp_avg_sq.NAME` and `step.NAME` (absent before it took its first step). They share
        the optimizer's memory, except `steps`."""
        pairs = list(zip(names, self.masters, strict=True))
        held = {f"weight.{name}": master.detach() for name, master in pairs}
        for name, master in pairs:
            held |= {f"{kind}.{name}": value for kind, value in self._adamw.state.get(master, {}).items()}
        return {"steps": torch.tensor(self.steps), **held}

    def expect_moments(self, stepped: Collection[str], names: Sequence[str]) -> None:
        """Make room for the moments of the parameters that have `stepped`, so that a checkpoint is read into
        `tensors`."""
        for name, master in zip(names, self.masters, strict=True):
            self._adamw.state.pop(master, None)
            if name in stepped:
                zeros = {kind: torch.zeros_like(master.detach()) for kind in ("exp_avg", "exp_avg_sq")}
                self._adamw.state[master] = {"step": torch.tensor(0.0), **zeros}

    def loaded(self, steps: int) -> None:
        """A checkpoint of so many steps was read into `tensors`."""
        self._round()
        self.steps = steps


def _master(parameter: Parameter) -> Parameter:
    """A float32 copy of a bfloat16 weight; a float32 weight is its own master. Raises `ConfigError` for other narrow
    dtypes, which would need loss scaling."""
    if torch.finfo(parameter.dtype).bits >= 32:
        return parameter
    if parameter.dtype != torch.bfloat16:
        name = str(parameter.dtype).removeprefix("torch.")
        raise ConfigError(f"{name!r} weights are not trained", field="device.dtype", hint="use bfloat16 or float32")
    return Parameter(parameter.detach().float())
