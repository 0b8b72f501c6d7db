"""Whose log-probabilities the old policy's are: the engine's where they are the trainer's own, else the trainer's."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from test_lora import adapted
from torch import Tensor

from rollout_view import rollout_of
from tiny_models import tiny_model, tiny_tokenizer
from turntree.core.completion import Completion, Sampling
from turntree.core.cost import Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.labels import Credit, Rewards
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree.core.tree import RolloutTree
from turntree.core.verdict import Verdict
from turntree.credit.config import CreditConfig
from turntree.engine.hf import HFEngine
from turntree.pack.packing import pack
from turntree.render.template import ChatRenderer
from turntree.rollout.local import render, sample_local
from turntree.train.forward import with_old_logprobs
from turntree.train.losses import LossConfig, LossSums, loss_normalizer
from turntree.train.optimizer import OptimizerConfig
from turntree.train.trainer import open_trainers
from turntree.train.update import Learner, batch_loss, engine_differs, update_step

RENDERER = ChatRenderer(tiny_tokenizer())
NO_KL = LossConfig(kl_coefficient=0.0)
STILL = OptimizerConfig(learning_rate=1e-9)


class Rounding:
    """An engine elsewhere: the same tokens, with log-probabilities that are off by `off`."""

    def __init__(self, engine: HFEngine, off: float) -> None:
        self.engine, self.off = engine, off

    def __getattr__(self, name):
        if name == "model":
            raise AttributeError(name)
        return getattr(self.engine, name)

    def generate(self, requests) -> list[Completion]:
        return [
            dataclasses.replace(done, logprobs=tuple(value - self.off for value in done.logprobs))
            for done in self.engine.generate(requests)
        ]


def sampled(
    engine, states: int = 3, group: int = 4, temperature: float = 1.0
) -> tuple[list[RolloutTree], list[Credit]]:
    """Groups of one-turn rollouts of which every second one is right."""
    asked = [
        render(TurnState(f"t{i}", 0, (Message("user", f"say {i}"),), Message("assistant", "yes")), RENDERER)
        for i in range(states)
    ]
    trees = sample_local(asked, engine, RENDERER, Sampling(max_tokens=12, temperature=temperature), group, seed=0)
    rewards = [Rewards({leaf: Verdict(float(n % 2), "") for n, leaf in enumerate(t.leaves())}) for t in trees]
    return trees, [NO_KL.estimator(CreditConfig())(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]


def learner(model, engine, *, loss: LossConfig = NO_KL, optimizer: OptimizerConfig = STILL, referred=False) -> Learner:
    return Learner(
        model, open_trainers(model, optimizer, 9, reference=model if referred else None), engine, loss, 1, 4096
    )


def test_no_policy_has_moved_before_its_first_update_in_bfloat16_either() -> None:
    """Decoding and the packed pass round differently in bfloat16: with the engine's numbers as pi_old the ratio is off
    by more than a tenth though nothing was learned."""
    found = {}
    for whose in ("engine", "auto"):
        model = adapted(tiny_model(dtype=torch.bfloat16), spread=0.1)
        engine = HFEngine(model, RENDERER.stop_ids)
        loss = dataclasses.replace(NO_KL, old_logprobs=whose)
        found[whose], _ = learner(model, engine, loss=loss).learn(*sampled(engine))
    assert found["engine"]["ratio_max"] > 1.02
    assert found["auto"]["ratio_max"] == pytest.approx(1.0, abs=1e-6)
    assert found["auto"]["ratio_mean"] == pytest.approx(1.0, abs=1e-6)
    assert found["auto"]["importance_mean"] != 1.0  # what the ratio lost, the importance weight says


def test_the_engine_s_numbers_are_taken_where_they_are_the_trainer_s_own() -> None:
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    trees, credits = sampled(engine)
    once = learner(model, engine)
    assert not once.rescores(trees)
    metrics, cost = once.learn(trees, credits)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4) and metrics["importance_mean"] == 1.0
    assert cost.scored_tokens == 0
    assert once.rescores(trees)  # the weights have moved: these rollouts are of an older policy
    assert learner(copy.deepcopy(model), engine).rescores(sampled(engine)[0])
    assert learner(model, Rounding(engine, 0.0)).rescores(sampled(engine)[0])


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_bill_counts_every_pass_that_only_scores(dtype: torch.dtype, updates: int) -> None:
    model = adapted(tiny_model(dtype=dtype))
    engine = HFEngine(model, RENDERER.stop_ids)
    several = dataclasses.replace(learner(model, engine, loss=LossConfig(), referred=True), updates=updates)
    metrics, cost = several.learn(*sampled(engine))
    passes = 2 if dtype == torch.bfloat16 and updates > 1 else 1  # the old policy's, and the reference's
    assert cost.scored_tokens == passes * metrics["trained_tokens"] > 0


@pytest.mark.parametrize("ratio", ["token", "action"])
def test_one_update_learns_the_same_without_a_pass_for_the_old_policy(ratio: Literal["token", "action"]) -> None:
    """Its own pass is the old policy's: equal gradients and importance weights, for an engine whose log-probabilities
    are off."""
    found: list[tuple[list[Tensor], LossSums]] = []
    config = dataclasses.replace(NO_KL, ratio=ratio)
    for scored_before in (False, True):
        model = tiny_model()
        (packed,) = pack(*sampled(Rounding(HFEngine(model, RENDERER.stop_ids), 0.05)), max_tokens=4096)
        own = dataclasses.replace(packed, old_logprobs_T=None)
        batch = with_old_logprobs(model, [packed])[0] if scored_before else own
        loss, sums = batch_loss(model, None, batch, config, loss_normalizer([batch], config))
        loss.backward()
        found.append(([p.grad for p in model.parameters() if p.grad is not None], sums))
    (mine, my_sums), (wanted, sums) = found
    assert my_sums.metrics() == pytest.approx(sums.metrics(), rel=1e-5, abs=1e-6)
    assert my_sums.metrics()["ratio_max"] == 1 and my_sums.metrics()["importance_mean"] > 1.04
    assert len(mine) == len(wanted) > 0 and max(float(gradient.abs().max()) for gradient in mine) > 1e-4
    for one, other in zip(mine, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


def test_nothing_has_moved_before_the_first_update_at_any_temperature() -> None:
    """Neither from the old policy, whoever scores it, nor from a reference that is the policy itself."""
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    for whose in ("engine", "trainer"):
        loss = LossConfig(temperature=0.6, old_logprobs=whose)
        still = learner(model, engine, loss=loss, referred=True)
        trees, credits = sampled(engine, temperature=0.6)
        assert still.rescores(trees) == (whose == "trainer")
        metrics, _ = still.learn(trees, credits)
        assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["kl"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(("device", "precision", "differs"), [("cpu", "high", False), ("cuda", "high", True)])
def test_on_a_gpu_rounded_products_make_the_engine_differ(device: str, precision: str, differs: bool) -> None:
    model = SimpleNamespace(device=torch.device(device), parameters=lambda: iter([torch.zeros(1)]))
    engine = SimpleNamespace(model=model, policy_version=0)
    before = torch.get_float32_matmul_precision()
    assert not engine_differs(engine, model, []), before
    torch.set_float32_matmul_precision(precision)
    try:
        assert engine_differs(engine, model, []) == differs
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_reference_that_the_loss_does_not_need_is_not_asked_and_a_batch_without_a_score_is_no_step() -> None:
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    trees, credits = sampled(engine)
    beside = learner(model, engine, referred=True)
    metrics, cost = beside.learn(trees, credits)
    assert cost.scored_tokens == 0 and metrics["trained_groups"] == len(trees)
    assert engine.policy_version == 1
    trees, _ = sampled(engine)
    nothing = [NO_KL.estimator(CreditConfig())(tree, censored(tree)) for tree in trees]
    assert beside.learn(trees, nothing) == ({"trained_groups": 0}, Cost())
    assert engine.policy_version == 1, "nothing was learned"


def test_a_batch_is_stepped_on_as_often_as_asked_and_every_step_is_paid_for() -> None:
    bills = {}
    for updates in (1, 3):
        model = tiny_model()
        engine = HFEngine(model, RENDERER.stop_ids)
        again = dataclasses.replace(learner(model, engine), updates=updates)
        _, cost = again.learn(*sampled(engine))
        bills[updates] = cost.trained_tokens
        assert again.trainers.own.optimizer.steps == updates and engine.policy_version == 1
        assert 0 < cost.training_seconds < 60
    assert bills[3] == 3 * bills[1] > 0


def test_minibatches_are_optimizer_steps_on_parts_of_the_batch_with_the_old_policy_of_its_start() -> None:
    """ARPO as released takes eight steps on 128 prompts, sixteen at a time: the same steps by hand, one after the
    other, with old log-probabilities from before the first."""
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    trees, credits = sampled(engine)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    moves = OptimizerConfig(learning_rate=1e-2, eps=1e-3)  # Adam makes whole steps of a gradient that is rounding
    split = dataclasses.replace(learner(model, engine, optimizer=moves), minibatch=1)
    metrics, cost = split.learn(trees, credits)
    after = {name: value.clone() for name, value in model.state_dict().items()}
    assert split.trainers.own.optimizer.steps == len(trees) > 1
    assert metrics["trees"] == len(trees) and cost.trained_tokens == metrics["trained_tokens"]
    whole = [batch.stats for batch in pack(trees, credits, max_tokens=4096)]
    flat, unique = (sum(getattr(stats, name) for stats in whole) for name in ("flat_tokens", "unique_tokens"))
    assert metrics["rho"] == pytest.approx(flat / unique)

    model.load_state_dict(before)
    by_hand = learner(model, HFEngine(model, RENDERER.stop_ids), optimizer=moves)
    own = by_hand.trainers.own
    windows = [pack([tree], [credit], max_tokens=4096) for tree, credit in zip(trees, credits, strict=True)]
    for window in [with_old_logprobs(model, window) for window in windows] if split.rescores(trees) else windows:
        update_step(own.model, own.reference, own.optimizer, window, by_hand.loss)
    for name, value in model.state_dict().items():
        assert torch.allclose(value, after[name], atol=1e-6), name


def censored(tree: RolloutTree) -> Rewards:
    return Rewards({leaf: Verdict(None, "lost") for leaf in tree.leaves()})


@pytest.mark.parametrize(("off", "cap"), [(0.3, 2.0), (0.3, 1.1), (-0.4, 2.0)])
def test_an_engine_that_is_off_is_corrected_by_the_truncated_weight(off: float, cap: float) -> None:
    """The gradient is -1/Z sum of min(exp(old - sampling), C) A d log pi, with old = pi before the update: the plain
    policy gradient of the same tokens, times exp(off) or the cap. Uncorrected it would be A exp(old - sampling)."""
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    trees, credits = sampled(Rounding(engine, off))
    loss = dataclasses.replace(NO_KL, importance_cap=cap)
    gradient: dict[torch.nn.Parameter, torch.Tensor] = {}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: gradient.update({p: p.grad.clone()}))
    metrics, _ = learner(model, Rounding(engine, off), loss=loss).learn(trees, credits)
    weight = min(math.exp(off), cap)
    assert metrics["importance_mean"] == pytest.approx(weight, rel=1e-4)
    assert metrics["importance_truncated"] == (1.0 if cap < math.exp(off) else 0.0)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-6) and metrics["clip_fraction"] == 0.0

    fresh = tiny_model()
    total, tokens = torch.tensor(0.0), 0
    for tree, credit in zip(trees, credits, strict=True):
        for leaf in tree.leaves():
            path = torch.tensor([rollout_of(tree, leaf).token_ids])
            said = len(tree[leaf].token_ids)
            scores = torch.log_softmax(fresh(input_ids=path).logits[0], -1)[-1 - said : -1]
            advantage = credit.nodes[leaf].positive + credit.nodes[leaf].negative
            total = total - weight * advantage * scores.gather(1, path[0, -said:, None]).sum()
            tokens += said
    (total / tokens).backward()
    for ours, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.allclose(gradient[ours], theirs.grad, rtol=1e-3, atol=1e-5 * float(theirs.grad.norm()))


class Deaf(Rounding):
    """An engine elsewhere that does not take the weights."""

    def update_weights(self, model, policy_version) -> None:
        pass


def test_an_engine_that_does_not_take_the_weights_of_an_update_ends_the_run() -> None:
    engine = Deaf(HFEngine(model := tiny_model(), RENDERER.stop_ids), 0.0)
    with pytest.raises(TurntreeError, match="did not take the weights of version 1: its policy_version is 0"):
        learner(model, engine).learn(*sampled(engine))


def test_a_token_that_the_model_lacks_is_named_before_a_pass() -> None:
    """It was an `IndexError`; a GPU ends the process and says nothing of the token."""
    model = tiny_model()
    engine = HFEngine(model, RENDERER.stop_ids)
    trees, credits = sampled(engine)
    leaf = trees[1].leaves()[2]
    tokens = trees[1][leaf].token_ids
    trees[1]._nodes[leaf] = dataclasses.replace(trees[1][leaf], token_ids=(*tokens[:-1], 9999))
    with pytest.raises(InputError, match=rf"turn 1 of 't1#0' \(node {leaf}, completion\) has token 9999; the model"):
        learner(model, engine).learn(trees, credits)
