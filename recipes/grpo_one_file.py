"""GRPO in one file: sample a group, score it, compare siblings, step. Nothing of turntree is imported.

A tiny decoder from scratch learns to repeat the digit that its prompt names. The library does the same update with
every shared token computed once (`turntree.train`); a test runs both on the same tokens and compares loss and
gradient.

    python recipes/grpo_one_file.py --steps 150

Shape suffixes: B rows (rollouts), L positions, V vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

DIGITS = 10
ASK = DIGITS  # the prompt is (ASK, digit)
VOCABULARY = DIGITS + 2

GROUP_SIZE = 16
PROMPTS = 8  # groups a step
COMPLETION = 4  # tokens a rollout
CLIP_LOW, CLIP_HIGH = 0.2, 0.2
KL_COEFFICIENT = 0.001
STD_EPS = 1e-6
EPOCHS = 2  # optimizer steps on the same rollouts: the clip acts from the second one on


@dataclass(frozen=True)
class Row:
    """One rollout. `loss_mask[t]` is 1 where the policy sampled token t; `old_logprobs[t]` is read only there."""

    token_ids: list[int]
    loss_mask: list[int]
    old_logprobs: list[float]
    advantage: float


def group_advantages(rewards: list[float]) -> list[float]:
    """(reward - mean) / (population std + eps); a group that agrees teaches nothing."""
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    if max(rewards) - min(rewards) <= 1e-8:
        return [0.0] * len(rewards)
    return [(r - mean) / (std + STD_EPS) for r in rewards]


def token_logprobs(model: torch.nn.Module, ids_BL: Tensor) -> Tensor:
    """log pi(token | what came before it), [B, L - 1]: of the second token to the last.

    Rows are padded on the right, so causal attention alone keeps the padding out of everything that is read.
    """
    logits_BLV = model(input_ids=ids_BL, use_cache=False).logits[:, :-1]
    return torch.log_softmax(logits_BLV, dim=-1).gather(2, ids_BL[:, 1:, None]).squeeze(2)


def padded(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token ids [B, L]; loss mask and old log-probabilities [B, L - 1], aligned with `token_logprobs`; advantages."""
    length = max(len(row.token_ids) for row in rows)

    def pad(values: list, fill: float) -> list:
        return values + [fill] * (length - len(values))

    ids_BL = torch.tensor([pad(row.token_ids, 0) for row in rows])
    mask_BL = torch.tensor([pad(row.loss_mask, 0) for row in rows])
    old_BL = torch.tensor([pad(row.old_logprobs, 0.0) for row in rows], dtype=torch.float64)
    return ids_BL, mask_BL[:, 1:], old_BL[:, 1:], torch.tensor([row.advantage for row in rows], dtype=torch.float64)


def grpo_loss(
    model: torch.nn.Module, reference: torch.nn.Module, rows: list[Row], kl_coefficient: float = KL_COEFFICIENT
) -> Tensor:
    """The mean over sampled tokens of -min(r A, clip(r) A) + beta KL.

    r is the probability ratio of one token, now against when it was sampled. The KL term is (log pi - log ref)^2 / 2,
    whose gradient is that of KL(pi || ref) in expectation, weighted by r because the tokens came from the old policy.
    """
    ids_BL, mask_BL, old_BL, advantage_B = padded(rows)
    new_BL = token_logprobs(model, ids_BL)
    with torch.no_grad():
        reference_BL = token_logprobs(reference, ids_BL)
    ratio_BL = torch.exp(new_BL - old_BL.to(new_BL))
    advantage_B1 = advantage_B.to(new_BL)[:, None]
    clipped_BL = ratio_BL.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
    surrogate_BL = torch.minimum(ratio_BL * advantage_B1, clipped_BL * advantage_B1)
    kl_BL = ratio_BL.detach() * 0.5 * (new_BL - reference_BL) ** 2
    return (mask_BL * (kl_coefficient * kl_BL - surrogate_BL)).sum() / mask_BL.sum()


@torch.no_grad()
def sample(model: torch.nn.Module, prompt: list[int], draw: torch.Generator) -> tuple[list[list[int]], Tensor]:
    """One group: completions and the log-probabilities at which they were sampled, [group, completion]."""
    ids_BL = torch.tensor([prompt] * GROUP_SIZE)
    picked: list[Tensor] = []
    for _ in range(COMPLETION):
        logprobs_BV = torch.log_softmax(model(input_ids=ids_BL, use_cache=False).logits[:, -1], dim=-1)
        token_B1 = torch.multinomial(logprobs_BV.exp(), 1, generator=draw)
        picked.append(logprobs_BV.gather(1, token_B1))
        ids_BL = torch.cat([ids_BL, token_B1], dim=1)
    return ids_BL[:, len(prompt) :].tolist(), torch.cat(picked, dim=1)


def reward(prompt: list[int], completion: list[int]) -> float:
    """The share of the completion that is the digit asked for."""
    return sum(token == prompt[-1] for token in completion) / len(completion)


def roll_out(model: torch.nn.Module, draw: torch.Generator) -> tuple[list[Row], float]:
    """One step's rows, and their mean reward."""
    rows: list[Row] = []
    total = 0.0
    for digit in torch.randint(DIGITS, (PROMPTS,), generator=draw).tolist():
        prompt = [ASK, digit]
        completions, logprobs = sample(model, prompt, draw)
        rewards = [reward(prompt, completion) for completion in completions]
        total += sum(rewards)
        for completion, old, advantage in zip(completions, logprobs.tolist(), group_advantages(rewards), strict=True):
            mask = [0] * len(prompt) + [1] * len(completion)
            rows.append(Row(prompt + completion, mask, [0.0] * len(prompt) + old, advantage))
    return rows, total / len(rows)


def tiny_decoder(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def train(steps: int, learning_rate: float, seed: int, log=print) -> list[float]:
    """The mean reward of every step."""
    torch.set_num_threads(1)  # faster than many, for a model this small
    policy = tiny_decoder(seed)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    draw = torch.Generator().manual_seed(seed)
    rewards: list[float] = []
    for step in range(steps):
        rows, mean_reward = roll_out(policy, draw)
        rewards.append(mean_reward)
        for _ in range(EPOCHS):
            optimizer.zero_grad()
            grpo_loss(policy, reference, rows).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if step % 10 == 0 or step == steps - 1:
            log(f"step {step:4d}  reward {mean_reward:.3f}")
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.steps, arguments.learning_rate, arguments.seed)
