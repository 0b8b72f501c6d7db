"""Local rollouts inside a tree: they leave the episodes' credit alone, and add that of one-turn groups."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import add_completion, ids, one_turn, sampled_near, score, scored_trees
from test_online import config, corridors, parts
from test_parity import CASES, VOCABULARY, Case, flat_loss

from fault_drill import Hopeless
from packed_gradient import gradient, library_gradient, relative_error
from tiny_models import tiny_model
from turntree.advantages.comparisons import across_siblings, across_starts, grpo_advantages, mean_centred
from turntree.advantages.credit import CreditRule
from turntree.advantages.local import local_credit, with_turns
from turntree.advantages.scored import path_weighted
from turntree.core.completion import Completion
from turntree.core.cost import Cost
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import LOCAL, Decision, NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.filters.dapo import DapoFilter
from turntree.logs.rollouts import depth_first, group_from_tree
from turntree.rollouts.acceptance import Acceptance
from turntree.rollouts.accounting import account
from turntree.rollouts.groups import GrownGroup
from turntree.training.config import LocalConfig, LossConfig, OnlineConfig
from turntree.training.inside import GrownInside, LocalCredits
from turntree.training.online import train_online
from turntree.training.packing import flat_batches, pack
from turntree.training.update import gradient as policy_gradient

RULES = (
    CreditRule(),
    CreditRule(per_rollout=True),
    CreditRule(comparison=across_starts, advantages=mean_centred),
    CreditRule(comparison=across_siblings, advantages=mean_centred, leaf_weights=path_weighted),
)


def with_local(tree: RolloutTree, draw: random.Random, groups: int = 3) -> RolloutTree:
    """A copy of the tree with local rollouts at some of its places, one of them censored."""
    grown = RolloutTree.from_json(tree.to_json())
    above = [n.id for n in tree if any(tree[child].sampled for child in tree.children(n.id))]
    for place in draw.sample(above, min(groups, len(above))):
        for number in range(draw.randint(2, 4)):
            leaf = add_completion(grown, place, ids(draw, 1, 4))
            reward = draw.choice([0.0, 1.0])
            censored = number == 0 and draw.random() < 0.3
            grown.stop(leaf, StopReason.RENDERER_ERROR if censored else StopReason.COMPLETED)
            grown.record(Decision("verifier", leaf, LOCAL, "drawn", {} if censored else {"reward": reward}))
    return grown


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_nothing_of_the_episodes_changes(seed: int) -> None:
    draw = random.Random(seed)
    for tree, rewards in zip(*scored_trees(draw), strict=True):
        grown = with_local(tree, draw)
        assert (grown.ends(), grown.starts(), grown.branch_points()) == (
            tree.ends(),
            tree.starts(),
            tree.branch_points(),
        )
        assert list(depth_first(grown)) == list(depth_first(tree))
        assert account(grown) == account(tree)
        for rule in RULES:
            assert rule(grown, rewards) == rule(tree, rewards)
        named = [group_from_tree(one, rewards, id="one") for one in (tree, grown)]
        assert named[0] == named[1]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), weight=st.sampled_from([0.5, 1.0, 3.0]))
def test_each_place_is_a_group_of_its_own(seed: int, weight: float) -> None:
    draw = random.Random(seed)
    grown = with_local(scored_trees(draw)[0][1], draw)
    credit = local_credit(grown, weight=weight)
    verdicts = grown.local_rollouts()
    scored = {leaf: reward for leaf, reward in verdicts.items() if reward is not None}
    assert set(credit.nodes) == set(scored)
    assert credit.censored == len(verdicts) - len(scored)
    for place in {grown[leaf].parent for leaf in scored}:
        group = [leaf for leaf in scored if grown[leaf].parent == place]
        for leaf, advantage in zip(group, grpo_advantages([scored[leaf] for leaf in group]), strict=True):
            found = credit.nodes[leaf]
            assert found.positive + found.negative == pytest.approx(weight * advantage)
            assert found.multiplicity == weight


def without_local(tree: RolloutTree) -> RolloutTree:
    value, local = tree.to_json(), tree.local_rollouts()
    value["nodes"] = [row for number, row in enumerate(value["nodes"]) if number not in local]  # they come last
    value["stops"] = {leaf: reason for leaf, reason in value["stops"].items() if int(leaf) not in local}
    value["decisions"] = [one for one in value["decisions"] if one["action"] != LOCAL]
    return RolloutTree.from_json(value)


def one_turn_trees(tree: RolloutTree) -> list[tuple[RolloutTree, Rewards]]:
    """A tree for every place: its prompt given, its local rollouts the leaves."""
    verdicts, found = tree.local_rollouts(), []
    for place in sorted({tree[leaf].parent for leaf in verdicts}):
        one = RolloutTree("one place")
        root = one.add(None, NodeKind.PROMPT, tree.rollout(place).token_ids).id
        rewards = {}
        for leaf in (leaf for leaf in verdicts if tree[leaf].parent == place):
            node = tree[leaf]
            copied = one.add(root, node.kind, node.token_ids, logprobs=node.logprobs, entropies=node.entropies).id
            one.stop(copied, tree.stop_reason(leaf))
            rewards[copied] = Verdict(verdicts[leaf], "copied")
        found.append((one, Rewards(rewards)))
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_packed_tree_has_the_gradient_of_the_episodes_and_of_a_tree_for_every_place(case: Case) -> None:
    """The papers' formulas on flat rows: PivotRL's on every place, GRPO's on the episodes, under one normaliser."""
    draw = random.Random(f"local/{case}")
    model = tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3, dtype=torch.float64)
    reference = tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=103, dtype=torch.float64)
    per_rollout = case.normalizer == "rollouts" and case.ratio == "token"
    rule = CreditRule(per_rollout=per_rollout)
    shapes, rewards = scored_trees(draw)
    grown = [sampled_near(model, with_local(tree, draw), draw, 0.2) for tree in shapes]
    credits = [
        rule(tree, verdicts) + local_credit(tree, per_rollout=per_rollout)
        for tree, verdicts in zip(grown, rewards, strict=True)
    ]
    packed = pack(grown, credits, max_tokens=70)
    flat = flat_batches(grown, credits, max_tokens=70)
    assert sum(batch.stats.unique_tokens for batch in packed) < sum(batch.stats.unique_tokens for batch in flat)
    found = [library_gradient(model, reference, batches, case.config()) for batches in (packed, flat)]
    apart = [pair for tree in grown for pair in one_turn_trees(tree)]
    model.zero_grad()
    trees = [*map(without_local, grown), *(tree for tree, _ in apart)]
    expected = flat_loss(model, reference, trees, [*rewards, *(verdicts for _, verdicts in apart)], case)
    expected.backward()
    for loss, one in found:
        assert loss == pytest.approx(float(expected.detach()), rel=1e-6, abs=1e-7)
        assert relative_error(one, gradient(model)) < 1e-6


