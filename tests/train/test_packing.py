"""Slots are shared, terms are not: what lies where in a packed batch."""

from __future__ import annotations

import itertools
import random
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from random_trees import add_completion, ids, scored_trees

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit, Rewards
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.credit.credit import CreditRule
from turntree.pack.packing import PackedBatch, PackingStats, flat_batches, pack
from turntree.pack.rows import rows
from turntree.pack.slots import Segment, merged, tree_segment


def group(prompt: tuple[int, ...], *actions: tuple[int, ...], task_id: str = "task") -> tuple[RolloutTree, Credit]:
    """A one-turn group; the first action succeeds."""
    tree = RolloutTree(task_id)
    root = tree.add(None, NodeKind.PROMPT, prompt).id
    leaves = [add_completion(tree, root, action) for action in actions]
    for leaf in leaves:
        tree.stop(leaf, StopReason.COMPLETED)
    verdicts = {leaf: Verdict(1.0 if leaf == leaves[0] else 0.0, "") for leaf in leaves}
    return tree, CreditRule()(tree, Rewards(verdicts))


def only(batches: list[PackedBatch]) -> PackedBatch:
    (batch,) = batches
    return batch


def test_equal_prefixes_of_siblings_share_slots_in_depth_first_order() -> None:
    batch = only(pack(*zip(group((1, 2), (5, 6), (5, 7), (8,)), strict=True), max_tokens=99))
    #                                 slot:   0  1  2  3  4  5
    assert batch.tokens_BL.tolist() == [[1, 2, 5, 6, 7, 8]]
    assert batch.positions_BL.tolist() == [[0, 1, 2, 3, 3, 2]]
    assert batch.last_BL.tolist() == [[6, 6, 5, 4, 5, 6]]
    assert batch.target_S.tolist() == [5, 6, 7, 8]
    assert batch.predecessor_S.tolist() == [1, 2, 2, 1]  # the path predecessor, not the slot before
    assert batch.slot_T.tolist() == [0, 1, 0, 2, 3]
    assert batch.action_T.tolist() == [0, 0, 1, 1, 2]


def test_the_mask_shows_each_token_its_own_path_and_nothing_else() -> None:
    batch = only(pack(*zip(group((1, 2), (5, 6), (5, 7), (8,)), strict=True), max_tokens=99))
    seen = batch.attention_mask()[0, 0].int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]


def test_identical_siblings_keep_two_terms_with_their_own_statistics() -> None:
    tree = RolloutTree("twins")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    first = tree.add(root, NodeKind.COMPLETION, (5,), logprobs=(-0.5,), policy_version=3).id
    second = tree.add(root, NodeKind.COMPLETION, (5,), logprobs=(-0.9,), policy_version=4).id
    credit = Credit({first: NodeCredit(1.0, 0.0, 1.0), second: NodeCredit(0.0, -2.0, 1.0)}, 2.0, 2.0, False)
    batch = only(pack([tree], [credit], max_tokens=9))
    assert batch.tokens_BL.tolist() == [[1, 5]]
    assert batch.slot_T.tolist() == [0, 0]
    assert batch.old_logprobs_T.tolist() == [-0.5, -0.9]
    assert batch.positive_A.tolist() == [1.0, 0.0] and batch.negative_A.tolist() == [0.0, -2.0]


def test_a_sampled_action_shares_the_slots_of_an_equal_untrained_expert_prefix() -> None:
    tree = RolloutTree("expert")
    state = tree.add(None, NodeKind.PROMPT, (1,)).id
    later = tree.add(state, NodeKind.PROMPT, (5, 6, 9)).id  # the expert said 5 6, the environment answered 9
    same = add_completion(tree, state, (5, 6))
    below = add_completion(tree, later, (7,))
    credit = Credit({n: NodeCredit(1.0, 0.0, 1.0) for n in (same, below)}, 3.0, 2.0, False)
    batch = only(pack([tree], [credit], max_tokens=9))
    assert batch.tokens_BL.tolist() == [[1, 5, 6, 9, 7]]
    assert batch.target_S.tolist() == [5, 6, 7]  # 9 is in the row, but nothing trains it
    assert batch.slot_T.tolist() == [0, 1, 2]


