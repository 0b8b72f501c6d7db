"""Remake the embedded default policy: a tiny Qwen3 pre-trained on household play and unrelated text skills.

    python recipes/pretrain_base.py language --out runs/base/language --compile
    python recipes/pretrain_base.py recovery --start runs/base/language --compile \\
        --out src/turntree_worlds/models/household_tiny --lr 2e-3 --tokens 4e6 --other-weight 0.3

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
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from pretraining import Steps, batches, bpe, fresh_model, save, saved_policy, with_template
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from turntree.core import seeds
from turntree_worlds import skills
from turntree_worlds.household.experts import UnreachableGoal, next_exploring_action, slip
from turntree_worlds.household.generate import EASY, HARD, MEDIUM, generate_game
from turntree_worlds.household.world import State, parse_command

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
Conversation = list[tuple[str, str]]


def noisy_explore(state: State, rng: random.Random, epsilon: float) -> Iterator[str]:
    """An exploring player's commands; with probability `epsilon` one is any admissible command, drawn evenly, except
    picking up an object that no receptacle takes back."""
    while not state.won:
        if rng.random() < epsilon:
            yield rng.choice([command for command in state.admissible() if not _traps(state, command)])
        else:
            yield next_exploring_action(state, rng)


def _traps(state: State, command: str) -> bool:
    parsed = parse_command(command)
    if parsed is None or parsed[0] != "take":
        return False
    return not any(state.game.accepts(name, parsed[1]) for name in state.game.receptacles)


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


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = seeds.generator(arguments.seed, "pretrain")
    model, tokenizer = start_from(arguments)
    forward = torch.compile(model) if arguments.compile else model
    steps = Steps(model, forward, arguments.lr)
    buckets = [bucket for bucket in BUCKETS if bucket <= arguments.longest]
    player = play if arguments.phase == "language" else partial(play_with_slips, hard=arguments.hard)
    total, seen, games, started = int(arguments.tokens), 0, 0, time.time()
    while seen < total:
        first = 1_000_000 + games
        rows = [encode(tokenizer, player(first + i, arguments.max_turns), arguments.other_weight) for i in range(1500)]
        rows += [encode(tokenizer, lessons(first + i, 12), arguments.other_weight) for i in range(900)]
        games += 1500
        for ids, weights in batches(rows, arguments.batch, rng, buckets):
            loss, loss_BT = steps.take(ids, weights, seen / total)
            seen += int((weights > 0).sum())
            if steps.count % 100 == 0:
                said = weights[:, 1:] == 1.0
                row = {
                    "step": steps.count,
                    "tokens": seen,
                    "loss": round(loss.item(), 4),
                    "assistant_nll": round(float(loss_BT[said].mean()), 4),
                    "tokens_per_second": round(seen / (time.time() - started)),
                }
                print(json.dumps(row), flush=True)
            if arguments.save_every and steps.count % arguments.save_every == 0:
                save(model, tokenizer, Path(f"{arguments.out}-{steps.count}"))
            if seen >= total:
                break
    save(model, tokenizer, Path(arguments.out))


def start_from(arguments: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A saved policy, or a fresh one with a tokenizer made of sample play."""
    if arguments.start:
        return saved_policy(arguments.start)
    sample = [play(seed, 30) for seed in range(400)] + [lessons(seed, 10) for seed in range(400)]
    tokenizer = with_template(bpe((text for talk in sample for _, text in talk), arguments.vocab), TEMPLATE)
    return fresh_model(tokenizer, arguments, positions=4096), tokenizer


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
