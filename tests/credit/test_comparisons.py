"""What is compared with what, by hand on one small tree, and equal to the flat computation where nothing forked."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.config import from_mapping, to_mapping
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit, Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.checked import credit_of
from turntree.credit.comparisons import (
    AcrossAnchors,
    BatchStandardised,
    across_leaves,
    across_siblings,
    across_starts,
    grpo_advantages,
    mean_centred,
    rloo,
)
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule, hard, hard_dedup
from turntree.credit.scored import path_weighted, unit_weights


def say(tree: RolloutTree, parent: int, *ids: int) -> int:
    return tree.add(parent, NodeKind.COMPLETION, ids, logprobs=(0.0,) * len(ids)).id


def hear(tree: RolloutTree, parent: int, *ids: int) -> int:
    return tree.add(parent, NodeKind.OBSERVATION, ids).id


@dataclasses.dataclass(frozen=True)
class Forked:
    """Start `a` forks into three after its first answer from the environment, of which the last was lost to an error;
    starts `b` and `c` (a refill) are chains that met the same observation.

        a - (8) - a1 reward 1, two tokens      b - (8) - b1 reward 0      c - (8) - c1 reward 1
                - a2 reward 0
                - lost
    """

    tree: RolloutTree
    rewards: Rewards
    a: int
    a1: int
    a2: int
    b: int
    b1: int
    c: int
    c1: int


@pytest.fixture
def forked() -> Forked:
    tree = RolloutTree("forked")
    task = tree.add(None, NodeKind.PROMPT, (1,)).id
    a, b, c = say(tree, task, 2), say(tree, task, 3), say(tree, task, 4)
    tree.mark_refill(c)
    seen = hear(tree, a, 8)
    a1, a2, lost = say(tree, seen, 5, 5), say(tree, seen, 6), say(tree, seen, 7)
    b1, c1 = say(tree, hear(tree, b, 8), 5), say(tree, hear(tree, c, 8), 6)
    for leaf in (a1, a2, b1, c1):
        tree.stop(leaf, StopReason.COMPLETED)
    tree.stop(lost, StopReason.ENVIRONMENT_ERROR)
    rewards = {a1: Verdict(1.0, ""), a2: Verdict(0.0, ""), b1: Verdict(0.0, ""), c1: Verdict(1.0, "")}
    return Forked(tree, Rewards(rewards | {lost: Verdict(None, "broken")}), a, a1, a2, b, b1, c, c1)


def net(credit: Credit) -> dict[int, float]:
    """P + N of every node: what it is pushed by on-policy."""
    return {n: c.positive + c.negative for n, c in credit.nodes.items()}


def approx(expected: dict[int, float]):
    return {n: pytest.approx(value, abs=1e-9) for n, value in expected.items()}


def test_path_weights_are_the_share_of_each_leaf_in_its_start(forked: Forked) -> None:
    f = forked
    credit = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)(f.tree, f.rewards)
    assert {n: c.multiplicity for n, c in credit.nodes.items()} == approx(
        {f.a: 1.0, f.a1: 0.5, f.a2: 0.5, f.b: 1.0, f.b1: 1.0}
    )  # c is a refill: how many there are is an outcome
    assert credit.rollouts == pytest.approx(2.0) and credit.censored == credit.uncounted == 1
    assert credit.redistributed == pytest.approx(1 / 3)  # what the lost branch would have weighed


def test_a_leaf_stands_in_for_its_start_among_the_other_initial_starts(forked: Forked) -> None:
    """Value of a: 1/2, of b: 0; c is a refill and no baseline. RLOO: a1 has 1 - 0, a2 0 - 0, b 0 - 1/2. Where leaves
    weigh 1 each, c is compared with the mean of a and b, 1/4."""
    f = forked
    credit = CreditRule(leaf_weights=path_weighted, comparison=across_starts, advantages=rloo)(f.tree, f.rewards)
    assert net(credit) == approx({f.a: 0.5, f.a1: 0.5, f.a2: 0.0, f.b: -0.5, f.b1: -0.5})
    unit = CreditRule(comparison=across_starts, advantages=rloo)(f.tree, f.rewards)
    assert net(unit) == approx({f.a: 1.0, f.a1: 1.0, f.a2: 0.0, f.b: -0.5, f.b1: -0.5, f.c: 0.75, f.c1: 0.75})


def test_a_branch_is_compared_with_its_siblings(forked: Forked) -> None:
    """The first turn of a is compared with that of b; below the fork a1 is compared with a2 only."""
    f = forked
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_siblings, advantages=mean_centred)
    credit = rule(f.tree, f.rewards)
    assert net(credit) == approx({f.a: 0.25, f.a1: 0.5 * 0.5, f.a2: -0.5 * 0.5, f.b: -0.25, f.b1: -0.25})
    unit = CreditRule(comparison=across_siblings, advantages=mean_centred)(f.tree, f.rewards)
    assert net(unit)[f.c] == pytest.approx(1.0 - (0.5 + 0.0 + 1.0) / 3)  # beside the starts, which never see it


def test_a_branch_that_lost_its_siblings_is_no_branch(forked: Forked) -> None:
    f = forked
    value = f.tree.to_json()
    value["stops"][str(f.a2)] = "environment_error"
    rewards = Rewards(dict(f.rewards.verdicts) | {f.a2: Verdict(None, "broken")})
    rule = CreditRule(leaf_weights=path_weighted, comparison=across_siblings, advantages=mean_centred)
    credit = rule(RolloutTree.from_json(value), rewards)
    assert net(credit)[f.a1] == net(credit)[f.a] == pytest.approx(0.5)
    assert credit.redistributed == pytest.approx(2 / 3)


def test_gigpo_adds_what_a_step_gained_over_the_steps_taken_at_the_same_state(forked: Forked) -> None:
    """All first turns saw the task (returns 1/4, 0 and 1/2 at discount 1/2), all second turns saw (8); each sampling
    event is one member of its group, however many leaves lie below it."""
    f = forked
    rule = CreditRule(comparison=AcrossAnchors(step_weight=2.0, discount=0.5), advantages=mean_centred)
    assert net(rule(f.tree, f.rewards)) == approx({
        f.a: 0.0 + 2 * 2.0 * (0.25 - 0.25),  # two leaves below
        f.b: -0.5 + 2.0 * (0.0 - 0.25),
        f.c: 0.5 + 2.0 * (0.5 - 0.25),
        f.a1: 0.5 + 2.0 * 0.5,
        f.a2: -0.5 - 2.0 * 0.5,
        f.b1: -0.5 - 2.0 * 0.5,
        f.c1: 0.5 + 2.0 * 0.5,
    })  # fmt: skip


def test_steps_at_states_of_their_own_gain_nothing_from_anchors(forked: Forked) -> None:
    f = forked
    alone = AcrossAnchors(step_weight=5.0, state=lambda tree, node: node.id)
    rules = (CreditRule(comparison=alone), CreditRule())
    assert net(rules[0](f.tree, f.rewards)) == net(rules[1](f.tree, f.rewards))
    standardised = replace(CreditRule(advantages=BatchStandardised(0.5, 0.5)), comparison=alone)
    plain = replace(standardised, comparison=across_leaves)
    assert net(standardised(f.tree, f.rewards)) == net(plain(f.tree, f.rewards))


def test_a_long_rollout_beside_a_short_one_discounts_nothing_that_is_not_below_it() -> None:
    tree = RolloutTree("long")
    task = tree.add(None, NodeKind.PROMPT, (1,)).id
    short = say(tree, task, 2)
    node = say(tree, task, 3)
    for turn in range(400):
        node = say(tree, tree.add(node, NodeKind.OBSERVATION, (turn,)).id, 4)
    for leaf in (short, node):
        tree.stop(leaf, StopReason.COMPLETED)
    rule = CreditRule(comparison=AcrossAnchors(discount=0.1), advantages=mean_centred)
    credit = net(rule(tree, Rewards({short: Verdict(0.0, ""), node: Verdict(1.0, "")})))
    assert all(map(math.isfinite, credit.values())) and credit[node] == pytest.approx(0.5)


def test_one_baseline_for_a_batch_knows_no_starts_and_no_paths() -> None:
    for more in ({"comparison": "starts"}, {"comparison": "starts", "leaf_weights": "path_weighted"}):
        with pytest.raises(ConfigError):
            CreditConfig(advantages="reinforce_pp", **more)


class Float32(float):
    def item(self) -> float:
        return float(self)


@pytest.mark.parametrize(
    "wrong", [{"rollouts": float("nan")}, {"zero_variance": 1}, {"nodes": {0: "good"}}, {"redistributed": float("inf")}]
)
def test_what_an_estimator_of_ones_own_says_is_plain_numbers_or_refused(forked: Forked, wrong: dict[str, Any]) -> None:
    f = forked
    good = CreditRule()(f.tree, f.rewards)
    numbers = {name: Float32(getattr(good, name)) for name in ("rollout_tokens", "rollouts")}
    foreign = replace(good, **numbers)
    plain = credit_of(lambda tree, rewards: foreign, f.tree, f.rewards)
    assert plain == good and type(plain.rollouts) is float
    with pytest.raises(ConfigError):
        credit_of(lambda tree, rewards: replace(good, **wrong), f.tree, f.rewards)


def test_continuations_of_probed_tokens_are_at_a_state_of_their_own() -> None:
    """Two probes with the same tokens: their continuations compare with their own siblings only."""
    tree = RolloutTree("probe")
    task = tree.add(None, NodeKind.PROMPT, (1,)).id
    ends = {}
    for k, rewards in enumerate([(1.0, 0.0), (1.0, 1.0)]):
        probe = say(tree, task, 2)
        for reward in rewards:
            ends[say(tree, probe, 3 + k)] = reward
    for leaf in ends:
        tree.stop(leaf, StopReason.COMPLETED)
    rule = CreditRule(comparison=AcrossAnchors(discount=1.0), advantages=mean_centred)
    credit = net(rule(tree, Rewards({leaf: Verdict(r, "") for leaf, r in ends.items()})))
    (won, lost, *others) = ends
    assert credit[won] - credit[lost] == pytest.approx(1.0 + 1.0)  # episode and step
    assert [credit[n] for n in others] == pytest.approx([0.25, 0.25])


def test_hard_credit_is_the_mean_over_leaves_below_on_every_copy_or_once(forked: Forked) -> None:
    """Rewards 1, 0, 0, 1 have mean 1/2; below a the advantages +-1/2 cancel before they are split by sign."""
    f = forked
    soft, each, once = (
        CreditRule(advantages=mean_centred, attribution=attribution)(f.tree, f.rewards).nodes[f.a]
        for attribution in (CreditRule().attribution, hard, hard_dedup)
    )
    assert (soft.positive, soft.negative, soft.multiplicity) == (0.5, -0.5, 2.0)
    assert (each.positive, each.negative, each.multiplicity) == (0.0, 0.0, 2.0)
    assert (once.positive, once.negative, once.multiplicity) == (0.0, 0.0, 1.0)


def test_credit_divided_by_length_keeps_the_mean_of_hard_attribution(forked: Forked) -> None:
    """a1 has three trained tokens on its path, a2 two: the mean of their advantages is that of the rollouts, the
    weight that it gets is 1/3 + 1/2."""
    f = forked
    rule = CreditRule(advantages=lambda r: [3.0, 1.0, 0.0, 0.0], attribution=hard, per_rollout=True)
    credit = rule(f.tree, f.rewards).nodes[f.a]
    assert credit.multiplicity == pytest.approx(1 / 3 + 1 / 2)
    assert credit.positive == pytest.approx(2.0 * (1 / 3 + 1 / 2))
    with pytest.raises(ConfigError, match="counts a node once"):
        CreditRule(attribution=hard_dedup, per_rollout=True)


def test_equal_words_of_two_starts_are_no_branch_point() -> None:
    tree = RolloutTree("twins")
    task = tree.add(None, NodeKind.PROMPT, (1,)).id
    twins = [say(tree, task, 5, 6) for _ in range(3)]
    for leaf in twins:
        tree.stop(leaf, StopReason.COMPLETED)
    assert path_weighted(tree, twins).weights == (1.0, 1.0, 1.0)


def random_tree(seed: int, *, forks: bool) -> tuple[RolloutTree, Rewards]:
    """Starts of several turns, with forks or without; one leaf in six is lost."""
    draw = random.Random(seed)
    tree = RolloutTree("random")
    task = tree.add(None, NodeKind.PROMPT, (1,)).id
    frontier = [(say(tree, task, *[2] * draw.randint(1, 3)), 1) for _ in range(draw.randint(1, 6))]
    while frontier:
        node, turns = frontier.pop()
        if turns < 4 and draw.random() < 0.6:
            seen = hear(tree, node, 8, draw.randint(0, 1))
            for _ in range(draw.choice([1, 1, 2, 3]) if forks else 1):
                frontier.append((say(tree, seen, *[3] * draw.randint(1, 4)), turns + 1))
    verdicts = {}
    for leaf in tree.leaves():
        lost = draw.random() < 1 / 6
        tree.stop(leaf, StopReason.ENGINE_ERROR if lost else StopReason.COMPLETED)
        verdicts[leaf] = Verdict(None if lost else draw.choice([0.0, 0.3, 1.0]), "")
    return tree, Rewards(verdicts)


FLAT = {
    "starts": {"comparison": across_starts},
    "starts, path weights": {"comparison": across_starts, "leaf_weights": path_weighted},
    "siblings, path weights": {"comparison": across_siblings, "leaf_weights": path_weighted},
    "anchors of no weight": {"comparison": AcrossAnchors(step_weight=0.0)},
    "hard": {"attribution": hard},
    "hard_dedup": {"attribution": hard_dedup},
}


@pytest.mark.parametrize("difference", FLAT.values(), ids=FLAT)
@pytest.mark.parametrize("advantages", [grpo_advantages, mean_centred, rloo])
@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_without_forks_every_estimator_is_the_flat_computation(difference, advantages, seed: int) -> None:
    tree, rewards = random_tree(seed, forks=False)
    plain = CreditRule(advantages=advantages)(tree, rewards)
    other = CreditRule(advantages=advantages, **difference)(tree, rewards)
    assert plain.nodes.keys() == other.nodes.keys()
    for n, c in plain.nodes.items():
        assert vars(other.nodes[n]) == {name: pytest.approx(value, abs=1e-9) for name, value in vars(c).items()}
    assert (other.rollout_tokens, other.rollouts) == pytest.approx((plain.rollout_tokens, plain.rollouts))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_the_leaves_of_a_start_weigh_one_whatever_was_lost(seed: int) -> None:
    tree, rewards = random_tree(seed, forks=True)
    scored = list(rewards.scored())
    weighting = path_weighted(tree, scored)
    for start in tree.starts():
        inside = [
            w for w, leaf in zip(weighting.weights, scored, strict=True) if start in (n.id for n in tree.path(leaf))
        ]
        assert not inside or math.fsum(inside) == pytest.approx(1.0)
    everything = path_weighted(tree, tree.leaves())
    kept = [w for w, leaf in zip(everything.weights, tree.leaves(), strict=True) if leaf in scored]
    assert weighting.redistributed == pytest.approx(math.fsum(weighting.weights) - math.fsum(kept), abs=1e-12)
    assert everything.redistributed == 0.0 == unit_weights(tree, scored).redistributed


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_the_token_normaliser_is_the_sum_of_multiplicities(seed: int) -> None:
    tree, rewards = random_tree(seed, forks=True)
    for attribution in (CreditRule().attribution, hard, hard_dedup):
        credit = CreditRule(attribution=attribution)(tree, rewards)
        assert credit.rollout_tokens == pytest.approx(
            sum(c.multiplicity * len(tree[n].token_ids) for n, c in credit.nodes.items())
        )
    unique = sum(len(tree[n].token_ids) for n in credit.nodes)
    assert credit.rollout_tokens == unique


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"leaf_weights": "path_weighted"}, "comparison"),
        ({"comparison": "siblings"}, "comparison"),
        ({"anchor_weight": 0.5}, "anchor_weight"),
        ({"attribution": "harder"}, "attribution"),
        ({"weights": "unit"}, "weights"),
    ],
)
def test_credit_that_theory_calls_wrong_is_refused(values: dict, field: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_mapping(CreditConfig, values)
    assert error.value.field == field


def test_a_configuration_becomes_its_rule_and_survives_a_round_trip() -> None:
    config = CreditConfig(advantages="rloo", comparison="starts", leaf_weights="path_weighted", attribution="hard")
    assert from_mapping(CreditConfig, to_mapping(config)) == config
    assert config.rule("constant", per_rollout=False) == CreditRule(
        advantages=rloo, comparison=across_starts, leaf_weights=path_weighted, attribution=hard
    )
    assert CreditConfig().rule("tokens", per_rollout=False) == CreditRule(comparison=across_leaves)


# over a batch, and against a greedy rollout


def chains(*rewards: float | None) -> tuple[RolloutTree, Rewards]:
    """Rollouts of one token each; None is censored."""
    tree = RolloutTree("chains")
    root = tree.add(None, NodeKind.PROMPT, (9,)).id
    leaves = [say(tree, root, token) for token in range(len(rewards))]
    for leaf, reward in zip(leaves, rewards, strict=True):
        tree.stop(leaf, StopReason.ENGINE_ERROR if reward is None else StopReason.COMPLETED)
    return tree, Rewards({leaf: Verdict(r, "") for leaf, r in zip(leaves, rewards, strict=True)})


def signed(credit: Credit) -> list[float]:
    return [one.positive + one.negative for _, one in sorted(credit.nodes.items())]


BATCHES = st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=4), min_size=2, max_size=4)


@given(batch=BATCHES)
def test_reinforce_pp_standardises_over_all_rollouts_of_the_batch_whatever_their_task(batch: list[list[float]]) -> None:
    """A_i = (r_i - mean(batch)) / std(batch): so a group of equal rewards moves the policy, which GRPO leaves."""
    flat = [reward for rewards in batch for reward in rewards]
    mean = sum(flat) / len(flat)
    std = math.sqrt(sum((reward - mean) ** 2 for reward in flat) / len(flat))
    grown = [chains(*rewards) for rewards in batch]
    rule = CreditConfig(advantages="reinforce_pp").rule("tokens", per_rollout=False).over([r for _, r in grown])
    for (tree, rewards), given_ in zip(grown, batch, strict=True):
        credit = rule(tree, rewards)
        assert signed(credit) == pytest.approx([(reward - mean) / (std + 1e-6) for reward in given_])
        assert credit.zero_variance == (not any(signed(credit)))
    plain = CreditConfig().rule("tokens", per_rollout=False)
    assert plain.over([r for _, r in grown]) is plain


@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=5))
def test_remax_compares_with_the_greedy_rollout_which_is_not_trained_on(rewards: list[float]) -> None:
    """A_i = r_i - r(greedy). Everything that the greedy rollout adds to a normaliser is gone too."""
    credit = CreditConfig(advantages="remax").rule("tokens", per_rollout=False)(*chains(*rewards))
    assert signed(credit) == [reward - rewards[0] for reward in rewards[1:]]
    assert (credit.rollouts, credit.rollout_tokens) == (len(rewards) - 1, len(rewards) - 1)
    assert credit.censored == 0


def test_remax_without_a_greedy_reward_trains_on_nothing() -> None:
    credit = CreditConfig(advantages="remax").rule("tokens", per_rollout=False)(*chains(None, 1.0, 0.0))
    assert (dict(credit.nodes), credit.censored) == ({}, 1)
    with pytest.raises(ConfigError, match="one baseline"):
        CreditConfig(advantages="remax", comparison="starts").rule("tokens", per_rollout=False)


def test_a_batch_of_equal_rewards_is_no_gradient_by_rounding() -> None:
    assert BatchStandardised().over([0.7] * 12)([0.7] * 4) == [0.0] * 4


def test_remax_trains_on_nothing_where_a_rollout_without_a_turn_hides_which_one_is_greedy() -> None:
    """The greedy rollout is known as the first start; it may be the one that never started."""
    tree, rewards = chains(0.0, 1.0, 1.0)
    empty = tree.add(tree.roots[0], NodeKind.OBSERVATION, (7,)).id
    tree.stop(empty, StopReason.COMPLETED)
    verdicts = {**rewards.verdicts, empty: Verdict(0.0, "fails")}
    credit = CreditConfig(advantages="remax").rule("tokens", per_rollout=False)(tree, Rewards(verdicts))
    assert dict(credit.nodes) == {}
