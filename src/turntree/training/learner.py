"""One training step, shared by all stages: labelled trees in, updated policy and cost out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Credit
from turntree.core.protocols import Engine
from turntree.core.tree import RolloutTree
from turntree.training.config import LossConfig
from turntree.training.forward import with_old_logprobs, with_reference_logprobs
from turntree.training.lora import Reference
from turntree.training.optimizer import Optimizer
from turntree.training.packing import pack
from turntree.training.update import update_step


@dataclass
class Learner:
    """Packs, scores with the old policy and the reference, steps `updates` times on the same batch, and notifies the
    engine.

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
        """The metrics of the last step, and the cost of all steps, scoring passes included. If no tree has a scored
        leaf, no step is taken, the policy keeps its version, and the metrics show 0 trained groups."""
        started = time.perf_counter()
        batches = [part.to(self.model.device) for part in pack(trees, credits, max_tokens=self.max_tokens)]
        if not batches:
            self.engine.weights_changed(self.engine.policy_version)  # a run that goes on from here has kept nothing
            return {"trained_groups": 0}, NO_COST
        one_pass = Cost(scored_tokens=sum(int(batch.stats.unique_tokens) for batch in batches))
        cost = NO_COST
        if self.rescores(trees):
            batches = with_old_logprobs(self.model, batches, temperature=self.loss.temperature)
            cost += one_pass
        if self.reference is not None and self.loss.needs_reference_logprobs:
            batches = with_reference_logprobs(self.reference, batches, temperature=self.loss.temperature)
            cost += one_pass
        trained = sum(bool(credit.nodes) for credit in credits)
        metrics: dict[str, float] = {}
        for _ in range(self.updates):
            metrics = update_step(self.model, self.reference, self.optimizer, batches, self.loss)
            cost += Cost(trained_tokens=int(metrics["trained_tokens"]))
            if self.loss.kl_coefficient > 0 and self.loss.kl == "full":
                cost += one_pass  # the exact KL needs the reference again at every step
        self.engine.update_weights(self.model, self.engine.policy_version + 1)
        return {"trained_groups": trained, **metrics}, cost + Cost(training_seconds=time.perf_counter() - started)

    def rescores(self, trees: Sequence[RolloutTree]) -> bool:
        """Whether the trainer computes old log-probabilities, which costs a forward pass."""
        if self.loss.old_logprobs == "auto":
            return engine_differs(self.engine, self.model, trees)
        return self.loss.old_logprobs == "trainer"


def engine_differs(engine: Engine, model: PreTrainedModel, trees: Sequence[RolloutTree]) -> bool:
    """Whether the engine's log-probabilities can differ from those of `model` now by more than float32 rounding. They
    cannot where the engine samples from the same model object (so an adapter is merged in the same way), every weight
    and product is float32 or wider, and no completion is older than the weights. In bfloat16, decoding and the packed
    pass round differently: log-probabilities are off by 0.1, which the clip would treat as an update.
    """
    if getattr(engine, "model", None) is not model:
        return True
    if any(p.is_floating_point() and torch.finfo(p.dtype).bits < 32 for p in model.parameters()):
        return True
    if model.device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return True
    now = engine.policy_version
    return any(node.sampled and node.policy_version != now for tree in trees for node in tree)
