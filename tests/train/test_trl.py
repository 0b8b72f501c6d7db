"""TRL's asynchronous trainer on our rollouts: what the worker gives it, and (where TRL is installed: `make
test-exports`) that its real packer, loss and trainer make our update of it. Of TRL what needs a GPU is replaced: the
attention kernel, and the look-up of the GPU's speed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import sampled_near, score, scored_trees
from test_branched import branched
from test_online import config, parts, weights

from packed_gradient import library_gradient, relative_error
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.errors import ConfigError, TurntreeError
from turntree.core.labels import Credit, Rewards
from turntree.core.tree import RolloutTree
from turntree.credit.config import CreditConfig
from turntree.pack.packing import pack
from turntree.pack.rows import rows
from turntree.rollout.groups import GrownGroup
from turntree.rollout.scheduler import SchedulerConfig
from turntree.rollout.service import EpisodeGroup, Iterations, RolloutService
from turntree.train.config import OptimizerConfig
from turntree.train.loop import train
from turntree.train.losses import LossConfig
from turntree.train.online import OnlineGRPO
from turntree_interop.trl import RolloutWorker, micro_batches

LOSS = LossConfig(kl_coefficient=0.0)
ROLLOUTS = SchedulerConfig()


def settings(**others: Any) -> Any:
    """The part of TRL's `AsyncGRPOConfig` that the worker reads."""
    given: dict[str, Any] = {
        "epsilon": 0.2,
        "epsilon_high": None,
        "temperature": 1.0,
        "token_budget": 0,
        "weight_sync_steps": 1,
        "max_staleness": 4,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "world_size": 1,
    }
    return SimpleNamespace(**{**given, **others})


@dataclass
class Played:
    """A service that has played its iterations already."""

    played: Sequence[Sequence[EpisodeGroup]]
    version: int = 0

    @property
    def iterations(self) -> Iterations:
        return Iterations(groups=1, rollouts=ROLLOUTS, last=len(self.played))

    def update(self, version: int) -> None:
        self.version = version

    def groups(self, iteration: int) -> Iterator[EpisodeGroup]:
        yield from self.played[iteration - 1]


