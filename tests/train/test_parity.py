"""Packed equals flat: the library's loss and gradient against one stock `model(input_ids)` call per rollout and the
papers' formulas written out here. Nothing of the reference side comes from `turntree.train`."""

from __future__ import annotations

import copy
import math
import random
import types
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from random_trees import sampled_near, scored_trees

from packed_gradient import gradient, library_gradient, relative_error
from rollout_view import rollout_of
from tiny_models import tiny_model
from turntree.core.labels import Rewards
from turntree.core.tree import RolloutTree
from turntree.credit.credit import CreditRule
from turntree.pack import attention
from turntree.pack.attention import set_tree_attention
from turntree.pack.packing import PackedBatch, PackingStats, flat_batches, pack
from turntree.pack.slots import longest_path, tree_segment
from turntree.train.forward import set_checkpointing
from turntree.train.losses import LossConfig
from turntree.train.optimizer import Optimizer, OptimizerConfig
from turntree.train.update import update_step

VOCABULARY = 24
LOW, HIGH, BETA, CONSTANT = 0.2, 0.28, 0.05, 17.0


@dataclass(frozen=True)
class Case:
    ratio: str
    normalizer: str
    kl: str
    temperature: float = 1.0

    def config(self) -> LossConfig:
        return LossConfig(
            clip_low=LOW,
            clip_high=HIGH,
            ratio=self.ratio,
            kl=self.kl,
            kl_coefficient=BETA,
            normalizer=self.normalizer,
            constant=CONSTANT if self.normalizer == "constant" else None,
            temperature=self.temperature,
        )


CASES = [
    Case("token", "tokens", "k2"),
    Case("token", "rollouts", "k2", temperature=0.7),
    Case("token", "constant", "k3"),
    Case("action", "rollouts", "k3"),
    Case("action", "tokens", "k2"),
]


def group_advantages(rewards: list[float]) -> list[float]:
    mean = sum(rewards) / len(rewards)
    std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return [(r - mean) / (std + 1e-6) if max(rewards) > min(rewards) else 0.0 for r in rewards]


def flat_loss(
    model: torch.nn.Module,
    reference: torch.nn.Module,
    trees: list[RolloutTree],
    rewards: list[Rewards],
    case: Case,
) -> torch.Tensor:
    """The objective as the papers write it: a sum over rollouts, one row each, nothing shared."""
    total, tokens, rollouts = torch.tensor(0.0), 0, 0
    for tree, labels in zip(trees, rewards, strict=True):
        leaves = [leaf for leaf in tree.leaves() if labels.of(leaf) is not None]
        for leaf, advantage in zip(leaves, group_advantages([labels.of(leaf) for leaf in leaves]), strict=True):
            rollout = rollout_of(tree, leaf)
            path = torch.tensor([rollout.token_ids])
            scores = torch.log_softmax(model(input_ids=path).logits[0] / case.temperature, -1)
            with torch.no_grad():
                anchor = torch.log_softmax(reference(input_ids=path).logits[0] / case.temperature, -1)
            length = sum(rollout.loss_mask)
            objective, at = torch.tensor(0.0), 0
            for node in rollout.nodes:
                start, at = at, at + len(node.token_ids)
                if not node.sampled:
                    continue
                here = torch.arange(start, at)
                new = scores[here - 1, path[0, here]]
                old = torch.tensor(node.logprobs, dtype=new.dtype)
                w = torch.exp((new - old).sum()) if case.ratio == "action" else torch.exp(new - old)
                objective = objective + torch.min(w * advantage, w.clamp(1 - LOW, 1 + HIGH) * advantage).sum()
                gap = new - anchor[here - 1, path[0, here]]
                distance = gap**2 / 2 if case.kl == "k2" else torch.exp(-gap) - 1 + gap
                objective = objective - BETA * (torch.exp(new - old).detach() * distance).sum()
            mean_over_own_tokens = case.normalizer == "rollouts" and case.ratio == "token"
            total = total - (objective / length if mean_over_own_tokens else objective)
            tokens, rollouts = tokens + length, rollouts + 1
    return total / {"tokens": tokens, "rollouts": rollouts, "constant": CONSTANT}[case.normalizer]


