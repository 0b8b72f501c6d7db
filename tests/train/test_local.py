"""Judged turns: their advantages lie beside those of the episodes. Local rollouts in a tree leave these alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import one_turn, score, scored_trees
from test_parity import VOCABULARY

from packed_gradient import library_gradient
from tiny_models import tiny_model
from turntree.core.labels import Rewards
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import across_siblings, across_starts, mean_centred
from turntree.credit.credit import CreditRule, with_turns
from turntree.credit.scored import path_weighted
from turntree.pack.packing import pack
from turntree.train.loss_config import LossConfig

RULES = (
    CreditRule(),
    CreditRule(per_rollout=True),
    CreditRule(comparison=across_starts, advantages=mean_centred),
    CreditRule(comparison=across_siblings, advantages=mean_centred, leaf_weights=path_weighted),
)


@given(seed=st.integers(0, 2**32), weight=st.sampled_from([-2.0, 0.5, 1.0]))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("rule", [CreditRule(), CreditRule(per_rollout=True)])
def test_a_judged_turn_counts_once_for_every_rollout_through_it_and_nothing_else_changes(
    rule: Any, seed: int, weight: float
):
    draw = random.Random(seed)
    tree = scored_trees(draw)[0][1]
    ends = {leaf: tree.stop_reason(leaf) for leaf in tree.ends()}
    alike = rule(
        tree, Rewards({leaf: Verdict(None if stop and stop.censors else 1.0, "") for leaf, stop in ends.items()})
    )
    if not alike.nodes:
        return
    (chosen, *_) = sorted(alike.nodes)
    found = with_turns(alike, {chosen: weight, -1: 3.0})
    assert found.nodes[chosen].positive + found.nodes[chosen].negative == pytest.approx(
        weight * alike.nodes[chosen].multiplicity
    )
    assert {node: c for node, c in found.nodes.items() if node != chosen} == {
        node: c for node, c in alike.nodes.items() if node != chosen
    }
    assert alike.zero_variance and not found.zero_variance
    assert (found.rollout_tokens, found.rollouts) == (alike.rollout_tokens, alike.rollouts)
    assert with_turns(alike, dict.fromkeys(alike.nodes, 0.0)) == alike


def test_the_packed_gradient_of_judged_turns_is_the_sum_of_both_advantages() -> None:
    """One-turn groups: a verdict on the turn that has the episode's advantage doubles the gradient."""
    draw = random.Random(5)
    trees = [one_turn(draw) for _ in range(4)]
    rewards = [score(draw, tree, censor=False) for tree in trees]
    credits = [CreditRule()(tree, verdicts) for tree, verdicts in zip(trees, rewards, strict=True)]
    again = [{node: one.positive + one.negative for node, one in credit.nodes.items()} for credit in credits]
    model = tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3)
    loss = LossConfig(kl_coefficient=0.0)
    judged = list(map(with_turns, credits, again))
    _, alone = library_gradient(model, None, pack(trees, credits, max_tokens=400), loss)
    _, both = library_gradient(model, None, pack(trees, judged, max_tokens=400), loss)
    assert float(alone.norm()) > 0
    assert float((both - 2 * alone).norm()) < 1e-5 * float(alone.norm())
