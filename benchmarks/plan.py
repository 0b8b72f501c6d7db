"""What `turntree plan` says a rank needs beside what ranks then take, on CPUs.

    python benchmarks/plan.py [--cell NAME ...] [--json PATH]   # the cells of the table, measured and planned
    python benchmarks/plan.py --published [--json PATH]         # plans of published sizes on eight cards of 80 GB

A cell trains a random model for two optimizer steps on as many gloo ranks as it names, one process each. Measured is by
how much the resident memory of a rank rose at most since it had its libraries and its process group; planned is
`turntree.train.plan.memory`, which computes nothing. The first rank holds the whole weights too, to sample with.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from turntree.cli.common import finish
from turntree.stages.plan import advice, shown
from turntree.train import plan
from turntree.train.config import LoRAConfig, OptimizerConfig
from turntree.train.launch import open_ranks
from turntree.train.losses import LossConfig
from turntree.train.plan import Planned
from turntree.train.ranks import ProcessGroup
from turntree.train.trainer import Trainer, Trainers, end, follow, open_trainers
from turntree.train.update import train_windows

MIB = 1 << 20
M_MMAP_THRESHOLD = -3  # of glibc's malloc.h
BEFORE = 0  # resident bytes of this rank when its libraries were in memory
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
EXPERTS = {"num_experts": 16, "num_experts_per_tok": 4}


def dense(width: int, layers: int, vocabulary: int) -> transformers.PreTrainedConfig:
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    return transformers.Qwen3Config(**sizes, **HEADS, vocab_size=vocabulary, tie_word_embeddings=True)


def mixture(width: int, layers: int, vocabulary: int) -> transformers.PreTrainedConfig:
    sizes = {"hidden_size": width, "moe_intermediate_size": width, "num_hidden_layers": layers}
    return transformers.Qwen3MoeConfig(**sizes, **HEADS, **EXPERTS, vocab_size=vocabulary, tie_word_embeddings=True)


SIZES = {"small": (512, 2, 8000), "middle": (640, 3, 16_000), "large": (1024, 3, 32_000)}
KINDS = {"dense": dense, "mixture": mixture}
ADAPTER = LoRAConfig()
CELLS: dict[str, tuple[transformers.PreTrainedConfig, Planned]] = {
    f"{kind} {size}, {ranks} ranks, {'LoRA' if lora else 'full'}{', reference' * referred}": (
        make(*SIZES[size]),
        Planned(ranks=ranks, lora=lora, referred=referred, tokens=256, branches=4, bfloat16=False),
    )
    for kind, make in KINDS.items()
    for size in SIZES
    for ranks in (2, 4)
    for lora in (None, ADAPTER)
    for referred in (False, True)
}

_LONG = {"max_position_embeddings": 40_960, "vocab_size": 151_936, "head_dim": 128, "tie_word_embeddings": False}
PUBLISHED = {  # by what their config.json says
    "Qwen3-8B": partial(
        transformers.Qwen3Config, **_LONG, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8,
    ),
    "Qwen3-14B": partial(
        transformers.Qwen3Config, **_LONG, hidden_size=5120, intermediate_size=17_408, num_hidden_layers=40,
        num_attention_heads=40, num_key_value_heads=8,
    ),
    "Qwen3-30B-A3B": partial(
        transformers.Qwen3MoeConfig, **_LONG, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
    ),
}  # fmt: skip


def ranks_of(config: Any, asked: Planned, number: int, port: int, peaks: Any) -> None:
    """One rank of a cell; the first puts by how many bytes the memory of every rank rose at most."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 65_536)  # so that what is freed is given back
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": asked.ranks, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}}
    with open_ranks() as group:
        if number:
            follow(group)
            return
        warm = trained(dense(64, 1, 500) if "Moe" not in type(config).__name__ else mixture(64, 1, 500), asked, group)
        warm.run(begin, [None] * asked.ranks)  # the libraries are in memory
        peaks.put(trained(config, asked, group).run(peak, [None] * asked.ranks))
        end(group, None)


