"""The verb that every stage shares: labelled trees in, a better policy and its bill out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Credit
from turntree.core.protocols import Engine
from turntree.core.tree import RolloutTree
from turntree.training.forward import with_reference_logprobs
from turntree.training.lora import Reference
from turntree.training.losses import LossConfig
from turntree.training.optimizer import Optimizer
from turntree.training.packing import pack
from turntree.training.update import update_step


@dataclass
class Learner:
    """Packs, compares with the reference, steps `updates` times on the same batch, and tells the engine.

    `max_tokens` bounds one forward and backward pass; all passes of a batch share one normaliser.
    """

    model: PreTrainedModel
    reference: Reference | None
    optimizer: Optimizer
    engine: Engine
    loss: LossConfig
    updates: int
    max_tokens: int

    def learn(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[dict[str, float], Cost]:
        """The metrics of the last step, and what all steps cost. Where no tree has a scored leaf there is nothing to
        learn: no step is taken, the policy keeps its version, and the metrics say that 0 groups were trained."""
        started = time.perf_counter()
        batches = [part.to(self.model.device) for part in pack(trees, credits, max_tokens=self.max_tokens)]
        if not batches:
            return {"trained_groups": 0}, NO_COST
        if self.reference is not None and self.loss.needs_reference_logprobs:
            batches = with_reference_logprobs(self.reference, batches, temperature=self.loss.temperature)
        trained = sum(bool(credit.nodes) for credit in credits)
        metrics: dict[str, float] = {}
        cost = NO_COST
        for _ in range(self.updates):
            metrics = update_step(self.model, self.reference, self.optimizer, batches, self.loss)
            cost += Cost(trained_tokens=int(metrics["trained_tokens"]))
        self.engine.weights_changed(self.engine.policy_version + 1)
        return {"trained_groups": trained, **metrics}, cost + Cost(training_seconds=time.perf_counter() - started)
