"""What only a GPU can show, in order of worth: each part writes its figures as soon as it has them.

    python benchmarks/gpu/run.py --out FOLDER [--limit 1500] [--only PART ...]  # on a machine with one GPU
    python benchmarks/gpu/run.py --out FOLDER --page FOLDER/page.md             # the page, from what is in FOLDER
    python benchmarks/gpu/run.py --out FOLDER --tiny                            # tiny sizes on the CPU, as in the suite

A part runs in a process of its own, so that one which fails, runs out of memory or of time takes no other with it. A
part whose file is in FOLDER is not run again. No network is used: models are random, of the sizes of published ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "src")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import transformers  # noqa: E402
from generate import Turns  # noqa: E402
from generate import measure as measure_generation  # noqa: E402
from torch.nn.attention.flex_attention import flex_attention  # noqa: E402
from torch.nn.functional import scaled_dot_product_attention  # noqa: E402
from update_step import LOSS, Shape, error, gradient, interleaved, ratio, sampled_tree  # noqa: E402

from turntree.engine.checkpoint import load_model, save_model  # noqa: E402
from turntree.engine.tokenizer import load_tokenizer  # noqa: E402
from turntree.pack.attention import set_tree_attention, tree_block_mask  # noqa: E402
from turntree.pack.carried import set_carried  # noqa: E402
from turntree.pack.packing import PackedBatch, flat_batches, pack  # noqa: E402
from turntree.train import plan  # noqa: E402
from turntree.train.config import LoRAConfig  # noqa: E402
from turntree.train.forward import set_checkpointing  # noqa: E402
from turntree.train.launch import DistributedGroup  # noqa: E402
from turntree.train.optimizer import Optimizer, OptimizerConfig  # noqa: E402
from turntree.train.ranks import SINGLE  # noqa: E402
from turntree.train.sharded import shard  # noqa: E402
from turntree.train.update import train_windows, update_step  # noqa: E402
from turntree_worlds.household.entry import POLICY  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
GIB = 1 << 30
VOCABULARY = 151_936

# layers, width, feed-forward, heads, heads of keys and values: the shapes of Qwen3
MODELS = {
    "0.6B": (28, 1024, 3072, 16, 8),
    "1.7B": (28, 2048, 6144, 16, 8),
    "4B": (36, 2560, 9728, 32, 8),
    "tiny": (2, 32, 64, 4, 2),
}
SHAPES = {
    "16 answers of 256 on 2,048": Shape(2048, (16,), 256),
    "16 answers of 512 on 8,192": Shape(8192, (16,), 512),
    "three turns, forks of 4, 2, 2": Shape(1024, (4, 2, 2), 128, observation=256),
    "tiny": Shape(32, (4,), 4),
    "tiny turns": Shape(32, (2, 2), 4, observation=4),
}
SIBLINGS, LONG, TURNS = list(SHAPES)[:3]
ROWS = 4  # of a flat batch, and of TRL's
FLEX, DENSE, FLAT = "packed, FlexAttention", "packed, dense mask", "flat rows"
SIDES = (FLEX, DENSE, FLAT) if GPU else (DENSE, FLAT)  # FlexAttention has no backward pass on a CPU


def clock() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def sizes_of(size: str) -> dict[str, Any]:
    layers, width, inner, heads, kv_heads = MODELS[size]
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128 if GPU else width // heads,
        "vocab_size": 50 if size == "tiny" else VOCABULARY,
        "max_position_embeddings": 65_536,
        "tie_word_embeddings": True,
    }


def random_model(size: str, config: transformers.PreTrainedConfig | None = None) -> transformers.PreTrainedModel:
    """Random weights in bfloat16 (float32 on the CPU), made on the device."""
    config = transformers.Qwen3Config(**sizes_of(size)) if config is None else config
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model.to(torch.bfloat16 if GPU else torch.float32).eval()


def peak_of(side: Callable[[], object]) -> float | None:
    """The most memory that tensors held during `side`, in GiB (weights and optimizer too); None on the CPU."""
    if GPU:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    side()
    return torch.cuda.max_memory_allocated() / GIB if GPU else None


def set_attention(model: transformers.PreTrainedModel, how: str) -> None:
    set_tree_attention(model, "flex_attention" if how == FLEX else "sdpa")


def batches_of(model: transformers.PreTrainedModel, shape: Shape, how: str) -> list[PackedBatch]:
    """The batches of one update on `model`, on its device; its attention is set to what they need."""
    tree, credit = sampled_tree(shape, model.config.vocab_size)
    set_attention(model, how)
    if how == FLAT:
        found = flat_batches([tree], [credit], max_tokens=ROWS * shape.path)
    else:
        found = pack([tree], [credit], max_tokens=shape.rollouts * shape.path)
    return [batch.to(DEVICE) for batch in found]


# the parts


def tests(tiny: bool) -> Iterator[dict[str, Any]]:
    """The tests marked gpu."""
    marked = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *marked]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    yield {"exit": ended.returncode, "says": ended.stdout.strip().splitlines()[-1], "output": ended.stdout[-4000:]}


def commands(tiny: bool) -> Iterator[dict[str, Any]]:
    """`train online` and `train pivot` on the embedded policy, on the device beside the CPU: the first step's figures,
    which differ by rounding, and by samples that rounding turned."""
    run = [sys.executable, "-m", "turntree"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def turntree(*words: object) -> None:
            command = [*run, *map(str, words)]
            ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            if ended.returncode:
                raise RuntimeError(f"{' '.join(command)}: {ended.stderr[-2000:]}")

        turntree("traces", "household", "--count", 8, "--split", "train", "--out", "t.jsonl")
        turntree("profile", "--traces", "t.jsonl", "--split", "", "--limit", 24, "--rollouts", 4, "--max-tokens", 24,
                 "--out", "profile.jsonl")  # fmt: skip
        turntree("select", "profile.jsonl", "--threshold", 1.0, "--max-per-kind", 1, "--anchor-share", 0,
                 "--out", "pivots.jsonl")  # fmt: skip
        kinds: dict[str, list[str]] = {"cpu": []}
        if GPU:
            wide = ["device.name=cuda", "device.dtype=bfloat16", "device.attention=flex_attention"]
            kinds["cuda"] = ["--set", wide[0]]
            kinds["cuda, bfloat16, FlexAttention"] = [word for key in wide for word in ("--set", key)]
        stages = {
            # in bfloat16 the weights are not those that were profiled: --allow-stale
            "pivot": "train pivot pivots.jsonl --steps 2 --max-tokens 24 --allow-stale --set check.tasks=0",
            "online": "train online --iterations 2",
        }
        if tiny:
            del stages["online"]
        for stage, words in stages.items():
            for kind, more in kinds.items():
                out = folder / f"{stage} {kind}"
                started = time.perf_counter()
                turntree(*words.split(), *more, "--learning-rate", 3e-4, "--out", out)
                seconds = time.perf_counter() - started
                first = next(
                    row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if row.get("step")
                )
                shown = ("loss", "grad_norm", "ratio_max", "kl", "entropy", "trained_tokens")
                yield {"stage": stage, "device": kind, "seconds": seconds, "first": {k: first.get(k) for k in shown}}


def update(tiny: bool) -> Iterator[dict[str, Any]]:
    """One update (loss, gradient, AdamW on float32 masters): packed against flat rows of the same tokens."""
    plan = [("0.6B", SIBLINGS), ("0.6B", TURNS), ("1.7B", SIBLINGS), ("1.7B", LONG), ("4B", SIBLINGS)]
    for size, name in [("tiny", "tiny"), ("tiny", "tiny turns")] if tiny else plan:
        try:
            yield _update(size, name)
        except torch.OutOfMemoryError:
            yield {"model": size, "shape": name, "out_of_memory": True, "sides": {}}


def _update(size: str, name: str) -> dict[str, Any]:
    shape, model = SHAPES[name], random_model(size)
    if size == "4B":
        set_checkpointing(model)
    optimizer = Optimizer(model.parameters(), OptimizerConfig())
    batches = {how: batches_of(model, shape, how) for how in SIDES}
    differences = gradient_differences(model, batches) if size in ("0.6B", "tiny") else None

    def step(how: str) -> None:
        set_attention(model, how)
        update_step(model, None, optimizer, batches[how], config=LOSS)

    steps = [partial(step, how) for how in batches]
    peaks = [peak_of(side) for side in steps]  # and a warm-up
    taken = interleaved(steps, 2 if size == "tiny" else 5, clock)
    tree = batches[SIDES[0]][0]
    return {
        "model": size,
        "shape": name,
        "rho": tree.stats.rho,
        "slots": tree.tokens_BL.shape[1],
        "gradient_difference": differences,
        "sides": {
            how: {"seconds": statistics.median(found), "peak_gib": peak, "speedup": ratio(taken[-1], found)}
            for how, found, peak in zip(batches, taken, peaks, strict=True)
        },
    }


def gradient_differences(
    model: transformers.PreTrainedModel, batches: dict[str, list[PackedBatch]]
) -> dict[str, float]:
    """Relative L2 differences of the whole gradients from that of float32 flat rows."""
    narrow = next(model.parameters()).dtype
    model.float()
    set_attention(model, FLAT)
    exact = gradient(model, batches[FLAT])
    model.to(narrow)
    found = {}
    for how, of_side in batches.items():
        set_attention(model, how)
        found[how] = error(gradient(model, of_side), exact)
    model.zero_grad()
    return found


def trl(tiny: bool) -> Iterator[dict[str, Any]]:
    """The same update by `GRPOTrainer.compute_loss` and its own AdamW, whose weights and moments are bfloat16 alone."""
    for size in ["tiny"] if tiny else ["0.6B", "1.7B"]:
        yield _beside_trl(size, "tiny" if tiny else SIBLINGS)


def _beside_trl(size: str, name: str) -> dict[str, Any]:
    from trl_step import TRLStep  # noqa: PLC0415

    shape, model = SHAPES[name], random_model(size)
    batches = batches_of(model, shape, SIDES[0])
    optimizer = Optimizer(model.parameters(), OptimizerConfig())
    with tempfile.TemporaryDirectory() as folder:
        theirs = TRLStep(random_model(size), LOSS, OptimizerConfig(), folder)
        inputs = theirs.prepare(*sampled_tree(shape, model.config.vocab_size), ROWS)
        inputs = [{key: value.to(DEVICE) for key, value in part.items()} for part in inputs]
        sides = [partial(update_step, model, None, optimizer, batches, config=LOSS), partial(theirs.step, inputs)]
        peaks = [peak_of(side) for side in sides]
        ours, other = interleaved(sides, 2 if size == "tiny" else 5, clock)
    return {
        "model": size,
        "shape": name,
        "packed_seconds": statistics.median(ours),
        "trl_seconds": statistics.median(other),
        "speedup": ratio(other, ours),
        "peaks_of_both_gib": peaks,
    }


def attention(tiny: bool) -> Iterator[dict[str, Any]]:
    """Attention alone, forward and backward, 16 heads of 128: FlexAttention and a dense mask over the packed tree, and
    causal attention over flat rows."""
    for name in ["tiny", "tiny turns"] if tiny else list(SHAPES)[:3]:
        yield _attention(name, 2 if tiny else 20)


def _attention(name: str, repeats: int) -> dict[str, Any]:
    shape = SHAPES[name]
    tree, credit = sampled_tree(shape, 50)
    batch = pack([tree], [credit], max_tokens=shape.rollouts * shape.path)[0].to(DEVICE)
    slots, (heads, width) = batch.tokens_BL.shape[1], (16, 128) if GPU else (2, 8)

    def drawn(rows: int, length: int) -> list[torch.Tensor]:
        kind = {"device": DEVICE, "dtype": torch.bfloat16 if GPU else torch.float32}
        return [torch.randn(rows, heads, length, width, **kind, requires_grad=True) for _ in range(3)]

    one, rows, mask = drawn(1, slots), drawn(shape.rollouts, shape.path), batch.attention_mask()
    sides: dict[str, Callable[[], torch.Tensor]] = {
        DENSE: lambda: scaled_dot_product_attention(*one, attn_mask=mask),
        FLAT: lambda: scaled_dot_product_attention(*rows, is_causal=True),
    }
    if GPU:
        compiled, blocks = torch.compile(flex_attention, dynamic=False), tree_block_mask(batch)
        sides = {FLEX: lambda: compiled(*one, block_mask=blocks), **sides}

    def both(side: Callable[[], torch.Tensor]) -> None:
        side().sum().backward()

    timed = [partial(both, side) for side in sides.values()]
    interleaved(timed, 1, clock)
    taken = interleaved(timed, repeats, clock)
    seen, pairs = float((batch.positions_BL + 1).sum()), shape.rollouts * shape.path * (shape.path + 1) / 2
    milliseconds = {how: 1e3 * statistics.median(found) for how, found in zip(sides, taken, strict=True)}
    return {"shape": name, "slots": slots, "rho_attention": pairs / seen, "milliseconds": milliseconds}


def generation(tiny: bool) -> Iterator[dict[str, Any]]:
    """`HFEngine` against `generate`, siblings of one prompt, ids, log-probabilities and entropies from both."""
    cases = [Turns("siblings", 4, 32, 4)] if tiny else [Turns("siblings", count, 2048, 64) for count in (16, 64)]
    for size in ["tiny"] if tiny else ["0.6B", "1.7B"]:
        model = random_model(size)
        for case in cases:
            row = measure_generation(model, case, 1 if tiny else 3, clock)
            yield {"model": size, "sequences": case.sequences, "prompt": case.prompt, "new": case.new, **row}


def ranks(tiny: bool) -> Iterator[dict[str, Any]]:
    """FSDP2 and NCCL with one rank on one card: the step of the sharded trainer beside that of the plain one."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", rank=0, world_size=1)
    size, shape = ("tiny", SHAPES["tiny"]) if tiny else ("0.6B", SHAPES[SIBLINGS])
    found: dict[str, dict[str, Any]] = {}
    for name, group in {"plain": SINGLE, "sharded": DistributedGroup(DEVICE)}.items():
        model = random_model(size)
        batches = batches_of(model, shape, SIDES[0])
        model = model if group is SINGLE else shard(model, group)
        optimizer = Optimizer(model.parameters(), OptimizerConfig(learning_rate=1e-4))
        step = partial(update_step, model, None, optimizer, batches, config=LOSS, group=group)
        metrics = step()
        peak = peak_of(step)
        (taken,) = interleaved([step], 2 if tiny else 5, clock)
        shown = {key: metrics[key] for key in ("loss", "grad_norm")}
        found[name] = {"seconds": statistics.median(taken), "peak_gib": peak, **shown}
        del model, optimizer, step
    yield {"model": size, "backend": dist.get_backend_config(), **found}
    dist.destroy_process_group()


