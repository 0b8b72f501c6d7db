"""One update on the actions sampled at one state: packed against one row per rollout, side by side.

    python benchmarks/update_step.py [--shape long|short] [--repeats 5] [--json PATH]

Both sides run the whole update, from packing to AdamW (no KL term), on the same tree and credit. The flat side is this
library's own `flat_batches` with plain causal attention, at the fastest of several batch sizes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

from turntree.cli.common import finish
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.training.losses import LossConfig, loss_normalizer
from turntree.training.optimizer import OptimizerConfig, build_optimizer
from turntree.training.packing import PackedBatch, flat_batches, pack
from turntree.training.update import batch_loss, update_step

LOSS = LossConfig(kl_coefficient=0.0)
BATCH_ROWS = (1, 4, 16)  # of a flat batch


@dataclass(frozen=True)
class Shape:
    """Sizes in tokens. Width 256 is 5 M parameters at vocabulary 1000, 13 M at 32000."""

    state: int
    actions: int
    action: int
    vocabularies: tuple[int, ...] = (1000, 32000)
    width: int = 256


SHAPES = {"long": Shape(1024, 16, 32), "short": Shape(256, 16, 8), "quick": Shape(32, 4, 4, (50, 500), width=32)}


def random_qwen3(vocabulary: int, width: int) -> transformers.PreTrainedModel:
    """A random float32 decoder of six layers, half as many heads for keys and values, embeddings tied."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).eval()


def interleaved(sides: Sequence[Callable[[], object]], repeats: int) -> list[list[float]]:
    """Seconds of every side, `repeats` times in turn, so that a slow moment of the machine meets all of them."""
    taken: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats):
        for side, seconds in list(zip(sides, taken, strict=True))[:: -1 if repeat % 2 else 1]:
            started = time.perf_counter()
            side()
            seconds.append(time.perf_counter() - started)
    return taken


def ratio(slow: Sequence[float], fast: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Ratio of the medians, and the smallest and largest ratio within one repeat; times `scale`."""
    pairs = [scale * s / f for s, f in zip(slow, fast, strict=True)]
    return {"median": scale * statistics.median(slow) / statistics.median(fast), "low": min(pairs), "high": max(pairs)}


def one_state(shape: Shape, vocabulary: int) -> tuple[RolloutTree, Credit]:
    """Random actions with random advantages, sampled by a policy near the random model: ratios on both sides of 1."""
    draw = random.Random(0)
    tree, credits = RolloutTree("one state"), dict[int, NodeCredit]()
    root = tree.add(None, NodeKind.PROMPT, tuple(draw.choices(range(vocabulary), k=shape.state)))
    for advantage in [draw.gauss(0.0, 1.0) for _ in range(shape.actions)]:
        tokens = tuple(draw.choices(range(vocabulary), k=shape.action))
        logprobs = tuple(draw.gauss(-math.log(vocabulary), 0.1) for _ in tokens)
        leaf = tree.add(root.id, NodeKind.COMPLETION, tokens, logprobs=logprobs).id
        credits[leaf] = NodeCredit(positive=max(advantage, 0.0), negative=min(advantage, 0.0), multiplicity=1.0)
    return tree, Credit(credits, shape.actions * shape.action, shape.actions, zero_variance=False)


def gradient(model: transformers.PreTrainedModel, batches: Sequence[PackedBatch]) -> torch.Tensor:
    """The gradient of the whole update, flattened."""
    model.zero_grad()
    for batch in batches:
        batch_loss(model, None, batch, LOSS, loss_normalizer(batches, LOSS))[0].backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def measure(shape: Shape, vocabulary: int, repeats: int) -> dict[str, Any]:
    model = random_qwen3(vocabulary, shape.width)
    tree, credit = one_state(shape, vocabulary)

    def packed() -> list[PackedBatch]:
        return pack([tree], [credit], max_tokens=shape.state + shape.actions * shape.action)

    def flat(rows: int) -> list[PackedBatch]:
        return flat_batches([tree], [credit], max_tokens=rows * (shape.state + shape.action))

    flat_gradient = gradient(model, flat(1))
    error = float((gradient(model, packed()) - flat_gradient).norm() / flat_gradient.norm())
    update = partial(update_step, model, None, build_optimizer(model, OptimizerConfig()), config=LOSS)
    flat_sides = [lambda rows=rows: update(flat(rows)) for rows in BATCH_ROWS]
    trials = interleaved(flat_sides, 1)
    fastest = trials.index(min(trials))
    ours, theirs = interleaved([lambda: update(packed()), flat_sides[fastest]], repeats)
    return {
        "name": f"vocabulary_{vocabulary}",
        "rho": (rho := packed()[0].stats.rho),
        "speedup_flat": ratio(theirs, ours),
        "share_of_rho": ratio(theirs, ours, 1 / rho),
        "gradient_error": error,
        "seconds": {"packed": statistics.median(ours), "flat": statistics.median(theirs)},
        "flat_batch_rows": BATCH_ROWS[fastest],
    }


def arguments_of(parser: argparse.ArgumentParser, repeats: int) -> argparse.Namespace:
    parser.add_argument("--repeats", type=int, default=repeats, help="timings of every side (default %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that it runs")
    parser.add_argument("--json", metavar="PATH", help="'-' is standard output, and only it")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats must be at least 1")
    return arguments


def main() -> None:
    parser = argparse.ArgumentParser(description="One update, packed against one row per rollout.")
    parser.add_argument("--shape", choices=SHAPES, default="long", help="long: 16 x 32 on 1024; short: 16 x 8 on 256")
    arguments = arguments_of(parser, repeats=5)
    shape = SHAPES["quick" if arguments.quick else arguments.shape]
    cases = [measure(shape, vocabulary, arguments.repeats) for vocabulary in shape.vocabularies]
    text = (
        "{name}: {speedup_flat[median]:.2f} times flat [{speedup_flat[low]:.2f}, {speedup_flat[high]:.2f}], "
        "{share_of_rho[median]:.0%} of rho {rho:.2f}; gradient error {gradient_error:.1e}"
    )
    result = {"shape": vars(shape), "threads": torch.get_num_threads(), "cases": cases}
    finish(result, arguments.json, [text.format(**case) for case in cases])


if __name__ == "__main__":
    main()
