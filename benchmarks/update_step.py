"""One update on the actions sampled at one state: packed against one row per rollout, side by side.

    python benchmarks/update_step.py [--shape long|short|branched] [--repeats 5] [--json PATH]
    python benchmarks/update_step.py --grid [--json PATH]

All sides take the whole step on the same tokens, advantages and old log-probabilities, without a KL term and without
checkpointing: loss, gradient, clipping, AdamW. `flat` is this library's own `flat_batches`: one row per rollout with
plain causal attention, the head at trained positions only, the same fused scores. `trl` (pip install turntree[bench],
one-state shapes) is `GRPOTrainer.compute_loss` on prepared inputs and the trainer's own optimizer. Both run at the
fastest of several batch sizes; packing is inside the clock of `packed` and `flat`, preparing TRL's inputs outside.

`--grid` goes over the length of the prompt, the number of rollouts and the number of turns, one at a time, on a smaller
model. There flat is the time of one of its rows times their number, because rows are equally long.

With one thread the clock is the CPU time of the process, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from turntree.cli.common import finish
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.pack.attention import set_tree_attention
from turntree.pack.packing import PackedBatch, flat_batches, pack
from turntree.train.losses import LossConfig, loss_normalizer
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.update import batch_loss, update_step

if TYPE_CHECKING:
    from trl_step import TRLStep

LOSS = LossConfig(kl_coefficient=0.0)
BATCH_ROWS = (1, 4, 16)  # of a flat batch
GRADIENT_DRAWS = 3
LONG_STEP = 10.0  # seconds


@dataclass(frozen=True)
class Shape:
    """Sizes in tokens. At every turn of `forks`, each trajectory becomes so many, which sample `action` tokens each and
    then, but for the last turn, read `observation` tokens. Width 256 is 5 M parameters at vocabulary 1000, 13 M at
    32000."""

    state: int
    forks: tuple[int, ...]
    action: int
    observation: int = 0
    vocabularies: tuple[int, ...] = (1000, 32000)
    width: int = 256

    @property
    def rollouts(self) -> int:
        return math.prod(self.forks)

    @property
    def path(self) -> int:
        """Tokens of one rollout."""
        return self.state + len(self.forks) * self.action + (len(self.forks) - 1) * self.observation


# Prompts, rollouts and turns (32 sampled tokens each, 64 read between two), around 8 rollouts of one turn on 2,048.
GRID = [
    *((state, (8,)) for state in (512, 2048, 8192, 32768)),
    *((2048, (group,)) for group in (4, 16, 64)),
    *((2048, (8, *[1] * (turns - 1))) for turns in (5, 10, 30)),
]

SHAPES = {
    "long": Shape(1024, (16,), 32),
    "short": Shape(256, (16,), 8),
    "branched": Shape(512, (4, 2, 2), 32, observation=96),
    "quick": Shape(32, (4,), 4, vocabularies=(50, 500), width=32),
    "quick branched": Shape(32, (2, 2), 4, observation=4, vocabularies=(50, 500), width=32),
}


def random_qwen3(vocabulary: int, width: int) -> transformers.PreTrainedModel:
    """A random float32 decoder of six layers, half as many heads for keys and values, embeddings tied."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": width // 4}
    sizes = {"vocab_size": vocabulary, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": 6}
    torch.manual_seed(0)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, tie_word_embeddings=True)).eval()


