"""What the recipes of the embedded policies share: a fresh tiny Qwen3, batches of weighted rows, one step, saving."""

from __future__ import annotations

import argparse
import copy
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END = "<|end|>"
Row = tuple[list[int], list[float]]  # token ids and loss weights


def bpe(corpus: Iterable[str], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with one token for each role, the end of a turn and padding (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def with_template(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>")
    fast.chat_template = template
    return fast


def saved_policy(folder: str) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """The policy that an earlier phase left."""
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def fresh_model(
    tokenizer: PreTrainedTokenizerFast, arguments: argparse.Namespace, *, positions: int
) -> Qwen3ForCausalLM:
    """A model of `arguments.layers` layers of width `arguments.hidden`.

    Its query and key norms start above 1: with head width 32 and unit norms no score can exceed 5.7, too flat to copy
    one word out of three hundred.
    """
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        intermediate_size=arguments.hidden * 3,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(math.sqrt(2))
    return model


def batches(
    rows: Sequence[Row], tokens: int, rng: random.Random, buckets: Sequence[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of about `tokens` positions: rows padded to their bucket, cut at the longest, in random order."""
    by_bucket: dict[int, list[int]] = {bucket: [] for bucket in buckets}
    for row, (ids, _) in enumerate(rows):
        by_bucket[next((bucket for bucket in buckets if len(ids) <= bucket), buckets[-1])].append(row)
    groups: list[tuple[int, list[int]]] = []
    for bucket, members in by_bucket.items():
        rng.shuffle(members)
        size = max(1, tokens // bucket)
        groups += [(bucket, members[start : start + size]) for start in range(0, len(members) - size + 1, size)]
    rng.shuffle(groups)
    for bucket, group in groups:
        ids = np.zeros((len(group), bucket), dtype=np.int64)
        weights = np.zeros((len(group), bucket), dtype=np.float32)
        for index, row in enumerate(group):
            length = min(bucket, len(rows[row][0]))
            ids[index, :length], weights[index, :length] = rows[row][0][:length], rows[row][1][:length]
        yield torch.from_numpy(ids), torch.from_numpy(weights)


class Steps:
    """AdamW at a rate that warms up for 100 steps and goes down to 2% over the last quarter of the training."""

    def __init__(self, model: Qwen3ForCausalLM, forward: Callable[..., Any], rate: float) -> None:
        self.count = 0
        self._model, self._forward, self._rate = model, forward, rate
        matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
        norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))

    def take(self, ids: torch.Tensor, weights: torch.Tensor, done: float) -> tuple[torch.Tensor, torch.Tensor]:
        """One step on a batch, after a share `done` of the training: the weighted loss, and that of every token."""
        schedule = 1.0 if done < 0.75 else max(0.02, (1 - done) / 0.25)
        for group in self._optimizer.param_groups:
            group["lr"] = self._rate * min(1.0, (self.count + 1) / 100) * schedule
        with torch.autocast("cpu", torch.bfloat16):
            logits_BTV = self._forward(input_ids=ids, use_cache=False).logits[:, :-1]
        loss_BT = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
        ).view(ids.shape[0], -1)
        target_BT = weights[:, 1:]
        loss = (loss_BT * target_BT).sum() / target_BT.sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self.count += 1
        return loss, loss_BT


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
