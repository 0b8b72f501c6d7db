"""The tree in one file and the library are the same: loss, gradient, and where to train, to fork and to stop."""

from __future__ import annotations

import dataclasses
import importlib.util
import random
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import tiny_model
from turntree.core.labels import Rewards
from turntree.core.protocols import ForkMoment, GroupProgress
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.credit import CreditRule
from turntree.decide.branching.rules import EntropyBrancher
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.pack.packing import pack
from turntree.pivots.rows import Class, class_of
from turntree.train.losses import LossConfig, loss_normalizer
from turntree.train.update import batch_loss

PATH = Path(__file__).resolve().parents[2] / "recipes" / "tree_in_one_file.py"


def load():
    spec = importlib.util.spec_from_file_location("tree_in_one_file", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tree_in_one_file"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


recipe = load()


@pytest.fixture
def forking(monkeypatch):
    """The entropies of a random model hardly change, so that every second turn forks only with this bound."""
    monkeypatch.setattr(recipe, "RISE", 0.0)


def test_the_file_and_the_library_agree_on_loss_and_gradient(forking) -> None:
    model = tiny_model("qwen3", len(recipe.WORDS), hidden_size=32, dtype=torch.float64)
    trees = [near(tree, random.Random(5)) for tree in grown_trees(model)]

    packed_row = recipe.loss(as_policy(model), trees)
    packed_row.backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    model.zero_grad()
    config = LossConfig(clip_low=recipe.CLIP, clip_high=recipe.CLIP, kl_coefficient=0.0)
    labelled = [(library_tree(tree), rewards_of(tree)) for tree in trees]
    credits = [CreditRule()(tree, rewards) for tree, rewards in labelled]
    batches = pack([tree for tree, _ in labelled], credits, max_tokens=4096)
    normalizer = loss_normalizer(batches, config)
    losses = [batch_loss(model, None, batch, config, normalizer)[0] for batch in batches]
    sum(losses).backward()

    assert float(packed_row.detach()) == pytest.approx(float(sum(losses).detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, expected[name], rtol=1e-5, atol=1e-8), name
    assert len(recipe.pack(trees)[0]) == sum(batch.stats.unique_tokens for batch in batches)


def test_credit_is_the_library_s_three_numbers_at_every_node(forking) -> None:
    model = tiny_model("qwen3", len(recipe.WORDS), hidden_size=32, dtype=torch.float64)
    for tree in grown_trees(model):
        expected = CreditRule()(library_tree(tree), rewards_of(tree)).nodes
        numbers = {node: (c.positive, c.negative, c.multiplicity) for node, c in expected.items()}
        assert recipe.credit(tree) == {node: pytest.approx(credit, rel=1e-6) for node, credit in numbers.items()}


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=16))
def test_a_turn_is_a_pivot_where_the_library_says_so(rewards: list[float]) -> None:
    assert recipe.is_pivot(rewards) == (class_of(rewards, recipe.LAMBDA) is Class.PIVOT)


@given(*[st.tuples(*[st.floats(0, 3.0)] * recipe.TURN_TOKENS)] * 2)
def test_a_rollout_forks_where_arpo_s_rule_forks(first: tuple[float, ...], entropies: tuple[float, ...]) -> None:
    rule = EntropyBrancher(
        vocabulary=len(recipe.WORDS), probe_tokens=recipe.PROBE, alpha=0.0, beta=1.0, tau=recipe.RISE
    )
    moment = ForkMoment(
        task_id="t", key=(0,), turn=2, max_turns=recipe.TURNS, budget=1, entropies=(first, entropies), seed=0
    )
    decision = rule.decide(moment)
    assert recipe.entropy_rose(list(entropies), list(first)) == (decision.branches == 2)
    assert decision.branches == 1 or decision.shared == recipe.PROBE - 1


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=recipe.GATE_TURN), min_size=2, max_size=6))
def test_a_group_stops_where_the_library_s_gate_cuts_it(groups: list[list[str]]) -> None:
    running = [*groups, ["a", "b"]]  # one is not over, so that there is something to save
    progress = GroupProgress(
        task_id="t",
        max_turns=recipe.TURNS,
        actions=tuple(map(tuple, running)),
        observations=tuple(("",) * len(actions) for actions in running),
        finished=(True,) * len(groups) + (False,),
        progress=(None,) * len(running),
    )
    gate = PrefixDivergenceGate(turn=recipe.GATE_TURN, threshold=recipe.DIVERGENCE)
    assert recipe.converged(running) == gate.decide(progress).cut


def test_the_file_learns_its_toy_world_and_finds_the_turn_that_has_a_gradient() -> None:
    lines: list[str] = []
    before, after = recipe.train(steps=40, seed=1, log=lines.append)
    assert after > before + 0.15
    assert [("pivot" in line) for line in lines[:6]] == [False, True, False, False, True, False]


def test_the_file_stands_alone() -> None:
    source = PATH.read_text()
    assert "import turntree" not in source and "from turntree" not in source
    assert len(source.splitlines()) <= 250


# helpers


def as_policy(model):
    """The model behind the recipe's interface: any mask over the slots of one row."""

    def policy(tokens_BL, positions_BL, visible_LL):
        hidden = torch.zeros(visible_LL.shape, dtype=torch.float64).masked_fill(~visible_LL, float("-inf"))
        mask_B1LL = hidden.expand(len(tokens_BL), 1, *hidden.shape)
        return model(input_ids=tokens_BL, position_ids=positions_BL, attention_mask=mask_B1LL, use_cache=False).logits

    return policy


def grown_trees(model) -> list:
    """Groups with forks, faults and different rewards, one group that was stopped, and one whose rewards are equal."""
    draw = torch.Generator().manual_seed(3)
    trees = [recipe.grow(as_policy(model), task, draw) for task in recipe.TASKS[:6]]
    judged = random.Random(7)
    for tree in trees[:4]:  # a random model never succeeds
        tree.rewards = {leaf: judged.choice([0.0, 1.0, 0.25, None]) for leaf in tree.rewards}
    trees[4].rewards = dict.fromkeys(trees[4].rewards)
    trees[5].rewards = dict.fromkeys(trees[5].rewards, 1.0)
    assert any(len(tree.rewards) > recipe.STARTS for tree in trees), "some rollout forked"
    return trees


def near(tree, draw: random.Random):
    """The same tree as if sampled by policies around the model, so that ratios fall on both sides of the clip range."""
    nodes = [
        dataclasses.replace(node, logprobs=node.logprobs and [lp + draw.gauss(0.0, 0.4) for lp in node.logprobs])
        for node in tree.nodes
    ]
    return recipe.Tree(nodes, tree.rewards)


def library_tree(tree) -> RolloutTree:
    made = RolloutTree("t")
    for node in tree.nodes:
        sampled = node.logprobs is not None
        kind = NodeKind.COMPLETION if sampled else NodeKind.PROMPT if node.parent is None else NodeKind.OBSERVATION
        values = {"logprobs": tuple(node.logprobs), "entropies": tuple(node.entropies)} if sampled else {}
        made.add(node.parent, kind, tuple(node.tokens), **values)
    for leaf in made.leaves():
        made.stop(leaf, StopReason.COMPLETED if tree.rewards[leaf] is not None else StopReason.ENVIRONMENT_ERROR)
    return made


def rewards_of(tree) -> Rewards:
    return Rewards({leaf: Verdict(reward, "given") for leaf, reward in tree.rewards.items()})