def cpu_clock() -> Callable[[], float]:
    """CPU time of this process with one thread, else the time on the wall."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def interleaved(
    sides: Sequence[Callable[[], object]], repeats: int, clock: Callable[[], float] = time.perf_counter
) -> list[list[float]]:
    """Seconds of every side, `repeats` times in turn, so that a slow moment of the machine meets all of them."""
    taken: list[list[float]] = [[] for _ in sides]
    for repeat in range(repeats):
        for side, seconds in list(zip(sides, taken, strict=True))[:: -1 if repeat % 2 else 1]:
            started = clock()
            side()
            seconds.append(clock() - started)
    return taken


def ratio(slow: Sequence[float], fast: Sequence[float], scale: float = 1.0) -> dict[str, float]:
    """Ratio of the medians, and the smallest and largest ratio within one repeat; times `scale`."""
    pairs = [scale * s / f for s, f in zip(slow, fast, strict=True)]
    return {"median": scale * statistics.median(slow) / statistics.median(fast), "low": min(pairs), "high": max(pairs)}


def spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def sampled_tree(shape: Shape, vocabulary: int, seed: int = 0) -> tuple[RolloutTree, Credit]:
    """Random actions with random advantages, sampled by a policy near the random model: ratios on both sides of 1."""
    draw = random.Random(seed)
    tree, credits = RolloutTree("benchmark"), dict[int, NodeCredit]()
    ends = [tree.add(None, NodeKind.PROMPT, tuple(draw.choices(range(vocabulary), k=shape.state))).id]
    for turn, forks in enumerate(shape.forks):
        below: list[int] = []
        for parent in [end for end in ends for _ in range(forks)]:
            tokens = tuple(draw.choices(range(vocabulary), k=shape.action))
            logprobs = tuple(draw.gauss(-math.log(vocabulary), 0.1) for _ in tokens)
            node = tree.add(parent, NodeKind.COMPLETION, tokens, logprobs=logprobs).id
            advantage, leaves = draw.gauss(0.0, 1.0), math.prod(shape.forks[turn + 1 :])
            credits[node] = NodeCredit(max(advantage, 0.0) * leaves, min(advantage, 0.0) * leaves, leaves)
            if turn + 1 < len(shape.forks):
                seen = tuple(draw.choices(range(vocabulary), k=shape.observation))
                node = tree.add(node, NodeKind.OBSERVATION, seen).id
            below.append(node)
        ends = below
    tokens = shape.rollouts * len(shape.forks) * shape.action
    return tree, Credit(credits, tokens, shape.rollouts, zero_variance=False)


def gradient(model: transformers.PreTrainedModel, batches: Sequence[PackedBatch]) -> torch.Tensor:
    """The gradient of the whole update, flattened."""
    model.zero_grad()
    for batch in batches:
        batch_loss(model, None, batch, LOSS, loss_normalizer(batches, LOSS))[0].backward()
    return flat_gradient(model)


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def peak_bytes(side: Callable[[], object]) -> int:
    """The most that `side` holds at once beyond what it found, from every allocation of tensors that it makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        side()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


def trl_step(model: Callable[[], transformers.PreTrainedModel], shape: Shape, folder: str) -> TRLStep | None:
    """On a model of its own; None for branched trees, and where the extra is not installed."""
    if len(shape.forks) > 1 or importlib.util.find_spec("trl") is None:
        return None
    from trl_step import TRLStep  # noqa: PLC0415

    return TRLStep(model(), LOSS, OptimizerConfig(), folder)


def fastest(sides: Sequence[Callable[[], object]], clock: Callable[[], float]) -> int:
    """Which of the sides took least, once each."""
    trials = interleaved(sides, 1, clock)
    return trials.index(min(trials))


