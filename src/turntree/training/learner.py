"""One training step, shared by all stages: labelled trees in, updated policy and cost out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from turntree.core.cost import NO_COST, Cost
from turntree.core.labels import Credit
from turntree.core.protocols import Engine
from turntree.core.tree import RolloutTree
from turntree.training.config import LossConfig
from turntree.training.forward import with_old_logprobs, with_reference_logprobs
from turntree.training.packing import PackedBatch, pack_ranks
from turntree.training.trainer import Trainer, Trainers
from turntree.training.update import update_step


@dataclass(frozen=True)
class Lesson:
    """What one rank learns from: as many batches as every other rank."""

    batches: Sequence[PackedBatch]
    loss: LossConfig
    updates: int
    rescores: bool
    """Whether old log-probabilities are those of the trainer."""


def take(trainer: Trainer, lesson: Lesson) -> dict[str, float]:
    """Scores with the old policy and the reference, then `updates` optimizer steps on the same batches; the metrics of
    the last step over all ranks. Where there is one step, its own pass scores with the old policy."""
    batches = [batch.to(trainer.model.device) for batch in lesson.batches]
    loss = lesson.loss
    if lesson.rescores and lesson.updates == 1:
        batches = [replace(batch, old_logprobs_T=None) for batch in batches]
    elif lesson.rescores:
        batches = with_old_logprobs(trainer.model, batches, temperature=loss.temperature)
    if trainer.reference is not None and loss.needs_reference_logprobs:
        batches = with_reference_logprobs(trainer.reference, batches, temperature=loss.temperature)
    metrics: dict[str, float] = {}
    for _ in range(lesson.updates):
        metrics = update_step(trainer.model, trainer.reference, trainer.optimizer, batches, loss, group=trainer.group)
    trainer.publish()
    return metrics


@dataclass
class Learner:
    """Packs, has the ranks learn from it, and notifies the engine, which samples from `model`.

    `max_tokens` bounds one forward and backward pass of a rank; all passes of a batch share one normaliser.
    """

    model: PreTrainedModel
    trainers: Trainers
    engine: Engine
    loss: LossConfig
    updates: int
    max_tokens: int

    def learn(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[dict[str, float], Cost]:
        """The metrics of the last step, and the cost of all steps, scoring passes included. If no tree has a scored
        leaf, no step is taken, the policy keeps its version, and the metrics show 0 trained groups."""
        started = time.perf_counter()
        self.engine.weights_changed(self.engine.policy_version)  # what it kept serves no more: its memory is the pass's
        dealt = pack_ranks(trees, credits, self.trainers.size, max_tokens=self.max_tokens)
        if not any(dealt):
            return {"trained_groups": 0}, NO_COST
        rescores, referred = self.rescores(trees), self.trainers.own.reference is not None
        lessons = [Lesson(batches, self.loss, self.updates, rescores) for batches in dealt]
        metrics = self.trainers.run(take, lessons)
        passed = int(metrics["trained_tokens"])
        scored = (rescores and self.updates > 1) + (referred and self.loss.needs_reference_logprobs)
        if self.loss.kl_coefficient > 0 and self.loss.kl == "full":
            scored += self.updates  # the exact KL needs the reference again at every step
        cost = Cost(scored_tokens=scored * passed, trained_tokens=self.updates * passed)
        trained = sum(bool(credit.nodes) for credit in credits)
        self.engine.update_weights(self.model, self.engine.policy_version + 1)
        return {"trained_groups": trained, **metrics}, cost + Cost(training_seconds=time.perf_counter() - started)

    def rescores(self, trees: Sequence[RolloutTree]) -> bool:
        """Whether the trainer computes old log-probabilities: a forward pass more where there are several updates."""
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
