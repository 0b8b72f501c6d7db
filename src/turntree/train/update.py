"""One training step, shared by all stages: labelled trees in, updated policy and cost out.

`Learner` packs the trees and deals the batches to the ranks, `train_windows` is what a rank does with its own,
`update_step` is one optimizer step, and `batch_loss` the loss of one packed batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.core.labels import Credit
from turntree.core.protocols import Engine
from turntree.core.tree import RolloutTree
from turntree.engine.teacher import ServedPolicy
from turntree.pack.attention import layouts
from turntree.pack.head import vocabulary_size
from turntree.pack.packing import PackedBatch, PackingStats, pack_ranks
from turntree.train.forward import slot_scores, with_old_logprobs, with_reference_logprobs, with_served_logprobs
from turntree.train.lora import Reference
from turntree.train.loss_config import LossConfig
from turntree.train.losses import LossSums, loss_normalizer, policy_loss, window_stats
from turntree.train.optimizer import Optimizer
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.trainer import Trainer, Trainers


@dataclass
class Learner:
    """Packs, has the ranks learn from it, and notifies the engine, which samples from `model`.

    `max_tokens` bounds one forward and backward pass of a rank; all passes of a batch share one normaliser. Without
    `shared` every rollout has a row of its own (`isolation.shares_prefixes`).
    """

    model: PreTrainedModel
    trainers: Trainers
    engine: Engine
    loss: LossConfig
    updates: int
    max_tokens: int
    shared: bool = True
    minibatch: int | None = None  # groups of one optimizer step; None: all
    teacher: ServedPolicy | None = None  # the reference, where a server has it; it scores at temperature 1

    def __post_init__(self) -> None:
        if self.teacher is not None and self.loss.temperature != 1:
            hint = "sample at 1: a server's log-probabilities are those of temperature 1"
            raise ConfigError("does not go with a reference on a server", field="temperature", hint=hint)

    def learn(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[dict[str, float], Cost]:
        """The metrics of the last step, and the cost of all steps, scoring passes included. If no tree has a scored
        leaf, no step is taken, the policy keeps its version, and the metrics show 0 trained groups."""
        started = time.perf_counter()
        _require_known(trees, vocabulary_size(self.model))
        self.engine.clear_cache()  # the memory of its keys and values goes to the training pass
        ranks, size = self.trainers.size, self.minibatch or max(1, len(trees))
        parts = [slice(start, start + size) for start in range(0, len(trees), size)]
        packed = [self._dealt(trees[part], credits[part]) for part in parts]
        windows = [dealt for dealt, _ in packed if any(dealt)]
        idle = sum(len(trees[part]) for part, (dealt, _) in zip(parts, packed, strict=True) if not any(dealt))
        if not windows:
            return {"trained_groups": 0}, NO_COST
        rescores = self.rescores(trees)
        work = partial(train_windows, loss=self.loss, updates=self.updates, rescores=rescores)
        metrics = self.trainers.run(work, [[dealt[rank] for dealt in windows] for rank in range(ranks)])
        metrics["untrained_trees"] += idle
        passed = int(metrics["trained_tokens"])
        scored = passed * (rescores and self.updates * len(windows) > 1)
        scored += passed * (self.trainers.own.reference is not None and self.loss.needs_reference_logprobs)
        scored += sum(sent for _, sent in packed)
        cost = Cost(scored_tokens=scored, trained_tokens=self.updates * passed)
        trained = sum(bool(credit.nodes) for credit in credits)
        version = self.engine.policy_version + 1
        self.engine.update_weights(self.model, version)
        if self.engine.policy_version != version:  # it would go on with old weights, and nothing would show it
            stayed = f"its policy_version is {self.engine.policy_version}"
            raise TurntreeError(f"the engine did not take the weights of version {version}: {stayed}")
        return {"trained_groups": trained, **metrics}, cost + Cost(training_seconds=time.perf_counter() - started)

    def _dealt(self, trees: Sequence[RolloutTree], credits: Sequence[Credit]) -> tuple[list[list[PackedBatch]], int]:
        """What each rank learns from in an optimizer step, and the tokens that a teacher's server was sent for it."""
        ranks, dense = self.trainers.size, self.shared and layouts(self.model) == ("dense",)
        dealt = pack_ranks(trees, credits, ranks, max_tokens=self.max_tokens, shared=self.shared, dense=dense)
        return (dealt, 0) if self.teacher is None else with_served_logprobs(self.teacher, dealt, trees, credits)

    def rescores(self, trees: Sequence[RolloutTree]) -> bool:
        """Whether the trainer computes old log-probabilities: a forward pass more where there are several updates."""
        if self.loss.old_logprobs == "auto":
            return engine_differs(self.engine, self.model, trees)
        return self.loss.old_logprobs == "trainer"