def normalise_in_double(model: torch.nn.Module) -> None:
    """Stock RMSNorms round to float32 whatever the model's type, and Adam magnifies that rounding where gradients
    vanish; in double throughout, what is left of a difference is a difference of method."""

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(forward, module)


def setting(kind: str, case: Case, seed: int, dtype: torch.dtype):
    """Policy, reference, trees sampled near the policy by several versions of it, rewards and credit."""
    draw = random.Random(f"{kind}/{case}/{seed}")
    model = tiny_model(kind, VOCABULARY, hidden_size=32, seed=seed, dtype=dtype)
    reference = tiny_model(kind, VOCABULARY, hidden_size=32, seed=seed + 100, dtype=dtype)
    shapes, rewards = scored_trees(draw)
    trees = [sampled_near(model, tree, draw, spread=0.2) for tree in shapes]
    rule = CreditRule(per_rollout=case.normalizer == "rollouts" and case.ratio == "token")
    return model, reference, trees, rewards, [rule(t, r) for t, r in zip(trees, rewards, strict=True)]


def three_steps(
    kind: str, case: Case, layout, seed: int, *, learning_rate: float, stock_norms: bool, prepare=None
) -> list[float]:
    """Relative L2 error of the whole gradient at each of three optimizer steps, each side on weights of its own.
    `prepare` sets our side's model up."""
    ours, reference, trees, rewards, credits = setting(kind, case, seed, torch.float64)
    if not stock_norms:
        normalise_in_double(ours)
        normalise_in_double(reference)
    theirs = copy.deepcopy(ours)
    if prepare is not None:
        prepare(ours)
    batches = layout(trees, credits, max_tokens=70)
    optimizer = Optimizer(ours.parameters(), OptimizerConfig(learning_rate=learning_rate, max_grad_norm=math.inf))
    stock = torch.optim.AdamW(theirs.parameters(), lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    errors = []
    for _ in range(3):
        loss, found = library_gradient(ours, reference, batches, case.config())
        stock.zero_grad()
        expected = flat_loss(theirs, reference, trees, rewards, case)
        expected.backward()
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
        errors.append(relative_error(found, gradient(theirs)))
        optimizer.step()
        stock.step()
    return errors


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_packed_gradient_is_the_flat_gradient_over_three_steps(kind: str, case: Case) -> None:
    errors = three_steps(kind, case, pack, 0, learning_rate=1e-4, stock_norms=True)
    assert max(errors) <= 1e-6, errors


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_in_double_throughout_the_gradients_agree_after_large_steps(kind: str, case: Case) -> None:
    errors = three_steps(kind, case, pack, 2, learning_rate=1e-2, stock_norms=False)
    assert max(errors) <= 1e-10, errors


def in_small_pieces(monkeypatch) -> Callable[[torch.nn.Module], None]:
    """Tree attention that never takes siblings together to save a call."""
    monkeypatch.setattr(attention, "CALL", 0)
    monkeypatch.setattr(attention, "ADD", 0)
    return set_tree_attention


def checkpointing(model: torch.nn.Module) -> None:
    set_checkpointing(model)
    assert not model.training  # a policy that samples between updates stays in evaluation mode


def in_small_pieces_and_checkpointing(monkeypatch) -> Callable[[torch.nn.Module], None]:
    prepare = in_small_pieces(monkeypatch)
    return lambda model: (prepare(model), checkpointing(model))


def in_pieces(trees, credits, *, max_tokens: int) -> list[PackedBatch]:
    """Packed within the smallest budget that holds every path: most trees are cut."""
    segments = [tree_segment(tree, credit, 0) for tree, credit in zip(trees, credits, strict=True)]
    return pack(trees, credits, max_tokens=max(longest_path(segment) for segment in segments))


PATHS = {
    "cut": (in_pieces, lambda monkeypatch: None),
    "small pieces": (pack, in_small_pieces),
    "checkpointing": (pack, lambda monkeypatch: checkpointing),
    "all of them": (in_pieces, in_small_pieces_and_checkpointing),
}


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_every_way_to_save_memory_or_time_takes_the_same_three_steps(monkeypatch, path: str, case: Case) -> None:
    layout, prepare = PATHS[path]
    errors = three_steps("qwen3", case, layout, 2, learning_rate=1e-2, stock_norms=False, prepare=prepare(monkeypatch))
    assert max(errors) <= 1e-10, errors


@pytest.mark.parametrize("case", [CASES[1], CASES[3]], ids=str)
def test_in_pieces_trees_are_cut_and_ancestors_computed_again(case: Case) -> None:
    _, _, trees, _, credits = setting("qwen3", case, 2, torch.float64)
    stats = sum((batch.stats for batch in in_pieces(trees, credits, max_tokens=70)), PackingStats())
    assert stats.cut_trees >= 1 and stats.recomputed_tokens > 0


def test_checkpointed_layers_are_computed_again_in_the_backward_pass() -> None:
    model, reference, trees, _, credits = setting("qwen3", CASES[0], 0, torch.float64)
    checkpointing(model)
    calls = []
    model.get_decoder().layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    batches = pack(trees, credits, max_tokens=70)
    library_gradient(model, reference, batches, CASES[0].config())
    assert len(calls) == 2 * len(batches)


@pytest.mark.parametrize("case", CASES[2:4], ids=str)
def test_our_own_flat_layout_is_the_same_objective(case: Case) -> None:
    errors = three_steps("qwen3", case, flat_batches, 0, learning_rate=1e-2, stock_norms=False)
    assert max(errors) <= 1e-10, errors


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_the_first_step_agrees_in_single_precision(kind: str, case: Case) -> None:
    model, reference, trees, rewards, credits = setting(kind, case, 0, torch.float32)
    _, found = library_gradient(model, reference, pack(trees, credits, max_tokens=70), case.config())
    model.zero_grad()
    flat_loss(model, reference, trees, rewards, case).backward()
    assert relative_error(found, gradient(model)) <= 1e-5


def test_the_settings_reach_every_clip_state_and_every_kind_of_coincidence() -> None:
    """The parity above would be hollow if ratios never left the clip range or siblings never shared a slot."""
    model, _, trees, _, credits = setting("qwen3", CASES[0], 0, torch.float64)
    batches = pack(trees, credits, max_tokens=70)
    ratios = torch.cat([
        torch.exp(policy_T - batch.old_logprobs_T)
        for batch in batches
        for policy_T in [_scores(model, batch)[batch.slot_T]]
    ])  # fmt: skip
    assert (ratios < 1 - LOW).any() and (ratios > 1 + HIGH).any() and ((ratios > 0.9) & (ratios < 1.1)).any()
    assert any(_twins_in_different_clip_states(model, batch) for batch in batches)
    assert len(batches) > 1
    assert any(len(batch.slot_T) > len(batch.target_S) for batch in batches)
    assert any(credit.censored for credit in credits) and any(credit.zero_variance for credit in credits)
    assert sum(batch.stats.rho for batch in batches) > len(batches)


def _twins_in_different_clip_states(model, batch: PackedBatch) -> bool:
    """Whether two terms of one slot lie on different sides of a clip bound."""
    ratios_T = torch.exp(_scores(model, batch)[batch.slot_T] - batch.old_logprobs_T)
    states_T = (ratios_T > 1 + HIGH).int() - (ratios_T < 1 - LOW).int()
    return any(len(set(states_T[batch.slot_T == slot].tolist())) > 1 for slot in batch.slot_T.unique())


def _scores(model, batch: PackedBatch) -> torch.Tensor:
    from turntree.train.forward import slot_scores

    return slot_scores(model, batch).logprobs_S.detach()


def test_update_step_takes_the_same_three_steps_as_adamw_on_flat_rows() -> None:
    case = CASES[0]
    ours, reference, trees, rewards, credits = setting("qwen3", case, 3, torch.float64)
    normalise_in_double(ours)
    normalise_in_double(reference)
    theirs = copy.deepcopy(ours)
    optimizer = Optimizer(ours.parameters(), OptimizerConfig(learning_rate=1e-3, max_grad_norm=0.5))
    stock = torch.optim.AdamW(theirs.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    batches = pack(trees, credits, max_tokens=70)
    for _ in range(3):
        stock.zero_grad()
        expected = flat_loss(theirs, reference, trees, rewards, case)
        expected.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5))
        stock.step()
        metrics = update_step(ours, reference, optimizer, batches, case.config())
        assert metrics["loss"] == pytest.approx(float(expected.detach()), rel=1e-6)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-6)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-7), name
