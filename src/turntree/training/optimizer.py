"""AdamW, warm-up, schedule and gradient clipping: one object that takes a step and says what it did."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.utils import clip_grad_norm_

from turntree.core.errors import ConfigError, TurntreeError
from turntree.training.config import OptimizerConfig


class Optimizer:
    """AdamW over the trainable parameters. `steps` counts the steps taken of `total_steps` (None: open-ended)."""

    def __init__(
        self, parameters: Iterable[Parameter], config: OptimizerConfig, total_steps: int | None = None
    ) -> None:
        if config.schedule == "cosine" and (total_steps is None or total_steps <= config.warmup_steps):
            raise ConfigError("'cosine' needs a number of steps above warmup_steps", field="schedule")
        self.config = config
        self.total_steps = total_steps
        self.steps = 0
        self.parameters = [p for p in parameters if p.requires_grad]
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    def step(self) -> dict[str, float]:
        """Clip to `max_grad_norm`, step, clear the gradients; returns `grad_norm` (before clipping) and
        `learning_rate`. Raises `TurntreeError`, leaving the weights as they were, when the gradient is not finite."""
        norm = float(clip_grad_norm_(self.parameters, self.config.max_grad_norm))
        if not math.isfinite(norm):
            self.zero_grad()
            raise TurntreeError(f"optimizer step {self.steps}: the gradient norm is {norm}; the weights are unchanged")
        rate = self.config.learning_rate * self.config.factor(self.steps, self.total_steps)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.zero_grad()
        self.steps += 1
        return {"grad_norm": norm, "learning_rate": rate}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that `step` remembers, as tensors that safetensors can hold: `steps`, and for parameter number i
        `i.exp_avg`, `i.exp_avg_sq` and `i.step` (absent before it took its first step)."""
        state = self._adamw.state_dict()["state"]
        moments = {f"{index}.{name}": value for index, entry in state.items() for name, value in entry.items()}
        return {"steps": torch.tensor(self.steps), **moments}

    def load_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Go on from `tensors`. Raises ValueError where they belong to other parameters."""
        state: dict[int, dict[str, Tensor]] = defaultdict(dict)
        for key, value in tensors.items():
            if key != "steps":
                index, name = key.split(".")
                state[int(index)][name] = value.clone()
        shapes = {index: entry["exp_avg"].shape for index, entry in state.items()}
        if any(index >= len(self.parameters) or self.parameters[index].shape != s for index, s in shapes.items()):
            raise ValueError("the optimizer's moments belong to other parameters")
        self._adamw.load_state_dict({**self._adamw.state_dict(), "state": dict(state)})
        self.steps = int(tensors["steps"])


def build_optimizer(model: Module, config: OptimizerConfig, total_steps: int | None = None) -> Optimizer:
    """The optimizer of all trainable parameters of `model`."""
    return Optimizer(model.parameters(), config, total_steps)