def test_roots_of_one_tree_merge_where_they_are_equal_and_are_apart_where_not() -> None:
    tree = RolloutTree("three chains")
    prompts = (1, 2), (1, 2), (3,)
    leaves = [add_completion(tree, tree.add(None, NodeKind.PROMPT, prompt).id, (7,)) for prompt in prompts]
    credit = Credit({n: NodeCredit(1.0, 0.0, 1.0) for n in leaves}, 3.0, 3.0, False)
    batch = only(pack([tree], [credit], max_tokens=9))
    assert batch.tokens_BL.tolist() == [[1, 2, 7, 3, 7]]
    assert batch.positions_BL.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.attention_mask()[0, 0, 4].tolist() == [False, False, False, True, True]
    assert batch.slot_T.tolist() == [0, 0, 1]


def test_nothing_is_computed_for_censored_branches_and_trailing_observations() -> None:
    tree = RolloutTree("broken")
    root = tree.add(None, NodeKind.PROMPT, (1, 2)).id
    good = add_completion(tree, root, (3,))
    end = tree.add(good, NodeKind.OBSERVATION, (4, 4, 4)).id
    broken = add_completion(tree, root, (6, 6))
    tree.stop(end, StopReason.COMPLETED)
    tree.stop(broken, StopReason.ENGINE_ERROR)
    rewards = Rewards({end: Verdict(1.0, ""), broken: Verdict(None, "engine died")})
    batch = only(pack([tree], [CreditRule()(tree, rewards)], max_tokens=99))
    assert batch.tokens_BL.tolist() == [[1, 2, 3]]
    assert batch.stats.flat_tokens == batch.stats.unique_tokens == 3


def test_a_tree_without_scored_leaves_is_counted_not_lost() -> None:
    censored = RolloutTree("gated")
    leaf = add_completion(censored, censored.add(None, NodeKind.PROMPT, (1,)).id, (2,))
    censored.stop(leaf, StopReason.GATED)
    nothing = CreditRule()(censored, Rewards({leaf: Verdict(None, "gated")}))
    tree, credit = group((1,), (2,), (3,))
    batch = only(pack([censored, tree], [nothing, credit], max_tokens=99))
    assert batch.stats.untrained_trees == 1 and batch.stats.trees == 1
    assert batch.tree_A.tolist() == [1, 1]
    assert pack([censored], [nothing], max_tokens=99) == []


def test_rho_is_flat_over_unique_tokens() -> None:
    batch = only(pack(*zip(group(tuple(range(20)), (30,), (31,), (32,), (33,)), strict=True), max_tokens=99))
    assert batch.stats.unique_tokens == 24 and batch.stats.flat_tokens == 84
    assert batch.stats.rho == 3.5


def test_small_trees_share_a_row_up_to_the_longest_and_never_see_each_other() -> None:
    sizes = [group((number,) * n, (5,), (6,)) for number, n in enumerate((8, 3, 3))]  # 10, 5 and 5 slots
    shared = only(pack(*zip(*sizes, strict=True), max_tokens=20))
    assert shared.tokens_BL.shape == (2, 10)
    assert shared.stats.padding == 0
    mask = shared.attention_mask()[1, 0]
    assert not mask[5:, :5].any() and not mask[:5, 5:].any()
    assert shared.positions_BL[1].tolist() == [0, 1, 2, 3, 3] * 2


def test_a_tree_that_fits_in_no_row_and_no_budget_opens_the_next_batch() -> None:
    sizes = [group((n,) * n, (5,), (6,)) for n in (8, 4, 3)]  # 10, 6 and 5 slots
    first, second = pack(*zip(*sizes, strict=True), max_tokens=20)
    assert first.tokens_BL.shape == (2, 10) and second.tokens_BL.shape == (1, 5)
    assert first.tree_A.tolist() == [0, 0, 1, 1] and second.tree_A.tolist() == [2, 2]