def weights(tiny: bool) -> Iterator[dict[str, Any]]:
    """Weights to a folder and back onto the device, as they go to a server that samples."""
    for size in ["tiny"] if tiny else ["0.6B", "4B"]:
        model = random_model(size)
        count = sum(p.numel() * p.element_size() for p in model.parameters())
        with tempfile.TemporaryDirectory() as folder:
            started = clock()
            save_model(model, load_tokenizer(POLICY), Path(folder, "model"))
            saved = clock()
            load_model(Path(folder, "model"), dtype="auto", device=DEVICE)
            loaded = clock()
        yield {"model": size, "gib": count / GIB, "save_seconds": saved - started, "load_seconds": loaded - saved}


def memory(tiny: bool) -> Iterator[dict[str, Any]]:
    """What `turntree plan` says one card needs, from the config alone, beside the most that tensors then held on it:
    two optimizer steps on a prompt of half of the tokens and eight answers that share it, FlexAttention."""
    lora = LoRAConfig()
    cells: list[tuple[str, dict[str, Any]]] = [
        ("0.6B", {"tokens": 8192}),
        ("1.7B", {"tokens": 8192}),
        ("1.7B", {"tokens": 8192, "lora": lora, "referred": True}),
        ("1.7B", {"tokens": 16_384, "checkpointing": True}),
        ("4B", {"tokens": 8192, "lora": lora}),
        ("4B", {"tokens": 8192, "lora": lora, "checkpointing": True}),
    ]
    for size, settings in [("tiny", {"tokens": 64}), ("tiny", {"tokens": 64, "lora": lora})] if tiny else cells:
        asked = plan.Planned(bfloat16=GPU, branches=8, **settings)
        config = transformers.Qwen3Config(**sizes_of(size))
        started = time.perf_counter()
        need = plan.memory(config, asked)
        seconds = time.perf_counter() - started
        try:
            held = _held(config, asked)
        except torch.OutOfMemoryError:
            held = None
        shown = {
            "tokens": asked.tokens,
            "lora": asked.lora is not None,
            "checkpointing": asked.checkpointing,
            "referred": asked.referred,
        }
        planned = {"planned_gib": need.peak / GIB, "planned_steady_gib": need.steady / GIB}
        yield {"model": size, **shown, **planned, "plan_seconds": seconds, "measured_gib": held}