def test_a_node_has_one_credit() -> None:
    tree = with_local(scored_trees(random.Random(1))[0][1], random.Random(1))
    credit = local_credit(tree)
    with pytest.raises(ValueError, match="has credit from both"):
        credit + credit


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
    loss = OnlineConfig().loss
    alone, _ = policy_gradient(model, trees, credits, loss, max_tokens=400)
    both, _ = policy_gradient(model, trees, list(map(with_turns, credits, again)), loss, max_tokens=400)
    assert float(alone.norm()) > 0
    assert float((both - 2 * alone).norm()) < 1e-5 * float(alone.norm())


class Mirrored:
    """Local rollouts that repeat the rollouts of one-turn groups at their state, with the same rewards (kind "with")
    and with opposite ones (kind "against")."""

    def __init__(self, rewards: list[Rewards], kinds: Sequence[str] = ("with", "against")) -> None:
        self.seen = Acceptance()
        self.rewards, self.kinds = rewards, kinds

    def grow(self, groups, iteration):
        places = []
        for number, (group, rewards) in enumerate(zip(groups, self.rewards, strict=True)):
            tree, kind = group.tree, self.kinds[number % len(self.kinds)]
            for leaf, reward in rewards.scored().items():
                copied = add_completion(tree, tree.roots[0], tree[leaf].token_ids)
                tree.stop(copied, StopReason.COMPLETED)
                mirrored = reward if kind == "with" else 1 - reward
                tree.record(Decision("verifier", copied, LOCAL, "", {"reward": mirrored}))
            places.append({tree.roots[0]: kind})
        return GrownInside(Cost(), {}, places, self.seen)


