"""Laws of credit: three numbers a node are the flat objective, advantages are those of PivotRL's Eq. 1, and what is
censored takes part in nothing."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_view import rollout_of
from turntree.core.labels import Rewards
from turntree.core.outcome import is_zero_variance
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.comparisons import grpo_advantages, mean_centred, rloo
from turntree.credit.credit import CreditRule, hard, hard_dedup, soft

rewards_lists = st.lists(st.floats(0, 1, allow_subnormal=False), min_size=1, max_size=16)
leaves_below = st.lists(st.tuples(st.floats(0, 3), st.floats(-4, 4)), min_size=1, max_size=12)
ratios = st.floats(0.01, 8.0)
lows, highs = st.floats(0, 1), st.floats(0, 2)


@given(leaves_below, ratios, lows, highs)
def test_three_numbers_are_the_clipped_objective_of_all_leaves_below(leaves, r, low, high) -> None:
    """sum_i w_i min(r A_i, clip(r) A_i) = P min(r, 1 + hi) + N max(r, 1 - lo)."""
    weights, advantages = zip(*leaves, strict=True)
    clipped = min(max(r, 1 - low), 1 + high)
    flat = math.fsum(w * min(r * a, clipped * a) for w, a in leaves)
    credit = soft(weights, weights, advantages)
    assert credit.positive * min(r, 1 + high) + credit.negative * max(r, 1 - low) == pytest.approx(flat, abs=1e-9)
    assert credit.multiplicity == pytest.approx(sum(weights))


@given(leaves_below, ratios, lows, highs)
def test_the_identity_holds_for_the_gradient(leaves, r, low, high) -> None:
    """By r: a leaf has gradient w A unless its side is clipped."""
    weights, advantages = zip(*leaves, strict=True)
    flat = math.fsum(w * a for w, a in leaves if (r < 1 + high if a > 0 else r > 1 - low))
    credit = soft(weights, weights, advantages)
    packed = credit.positive * (r < 1 + high) + credit.negative * (r > 1 - low)
    assert packed == pytest.approx(flat, abs=1e-9)


@given(leaves_below, ratios, lows, highs)
def test_hard_credit_is_the_objective_with_the_mean_advantage_on_every_copy(leaves, r, low, high) -> None:
    weights, advantages = zip(*leaves, strict=True)
    if sum(weights) == 0:
        return
    mean = math.fsum(w * a for w, a in leaves) / math.fsum(weights)
    clipped = min(max(r, 1 - low), 1 + high)
    one = min(r * mean, clipped * mean)
    for attribution, copies in ((hard, sum(weights)), (hard_dedup, 1.0)):
        credit = attribution(weights, weights, advantages)
        found = credit.positive * min(r, 1 + high) + credit.negative * max(r, 1 - low)
        assert found == pytest.approx(copies * one, abs=1e-9)
        assert credit.multiplicity == pytest.approx(copies)


@given(leaves_below)
def test_on_policy_hard_and_soft_push_alike(leaves) -> None:
    """At r = 1 nothing is clipped: both have the slope P + N."""
    weights, advantages = zip(*leaves, strict=True)
    if sum(weights) > 0:
        a, b = (f(weights, weights, advantages) for f in (soft, hard))
        assert a.positive + a.negative == pytest.approx(b.positive + b.negative, abs=1e-9)


def test_hard_and_soft_part_when_the_ratio_leaves_the_clip_range() -> None:
    """Four leaves with advantages 1.5, -.5, -.2, .4 below one token, range 0.2: the slopes by r at 1.3 and 0.7."""
    advantages, ones = [1.5, -0.5, -0.2, 0.4], [1.0] * 4
    by_soft, by_hard = soft(ones, ones, advantages), hard(ones, ones, advantages)

    def slope(credit, r: float) -> float:
        return r * (credit.positive * (r < 1.2) + credit.negative * (r > 0.8))

    assert (slope(by_soft, 1.3), slope(by_hard, 1.3)) == pytest.approx((-0.91, 0.0))
    assert (slope(by_soft, 0.7), slope(by_hard, 0.7)) == pytest.approx((1.33, 0.84))
    assert slope(hard_dedup(ones, ones, advantages), 1.0) == pytest.approx(0.3)


@given(st.integers(0, 10_000))
def test_soft_credit_of_a_tree_is_the_sum_over_its_rollouts(seed: int) -> None:
    """For any per-token numbers f (seen with positive advantage) and g (negative), summing over nodes and summing over
    rollouts is the same; so are both normalisers."""
    draw = random.Random(seed)
    tree, rewards = random_scored_tree(draw)
    credit = CreditRule()(tree, rewards)
    f = {node.id: draw.random() for node in tree}
    g = {node.id: draw.random() for node in tree}
    scored = rewards.scored()
    flat = m = length = 0.0
    for leaf, a in zip(scored, grpo_advantages(list(scored.values())), strict=True):
        for node in tree.path(leaf):
            if node.sampled:
                flat += len(node.token_ids) * (max(a, 0) * f[node.id] + min(a, 0) * g[node.id])
                m += len(node.token_ids)
        length += sum(rollout_of(tree, leaf).loss_mask)
    packed = sum(len(tree[n].token_ids) * (c.positive * f[n] + c.negative * g[n]) for n, c in credit.nodes.items())
    assert packed == pytest.approx(flat, abs=1e-9)
    assert credit.rollout_tokens == pytest.approx(m) == pytest.approx(length)
    assert credit.rollouts == len(scored)
    assert credit.censored == len(tree.leaves()) - len(scored)


@given(st.integers(0, 10_000))
def test_per_rollout_credit_gives_every_rollout_the_same_say(seed: int) -> None:
    tree, rewards = random_scored_tree(random.Random(seed))
    credit = CreditRule(per_rollout=True)(tree, rewards)
    weight = sum(c.multiplicity * len(tree[n].token_ids) for n, c in credit.nodes.items())
    assert weight == pytest.approx(credit.rollouts)
    assert credit.rollout_tokens == CreditRule()(tree, rewards).rollout_tokens


@given(st.integers(0, 10_000))
def test_censored_leaves_change_nothing(seed: int) -> None:
    """Growing a branch that ends in an error leaves every number of the others as it was."""
    draw = random.Random(seed)
    tree, rewards = random_scored_tree(draw)
    before = CreditRule()(tree, rewards)
    broken = tree.add(tree.roots[0], NodeKind.COMPLETION, (1, 2), logprobs=(0.0, 0.0)).id
    tree.stop(broken, StopReason.ENVIRONMENT_ERROR)
    after = CreditRule()(tree, Rewards({**rewards.verdicts, broken: Verdict(None, "error")}))
    assert after.nodes == before.nodes and after.zero_variance == before.zero_variance
    assert (after.rollout_tokens, after.rollouts) == (before.rollout_tokens, before.rollouts)
    assert after.censored == before.censored + 1


@given(rewards_lists)
def test_advantages_are_centred_and_of_unit_spread(rewards: list[float]) -> None:
    advantages = grpo_advantages(rewards, eps=0.0)
    if is_zero_variance(rewards):
        assert advantages == [0.0] * len(rewards)
        return
    assert math.fsum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert math.fsum(a * a for a in advantages) / len(rewards) == pytest.approx(1.0)
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert all(advantages[i] <= advantages[j] for i, j in itertools.pairwise(order))


@given(rewards_lists)
def test_rloo_compares_each_reward_with_the_mean_of_the_others(rewards: list[float]) -> None:
    if is_zero_variance(rewards):
        assert rloo(rewards) == mean_centred(rewards) == [0.0] * len(rewards)
        return
    others = [(math.fsum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    assert rloo(rewards) == pytest.approx([r - b for r, b in zip(rewards, others, strict=True)], abs=1e-9)
    assert math.fsum(mean_centred(rewards)) == pytest.approx(0.0, abs=1e-9)


def test_advantages_of_a_lone_success() -> None:
    """One of four: no function here loses it, and only GRPO's scales it up for being rare."""
    lone = [1.0, 0.0, 0.0, 0.0]
    assert mean_centred(lone) == [0.75, -0.25, -0.25, -0.25]
    assert rloo(lone) == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert grpo_advantages(lone, eps=0.0)[0] == pytest.approx(math.sqrt(3))
    assert rloo([1.0]) == mean_centred([1.0]) == [0.0] and rloo([]) == mean_centred([]) == []