def _held(config: transformers.PreTrainedConfig, asked: plan.Planned) -> float | None:
    with torch.device(DEVICE):
        model = plan.outline(config, asked)
    plan.prepare(model, asked)
    set_attention(model, SIDES[0])
    trainer = plan.trained(model, asked, SINGLE)
    windows = [[batch.to(DEVICE) for batch in window] for window in plan.batches(config.vocab_size, asked)]
    loss = replace(LOSS, kl_coefficient=0.05 if asked.referred else 0.0)
    return peak_of(partial(train_windows, trainer, windows, loss=loss, updates=1, rescores=False))


def carried(tiny: bool) -> Iterator[dict[str, Any]]:
    """Models that keep a state: one forward and backward pass with states carried over the forks, beside a row a
    rollout. Attention is transformers' own; no kernels of linear attention are installed."""
    common = sizes_of("tiny" if tiny else "0.6B")
    layers = common["num_hidden_layers"]
    mixed = ["linear_attention" if (k + 1) % (2 if tiny else 4) else "full_attention" for k in range(layers)]
    windows = ["sliding_attention" if (k + 1) % 2 else "full_attention" for k in range(layers)]
    linear = {f"linear_{what}": 16 if not tiny else 2 for what in ("num_key_heads", "num_value_heads")}
    experts = {"num_local_experts": 8 if not tiny else 2, "num_experts_per_tok": 2, "intermediate_size": 256}
    families = {
        "Qwen3.5": lambda: transformers.Qwen3_5TextConfig(**common, **linear, layer_types=mixed),
        "gpt-oss": lambda: transformers.GptOssConfig(
            **common | experts, layer_types=windows, sliding_window=128, rope_scaling=None
        ),
        "Gemma 3": lambda: transformers.Gemma3TextConfig(**common, layer_types=windows, sliding_window=512),
    }
    for name, config in families.items():
        for tree in ["tiny turns"] if tiny else [SIBLINGS, TURNS]:
            model = random_model("", config())
            model.config.use_cache = False
            yield {"family": name, "shape": tree, **_carried(model, SHAPES[tree], 1 if tiny else 3)}