def test_kinds_that_point_against_the_episodes_are_measured_and_not_trained_on() -> None:
    draw = random.Random(11)
    trees = [one_turn(draw) for _ in range(4)]
    rewards = [score(draw, tree, censor=False) for tree in trees]
    groups = [SimpleNamespace(tree=tree) for tree in trees]
    config = OnlineConfig(local=LocalConfig(states=4, choose="alignment"), max_tokens=400)
    local = LocalCredits(Mirrored(rewards), config, tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3))
    episodes = [CreditRule()(tree, verdicts) for tree, verdicts in zip(trees, rewards, strict=True)]
    credits, cost, figures = local.credits(groups, episodes, 1)
    assert [one.local for one in credits] == [None] * 4
    assert figures["trained_kinds"] == []  # nothing is known before the first iteration
    assert figures["gains"]["with"] > 0 > figures["gains"]["against"]
    assert cost.training_seconds > 0 and cost.trained_tokens > 0  # a backward pass for the episodes, and one a kind
    fresh = [SimpleNamespace(tree=without_local(tree)) for tree in trees]
    credits, _, figures = local.credits(fresh, episodes, 2)
    assert figures["trained_kinds"] == ["with"]
    assert [one.local is not None for one in credits] == [True, False, True, False]
    assert [one.beside(None) for one in credits] == [one.local for one in credits]


def test_a_kind_without_a_judged_rollout_is_left_out_of_the_measurement() -> None:
    """A judge that failed on all of them says nothing about it, and ends no run."""
    draw = random.Random(11)
    trees = [one_turn(draw) for _ in range(2)]
    rewards = [score(draw, tree, censor=False) for tree in trees]

    class Silent(Mirrored):
        def grow(self, groups, iteration):
            grown = super().grow(groups, iteration)
            lost = groups[1].tree
            for leaf in lost.local_rollouts():
                lost.record(Decision("verifier", leaf, LOCAL, "timed out", {}))
            return grown

    config = OnlineConfig(local=LocalConfig(states=4, choose="alignment"), max_tokens=400)
    local = LocalCredits(Silent(rewards), config, tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3))
    episodes = [CreditRule()(tree, verdicts) for tree, verdicts in zip(trees, rewards, strict=True)]
    _, _, figures = local.credits([SimpleNamespace(tree=tree) for tree in trees], episodes, 1)
    assert set(figures["gains"]) == {"with"}


@pytest.mark.parametrize("normalizer", ["tokens", "rollouts"])
def test_a_kind_gains_as_much_a_state_at_one_state_as_at_many(normalizer: Any) -> None:
    """A mean over tokens is the same for eight equal states as for one, and was divided by eight all the same."""

    def gain(states: int) -> float:
        trees = [one_turn(random.Random(11)) for _ in range(states)]
        rewards = [score(random.Random(5), tree, censor=False) for tree in trees]
        chosen = LocalConfig(states=8, choose="alignment")
        config = OnlineConfig(local=chosen, max_tokens=400, loss=LossConfig(normalizer=normalizer))
        inside = Mirrored(rewards, kinds=("with",))
        local = LocalCredits(inside, config, tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3))
        episode = config.loss.estimator(config.credit)(trees[0], rewards[0])
        groups = [SimpleNamespace(tree=tree) for tree in trees]
        return local.credits(groups, [episode, *[None] * (states - 1)], 1)[2]["gains"]["with"]

    assert gain(8) == pytest.approx(gain(1), rel=1e-4)


