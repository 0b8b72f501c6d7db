"""Supervised fine-tuning on the assistant turns of traces: the baseline on the same data (PivotRL, section 2)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core import seeds
from turntree.core.cost import Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.protocols import Renderer
from turntree.pack.head import decoder_of
from turntree.pack.packing import partition
from turntree.traces.candidates import skipped_turns
from turntree.traces.schema import Trace
from turntree.train.config import SFTConfig
from turntree.train.forward import head_scores
from turntree.train.isolation import TOLERANCES
from turntree.train.loop import Algorithm, StepResult
from turntree.train.ranks import SINGLE, ProcessGroup
from turntree.train.sharded import in_pass
from turntree.train.trainer import Trainer, open_trainers


@dataclass(frozen=True)
class Example:
    """A conversation in tokens, or a part of one; `loss_mask[t]` is True where token t is learned."""

    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]


def examples(trace: Trace, renderer: Renderer) -> list[Example]:
    """What is learned from a trace: the episode, or, where a teacher labelled it, every label after its history.

    Prompts and completions are those of sampling. The loss covers the turns that are pivot candidates, so that all
    methods train on the same turns, each in the context in which it would be sampled.
    """
    skipped = skipped_turns(trace)
    found: list[Example] = []
    for turn, index in enumerate(trace.turn_positions):
        if trace.labels and turn in skipped:
            continue
        prompt = renderer.prompt(trace.messages[:index], trace.tools)
        said = renderer.completion(trace.labels[turn] if trace.labels else trace.messages[index])
        before = found.pop() if found and not trace.labels else Example((), ())
        if prompt[: len(before.token_ids)] != before.token_ids:
            found.append(before)
            before = Example((), ())
        given = (False,) * (len(prompt) - len(before.token_ids))
        mask = (*before.loss_mask, *given, *(turn not in skipped,) * len(said))
        found.append(Example((*prompt, *said), mask))
    return found


def micro_batches(examples: Sequence[Example], max_tokens: int) -> list[list[Example]]:
    """Examples of similar length together, at most `max_tokens` padded positions each (one example at least)."""
    groups: list[list[Example]] = []
    for row in sorted(examples, key=lambda row: len(row.token_ids)):
        if groups and len(row.token_ids) * (len(groups[-1]) + 1) <= max_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def negative_log_likelihood(model: PreTrainedModel, rows: Sequence[Example]) -> Tensor:
    """Sum over the assistant's tokens of -log p, in nats. The output head runs at these tokens only: over a large
    vocabulary it costs as much as several layers, and most tokens of a trace are not the assistant's."""
    length = max(len(row.token_ids) for row in rows)
    ids_BL = torch.zeros(len(rows), length, dtype=torch.long)
    said_BL = torch.zeros(len(rows), length, dtype=torch.bool)
    for index, row in enumerate(rows):
        ids_BL[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
        said_BL[index, : len(row.loss_mask)] = torch.tensor(row.loss_mask)
    ids_BL, said_BL = ids_BL.to(model.device), said_BL.to(model.device)
    # right-padded rows under causal attention: padding comes last and is seen by nothing that is trained
    positions_BL = torch.arange(length, device=model.device).expand_as(ids_BL)
    return in_pass(model, _likelihood, model, ids_BL, said_BL, positions_BL)


def _likelihood(model: PreTrainedModel, ids_BL: Tensor, said_BL: Tensor, positions_BL: Tensor) -> Tensor:
    output = decoder_of(model)(input_ids=ids_BL, position_ids=positions_BL, use_cache=False)
    hidden_BLD: Tensor = output.last_hidden_state
    said = said_BL[:, 1:]
    hidden_SD, target_S = hidden_BLD[:, :-1][said], ids_BL[:, 1:][said]
    every_S = torch.arange(len(target_S), device=model.device)
    return -head_scores(model, hidden_SD, every_S, target_S, 1.0)[0].sum()


@torch.no_grad()
def check_head(model: PreTrainedModel) -> None:
    """Raises `InputError` for a model that scales its logits in a way that `head.head_logits` does not know."""
    ids = tuple(range(1, 9))
    logprobs_LV = model(input_ids=torch.tensor([ids], device=model.device)).logits[0, :-1].float().log_softmax(-1)
    expected = -float(logprobs_LV[range(len(ids) - 1), ids[1:]].sum())
    found = float(negative_log_likelihood(model, [Example(ids, (False, *[True] * (len(ids) - 1)))]))
    if not abs(found - expected) <= len(ids) * TOLERANCES[model.dtype][0]:
        problem = f"{type(model).__name__} cannot be trained: its logits are not those of its head"
        raise InputError(f"{problem} (off by {abs(found - expected):.2g} nats)", hint="use a stock decoder")


@dataclass(frozen=True)
class Batch:
    """What one rank learns from in a step: as many micro-batches as every other rank. `learned` tokens of all ranks
    are the loss's normaliser; `seed` draws dropout."""

    rows: Sequence[Sequence[Example]]
    learned: int
    seed: int


def deal(rows: Sequence[Example], ranks: int, max_tokens: int, seed: int) -> list[Batch]:
    """The examples of a step for each rank, alike in their tokens. Blank micro-batches fill up, which add zero to loss
    and gradient."""
    parts = partition([len(row.token_ids) for row in rows], ranks)
    dealt = [micro_batches([rows[number] for number in part], max_tokens) for part in parts]
    passes = max(map(len, dealt))
    blank = [Example((0, 0), (False, False))]
    learned = sum(sum(row.loss_mask) for row in rows)
    return [Batch(groups + [blank] * (passes - len(groups)), learned, seed) for groups in dealt]


def imitate(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the learned tokens of all ranks; its metrics. Raises
    `TurntreeError`, leaving the weights as they were, where the loss is not finite."""
    rank, total = trainer.group.rank, 0.0
    torch.manual_seed(seeds.derive(batch.seed, "rank", rank) if rank else batch.seed)
    trainer.model.train()
    try:
        for rows in batch.rows:
            loss = negative_log_likelihood(trainer.model, rows) / batch.learned
            trainer.optimizer.backward(loss)
            total += float(loss.detach())
    finally:
        trainer.model.eval()
    (total,) = trainer.group.sums([total])
    if not math.isfinite(total):
        raise TurntreeError(f"step {trainer.optimizer.steps + 1}: the loss is {total}; the weights are unchanged")
    taken = trainer.optimizer.step()
    trainer.publish()
    return {"loss": total, **taken}


class SFT(Algorithm):
    """Minimises the mean token negative log-likelihood of examples. The ranks of `group` share each step."""

    def __init__(
        self, model: PreTrainedModel, examples: Sequence[Example], config: SFTConfig, group: ProcessGroup = SINGLE
    ) -> None:
        self._prepare(examples, config)
        self._ranks = self.trainers = open_trainers(model, config.optimizer, self.steps, group)

    def _prepare(self, examples: Sequence[Example], config: SFTConfig) -> None:
        self.examples, self.config = examples, config
        self.steps = config.steps(len(examples))
        self.check_every = math.ceil(self.steps / 4)

    def imitate(self, examples: Sequence[Example], seed: int) -> Mapping[str, float]:
        """One optimizer step on these examples; its metrics. `seed` draws dropout."""
        return self._ranks.run(imitate, deal(examples, self._ranks.size, self.config.max_tokens, seed))

    def step(self, step: int) -> StepResult:
        started = time.perf_counter()
        epoch, place = divmod(step - 1, self.steps // self.config.epochs)
        rows = [self.examples[index] for index in self._order(epoch)[place * self.config.batch :][: self.config.batch]]
        seed = seeds.derive(self.config.seed, "dropout", step)  # a step's draws depend on its number only
        metrics = self.imitate(rows, seed)
        self.cost += Cost(
            trained_tokens=sum(len(row.token_ids) for row in rows), training_seconds=time.perf_counter() - started
        )
        return StepResult({"epoch": epoch, "trained_tokens": self.cost.trained_tokens, **metrics})

    def _order(self, epoch: int) -> list[int]:
        """The numbers of the examples, each once in an epoch."""
        order = list(range(len(self.examples)))
        seeds.generator(self.config.seed, "sft", epoch).shuffle(order)
        return order