def trained(config: Any, asked: Planned, group: ProcessGroup) -> Trainers:
    """After the steps."""
    model = plan.outline(config, asked)
    plan.prepare(model, asked)
    trainers = open_trainers(model, OptimizerConfig(), 2, group, reference=model if asked.referred else None)
    windows = plan.batches(config.vocab_size, asked)
    trainers.run(partial(steps, referred=asked.referred), [windows] * asked.ranks)
    return trainers


def begin(trainer: Trainer, _: None) -> None:
    global BEFORE
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    BEFORE = status("VmRSS")


def peak(trainer: Trainer, _: None) -> list[int]:
    return trainer.group.collect(status("VmHWM") - BEFORE)


def steps(trainer: Trainer, windows: Any, *, referred: bool) -> None:
    loss = LossConfig(kl_coefficient=0.05 if referred else 0.0)
    train_windows(trainer, windows, loss=loss, updates=1, rescores=False)


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(config: Any, asked: Planned) -> tuple[int, int]:
    """The peaks of the first rank and of the largest of the others, in bytes."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__ if __name__ != "__main__" else "plan", "turntree.train.plan"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    peaks = context.Queue()
    ranks = [
        context.Process(target=ranks_of, args=(config, asked, number, port, peaks)) for number in range(asked.ranks)
    ]
    for rank in ranks:
        rank.start()
    first, *others = peaks.get(timeout=1800)
    for rank in ranks:
        rank.join()
    return first, max(others)


def compared(name: str) -> dict[str, Any]:
    """Of one cell: MiB planned and measured, of the first rank and of another."""
    config, asked = CELLS[name]
    need = plan.memory(config, asked)
    first, other = measured(config, asked)
    pairs = {"first": (need.peak + need.whole, first), "other": (need.peak, other)}
    row: dict[str, Any] = {"cell": name, "parameters": need.parameters}
    for which, (planned, found) in pairs.items():
        row[which] = {"planned": planned / MIB, "measured": found / MIB, "off": planned / found - 1}
    return row


def published(name: str) -> dict[str, Any]:
    """The plans of a published size on eight cards of 80 GB: full weights, and LoRA; activations recomputed."""
    config = PUBLISHED[name]()
    rows: dict[str, Any] = {}
    for kind, lora in (("full", None), ("LoRA", ADAPTER)):
        asked = Planned(ranks=8, lora=lora, referred=True, checkpointing=True, tokens=8192, branches=1, rows=0)
        need = plan.memory(config, asked)
        lines = [*shown(need, asked), *advice(asked, need, 80, partial(plan.memory, config))]
        rows[kind] = {"need": vars(need) | {"peak": need.peak}, "lines": lines}
    return {"model": name, **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", action="append", choices=CELLS, metavar="NAME", help=f"one of {len(CELLS)}")
    parser.add_argument("--published", action="append", nargs="?", const="all", choices=["all", *PUBLISHED])
    parser.add_argument("--json", metavar="PATH")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if asked.published:
        for name in PUBLISHED if "all" in asked.published else asked.published:
            rows.append(published(name))
            print(name, *rows[-1]["full"]["lines"], *rows[-1]["LoRA"]["lines"], sep="\n", file=sys.stderr)
    else:
        for name in asked.cell or CELLS:
            rows.append(row := compared(name))
            told = "; ".join(
                f"{which} {row[which]['planned']:.0f} planned, {row[which]['measured']:.0f} measured "
                f"({row[which]['off']:+.1%})"
                for which in ("other", "first")
            )
            print(f"{name} ({row['parameters'] / 1e6:.0f} M): MiB of a rank: {told}", file=sys.stderr)
    finish({"rows": rows}, asked.json, [])


if __name__ == "__main__":
    main()