def measure(shape: Shape, vocabulary: int, repeats: int) -> dict[str, Any]:
    model = random_qwen3(vocabulary, shape.width)
    set_tree_attention(model)
    tree, credit = sampled_tree(shape, vocabulary)
    clock = cpu_clock()

    def packed() -> list[PackedBatch]:
        return pack([tree], [credit], max_tokens=shape.rollouts * shape.path)

    def flat(rows: int) -> list[PackedBatch]:
        return flat_batches([tree], [credit], max_tokens=rows * shape.path)

    with tempfile.TemporaryDirectory() as folder:
        trl = trl_step(partial(random_qwen3, vocabulary, shape.width), shape, folder)
        errors, trl_errors = gradient_errors(model, trl, shape, vocabulary)
        update = partial(update_step, model, None, Optimizer(model.parameters(), OptimizerConfig()), config=LOSS)
        flat_sides = [partial(lambda rows: update(flat(rows)), rows) for rows in BATCH_ROWS]
        rows = fastest(flat_sides, clock)
        sides = [lambda: update(packed()), flat_sides[rows]]
        trl_rows = None
        if trl is not None:
            trl_sides = [partial(trl.step, trl.prepare(tree, credit, rows)) for rows in BATCH_ROWS]
            trl_rows = fastest(trl_sides, clock)
            sides.append(trl_sides[trl_rows])
        ours, *others = interleaved(sides, repeats, clock)
        memory = [peak_bytes(side) for side in sides]
    rho = packed()[0].stats.rho
    return {
        "name": f"vocabulary_{vocabulary}",
        "rho": spread([rho]),
        "speedup_flat": ratio(others[0], ours),
        "share_of_rho": ratio(others[0], ours, 1 / rho),
        "speedup_trl": ratio(others[1], ours) if trl is not None else None,
        "gradient_error": spread(errors),
        "gradient_error_trl": spread(trl_errors) if trl is not None else None,
        "memory_ratio": spread([memory[1] / memory[0]]),
        "memory_ratio_trl": spread([memory[2] / memory[0]]) if trl is not None else None,
        "seconds": dict(zip(("packed", "flat", "trl"), map(statistics.median, (ours, *others)), strict=False)),
        "peak_bytes": dict(zip(("packed", "flat", "trl"), memory, strict=False)),
        "batch_rows": {"flat": BATCH_ROWS[rows], "trl": None if trl_rows is None else BATCH_ROWS[trl_rows]},
    }


def measure_point(shape: Shape, repeats: int) -> dict[str, Any]:
    """One point of the grid: seconds of a step packed and flat, and the share of rho that is reached.

    `rho_attention` is flat over packed query-key pairs that are seen: a token reads the whole path above it on either
    side, so attention can save no more than that. `limit` is what a step can save at most: the flat step with its
    attention divided by `rho_attention` and the rest of it by rho.
    """
    model = random_qwen3(shape.vocabularies[0], shape.width)
    set_tree_attention(model)
    tree, credit = sampled_tree(shape, shape.vocabularies[0])
    clock = cpu_clock()
    update = partial(update_step, model, None, Optimizer(model.parameters(), OptimizerConfig()), config=LOSS)
    rows = flat_batches([tree], [credit], max_tokens=shape.path)
    kept = dataclasses.replace(rows[0].stats, rollout_tokens=float(rows[0].multiplicity_A[rows[0].action_T].sum()))
    row = dataclasses.replace(rows[0], stats=kept)  # a window of this row alone
    packed = pack([tree], [credit], max_tokens=shape.rollouts * shape.path)
    sides = [lambda: update(packed), lambda: update([row])]
    ours, one = interleaved(sides, 1, clock)  # a warm-up, unless a step takes so long that it does not matter
    if max(ours + one) < LONG_STEP:
        ours, one = interleaved(sides, repeats, clock)
    rho = packed[0].stats.rho
    speedup = ratio([len(rows) * seconds for seconds in one], ours)
    sizes = {"prompt": shape.state, "rollouts": shape.rollouts, "turns": len(shape.forks), "width": shape.width}
    share = {name: value / rho for name, value in speedup.items()}
    seconds = {"packed": statistics.median(ours), "flat": len(rows) * statistics.median(one)}
    pairs = len(rows) * shape.path * (shape.path + 1) / 2 / float((packed[0].positions_BL + 1).sum())
    attention = attention_share(sides[1]) if pairs < 0.95 * rho else 1.0
    limit = 1 / (attention / pairs + (1 - attention) / rho)
    return sizes | {
        "rho": rho,
        "rho_attention": pairs,
        "limit": limit,
        "share_of_limit": {name: value / limit for name, value in speedup.items()},
        "speedup_flat": speedup,
        "share_of_rho": share,
        "seconds": seconds,
    }


