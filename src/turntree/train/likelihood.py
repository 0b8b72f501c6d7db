"""The likelihood of examples, and an optimizer step on it, for one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from turntree.core import seeds
from turntree.core.errors import InputError, TurntreeError
from turntree.pack.head import decoder_of
from turntree.pack.packing import partition
from turntree.train.forward import head_scores
from turntree.train.isolation import TOLERANCES
from turntree.train.sft import Example
from turntree.train.sharded import in_pass
from turntree.train.trainer import Trainer


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
    # right-padded rows under causal attention: padding comes last and is seen by nothing that is trained
    ids_BL = pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True).to(model.device)
    said_BL = pad_sequence([torch.tensor(row.loss_mask) for row in rows], batch_first=True).to(model.device)
    positions_BL = torch.arange(ids_BL.shape[1], device=model.device).expand_as(ids_BL)
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


def deal(rows: Sequence[Example], ranks: int, max_tokens: int) -> list[list[list[Example]]]:
    """The micro-batches of a step for each rank, as many for all and alike in their tokens. Blank ones fill up, which
    add zero to loss and gradient."""
    parts = partition([len(row.token_ids) for row in rows], ranks)
    dealt = [micro_batches([rows[number] for number in part], max_tokens) for part in parts]
    passes = max(map(len, dealt))
    blank = [Example((0, 0), (False, False))]
    return [groups + [blank] * (passes - len(groups)) for groups in dealt]


def imitate(trainer: Trainer, batches: Sequence[Sequence[Example]], *, learned: int, seed: int) -> dict[str, float]:
    """One optimizer step on the mean negative log-likelihood of the `learned` tokens of all ranks; its metrics. `seed`
    draws dropout. Raises `TurntreeError`, leaving the weights as they were, where the loss is not finite."""
    rank, total = trainer.group.rank, 0.0
    torch.manual_seed(seeds.derive(seed, "rank", rank) if rank else seed)
    trainer.model.train()
    trainer.optimizer.zero_grad()  # of a step that was refused
    try:
        for rows in batches:
            loss = negative_log_likelihood(trainer.model, rows) / learned
            trainer.optimizer.backward(loss)
            total += float(loss.detach())
    finally:
        trainer.model.eval()
    total = sum(trainer.group.collect(total))
    if not math.isfinite(total):
        raise TurntreeError(f"step {trainer.optimizer.steps + 1}: the loss is {total}; the weights are unchanged")
    taken = trainer.optimizer.step()
    trainer.publish()
    return {"loss": total, **taken}
