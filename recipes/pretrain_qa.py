"""Remake the embedded question-answering policy: a tiny Qwen3 that has seen an expert use search and python.

    python recipes/pretrain_qa.py train --compile --out src/turntree_worlds/models/qa_tiny
    python recipes/pretrain_qa.py measure src/turntree_worlds/models/qa_tiny

`train` teaches from generated worlds, none of them the default one (seed 0): first with one document a search, which
shows more look-ups in as many tokens, then as it will be used. The expert slips now and then; slips are seen but not
learned. Seeded and single-threaded. Stopped while it is mediocre: that is the state in which post-training starts.
`measure` prints what its model card says.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from pretraining import Steps, batches, bpe, fresh_model, save, saved_policy, with_template
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from turntree.core import seeds
from turntree.core.completion import Sampling
from turntree.core.labels import Rewards
from turntree.core.tree import NodeKind, RolloutTree
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.players import grow
from turntree.stages.policy import Device, load_policy
from turntree_worlds.qa.build import QaWorld, QaWorldConfig, SearchConfig, open_tools
from turntree_worlds.qa.environment import QaEnvironment
from turntree_worlds.qa.experts import NotFound, Played, play
from turntree_worlds.qa.generate import Posed, QuestionMix

SCAFFOLD = (  # one token each: what a call and an answer are written with
    '<tool_call>{"name": "search", "arguments": {"query": "',
    '<tool_call>{"name": "python", "arguments": {"code": "',
    '"}}</tool_call>',
    "<answer>",
    "</answer>",
)
TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}<|end|>{% endif %}"
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>{\"name\": ' + call['function']['name'] | tojson + ', \"arguments\": '"
    " + call['function']['arguments'] | tojson + '}</tool_call>' }}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
Tools = tuple[dict[str, Any], ...]
FIRST_WORLD = 1000  # worlds of training have this seed or a higher one
BUCKETS = (96, 128, 192, 256, 320, 384, 512, 768)  # row lengths; few, so that few steps are compiled


def episodes(seed: int, count: int, documents: int, noise: float, mix: QuestionMix) -> tuple[list[Played], Tools]:
    """Episodes of the expert in the world of `seed`, with so many documents a search, and the tools that it had.
    Questions that so few documents leave open are left out."""
    world = QaWorld(QaWorldConfig(seed=seed, mix=mix))
    played: list[Played] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        world.build_index(Path(folder, "index.db")) as index,
        open_tools(index, search=SearchConfig(count=documents)) as tools,
    ):
        for number, posed in enumerate(world.questions("train", count)):
            rng = seeds.generator(seed, "slips", number)
            with contextlib.suppress(NotFound):
                played.append(play(QaEnvironment(posed.question, tools), posed, rng, noise))
        return played, tools.schemas


def build_tokenizer(corpus: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    tokenizer = bpe(corpus, vocab_size - len(SCAFFOLD))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in SCAFFOLD])
    return with_template(tokenizer, TEMPLATE)


def words_of(played: Played) -> Iterator[str]:
    """The texts that a tokenizer is made for: without the scaffold, whose tokens are given."""
    yield " search python"
    for message in played.messages:
        yield message.content.removeprefix("<answer>").removesuffix("</answer>")
        yield from (text for call in message.tool_calls for text in call.arguments.values())


def encode(renderer: ChatRenderer, played: Played, schemas: Tools, other: float) -> tuple[list[int], list[float]]:
    """Token ids and loss weights: 1 for what the expert says, 0 for its slips, `other` for what it is told."""
    messages = played.messages
    ids: list[int] = []
    weights: list[float] = []
    for place, message in enumerate(messages):
        if message.role == "user" and place:
            break  # the episode is over
        if message.role == "assistant":
            part, weight = renderer.completion(message), 0.0 if place in played.slips else 1.0
        else:
            before = messages[:place]
            part = renderer.extend(before, [message], schemas) if place else renderer.prompt([message], schemas)
            weight = other
        ids += part
        weights += [weight] * len(part)
    return ids, weights


def lesson(arguments: argparse.Namespace, done: float) -> tuple[int, float, QuestionMix]:
    """Documents a search, loss weight of what the expert is told, and questions, after a share `done` of the training.
    The titles of results repeat the query: predicting them, too, is how copying is learned soonest."""
    if done < arguments.warm_up:
        return 1, 0.5, QuestionMix(hops=((1, 0.3), (2, 0.3), (3, 0.2), (4, 0.2)))
    return 3, arguments.other_weight, QuestionMix()


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    rng = seeds.generator(arguments.seed, "pretrain")
    model, tokenizer = start_from(arguments)
    renderer = ChatRenderer(tokenizer)
    forward = torch.compile(model, dynamic=False) if arguments.compile else model
    steps = Steps(model, forward, arguments.lr)
    total, seen, worlds, started = int(arguments.tokens), 0, 0, time.time()
    while seen < total:
        documents, other, mix = lesson(arguments, seen / total)
        rows: list[tuple[list[int], list[float]]] = []
        for _ in range(arguments.worlds):
            worlds += 1
            played, schemas = episodes(FIRST_WORLD + arguments.skip + worlds, 1000, documents, arguments.noise, mix)
            rows += [encode(renderer, one, schemas, other) for one in played]
        for ids, weights in batches(rows, arguments.batch, rng, BUCKETS):
            _, loss_BT = steps.take(ids, weights, seen / total)
            seen += int((ids > 0).sum())
            if steps.count % 50 == 0:
                target = weights[:, 1:]
                row = {
                    "step": steps.count,
                    "tokens": seen,
                    "expert_nll": round(loss_BT[target == 1.0].mean().item(), 4),
                    "other_nll": round(loss_BT[(target < 1.0) & (ids[:, 1:] > 0)].mean().item(), 4),
                    "seconds": round(time.time() - started),
                }
                print(json.dumps(row), flush=True)
            if arguments.save_every and steps.count % arguments.save_every == 0:
                save(model, tokenizer, Path(f"{arguments.out}-{steps.count}"))
            if seen >= total:
                break
    save(model, tokenizer, Path(arguments.out))


def start_from(arguments: argparse.Namespace) -> tuple[Qwen3ForCausalLM, PreTrainedTokenizerFast]:
    """A saved policy, or a fresh one with a tokenizer made of sample episodes."""
    if arguments.start:
        return saved_policy(arguments.start)
    mix = QuestionMix()
    sample = [one for seed in range(8) for one in episodes(FIRST_WORLD + seed, 250, 3, 0.0, mix)[0]]
    tokenizer = build_tokenizer([text for played in sample for text in words_of(played)], arguments.vocab)
    return fresh_model(tokenizer, arguments, positions=2048), tokenizer


def measure(arguments: argparse.Namespace) -> None:
    """Groups of 8 on development questions of the default world, by number of look-ups, and a greedy pass."""
    policy = load_policy(arguments.model, Device())
    world = QaWorld(QaWorldConfig(seed=arguments.world))
    posed = world.questions("dev", arguments.questions)
    with (
        tempfile.TemporaryDirectory() as folder,
        world.build_index(Path(folder, "index.db")) as index,
        open_tools(index) as tools,
    ):
        tasks = [QaEnvironment(one.question, tools) for one in posed]
        for temperature, size in ((1.0, arguments.samples), (0.0, 1)):
            sampling = Sampling(temperature=temperature, max_tokens=32)
            config = EpisodeConfig(max_turns=12, max_context=1200, sampling=sampling)
            started = time.time()
            groups = grow(tasks, policy.engine, policy.renderer, config, group_size=size, seed=7)
            report(temperature, size, posed, groups, time.time() - started)


def report(
    temperature: float, size: int, posed: Sequence[Posed], groups: list[tuple[RolloutTree, Rewards]], seconds: float
) -> None:
    by_hops: dict[object, list[tuple[float, bool]]] = defaultdict(list)
    turns, tokens = [], []
    for one, (tree, rewards) in zip(posed, groups, strict=True):
        right = [reward >= 1.0 for reward in rewards.scored().values()]
        row = (sum(right) / len(right), 0 < sum(right) < len(right))
        hops = sum(len(chain.relations) for chain in one.chains)
        for key in ("all", f"{hops} hops", one.question.kind):
            by_hops[key].append(row)
        for leaf in tree.leaves():
            path = tree.path(leaf)
            turns.append(sum(node.kind is NodeKind.COMPLETION for node in path))
            tokens.append(sum(len(node.token_ids) for node in path))
    for key in sorted(by_hops, key=str):
        rows = by_hops[key]
        success, mixed = (statistics.fmean(column) for column in zip(*rows, strict=True))
        print(f"T={temperature:g} {key}: {len(rows)} questions, success {success:.1%}, mixed groups {mixed:.1%}")
    rollouts = len(groups) * size
    print(
        f"T={temperature:g}: turns {statistics.median(turns)} (median), tokens {statistics.median(tokens)} (median), "
        f"{max(tokens)} (most); {64 * seconds / rollouts:.1f} s per 64 rollouts"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train")
    training.set_defaults(run=train)
    training.add_argument("--start", help="the policy to go on from")
    training.add_argument("--out", required=True)
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--tokens", type=float, default=8e6)
    training.add_argument("--batch", type=int, default=2000, help="tokens a step, padding included")
    training.add_argument("--lr", type=float, default=3e-3)
    training.add_argument("--hidden", type=int, default=128)
    training.add_argument("--layers", type=int, default=4)
    training.add_argument("--vocab", type=int, default=1536)
    training.add_argument("--other-weight", type=float, default=0.05)
    training.add_argument("--noise", type=float, default=0.05, help="slips a look-up")
    training.add_argument("--warm-up", type=float, default=0.4, help="share of the training with one document a search")
    training.add_argument("--worlds", type=int, default=2, help="worlds of 1000 questions between two shuffles")
    training.add_argument("--skip", type=int, default=0, help="worlds to leave out, when training goes on")
    training.add_argument("--compile", action="store_true", help="compile the step")
    training.add_argument("--save-every", type=int, default=0)
    measuring = commands.add_parser("measure")
    measuring.set_defaults(run=measure)
    measuring.add_argument("model")
    measuring.add_argument("--world", type=int, default=0)
    measuring.add_argument("--questions", type=int, default=300)
    measuring.add_argument("--samples", type=int, default=8)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