def attention_share(side: Callable[[], object]) -> float:
    """The part of the CPU time of `side` that attention takes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        side()
    taken = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    return sum(seconds for name, seconds in taken.items() if "scaled_dot_product" in name) / sum(taken.values())


def point_line(point: dict[str, Any]) -> str:
    return (
        "{prompt} + {rollouts} x {turns} turns, width {width}: {speedup_flat[median]:.1f} times flat, "
        "{share_of_rho[median]:.0%} of rho {rho:.1f} and {share_of_limit[median]:.0%} of the limit {limit:.1f}; "
        "{seconds[packed]:.2f} s, flat {seconds[flat]:.2f} s"
    ).format(**point)


def gradient_errors(
    model: transformers.PreTrainedModel, trl: TRLStep | None, shape: Shape, vocabulary: int
) -> tuple[list[float], list[float]]:
    """Relative error of the packed gradient against the flat one, and against TRL's, on several trees."""
    against_flat, against_trl = [], []
    for seed in range(GRADIENT_DRAWS):
        tree, credit = sampled_tree(shape, vocabulary, seed)
        found = gradient(model, pack([tree], [credit], max_tokens=shape.rollouts * shape.path))
        expected = gradient(model, flat_batches([tree], [credit], max_tokens=4 * shape.path))
        against_flat.append(error(found, expected))
        if trl is not None:
            trl.backward(trl.prepare(tree, credit, 4))
            against_trl.append(error(found, flat_gradient(trl.model)))
            trl.model.zero_grad()
    model.zero_grad()
    return against_flat, against_trl


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
    shapes = [name for name in SHAPES if "quick" not in name]
    parser.add_argument("--shape", choices=shapes, default="long", help="16 x 32 on 1024; 16 x 8 on 256; a tree")
    parser.add_argument("--grid", action="store_true", help="over prompts, rollouts and turns")
    parser.add_argument("--least", type=int, default=0, help="shortest prompt of the grid (default %(default)s)")
    parser.add_argument("--most", type=int, default=32768, help="longest prompt of the grid (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the grid's model (default %(default)s)")
    arguments = arguments_of(parser, repeats=5)
    if arguments.grid:
        points: list[dict[str, Any]] = []
        for state, forks in [each for each in GRID if arguments.least <= each[0] <= arguments.most]:
            shape = Shape(state, forks, 32, 64, vocabularies=(1000,), width=arguments.width)
            points.append(measure_point(shape, arguments.repeats))
            print(point_line(points[-1]), file=sys.stderr, flush=True)
        finish({"threads": torch.get_num_threads(), "repeats": arguments.repeats, "grid": points}, arguments.json, [])
        return
    quick = "quick branched" if arguments.shape == "branched" else "quick"
    shape = SHAPES[quick if arguments.quick else arguments.shape]
    cases = [measure(shape, vocabulary, arguments.repeats) for vocabulary in shape.vocabularies]
    result = {"shape": vars(shape), "threads": torch.get_num_threads(), "repeats": arguments.repeats, "cases": cases}
    finish(result, arguments.json, [line(case) for case in cases])


def line(case: dict[str, Any]) -> str:
    text = (
        "{name}: {speedup_flat[median]:.2f} times flat [{speedup_flat[low]:.2f}, {speedup_flat[high]:.2f}], "
        "{share_of_rho[median]:.0%} of rho {rho[median]:.2f}; gradient error {gradient_error[high]:.1e}; "
        "memory {memory_ratio[median]:.2f} times less"
    )
    if case["speedup_trl"] is not None:
        text += "; {speedup_trl[median]:.2f} times TRL [{speedup_trl[low]:.2f}, {speedup_trl[high]:.2f}]"
    return text.format(**case)


if __name__ == "__main__":
    main()
