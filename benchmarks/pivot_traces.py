"""Tokens of a PivotRL step, by how many of its states are of one trace: python benchmarks/pivot_traces.py TRACES

`train pivot` packs states that begin alike as one tree, so what they share is computed once. Steps of `--states`
states, drawn as `train.per_trace` draws them, with `--rollouts` answers of `--answer` tokens each; the prompts are
those of the traces (a file of `turntree traces import`) as `--model` writes them. Nothing is sampled: tokens are
counted.

  apart    every state a tree of its own, its rollouts sharing its prompt
  trained  states that begin alike in one tree: slots of the forward and backward pass
"""

from __future__ import annotations

import argparse
import random
from statistics import median

from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.pack.packing import pack
from turntree.rollout.local import Prompted, render
from turntree.stages.candidates import read_candidates
from turntree.stages.config import Device
from turntree.stages.policy import load_policy
from turntree.train.sampler import PivotSampler


def grown(item: Prompted, rollouts: int, answer: int, draw: random.Random) -> tuple[RolloutTree, Credit]:
    tree = RolloutTree(item.state.id)
    root = tree.add(None, NodeKind.PROMPT, item.prompt_ids).id
    zeros = (0.0,) * answer
    for _ in range(rollouts):
        ids = tuple(draw.randrange(1000) for _ in range(answer))
        tree.add(root, NodeKind.COMPLETION, ids, logprobs=zeros, entropies=zeros)
    trained = {node.id: NodeCredit(1.0, 0.0, 1.0) for node in tree if node.sampled}
    return tree, Credit(trained, rollout_tokens=float(rollouts * answer), rollouts=float(rollouts), zero_variance=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces")
    parser.add_argument("--model", default="default", help="whose tokenizer and template (default: %(default)s)")
    parser.add_argument("--states", type=int, default=32)
    parser.add_argument("--rollouts", type=int, default=8)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=16384, help="of a pass (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=8192, help="prompt that is taken (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    renderer = load_policy(given.model, Device()).renderer
    states = read_candidates(given.traces, "", 0, 0)
    prompted = [item for item in (render(state, renderer) for state in states) if len(item.prompt_ids) <= given.longest]
    traces = [item.state.trace_id for item in prompted]
    length = median(len(item.prompt_ids) for item in prompted)
    print(f"{len(prompted)} of {len(states)} states, {len(set(traces))} traces; median prompt: {length:.0f} tokens\n")
    print("| states of a trace | apart | trained | share |\n|---|---|---|---|")
    for per_trace in (1, 2, 4, 8, 16):
        sampler = PivotSampler([1.0] * len(prompted), 0, traces, per_trace)
        apart, trained = 0, 0
        for step in range(given.steps):
            draw = random.Random(step)
            drawn = [prompted[index] for index in sampler.draw(given.states, step)]
            made = [grown(item, given.rollouts, given.answer, draw) for item in drawn]
            apart += sum(pack([tree], [credit], max_tokens=10**9)[0].stats.unique_tokens for tree, credit in made)
            trees, credits = zip(*made, strict=True)
            trained += sum(batch.stats.unique_tokens for batch in pack(trees, credits, max_tokens=given.max_tokens))
        counts = (apart // given.steps, trained // given.steps)
        print(f"| {per_trace} | {counts[0]:,} | {counts[1]:,} | {trained / apart:.2f} |", flush=True)


if __name__ == "__main__":
    main()