def test_states_of_one_trace_are_one_tree_and_keep_their_own_credit() -> None:
    early, late = group((1, 2), (5,), (6,), task_id="early"), group((1, 2, 5, 3), (5,), (7,), task_id="late")
    batch = only(pack(*zip(early, late, strict=True), max_tokens=99))
    #                                 slot:   0  1  2  3  4  5  6
    assert batch.tokens_BL.tolist() == [[1, 2, 5, 3, 5, 7, 6]]
    assert batch.predecessor_S.tolist() == [1, 3, 3, 1]
    trained = zip(batch.tree_A.tolist(), batch.target_S[batch.slot_T].tolist(), strict=True)
    assert sorted(trained) == [(0, 5), (0, 6), (1, 5), (1, 7)]
    assert (batch.stats.trees, batch.stats.rollouts, batch.stats.rollout_tokens) == (2, 4, 4)
    assert (batch.stats.unique_tokens, batch.stats.flat_tokens) == (7, 16)


def test_trees_with_little_in_common_or_above_the_budget_together_stay_apart() -> None:
    little = [group((1, *(n,) * 9), (5,), (6,)) for n in (2, 3)]  # one token of twelve
    assert only(pack(*zip(*little, strict=True), max_tokens=99)).stats.unique_tokens == 24
    much = [group((1,) * 9 + (n,), (5,), (6,)) for n in (2, 3)]  # 12 slots each, 15 together
    assert only(pack(*zip(*much, strict=True), max_tokens=15)).stats.unique_tokens == 15
    assert sum(batch.stats.unique_tokens for batch in pack(*zip(*much, strict=True), max_tokens=14)) == 24


@given(seed=st.integers(0, 10_000), most=st.integers(8, 90), dense=st.booleans())
def test_merged_trees_hold_every_term_once_on_its_own_path(seed: int, most: int, dense: bool) -> None:
    draw = random.Random(seed)
    shown = ids(draw, 6, 12)  # a trace; its states are the groups
    made = [group(shown[: draw.randint(1, 12)], *(ids(draw, 1, 3) for _ in range(3))) for _ in range(5)]
    apart = [segment for n, (tree, credit) in enumerate(made) if (segment := tree_segment(tree, credit, n))]
    together = merged(apart, most, dense=dense)
    assert sorted(itertools.chain(*map(terms, together))) == sorted(itertools.chain(*map(terms, apart)))
    assert all(len(one) <= most for one in together if len(one.shares) > 1)
    assert sum(map(len, together)) <= sum(map(len, apart))
    assert not dense or sum(len(one) ** 2 for one in together) <= sum(len(one) ** 2 for one in apart)
    assert sum(one.flat_tokens for one in together) == sum(one.flat_tokens for one in apart)
    assert sorted(share for one in together for share in one.shares) == [(n, 1.0) for n in range(5)]


@pytest.mark.parametrize("routed", [{0}, {1}, {0, 1}])
def test_trees_with_routes_stay_apart_because_versions_may_route_one_prefix_differently(routed: set[int]) -> None:
    made = [group((1,) * 9 + (n,), (5,), (6,)) for n in (2, 3)]
    found = [segment for n, pair in enumerate(made) if (segment := tree_segment(*pair, n))]
    found = [replace(one, routes=("AA==",) * len(one)) if n in routed else one for n, one in enumerate(found)]
    assert merged(found, 99) == found


def terms(segment: Segment) -> list[tuple[Any, ...]]:
    """Every term: its tree, the tokens of its path, its credit."""
    found = []
    for action in segment.actions:
        for slot in action.slots:
            path, at = [], slot
            while at >= 0:
                path.append(segment.tokens[at])
                at = segment.predecessors[at]
            found.append((action.tree, tuple(path), astuple(action.credit)))
    return found


def test_padding_attends_to_itself_alone() -> None:
    sizes = [group((n,) * n, (5,), (6,)) for n in (8, 4)]
    batch = only(pack(*zip(*sizes, strict=True), max_tokens=99))
    assert batch.tokens_BL[1].tolist() == [4, 4, 4, 4, 5, 6, 0, 0, 0, 0]
    padding = batch.attention_mask()[1, 0, 6:]
    assert padding.sum(-1).tolist() == [1, 1, 1, 1] and padding[:, 6:].diagonal().all()