def _require_known(trees: Sequence[RolloutTree], vocabulary: int) -> None:
    """Raise `InputError` for a token that the model lacks: a GPU would end the process, and not say which."""
    for tree in trees:
        for node in tree:
            if node.token_ids and not 0 <= min(node.token_ids) <= max(node.token_ids) < vocabulary:
                unknown = [token for token in node.token_ids if not 0 <= token < vocabulary]
                where = f"turn {node.turn} of {tree.task_id!r} (node {node.id}, {node.kind.value})"
                hint = "the engine or the renderer has the tokenizer of another model"
                raise InputError(f"{where} has token {unknown[0]}; the model knows 0 to {vocabulary - 1}", hint=hint)


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


def train_windows(
    trainer: Trainer, windows: Sequence[Sequence[PackedBatch]], *, loss: LossConfig, updates: int, rescores: bool
) -> dict[str, float]:
    """One rank's part of an update, with as many batches as every other rank: scores with the old policy (where the
    trainer `rescores`) and with the reference, then `updates` passes with an optimizer step a window. Returns the
    metrics of the last step over all ranks, with the counts of its whole pass. Where there is one step, its own pass
    scores with the old policy."""
    batches = [batch.to(trainer.model.device) for window in windows for batch in window]
    if rescores and updates * len(windows) == 1:
        batches = [replace(batch, old_logprobs_T=None) for batch in batches]
    elif rescores:
        batches = with_old_logprobs(trainer.model, batches, temperature=loss.temperature)
    if trainer.reference is not None and loss.needs_reference_logprobs:
        batches = with_reference_logprobs(trainer.reference, batches, temperature=loss.temperature)
    metrics: dict[str, float] = {}
    for _ in range(updates):
        rest = iter(batches)
        for window in windows:
            taken = [next(rest) for _ in window]
            metrics = update_step(trainer.model, trainer.reference, trainer.optimizer, taken, loss, group=trainer.group)
    trainer.publish()
    return metrics | packing_metrics(window_stats(batches, trainer.group))


def update_step(
    model: PreTrainedModel,
    reference: Reference | None,
    optimizer: Optimizer,
    batches: Sequence[PackedBatch],
    config: LossConfig,
    *,
    group: ProcessGroup = SINGLE,
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
        found = sum(group.collect(parts.loss))
        if not math.isfinite(found):
            optimizer.zero_grad()
            raise TurntreeError(
                f"optimizer step {optimizer.steps}: the loss of batch {number + 1} of {len(batches)} is {found}; "
                "the weights are unchanged"
            )
        optimizer.backward(loss)
        sums += parts
    metrics = sum(group.collect(sums), LossSums()).metrics()
    if not config.kl_coefficient:
        del metrics["kl"]  # it was not measured, which is not zero
    return metrics | optimizer.step() | packing_metrics(window_stats(batches, group))


def batch_loss(
    model: PreTrainedModel, reference: Reference | None, batch: PackedBatch, config: LossConfig, normalizer: float
) -> tuple[Tensor, LossSums]:
    """Forward pass, reference where the KL term wants one, and loss of one batch."""
    if config.needs_reference_logprobs and batch.reference_logprobs_S is None and reference is not None:
        batch = with_reference_logprobs(reference, [batch], temperature=config.temperature)[0]
    scores = slot_scores(model, batch, temperature=config.temperature)
    return policy_loss(scores.logprobs_S, batch, config, normalizer=normalizer, entropies_S=scores.entropies_S)


def packing_metrics(stats: PackingStats) -> dict[str, float]:
    """Counts of the window. `trained_tokens` are unique token positions in the backward pass (`core.cost.Cost`), the
    experts of `replayed_tokens` those that the server chose."""
    return {
        "trained_tokens": float(stats.unique_tokens),
        "padding_tokens": float(stats.padding),
        "recomputed_tokens": float(stats.recomputed_tokens),
        "replayed_tokens": float(stats.replayed_tokens),
        "rho": stats.rho,
        "trees": stats.trees,
        "zero_variance_fraction": stats.zero_variance_trees / max(stats.trees, 1e-30),
        "untrained_trees": float(stats.untrained_trees),
        "cut_trees": float(stats.cut_trees),
    }
