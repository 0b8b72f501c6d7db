"""Remake the embedded default policy: a tiny Qwen3 pre-trained on household play and unrelated text skills.

    python recipes/pretrain_base.py language --out runs/base/language --compile
    python recipes/pretrain_base.py recovery --start runs/base/language --compile \\
        --out src/turntree/models/household_tiny --lr 2e-3 --tokens 4e6 --other-weight 0.3

`language`: an exploring player of mixed skill, whose random actions are learned too, and text skills: the policy
learns to speak. `recovery`: the player slips (random and impossible commands, which are seen but not learned) and
goes on sensibly, so that the policy has met "Nothing happens." and does not fall apart after its own mistakes.
Seeded and single-threaded: the same machine and versions give the same weights. Stopped before it plays well: that
is the state in which post-training starts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turntree.core import seeds
from turntree.domains import skills
from turntree.domains.household.experts import UnreachableGoal, next_exploring_action, noisy_explore, slip
from turntree.domains.household.generate import EASY, HARD, MEDIUM, generate_game

ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Conversation = list[tuple[str, str]]


def play(seed: int, max_turns: int) -> Conversation:
    """One game played by an exploring player of random skill, as (role, text) pairs."""
    rng = seeds.generator(seed, "pretrain", "play")
    noise = rng.choice((0.0, 0.0, 0.1, 0.25))
    game = generate_game(seeds.derive(seed, "pretrain", "game")).parse()
    state = game.reset()
    conversation = [("user", game.intro)]
    for command in itertools.islice(noisy_explore(state, rng, noise), max_turns):
        conversation += [("assistant", command), ("user", state.step(command).observation)]
    return conversation


def play_with_slips(seed: int, max_turns: int, hard: float = 0.0) -> Conversation:
    """The same, but slips have the role "slip": part of the history, never a target. `hard` is the share of games
    as large as ALFWorld's own."""
    rng = seeds.generator(seed, "pretrain", "slips")
    slips = rng.choice((0.0, 0.1, 0.25, 0.5))
    difficulty = MEDIUM if rng.random() < 0.2 else EASY
    if hard and seeds.generator(seed, "pretrain", "hard").random() < hard:
        difficulty = HARD
    state = generate_game(seeds.derive(seed, "pretrain", "slip game"), difficulty=difficulty).parse().reset()
    conversation = [("user", state.game.intro)]
    while not state.won and len(conversation) < 2 * max_turns:
        slipped = rng.random() < slips
        try:
            command = slip(state, rng) if slipped else next_exploring_action(state, rng)
        except UnreachableGoal:  # a slip took what no receptacle takes back
            break
        conversation += [("slip" if slipped else "assistant", command), ("user", state.step(command).observation)]
    return conversation


def lessons(seed: int, count: int) -> Conversation:
    """Several skill questions in a row, so that their sequences are about as long as short games."""
    rng = seeds.generator(seed, "pretrain", "skills")
    conversation: Conversation = []
    repeat = next(skill for skill in skills.SKILLS if skill.name == "repeat")  # copying is what games need most
    for _ in range(count):
        prompt, answer = (repeat if rng.random() < 0.25 else rng.choice(skills.SKILLS)).make(rng)
        conversation += [("user", prompt), ("assistant", answer)]
    return conversation


def build_tokenizer(corpus: list[Conversation], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|pad|>", END, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text for talk in corpus for _, text in talk), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<|pad|>")
    fast.chat_template = TEMPLATE
    return fast


def encode(
    tokenizer: PreTrainedTokenizerFast, talk: Conversation, other_weight: float
) -> tuple[list[int], list[float]]:
    """Token ids and loss weights: 1 for what the assistant says, `other_weight` for the rest."""
    ids: list[int] = []
    weights: list[float] = []
    for role, text in talk:
        opening = tokenizer.convert_tokens_to_ids("<|assistant|>" if role == "slip" else f"<|{role}|>")
        body = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        ids += [opening, *body]
        weight = {"assistant": 1.0, "slip": 0.0}.get(role, other_weight)
        weights += [0.0] + [weight] * len(body)
    return ids, weights