def _carried(model: transformers.PreTrainedModel, shape: Shape, repeats: int) -> dict[str, Any]:
    tree, credit = sampled_tree(shape, model.config.vocab_size)
    packed = [batch.to(DEVICE) for batch in pack([tree], [credit], max_tokens=shape.rollouts * shape.path)]
    flat = [batch.to(DEVICE) for batch in flat_batches([tree], [credit], max_tokens=ROWS * shape.path)]

    def found(batches: list[PackedBatch], carries: bool) -> torch.Tensor:
        set_carried(model, carries)
        return gradient(model, batches)

    sides = [partial(found, packed, True), partial(found, flat, False)]
    difference = error(sides[0](), sides[1]())
    peaks = [peak_of(side) for side in sides]
    ours, theirs = interleaved(sides, repeats, clock)
    return {
        "rho": packed[0].stats.rho,
        "gradient_difference": difference,
        "carried_seconds": statistics.median(ours),
        "flat_seconds": statistics.median(theirs),
        "speedup": ratio(theirs, ours),
        "peaks_gib": peaks,
    }


PARTS: dict[str, Callable[[bool], Iterator[dict[str, Any]]]] = {
    part.__name__: part
    for part in (update, trl, ranks, tests, memory, generation, carried, weights, commands, attention)
}