def test_episodes_without_credit_point_nowhere_and_end_no_run() -> None:
    draw = random.Random(11)
    tree = one_turn(draw)
    rewards = score(draw, tree, censor=False)
    config = OnlineConfig(local=LocalConfig(states=4, choose="alignment"), max_tokens=400)
    local = LocalCredits(Mirrored([rewards]), config, tiny_model("qwen3", VOCABULARY, hidden_size=32, seed=3))
    nothing = replace(CreditRule()(tree, rewards), nodes={})  # all that path weights count was censored
    _, cost, figures = local.credits([SimpleNamespace(tree=tree)], [nothing], 1)
    assert figures["gains"] == {} and cost == Cost()


class Again:
    """One more sample of the first turn of every group (`training.online.Inside`), at a high price."""

    def grow(self, groups: Sequence[GrownGroup], iteration: int) -> GrownInside:
        for tree in (group.tree for group in groups):
            sampled = Completion(
                token_ids=(1, 2), logprobs=(-1.0, -1.0), entropies=(1.0, 1.0), finish="stop", cost=Cost(turns=1000)
            )
            leaf = tree.add_completion(tree.roots[0], sampled, Message("assistant", "again")).id
            tree.stop(leaf, StopReason.COMPLETED)
            tree.record(Decision("verifier", leaf, LOCAL, "drawn", {"reward": 1.0}))
        return GrownInside(Cost(turns=1000 * len(groups)), {}, [{} for _ in groups], Acceptance())

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


def test_local_rollouts_are_no_cost_of_the_refills_in_whose_trees_they_lie() -> None:
    found = []
    for inside in (None, Again()):
        rows: list[dict[str, Any]] = []
        run = parts(corridors(Hopeless, 3), inside=inside)
        train_online(run, config(iterations=1, dapo=DapoFilter(refill_cap=1.0)), log=rows.append)
        found.append(rows[-1])
    assert found[1]["spent"]["turns"] - found[0]["spent"]["turns"] == 6000
    assert found[0]["saved"]["dapo"]["turns"] < 0
    assert found[1]["saved"]["dapo"]["turns"] == found[0]["saved"]["dapo"]["turns"]


class Judged(Again):
    """Two samples of the first turn of every group, one of them accepted, so that they have credit."""

    def grow(self, groups: Sequence[GrownGroup], iteration: int) -> GrownInside:
        one, other = super().grow(groups, iteration), super().grow(groups, iteration)
        for tree in (group.tree for group in groups):
            tree.record(Decision("verifier", max(tree.local_rollouts()), LOCAL, "drawn", {"reward": 0.0}))
        places = [{group.tree.roots[0]: "say"} for group in groups]
        return GrownInside(one.cost + other.cost, {}, places, Acceptance())


def test_what_dapo_saved_counts_the_local_rollouts_that_are_trained_either_way() -> None:
    found = {}
    for dapo in (None, DapoFilter()):
        rows: list[dict[str, Any]] = []
        run = parts(corridors(Hopeless, 3), inside=Judged())
        train_online(run, config(iterations=1, dapo=dapo, local=LocalConfig(states=3)), log=rows.append)
        found[dapo is not None] = rows[-1]
    assert found[True]["groups_dropped"] == {"all_fail": 3} and found[True]["spent"]["trained_tokens"] > 0
    saved = found[False]["spent"]["trained_tokens"] - found[True]["spent"]["trained_tokens"]
    assert found[True]["saved"]["dapo"]["trained_tokens"] == saved > 0
