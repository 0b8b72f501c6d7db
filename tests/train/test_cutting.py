"""A tree above the budget is cut: every term in one part, on its own path, with as few ancestors again as possible."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import add_completion, scored_trees

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import NodeKind, RolloutTree
from turntree.credit.credit import CreditRule
from turntree.pack.packing import PackingStats, pack
from turntree.pack.slots import Segment, cut, longest_path, tree_segment


def segments(seed: int) -> list[Segment]:
    trees, rewards = scored_trees(random.Random(seed))
    credits = [CreditRule()(tree, labels) for tree, labels in zip(trees, rewards, strict=True)]
    found = [tree_segment(tree, credit, i) for i, (tree, credit) in enumerate(zip(trees, credits, strict=True))]
    return [segment for segment in found if segment is not None]


def paths(segment: Segment) -> list[tuple[int, ...]]:
    """For every term, the tokens from the root to it."""
    found = []
    for action in segment.actions:
        for slot in action.slots:
            path = []
            while slot >= 0:
                path.append(segment.tokens[slot])
                slot = segment.predecessors[slot]
            found.append(tuple(reversed(path)))
    return sorted(found)


def seen(segment: Segment) -> list[set[int]]:
    return [{k for k in range(q + 1) if q < segment.last[k]} for q in range(len(segment))]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), slack=st.integers(0, 12))
def test_the_parts_hold_every_term_once_on_its_own_path(seed: int, slack: int) -> None:
    for segment in segments(seed):
        budget = longest_path(segment) + slack
        parts = cut(segment, budget)
        assert parts is not None and all(len(part) <= budget for part in parts)
        assert sorted(path for part in parts for path in paths(part)) == paths(segment)
        assert sum(len(part.actions) for part in parts) == len(segment.actions)
        assert sum(len(part) - part.recomputed for part in parts) == len(segment)
        assert sum(share for part in parts for _, share in part.shares) == pytest.approx(1.0)
        assert sum(part.flat_tokens for part in parts) == segment.flat_tokens
        for part in parts:
            ancestors = [{slot} for slot in range(len(part))]
            for slot, before in enumerate(part.predecessors):
                ancestors[slot] |= ancestors[before] if before >= 0 else set()
                assert part.depths[slot] == len(ancestors[slot]) - 1
            assert seen(part) == ancestors
            assert part.predecessors[0] == -1 == min(part.predecessors), "the root is above nothing"


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), slack=st.integers(0, 6))
def test_no_other_cut_after_leaves_computes_fewer_slots(seed: int, slack: int) -> None:
    for segment in segments(seed):
        budget = longest_path(segment) + slack
        after_leaves = [s for s in range(1, len(segment)) if segment.predecessors[s] != s - 1][:9]
        if len(segment) <= budget or len(after_leaves) == 9:
            continue
        sizes = []
        for count in range(1, len(after_leaves) + 1):
            for chosen in itertools.combinations(after_leaves, count):
                parts = itertools.pairwise([0, *chosen, len(segment)])
                sizes.append([segment.depths[a] + b - a for a, b in parts])
        cheapest = min(sum(parts) for parts in sizes if max(parts) <= budget)
        assert sum(len(part) for part in cut(segment, budget)) == cheapest


def fork(prompt: int, actions: int, length: int) -> tuple[RolloutTree, Credit]:
    tree = RolloutTree("fork")
    root = tree.add(None, NodeKind.PROMPT, tuple(range(100, 100 + prompt))).id
    leaves = [add_completion(tree, root, (i,) * length) for i in range(actions)]
    return tree, Credit({leaf: NodeCredit(1.0, 0.0, 1.0) for leaf in leaves}, actions * length, actions, False)


def test_a_fork_is_cut_between_siblings_and_the_prompt_computed_again() -> None:
    tree, credit = fork(prompt=4, actions=4, length=2)
    batches = pack([tree], [credit], max_tokens=8)
    assert sorted(b.tokens_BL.tolist() for b in batches) == [
        [[100, 101, 102, 103, 0, 0, 1, 1]],
        [[100, 101, 102, 103, 2, 2, 3, 3]],
    ]
    stats = sum((b.stats for b in batches), PackingStats())
    assert (stats.unique_tokens, stats.recomputed_tokens, stats.cut_trees, stats.trees) == (16, 4, 1, 1.0)
    assert (stats.rollouts, stats.rollout_tokens, stats.flat_tokens) == (4.0, 8.0, 24)
    assert stats.rho == 24 / 16


def test_a_budget_below_the_longest_path_names_the_tree_and_the_number() -> None:
    tree, credit = fork(prompt=30, actions=2, length=1)
    with pytest.raises(InputError, match=r"field 'max_tokens': a path of 'fork' has 31 tokens, above 30; raise .* 31"):
        pack([tree], [credit], max_tokens=30)
    assert [b.stats.cut_trees for b in pack([tree], [credit], max_tokens=31)] == [1, 0]
    assert [b.stats.cut_trees for b in pack([tree], [credit], max_tokens=32)] == [0]


def test_an_action_that_begins_in_one_part_belongs_whole_to_the_part_where_it_ends() -> None:
    tree = RolloutTree("twins")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    leaves = [add_completion(tree, root, action) for action in ((5, 6), (5, 7))]
    credit = Credit({leaf: NodeCredit(1.0, 0.0, 1.0) for leaf in leaves}, 4, 2, False)
    first, second = pack([tree], [credit], max_tokens=3)
    assert (first.tokens_BL.tolist(), second.tokens_BL.tolist()) == ([[1, 5, 6]], [[1, 5, 7]])
    assert first.target_S[first.slot_T].tolist() == [5, 6] and second.target_S[second.slot_T].tolist() == [5, 7]
