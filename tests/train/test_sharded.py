"""A run on two ranks is the run of one process: the same trees, losses, gradients and rows, whatever is trained."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import sampled_near, scored_trees
from transformers import Qwen3Config, Qwen3ForCausalLM

from fake_vllm import FakeVllm, running
from ranks_of_tests import followed, measured, moments, policy, shares, two_ranks
from routed import routed_at_random
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import Sampling
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit
from turntree.core.messages import Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.engine.hf import HFEngine
from turntree.engine.teacher import ServedPolicy
from turntree.pack.packing import pack, pack_ranks, partition
from turntree.render.template import ChatRenderer
from turntree.rollout.local import render
from turntree.train import forward
from turntree.train.checkpoints import CheckpointConfig, Checkpoints
from turntree.train.config import LossConfig, OptimizerConfig, PivotConfig, SFTConfig
from turntree.train.forward import with_served_logprobs
from turntree.train.launch import open_ranks
from turntree.train.loop import Trainee, train
from turntree.train.losses import loss_normalizer, window_stats
from turntree.train.pivot import Pivot, PivotRL
from turntree.train.ranks import ProcessGroup
from turntree.train.sft import SFT, Example
from turntree.train.trainer import end, open_trainers
from turntree.train.update import batch_loss, train_windows

STEPS = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5, eps=1e-3)  # else whole steps of what is rounding
LOSS = LossConfig(kl_coefficient=0.05)


def labelled(seed: int, config: LossConfig = LOSS, *, sampled: bool = True) -> tuple[list[RolloutTree], list[Credit]]:
    """Random trees, as if they were `sampled` near the policy, and their credit."""
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    if sampled:
        model = policy("")
        trees = [sampled_near(model, tree, draw, 0.3) for tree in trees]
    rule = config.estimator(CreditConfig())
    return trees, [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


# who gets what


@given(st.lists(st.integers(1, 10**6), max_size=40), st.integers(1, 9))
def test_every_tree_is_on_one_rank_and_ranks_are_alike(sizes: list[int], ranks: int) -> None:
    parts = partition(sizes, ranks)
    assert sorted(item for part in parts for item in part) == list(range(len(sizes)))
    assert parts == partition(sizes, ranks)
    loads = [sum(sizes[item] for item in part) for part in parts]
    assert all(parts) or len(sizes) < ranks, "a rank stays empty only where there are too few trees"
    assert max(loads) - min(loads) <= max(sizes, default=0)
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0) * (ranks - 1) / ranks


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([24, 4096]))
def test_what_ranks_train_on_adds_up_to_what_one_process_does(seed: int, ranks: int, max_tokens: int) -> None:
    trees, credits = labelled(seed, sampled=False)
    dealt, whole = pack_ranks(trees, credits, ranks, max_tokens=max_tokens), pack(trees, credits, max_tokens=max_tokens)
    assert len(dealt) == ranks and len({len(batches) for batches in dealt}) == 1
    owners = [{int(tree) for batch in batches for tree in batch.tree_A if tree >= 0} for batches in dealt]
    assert sum(map(len, owners)) == len(set.union(*owners)) == sum(bool(credit.nodes) for credit in credits)
    everything = [batch for batches in dealt for batch in batches]
    ours, theirs = window_stats(everything), window_stats(whole)
    for name in ("trees", "rollouts", "rollout_tokens", "flat_tokens", "untrained_trees", "cut_trees"):
        assert getattr(ours, name) == pytest.approx(getattr(theirs, name)), name
    alone = [pack([tree], [credit], max_tokens=max_tokens) for tree, credit in zip(trees, credits, strict=True)]
    apart = window_stats([batch for batches in alone for batch in batches])
    assert theirs.unique_tokens <= ours.unique_tokens <= apart.unique_tokens, "trees that begin alike part for ranks"
    assert loss_normalizer(everything, LOSS) == pytest.approx(loss_normalizer(whole, LOSS))


@pytest.mark.parametrize("config", [LOSS, LossConfig(ratio="action", kl="k3", normalizer="rollouts")])
def test_a_pass_without_a_tree_adds_nothing(config: LossConfig) -> None:
    trees, credits = labelled(1, config)
    (only, *_), (blank, *_) = pack_ranks(trees[:1], credits[:1], 2, max_tokens=4096)
    model = policy("").requires_grad_(True)
    reference = policy("untied").requires_grad_(False)
    assert loss_normalizer([only, blank], config) == loss_normalizer([only], config)
    loss, sums = batch_loss(model, reference, blank, config, 1.0)
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(not value for value in vars(sums).values())
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


# two processes


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_a_rank_holds_no_more_than_its_shard_and_a_layer_while_it_gets_its_weights(monkeypatch) -> None:
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")  # so that what is freed is given back
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 32, "vocab_size": 2000}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).to(torch.bfloat16)
    count = sum(parameter.numel() for parameter in model.parameters())
    layer = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    peaks = multiprocessing.get_context("spawn").Queue()
    with two_ranks(measured, peaks), open_ranks() as group:
        open_trainers(model, STEPS, 9, group, reference=model)
        end(group, None)
        trained, reference = peaks.get(timeout=60), peaks.get(timeout=60)
    spare = 16 << 20  # of the libraries
    assert trained <= 4 * count // 2 + 3 * 4 * layer + spare < 4 * count, "float32 masters, of half the weights"
    assert reference <= 2 * count // 2 + 3 * 2 * layer + spare


@pytest.fixture(scope="module")
def pair() -> Iterator[ProcessGroup]:
    """The group of this process and one more."""
    with two_ranks(followed), open_ranks() as group:
        yield group
        end(group, None)


@pytest.fixture(autouse=True)
def _whole_heads() -> Iterator[None]:
    yield
    forward.CHUNK_LOGITS = 1 << 26


@pytest.fixture
def serving() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


CASES = {  # with the token budget of a pass: 24 cuts trees
    "weights": (LOSS, 4096),
    "untied weights": (LossConfig(ratio="action", normalizer="rollouts", kl="k3", kl_coefficient=0.05), 24),
    "weights, saving memory": (LOSS, 24),
    "adapter": (LossConfig(kl="k3", kl_coefficient=0.05, normalizer="constant", constant=17.0), 4096),
    "adapter, saving memory": (LOSS, 24),
    "weights with a teacher": (LOSS, 24),
    "adapter with a teacher": (LOSS, 4096),
    "weights with a teacher on a server": (LOSS, 24),
    "bfloat16 weights": (LOSS, 24),
    "bfloat16 adapter": (LOSS, 4096),
    "bfloat16 mixture with a frozen router": (LOSS, 4096),
    "trained adapter": (LOSS, 4096),
    "trained adapter of a mixture, its experts too": (LOSS, 4096),
    "trained bfloat16 adapter": (LOSS, 24),
}


@pytest.mark.parametrize("kind", CASES)
def test_two_ranks_take_the_steps_of_one_process(pair: ProcessGroup, kind: str, serving: contextlib.ExitStack) -> None:
    (config, max_tokens), rescores = CASES[kind], "bfloat16" in kind
    steps = 1 if rescores else 2  # a sum in another order turns roundings of bfloat16 over, for the next step
    alone, together, (trees, credits) = policy(kind), policy(kind), labelled(3, config)
    if "mixture" in kind:
        trees = [routed_at_random(alone, tree) for tree in trees]
    dealt = pack_ranks(trees, credits, 2, max_tokens=max_tokens)
    teacher: Any = policy("untied").requires_grad_(False) if "teacher" in kind else None
    if "on a server" in kind:
        served = ServedPolicy(f"{serving.enter_context(running(FakeVllm(teacher)))}/v1", "policy")
        dealt, _ = with_served_logprobs(served, dealt, trees, credits)
    frozen = (None, None) if "on a server" in kind else (teacher or alone, teacher or together)
    single = open_trainers(alone, STEPS, 9, reference=frozen[0])
    double = open_trainers(together, STEPS, 9, pair, reference=frozen[1])
    for _ in range(steps):
        work = functools.partial(train_windows, loss=config, updates=steps, rescores=rescores)
        one = single.run(work, [[dealt[0] + dealt[1]] * steps])  # as many mini-batches
        two = double.run(work, [[batches] * steps for batches in dealt])
        assert one.keys() == two.keys()
        norms = {key: rows.pop("grad_norm") for key, rows in (("one", one), ("two", two))}
        # of a mixture: AdamW turns roundings of one step over, for the next
        assert norms["two"] == pytest.approx(norms["one"], rel=1e-4 if "mixture" in kind else 1e-5, abs=1e-7)
        losses = {key: rows.pop("loss") for key, rows in (("one", one), ("two", two))}
        assert losses["two"] == pytest.approx(losses["one"], rel=1e-5, abs=1e-6)  # near 0: of float32 terms near 1
        assert two == pytest.approx(one, rel=1e-5, abs=1e-7)
    ours, theirs = (trainers.run(moments, [None] * trainers.size) for trainers in (double, single))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert float((ours[name] - value).norm()) <= 1e-5 * float(value.norm()) + 1e-12, name
    for found, wanted in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-2 if rescores else 1e-4, atol=1e-6)
    for own, every in double.run(shares, [None] * 2):
        assert own <= 0.6 * every, "each rank holds its half of what is trained"


def pivotrl(
    group: ProcessGroup, rows: list[dict[str, Any]], checkpoints: Checkpoints | None = None, steps: int = 3
) -> Any:
    """PivotRL on states that a tiny policy answers at random; its policy."""
    renderer = ChatRenderer(tiny_tokenizer())
    states = [TurnState(f"{i}", 0, (Message("user", f"say {i}"),), Message("assistant", "yes")) for i in range(8)]
    model = tiny_model()
    algorithm = PivotRL(
        Trainee(model, HFEngine(model, renderer.stop_ids), renderer, group=group),
        PivotConfig(
            steps=steps,
            groups=3,
            group_size=4,
            updates=2,
            sampling=Sampling(max_tokens=6),
            cut_turns="judge",
            optimizer=STEPS,
        ),
        [Pivot(render(state, renderer), "say", "pivot") for state in states],
        Odd(),
    )
    train(algorithm, rows.append, checkpoints=checkpoints)
    return model


class Odd(TurnVerifier):
    """Accepts answers of an odd length."""

    name = "odd"

    def judge(self, state: Any, action: Any) -> Verdict:
        return Verdict(float(len(action.content) % 2), "", "say")


# what depends on how trees share rows, and the clock
LAYOUT = {"padding_tokens", "trained_tokens", "recomputed_tokens", "rho", "timing"}


def test_pivotrl_on_two_ranks_logs_the_rows_of_one_process(pair: ProcessGroup) -> None:
    alone: list[dict[str, Any]] = []
    together: list[dict[str, Any]] = []
    ours, theirs = pivotrl(pair, together), pivotrl(ProcessGroup(), alone)
    assert [row.keys() for row in alone] == [row.keys() for row in together]
    for step, (one, two) in enumerate(zip(alone, together, strict=True), start=1):
        for row in (one, two):
            row["spent"] = {key: value for key, value in row["spent"].items() if key not in LAYOUT | {"scored_tokens"}}
        for key in one.keys() - LAYOUT:  # sums in another order; every update carries the rounding of those before on
            close = pytest.approx(one[key], rel=1e-5 * step, abs=1e-7)
            assert two[key] == close if one[key] is not None else True, key
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_sft_on_two_ranks_logs_the_rows_of_one_process(pair: ProcessGroup) -> None:
    """Batches of five, and of one, in which a rank has nothing to learn from."""
    draw = random.Random(0)
    lengths = [draw.randint(4, 30) for _ in range(11)]
    examples = [Example(tuple(draw.choices(range(9), k=n)), (False,) + (True,) * (n - 1)) for n in lengths]
    config = SFTConfig(epochs=1, batch=5, max_tokens=64, optimizer=STEPS)
    rows: dict[ProcessGroup, list[dict[str, Any]]] = {pair: [], ProcessGroup(): []}
    models = {group: policy("") for group in rows}
    for group in rows:
        train(SFT(models[group], examples, config, group), rows[group].append)
    together, alone = rows.values()
    assert len(alone) == 3 and [row.keys() for row in alone] == [row.keys() for row in together]
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, rel=1e-5)
    for ours, theirs in zip(*(model.parameters() for model in models.values()), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_checkpoint_is_resumed_by_any_number_of_ranks(pair: ProcessGroup, tmp_path: Path) -> None:
    """Bit for bit by as many, and to rounding by others. Nothing of it is pickled."""
    saved = Checkpoints(tmp_path / "pair", CheckpointConfig(every=1))
    pivotrl(pair, [], saved, steps=2)
    files = {path.name for path in (tmp_path / "pair" / "step-00000002").iterdir()}
    assert files == {f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)} | {"state.json"}
    shutil.copytree(tmp_path / "pair", tmp_path / "alone")
    whole = pivotrl(pair, [])
    again = pivotrl(pair, rows := [], saved)
    other = pivotrl(ProcessGroup(), [], Checkpoints(tmp_path / "alone", CheckpointConfig(every=1)))
    back = pivotrl(pair, [], Checkpoints(tmp_path / "alone", CheckpointConfig(every=1)))
    assert [row["step"] for row in rows] == [3]
    for wanted, same, near, nothing_left in zip(*(m.parameters() for m in (whole, again, other, back)), strict=True):
        assert torch.equal(wanted, same)
        torch.testing.assert_close(near, wanted, rtol=1e-4, atol=1e-6)
        assert torch.equal(near, nothing_left), "what one process has saved, two ranks hold"


@pytest.mark.parametrize(
    ("device", "problem"),
    [
        ("cuda", "is cuda, and 2 ranks of this machine see 1 GPUs"),
        ("gpu", "is 'gpu', which ranks cannot use"),
        ("cuda:1", "'cuda:1' is one device"),
    ],
)
def test_a_rank_without_a_device_of_its_own_is_refused(monkeypatch, device: str, problem: str) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launcher = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=problem), open_ranks(device):
        pass