@pytest.mark.parametrize("layout", [pack, flat_batches])
@pytest.mark.parametrize("seed", range(8))
def test_every_term_is_in_exactly_one_batch_and_no_batch_exceeds_the_budget(layout, seed: int) -> None:
    draw = random.Random(seed)
    trees, rewards = scored_trees(draw)
    credits = [CreditRule()(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
    batches = layout(trees, credits, max_tokens=60)
    assert all(batch.tokens_BL.numel() <= 60 for batch in batches)
    stats = sum((batch.stats for batch in batches), PackingStats())
    weight = sum(float(batch.multiplicity_A[batch.action_T].sum()) for batch in batches)
    assert weight == pytest.approx(sum(credit.rollout_tokens for credit in credits))
    assert stats.rollouts == pytest.approx(sum(credit.rollouts for credit in credits))
    assert stats.trees == pytest.approx(sum(bool(credit.nodes) for credit in credits))
    for name in ("positive", "negative"):
        packed = sum(float(getattr(batch, f"{name}_A")[batch.action_T].sum()) for batch in batches)
        wanted = sum(
            getattr(c, name) * len(tree[n].token_ids)
            for tree, credit in zip(trees, credits, strict=True)
            for n, c in credit.nodes.items()
        )
        assert packed == pytest.approx(wanted)


@pytest.mark.parametrize("seed", range(8))
def test_each_slot_sees_exactly_the_path_that_its_term_was_sampled_on(seed: int) -> None:
    trees, rewards = scored_trees(random.Random(seed))
    credits = [CreditRule()(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
    for index, (tree, credit) in enumerate(zip(trees, credits, strict=True)):
        batch = only(pack(trees[index : index + 1], [credit], max_tokens=999))
        mask, at = batch.attention_mask()[0, 0], 0
        for node in sorted(credit.nodes):
            path = [token for part in tree.path(node) for token in part.token_ids]
            for back in range(len(tree[node].token_ids), 0, -1):
                before = int(batch.predecessor_S[batch.slot_T[at]])
                assert batch.tokens_BL[0][mask[before]].tolist() == path[: len(path) - back]
                assert int(batch.target_S[batch.slot_T[at]]) == path[len(path) - back]
                at += 1


def test_flat_batches_hold_one_rollout_a_row_and_need_no_mask() -> None:
    batch = only(flat_batches(*zip(group((1, 2), (5, 6), (5, 7), (8,)), strict=True), max_tokens=99))
    assert batch.is_flat
    assert batch.tokens_BL.tolist() == [[1, 2, 5, 6], [1, 2, 5, 7], [1, 2, 8, 0]]
    assert batch.positions_BL.tolist() == [[0, 1, 2, 3]] * 3
    assert batch.stats.rho == 1.0 and batch.stats.trees == pytest.approx(1.0)


def test_a_root_that_was_sampled_is_refused() -> None:
    for prompt in (False, True):
        tree = RolloutTree("headless")
        above = tree.add(None, NodeKind.PROMPT, ()).id if prompt else None
        leaf = tree.add(above, NodeKind.COMPLETION, (3,), logprobs=(-1.0,)).id
        credits = [Credit({leaf: NodeCredit(1.0, 0.0, 1.0)}, 1.0, 1.0, False)]
        for made in (lambda t=tree, c=credits: pack([t], c, max_tokens=9), lambda t=tree, c=credits: rows([t], c)):
            with pytest.raises(InputError, match="begins with a sampled token"):
                made()


def test_a_prompt_cannot_be_trained() -> None:
    tree = RolloutTree("mislabelled")
    root = tree.add(None, NodeKind.PROMPT, (3, 4)).id
    with pytest.raises(ValueError, match="was not sampled"):
        pack([tree], [Credit({root: NodeCredit(1.0, 0.0, 1.0)}, 1.0, 1.0, False)], max_tokens=9)


def test_a_batch_moves_between_devices_whole() -> None:
    batch = only(pack(*zip(group((1, 2), (5,), (6,)), strict=True), max_tokens=99))
    moved = batch.to("meta")
    assert moved.tokens_BL.device.type == "meta" and moved.positive_A.device.type == "meta"
    assert moved.stats == batch.stats and torch.equal(batch.tokens_BL, batch.to("cpu").tokens_BL)