@pytest.mark.parametrize(("successes", "artefact"), [(1, 1.00), (2, 3.62), (4, 1.93)])
def test_leave_one_out_deviations_are_not_offered_because_they_mis_scale_a_lone_success(successes, artefact) -> None:
    """(r_i - mean of others) / std of others, one where that is zero, as a widespread trainer has it: of 16, one
    success gets less than each of two would."""
    others = [1.0] * (successes - 1) + [0.0] * (16 - successes)
    mean = sum(others) / 15
    std = math.sqrt(sum((r - mean) ** 2 for r in others) / 14)
    assert (1.0 - mean) / (std or 1.0) == pytest.approx(artefact, abs=0.01)
    ours = [grpo_advantages([1.0] * k + [0.0] * (16 - k))[0] for k in range(1, 16)]
    assert ours == sorted(ours, reverse=True)


def test_advantages_by_hand() -> None:
    """Eq. 1 with the population deviation: one success in four has mean 1/4 and deviation sqrt(3)/4."""
    assert grpo_advantages([1, 0, 0, 0], eps=0.0) == pytest.approx([math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert grpo_advantages([1, 0], eps=0.5) == [0.5, -0.5]
    assert grpo_advantages([0.5]) == [0.0] and grpo_advantages([]) == []


def test_the_rarer_the_success_the_larger_its_advantage() -> None:
    """Leave-one-out deviations put one success of 16 at 1.00, below two of 16; Eq. 1 does not."""
    lone = [grpo_advantages([1.0] * k + [0.0] * (16 - k), eps=0.0)[0] for k in (1, 2, 4, 8)]
    assert lone == pytest.approx([3.8730, 2.6458, 1.7321, 1.0], abs=1e-4)


def test_rewards_that_differ_by_rounding_have_no_variance() -> None:
    assert is_zero_variance([0.3, 0.1 + 0.2]) and grpo_advantages([0.3, 0.1 + 0.2, 0.3]) == [0.0] * 3
    assert not is_zero_variance([0.0, 1e-6]) and not is_zero_variance([])


def test_credit_by_hand() -> None:
    """Two chains share their first turn; one wins."""
    tree = RolloutTree("fork")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    first = tree.add(root, NodeKind.COMPLETION, (2, 3), logprobs=(0.0, 0.0)).id
    seen = tree.add(first, NodeKind.OBSERVATION, (4,)).id
    won = tree.add(seen, NodeKind.COMPLETION, (5,), logprobs=(0.0,)).id
    lost = tree.add(seen, NodeKind.COMPLETION, (6, 6, 6), logprobs=(0.0,) * 3).id
    for leaf in (won, lost):
        tree.stop(leaf, StopReason.COMPLETED)
    credit = CreditRule(advantages=lambda rewards: grpo_advantages(rewards, eps=0.0))(
        tree, Rewards({won: Verdict(1.0, ""), lost: Verdict(0.0, "")})
    )
    assert {n: (c.positive, c.negative, c.multiplicity) for n, c in credit.nodes.items()} == {
        first: (1.0, -1.0, 2.0),
        won: (1.0, 0.0, 1.0),
        lost: (0.0, -1.0, 1.0),
    }
    assert (credit.rollout_tokens, credit.rollouts, credit.zero_variance) == (8.0, 2.0, False)


def test_a_gated_tree_censors_its_completed_leaves_too() -> None:
    tree = RolloutTree("gated")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    done, gated = (tree.add(root, NodeKind.COMPLETION, (t,), logprobs=(0.0,)).id for t in (2, 3))
    tree.stop(done, StopReason.COMPLETED)
    tree.stop(gated, StopReason.GATED)
    with pytest.raises(ValueError, match="was gated"):
        CreditRule()(tree, Rewards({done: Verdict(1.0, ""), gated: Verdict(None, "")}))
    nothing = CreditRule()(tree, Rewards({done: Verdict(None, ""), gated: Verdict(None, "")}))
    assert nothing.nodes == {} and not nothing.zero_variance and nothing.censored == 2


def test_rewards_must_label_exactly_the_leaves() -> None:
    tree = RolloutTree("short")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    leaf = tree.add(root, NodeKind.COMPLETION, (2,), logprobs=(0.0,)).id
    tree.stop(leaf, StopReason.CANCELLED)
    with pytest.raises(ValueError, match="exactly its leaves"):
        CreditRule()(tree, Rewards({root: Verdict(1.0, "")}))
    with pytest.raises(ValueError, match="must not carry a reward"):
        CreditRule()(tree, Rewards({leaf: Verdict(0.0, "a failure is not a zero")}))


def random_scored_tree(draw: random.Random) -> tuple[RolloutTree, Rewards]:
    """A prompt, completions below completions (observations between them or not), every leaf ended and judged."""
    tree = RolloutTree("random")
    open_nodes = [tree.add(None, NodeKind.PROMPT, (1, 2)).id]
    for _ in range(draw.randint(1, 12)):
        parent = draw.choice(open_nodes)
        if draw.random() < 0.3:
            parent = tree.add(parent, NodeKind.OBSERVATION, (7,)).id
        length = draw.randint(1, 4)
        open_nodes.append(tree.add(parent, NodeKind.COMPLETION, (5,) * length, logprobs=(0.0,) * length).id)
    verdicts = {}
    for leaf in tree.leaves():
        reason = draw.choice([StopReason.COMPLETED, StopReason.MAX_TURNS, StopReason.CANCELLED])
        tree.stop(leaf, reason)
        verdicts[leaf] = Verdict(None if reason.censors else draw.choice([0.0, 0.5, 1.0]), "")
    return tree, Rewards(verdicts)