def credited(trees: Sequence[RolloutTree], rewards: Sequence[Rewards], attribution: str) -> list[Credit]:
    rule = LOSS.estimator(CreditConfig(attribution=attribution))
    return [rule(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def divisor_of(made: Sequence[Any], credits: Sequence[Credit], loss: LossConfig = LOSS) -> float:
    return loss.divisor(
        math.fsum(m for row in made for m in row.multiplicities),
        rollout_tokens=sum(credit.rollout_tokens for credit in credits),
        rollouts=sum(credit.rollouts for credit in credits),
    )


@given(
    seed=st.integers(0, 10**6),
    attribution=st.sampled_from(["soft", "hard"]),
    size=st.integers(1, 9),
    accumulation=st.integers(2, 5),
    idle=st.integers(0, 1),
)
def test_the_mean_over_micro_batches_of_means_over_their_tokens_is_the_sum_over_our_normaliser(
    seed: int, attribution: str, size: int, accumulation: int, idle: int
) -> None:
    trees, rewards = scored_trees(random.Random(seed))
    credits = credited(trees, rewards, attribution)
    made = rows(trees, credits)
    divisor = divisor_of(made, credits)
    batches = micro_batches(made, divisor, size=size, accumulation=accumulation, idle=idle)
    slope = {
        (row.tree, node): random.Random(f"{seed} {row.tree} {node}").gauss(0, 1) for row in made for node in row.nodes
    }
    expected = sum(a * slope[row.tree, node] for row in made for a, node in zip(row.advantages, row.nodes, strict=True))
    assert all(len(batch) == size for batch in batches)
    assert all(sample.at and sample.at[-1] < sample.length for batch in batches for sample in batch)
    steps = [batches[start : start + accumulation] for start in range(0, len(batches), accumulation)]
    assert all(len(step) == accumulation for step in steps)
    assert not any(sample.advantage for step in steps if idle for sample in step[-1])
    losses = [
        sum(
            sum(sample.advantage * slope[sample.row.tree, sample.row.nodes[at]] for sample in batch for at in sample.at)
            / sum(len(sample.at) for sample in batch)
            for batch in step
        )
        / accumulation
        for step in steps
    ]
    moved = any(a for row in made for a in row.advantages)
    assert bool(batches) == moved
    if moved:
        assert sum(losses) / len(steps) == pytest.approx(expected / divisor, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("loss", "args", "ahead", "field"),
    [
        ({"kl_coefficient": 0.1}, {}, 1, "loss.kl_coefficient"),
        ({"ratio": "action"}, {}, 1, "loss.ratio"),
        ({"clip_high": 0.28}, {}, 1, "loss.clip_high"),
        ({}, {"epsilon": 0.1, "epsilon_high": 0.2}, 1, "loss.clip_low"),
        ({}, {"temperature": 0.7}, 1, "sampling.temperature"),
        ({}, {"token_budget": None}, 1, "token_budget"),
        ({}, {"weight_sync_steps": 2}, 1, "weight_sync_steps"),
        ({}, {"max_staleness": 1}, 2, "max_off_policy_steps"),
        ({}, {"gradient_accumulation_steps": 1}, 0, "gradient_accumulation_steps"),
    ],
)
def test_settings_under_which_trl_would_take_another_step_are_refused(
    loss: dict[str, Any], args: dict[str, Any], ahead: int, field: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        RolloutWorker(Played([]), replace(LOSS, **loss), settings(**args), max_off_policy_steps=ahead)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_the_trainer_is_told_why_no_further_sample_will_come() -> None:
    def fails(iteration: int) -> Iterator[EpisodeGroup]:
        raise ValueError("a task is broken")

    broken, ended = Played([[]]), Played([[]])
    broken.groups = fails  # type: ignore[method-assign]
    for service, told in ((broken, "a task is broken"), (ended, "max_steps")):
        worker = RolloutWorker(service, LOSS, settings())  # type: ignore[arg-type]
        worker.update_model_version(1)
        worker.start()
        worker._thread.join(60)
        with pytest.raises(TurntreeError, match=told):
            worker.check_health(300)


# TRL's own code


def attention_on_cpu(
    query: Any, key: Any, value: Any, starts_q: Any, starts_k: Any, *_: Any, softmax_scale: float, **__: Any
) -> torch.Tensor:
    """FlashAttention's `flash_attn_varlen_func`, causal, the last query at the last key."""
    found: list[torch.Tensor] = []
    times = query.shape[1] // key.shape[1]
    for (a, b), (c, d) in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        mask = torch.ones(b - a, d - c, dtype=torch.bool).tril(d - c - (b - a))
        q, k, v = (
            x.transpose(0, 1)
            for x in (query[a:b], key[c:d].repeat_interleave(times, 1), value[c:d].repeat_interleave(times, 1))
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
        found.append(attended.transpose(0, 1))
    return torch.cat(found)


class IntoEngine:
    """TRL's `weight_transfer` for an engine in this process."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.weights = dict(model.named_parameters())

    def send_weights(self, iterator: Any) -> None:
        with torch.no_grad():
            for name, value in iterator:
                self.weights[name].copy_(value)

    def nothing(self) -> None: ...

    init_weight_transfer = pause = resume = destroy = nothing


@pytest.fixture
def trl(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    pytest.importorskip("trl")
    from trl.experimental import async_grpo
    from trl.experimental.async_grpo import async_grpo_trainer, packing

    monkeypatch.setattr(async_grpo_trainer, "get_peak_flops_per_device", lambda *_: None)
    monkeypatch.setattr(packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=attention_on_cpu))
    return SimpleNamespace(**{**vars(async_grpo_trainer), **vars(packing), **vars(async_grpo)})


def arguments(trl: Any, folder: Path, **others: Any) -> Any:
    given = {
        "max_steps": 3,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "token_budget": 0,
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return trl.AsyncGRPOConfig(str(folder / "trl"), **{**given, **others})


def trainer_of(trl: Any, folder: Path, args: Any, worker: Any, sampled: Any) -> Any:
    """TRL's trainer of the tiny model that `test_online.parts` trains."""
    from datasets import Dataset

    tiny_model(seed=1).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    prompts = Dataset.from_dict({"prompt": ["the worker has its own tasks"]})
    return trl.AsyncGRPOTrainer(
        str(folder / "model"),
        args=args,
        train_dataset=prompts,
        rollout_worker=worker,
        weight_transfer=IntoEngine(sampled),
    )


@pytest.mark.parametrize("attribution", ["soft", "hard"])
def test_its_packer_and_loss_give_our_packed_loss_and_gradient(trl: Any, tmp_path: Path, attribution: str) -> None:
    draw, model = random.Random(3), tiny_model(seed=1)
    trees, rewards = scored_trees(draw)
    trees += [branched(draw) for _ in range(3)]
    rewards += [score(draw, tree) for tree in trees[-3:]]
    trees = [sampled_near(model, tree, draw, 0.2) for tree in trees]
    credits = credited(trees, rewards, attribution)
    batches = pack(trees, credits, max_tokens=4000)
    loss, expected = library_gradient(model, None, batches, LOSS)

    args = arguments(trl, tmp_path, per_device_train_batch_size=64)
    groups = [
        EpisodeGroup(GrownGroup(index=0, task=SimpleNamespace(), tree=tree, rewards=labels, seconds=0.0), credit)  # type: ignore[arg-type]
        for tree, labels, credit in zip(trees, rewards, credits, strict=True)
    ]
    worker = RolloutWorker(Played([groups]), LOSS, args)  # type: ignore[arg-type]
    trainer = trainer_of(trl, tmp_path, args, worker, model)
    worker.update_model_version(1)
    worker.start()
    worker._thread.join(600)
    trainer.model_version, trainer.current_gradient_accumulation_steps = 1, args.gradient_accumulation_steps
    trainer.model.train()
    found, forwarded = 0.0, 0.0
    for _, inputs in zip(range(args.gradient_accumulation_steps), trainer.get_train_dataloader(), strict=False):
        one = trainer.compute_loss(trainer.model, inputs)
        one.backward()
        found += float(one.detach())
        forwarded += float(inputs["global_n_forward_tokens"][0])
    gradients = {name: each.grad for name, each in trainer.model.named_parameters()}
    got = torch.cat([gradients[name].flatten() for name, _ in model.named_parameters()])
    moved = [
        (t, c) for t, c in zip(trees, credits, strict=True) if any(n.positive or n.negative for n in c.nodes.values())
    ]
    unique = sum(batch.stats.unique_tokens for batch in pack(*zip(*moved, strict=True), max_tokens=4000))  # type: ignore[arg-type]
    flat = sum(batch.stats.flat_tokens for batch in pack(*zip(*moved, strict=True), max_tokens=4000))  # type: ignore[arg-type]
    print(f"{attribution}: loss {found:.7f} and {loss:.7f}, gradients {relative_error(got, expected):.1e}, "
          f"{forwarded:.0f} tokens forward where {unique} are unique and {flat} flat")  # fmt: skip
    assert found == pytest.approx(loss, rel=1e-5)
    assert relative_error(got, expected) < 1e-5
    assert unique <= forwarded < 0.8 * flat


def test_three_steps_of_its_trainer_give_the_weights_of_our_loop(trl: Any, tmp_path: Path) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-3, betas=(0.9, 0.999), eps=1e-4)  # which keeps rounding small
    start_of = tiny_model(seed=1).state_dict()
    ours = config(loss=LOSS, optimizer=optimizer)
    own = parts()
    train(OnlineGRPO(own, ours), log=lambda row: None)

    run, played = parts(), []
    args = arguments(trl, tmp_path, per_device_train_batch_size=8, adam_epsilon=1e-4)
    service = RolloutService(run, ours.played, LOSS.estimator(ours.credit))
    keep = lambda iteration, groups: played.append([group.tree for group in groups])  # noqa: E731
    worker = RolloutWorker(service, LOSS, args, max_off_policy_steps=0, keep=keep)
    trainer = trainer_of(trl, tmp_path, args, worker, run.policy.model)
    trainer.train()
    assert [len(trees) for trees in played] == [3, 3, 3]
    versions = [{node.policy_version for tree in trees for node in tree if node.sampled} for trees in played]
    assert versions == [{1}, {2}, {3}]  # every group by the newest weights
    start, mine, theirs = (
        torch.cat([state[name].flatten() for name in start_of])
        for state in (start_of, weights(own), trainer.model.state_dict())
    )
    off = relative_error(theirs - start, mine - start)
    print(f"three steps of both move the weights alike to {off:.1e}")
    assert off < 1e-3


def test_rollouts_ahead_are_as_old_as_they_may_be_and_no_older(trl: Any, tmp_path: Path) -> None:
    run, played = parts(), []
    args = arguments(trl, tmp_path, per_device_train_batch_size=8, gradient_accumulation_steps=2, max_staleness=1)
    service = RolloutService(run, config(loss=LOSS).played, LOSS.estimator(CreditConfig()))
    keep = lambda iteration, groups: played.append([group.tree for group in groups])  # noqa: E731
    worker = RolloutWorker(service, LOSS, args, max_off_policy_steps=1, keep=keep)
    trainer = trainer_of(trl, tmp_path, args, worker, run.policy.model)
    trainer.train()
    oldest = [min(node.policy_version or 0 for tree in trees for node in tree if node.sampled) for trees in played]
    assert oldest[0] == 1 and all(number - 1 <= version <= number for number, version in enumerate(oldest, start=1))
    assert trainer.state.global_step == 3
    logged = [row for row in trainer.state.log_history if "turntree/reward_mean" in row]
    assert logged and all(row["turntree/steps"] == 1 for row in logged)
    assert not any(row.get("sample/dropped_stale_total") for row in trainer.state.log_history)