BUCKETS = (128, 256, 384, 512, 768, 1024)  # up to --longest; few shapes, so that few steps are compiled


def batches(rows: list[tuple[list[int], list[float]]], tokens: int, rng: random.Random, longest: int):
    """Batches of about `tokens` positions: rows padded to their bucket, cut at `longest`, in random order."""
    buckets = [bucket for bucket in BUCKETS if bucket <= longest]
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


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = seeds.generator(arguments.seed, "pretrain")
    model, tokenizer = start_from(arguments)
    forward = torch.compile(model) if arguments.compile else model
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=arguments.lr, betas=(0.9, 0.98))
    player = play if arguments.phase == "language" else partial(play_with_slips, hard=arguments.hard)
    total, seen, step, games, started = int(arguments.tokens), 0, 0, 0, time.time()
    while seen < total:
        first = 1_000_000 + games
        rows = [encode(tokenizer, player(first + i, arguments.max_turns), arguments.other_weight) for i in range(1500)]
        rows += [encode(tokenizer, lessons(first + i, 12), arguments.other_weight) for i in range(900)]
        games += 1500
        for ids, weights in batches(rows, arguments.batch, rng, arguments.longest):
            done = seen / total
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * min(1.0, (step + 1) / 100) * schedule(done)
            with torch.autocast("cpu", torch.bfloat16):
                logits_BTV = forward(input_ids=ids, use_cache=False).logits[:, :-1]
            loss_BT = torch.nn.functional.cross_entropy(
                logits_BTV.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none"
            ).view(ids.shape[0], -1)
            target = weights[:, 1:]
            loss = (loss_BT * target).sum() / target.sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            seen += int((weights > 0).sum())
            step += 1
            if step % 100 == 0:
                said = target == 1.0
                row = {
                    "step": step,
                    "tokens": seen,
                    "loss": round(loss.item(), 4),
                    "assistant_nll": round(float(loss_BT[said].mean()), 4),
                    "tokens_per_second": round(seen / (time.time() - started)),
                }
                print(json.dumps(row), flush=True)
            if arguments.save_every and step % arguments.save_every == 0:
                save(model, tokenizer, Path(f"{arguments.out}-{step}"))
            if seen >= total:
                break
    save(model, tokenizer, Path(arguments.out))


def start_from(arguments: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A saved policy, or a fresh one with a tokenizer made of sample play."""
    if arguments.start:
        model = Qwen3ForCausalLM.from_pretrained(arguments.start, dtype=torch.float32)
        return model, PreTrainedTokenizerFast.from_pretrained(arguments.start)
    sample = [play(seed, 30) for seed in range(400)] + [lessons(seed, 10) for seed in range(400)]
    tokenizer = build_tokenizer(sample, arguments.vocab)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        intermediate_size=arguments.hidden * 3,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config)
    sharpen_attention(model)
    return model, tokenizer


def sharpen_attention(model: Qwen3ForCausalLM) -> None:
    """Start the query and key norms above 1: with head width 32 and unit norms no score can exceed 5.7, too flat to
    copy one word out of three hundred."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_norm" in name or "k_norm" in name:
                parameter.fill_(math.sqrt(2))


def schedule(done: float) -> float:
    """Constant, then down to 2% over the last quarter."""
    return 1.0 if done < 0.75 else max(0.02, (1 - done) / 0.25)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    import copy

    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=["language", "recovery"])
    parser.add_argument("--start", help="the policy to go on from (recovery)")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=float, default=7e6)
    parser.add_argument("--batch", type=int, default=2000, help="tokens a step, padding included")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--other-weight", type=float, default=1.0)
    parser.add_argument("--hard", type=float, default=0.0, help="share of games as large as ALFWorld's (recovery)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a game; longer ones are cut")
    parser.add_argument("--max-turns", type=int, default=30)
    parser.add_argument("--compile", action="store_true", help="compile the step (1.8 times the speed on one core)")
    parser.add_argument("--save-every", type=int, default=0)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