# running them, and the page


def run_part(name: str, out: Path, tiny: bool) -> None:
    """Rows of a part, each appended as it is known; `NAME.json` is whole when the part has ended well."""
    rows: list[dict[str, Any]] = []
    for row in PARTS[name](tiny):
        rows.append(row)
        (out / f"{name}.part.json").write_text(json.dumps(rows, indent=1))
        print(f"{name}: {json.dumps({k: v for k, v in row.items() if k != 'output'})}", flush=True)
    (out / f"{name}.part.json").replace(out / f"{name}.json")


def run_all(names: Sequence[str], out: Path, tiny: bool, limit: float) -> int:
    ends, failed = time.monotonic() + limit, 0
    (out / "machine.json").write_text(json.dumps(machine(), indent=1))
    for name in names:
        if (out / f"{name}.json").is_file():
            continue
        command = [sys.executable, __file__, "--out", str(out), "--part", name, *(["--tiny"] if tiny else [])]
        left = ends - time.monotonic()
        started = time.monotonic()
        try:
            if left < 5:
                raise subprocess.TimeoutExpired(command, limit)
            code = subprocess.run(command, timeout=left).returncode
        except subprocess.TimeoutExpired:
            code = "no time left"
        print(f"{name}: {code or 'done'} after {time.monotonic() - started:.0f} s", flush=True)
        failed += bool(code)
    return 1 if failed else 0


def machine() -> dict[str, Any]:
    card = torch.cuda.get_device_properties(0) if GPU else None
    return {
        "card": card.name if card else "no GPU",
        "card_gib": card.total_memory / GIB if card else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def page(out: Path) -> str:
    """The figures in FOLDER as a page; parts that are not there are named."""
    found = {name: json.loads((out / f"{name}.json").read_text()) for name in PARTS if (out / f"{name}.json").is_file()}
    for path in out.glob("*.part.json"):
        found.setdefault(path.name.partition(".")[0], json.loads(path.read_text()))
    on = json.loads((out / "machine.json").read_text())
    text = [
        "# On a GPU",
        f"One {on['card']} ({number(on['card_gib'], 0)} GiB), torch {on['torch']}, transformers {on['transformers']}; "
        "`python benchmarks/gpu/run.py --out FOLDER`, one run, medians of five steps. Models are random weights in the "
        "shapes of Qwen3, in bfloat16; speed-ups are seconds of flat rows over seconds of the side, with the lowest "
        "and highest of the repeats.",
    ]
    missing = [name for name in PARTS if name not in found]
    if missing:
        text.append(f"**Not measured in this run:** {', '.join(missing)}.")
    if rows := found.get("tests"):
        text += ["## Tests marked gpu", rows[0]["says"]]
    if rows := found.get("update"):
        head = ["model", "tree", "rho", "side", "seconds", "times flat", "peak GiB", "gradient off float32 by"]
        cells = [
            [row["model"], row["shape"], number(row["rho"]), how, number(side["seconds"], 3),
             "{median:.2f} [{low:.2f}, {high:.2f}]".format(**side["speedup"]), number(side["peak_gib"], 1),
             f"{row['gradient_difference'][how]:.1e}" if row["gradient_difference"] else "-"]
            for row in rows for how, side in row["sides"].items()
        ]  # fmt: skip
        text += ["## One update", " ".join((update.__doc__ or "").split()), table(head, cells)]
        text += [f"Out of memory: {row['model']}, {row['shape']}." for row in rows if row.get("out_of_memory")]
    if rows := found.get("trl"):
        head = ["model", "tree", "packed s", "TRL s", "times TRL"]
        cells = [
            [row["model"], row["shape"], number(row["packed_seconds"], 3), number(row["trl_seconds"], 3),
             "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["speedup"])] for row in rows
        ]  # fmt: skip
        text += ["## Beside TRL", " ".join((trl.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("attention"):
        head = ["tree", "slots", "pairs flat over packed", *(f"{how}, ms" for how in rows[0]["milliseconds"])]
        cells = [
            [row["shape"], row["slots"], number(row["rho_attention"]), *map(number, row["milliseconds"].values())]
            for row in rows
        ]
        text += ["## Attention alone", " ".join((attention.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("generation"):
        head = ["model", "siblings", "tokens a second", "times generate", "times generate with its cache repeated"]
        cells = [
            [row["model"], f"{row['sequences']} x {row['new']} on {row['prompt']}", number(row["tokens_per_second"], 0),
             "{speedup:.2f} [{low:.2f}, {high:.2f}]".format(**row), number(row["beside"]["reuse"]["median"])]
            for row in rows
        ]  # fmt: skip
        text += ["## Generation", " ".join((generation.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("commands"):
        head = ["stage", "device", "loss", "gradient norm", "largest ratio", "seconds of the command"]
        cells = [
            [row["stage"], row["device"], *(number(row["first"][key], 5) for key in ("loss", "grad_norm", "ratio_max")),
             number(row["seconds"], 1)] for row in rows
        ]  # fmt: skip
        text += ["## Commands", " ".join((commands.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("ranks"):
        head = ["trainer", "loss", "gradient norm", "seconds", "peak GiB"]
        cells = [
            [name, number(row["loss"], 6), number(row["grad_norm"], 5), number(row["seconds"], 3),
             number(row["peak_gib"], 1)]
            for name, row in rows[0].items() if isinstance(row, dict)
        ]  # fmt: skip
        text += ["## Ranks", " ".join((ranks.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("memory"):
        head = [
            "model",
            "tokens of a pass",
            "LoRA",
            "recomputed",
            "reference",
            "planned GiB",
            "measured",
            "plan is off by",
        ]
        cells = [
            [row["model"], row["tokens"], *("yes" if row[key] else "" for key in ("lora", "checkpointing", "referred")),
             number(row["planned_gib"], 1), number(row["measured_gib"], 1),
             f"{row['planned_gib'] / row['measured_gib'] - 1:+.1%}" if row["measured_gib"] else "-"] for row in rows
        ]  # fmt: skip
        text += ["## Memory", " ".join((memory.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("carried"):
        head = ["family", "tree", "rho", "carried, s", "flat rows, s", "times flat", "peak GiB", "gradients apart by"]
        cells = [
            [row["family"], row["shape"], number(row["rho"]), number(row["carried_seconds"], 3),
             number(row["flat_seconds"], 3), "{median:.2f} [{low:.2f}, {high:.2f}]".format(**row["speedup"]),
             " and ".join(number(peak, 1) for peak in row["peaks_gib"]), f"{row['gradient_difference']:.1e}"]
            for row in rows
        ]  # fmt: skip
        text += ["## Carried states", " ".join((carried.__doc__ or "").split()), table(head, cells)]
    if rows := found.get("weights"):
        head = ["model", "GiB", "to the folder, s", "back, s"]
        cells = [[row["model"], *(number(row[key]) for key in ("gib", "save_seconds", "load_seconds"))] for row in rows]
        text += ["## Weights through a folder", " ".join((weights.__doc__ or "").split()), table(head, cells)]
    return "\n\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What only a GPU can show.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds for all parts (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--page", type=Path, metavar="FILE", help="only write the page of what is in FOLDER")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.page:
        arguments.page.write_text(page(arguments.out))
    elif arguments.part:
        run_part(arguments.part, arguments.out, arguments.tiny)
    else:
        if not (GPU or arguments.tiny):
            parser.error("no CUDA device was found: --tiny runs tiny sizes on the CPU")
        sys.exit(run_all(arguments.only, arguments.out, arguments.tiny, arguments.limit))


if __name__ == "__main__":
    main()
