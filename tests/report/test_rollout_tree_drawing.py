"""A logged group as a tree: what is shared is there once, nothing is lost, and what is drawn can be read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from online_directories import Played, equal_group, grown, mixed_group, search

from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.logs.trees import KeptTree
from turntree.report.browser import group_view
from turntree.report.figures import themed
from turntree.report.rollout_tree import ABOVE, BELOW, deciding_forks, rollout_tree, short_action, summed, tree_of


@st.composite
def groups(draw: st.DrawFn) -> tuple[KeptTree, list[Played]]:
    """Rollouts depth first: each leaves the one before at some turn, and takes at least a turn of its own."""
    made: list[Played] = []
    before: list[str] = []
    for row in range(draw(st.integers(1, 6))):
        shared = draw(st.integers(0, max(0, len(before) - 1)))
        own = [f"turn of {row}.{at}" for at in range(draw(st.integers(1, 4)))]
        before = before[:shared] + own
        made.append(Played(before, draw(st.sampled_from([None, 0.0, 1.0])), shared=shared))
    return grown(made), made


@settings(max_examples=40)
@given(groups())
def test_every_rollout_is_a_path_of_the_tree_and_shared_turns_are_there_once(
    group: tuple[KeptTree, list[Played]],
) -> None:
    kept, played = group
    tree = tree_of(kept, max_rollouts=99, max_turns=99)
    for leaf, one in zip(tree.leaves, played, strict=True):
        path, node = [], leaf.parent
        while node is not None:
            path.append(tree.nodes[node])
            node = tree.nodes[node].parent
        assert [turn.action for turn in reversed(path)] == list(one.actions)
        assert [turn.turn for turn in reversed(path)] == list(range(1, len(one.actions) + 1))
        assert leaf.shared == one.shared
    assert [node.node for node in tree.nodes] == [node.id for node in kept.tree if node.sampled], "the tree's own nodes"
    assert all(node.tokens for node in tree.nodes)  # each at the rollout that paid for it


@settings(max_examples=40)
@given(groups(), st.integers(1, 3), st.integers(1, 4))
def test_what_is_not_drawn_is_counted(group: tuple[KeptTree, list[Played]], rollouts: int, turns: int) -> None:
    kept, played = group
    tree = tree_of(kept, max_rollouts=rollouts, max_turns=turns)
    assert len(tree.leaves) + tree.left_out == len(played)
    for leaf in tree.leaves:
        drawn = 0 if leaf.parent is None else tree.nodes[leaf.parent].turn
        assert drawn <= turns
        assert drawn + leaf.hidden == len(leaf.rollout.actions)


@settings(max_examples=40)
@given(groups(), st.data())
def test_a_rollout_of_several_branches_is_drawn_with_all_of_them_and_ends_once(
    group: tuple[KeptTree, list[Played]], data: st.DataObject
) -> None:
    """As an agent's retries and sub-agents make it (`RolloutTree.parts`)."""
    kept, _ = group
    leaves = kept.tree.leaves()
    of = {leaf: data.draw(st.sampled_from([leaf, leaves[-1]])) for leaf in leaves}
    parts = {str(leaf): end for leaf, end in of.items() if leaf != end}
    kept = replace(kept, tree=RolloutTree.from_json({**kept.tree.to_json(), "parts": parts}))
    tree, ends = tree_of(kept, max_rollouts=99, max_turns=99), kept.tree.ends()
    assert len(tree.leaves) == len(leaves) and len(tree.nodes) == sum(node.sampled for node in kept.tree)
    assert sorted(leaf.number for leaf in tree.leaves if not leaf.part) == list(range(1, len(ends) + 1))
    assert sum(leaf.part for leaf in tree.leaves) == len(leaves) - len(ends)
    view = group_view(kept)["nodes"]
    assert (
        sum("part" in row for row in view) == len(leaves) - len(ends) == len(leaves) - sum("end" in row for row in view)
    )
    shown = rollout_tree(kept).svg
    assert shown.count(">part of ") == sum(leaf.part for leaf in tree_of(kept).leaves)


def test_a_fork_beyond_what_fits_is_still_drawn() -> None:
    long = [f"a{turn}" for turn in range(12)]
    tree = tree_of(grown([Played(long, 0.0), Played([*long[:6], "b"], 1.0, shared=6)]))
    assert [node.action for node in tree.nodes if node.row == 1] == ["b"]
    assert [leaf.hidden for leaf in tree.leaves] == [5, 0]


def test_a_branch_of_no_tokens_is_a_fork_all_the_same() -> None:
    """Told from the nodes: a log of rollouts alone cannot tell an empty turn from a shared one."""
    kept = grown([Played(["a", "b"], 0.0)])
    tree, start = kept.tree, kept.tree.starts()[0]
    silent = tree.add(
        tree.children(start)[0], NodeKind.COMPLETION, (), logprobs=(), messages=(Message("assistant", ""),)
    )
    tree.stop(silent.id, StopReason.COMPLETED)
    kept = replace(kept, rewards=Rewards({**kept.rewards.verdicts, silent.id: Verdict(1.0, "")}))
    drawn = tree_of(kept)
    assert [leaf.shared for leaf in drawn.leaves] == [0, 1]
    assert [node.node for node in drawn.nodes if node.row == 1] == [silent.id]
    assert deciding_forks(kept) == 1


def forked_group(rewards: Sequence[float], iteration: int) -> KeptTree:
    """Pairs of a start and a fork of it after one turn."""
    played = [Played([f"a{i // 2}", "b"], reward, shared=i % 2) for i, reward in enumerate(rewards)]
    return grown(played, iteration=iteration)


def test_a_group_of_one_reward_is_not_drawn() -> None:
    assert summed([equal_group()]).chosen is None
    mixed = mixed_group()
    found = summed([equal_group(), mixed])
    assert found.chosen is mixed
    assert (found.groups, found.mixed, found.iterations) == (2, 1, {1, 2})
    assert deciding_forks(mixed) == 1


def test_a_group_whose_forks_changed_the_reward_is_drawn_first_then_the_balanced_then_the_later_one() -> None:
    undecided = forked_group([1, 1, 0, 0], iteration=9)
    lone = forked_group([1, 0, 0, 0], iteration=8)
    balanced, later = forked_group([1, 0, 1, 0], iteration=1), forked_group([0, 1, 0, 1], iteration=2)
    assert summed([undecided, lone]).chosen is lone
    assert summed([lone, balanced]).chosen is balanced
    assert summed([balanced, later]).chosen is later


def test_a_reward_at_the_mean_is_not_above_it() -> None:
    drawn = rollout_tree(forked_group([0.0, 0.5, 1.0], iteration=1))
    assert [drawn.svg.count(f"fill: {themed(fill)}") for fill, _ in (ABOVE, BELOW)] == [1, 2]


def test_the_drawing_has_each_turn_and_reward_once_and_escapes_what_was_said() -> None:
    drawn = rollout_tree(mixed_group())
    assert re.findall(r">turn \d<", drawn.svg) == [">turn 1<", ">turn 2<", ">turn 3<"]
    assert re.findall(r">(reward [^<]*|censored)<", drawn.svg) == ["reward 0", "reward 1", "censored", "reward 0"]
    assert re.findall(r">(start|refill|fork)<", drawn.svg) == ["start", "start", "refill"]
    assert "mayor of &lt;Eaton&gt;" in drawn.svg
    assert "<Eaton>" not in drawn.svg
    assert drawn.svg.count(">mayor of &lt;Eaton&gt;<") == 1, "what is shared is there once"
    assert "1 fork, 8 turns drawn; rewards from top to bottom 0, 1, censored, 0." in drawn.alt
    assert "Dashed: a refill" in drawn.caption


def test_a_long_group_says_what_it_leaves_out() -> None:
    drawn = rollout_tree(grown([Played([f"a{turn}" for turn in range(7)], float(row % 2)) for row in range(19)]))
    assert "Not drawn: 3 further rows." in drawn.caption
    assert drawn.svg.count(">2 more turns<") == 16


@pytest.mark.parametrize(
    ("action", "said"),
    [
        (search("mayor of Eaton"), ("search", "mayor of Eaton")),
        ('f({"a": 1, "b": "x"})', ("f", "1, x")),
        (f"{search('a')}\n{search('b')}", ("search (+ 1 call)", "a")),
        ("search({broken)", ("search", "{broken")),
        (f"f({'[' * 20_000})", ("f", "[" * 20_000)),
        (f"f({'9' * 5_000})", ("f", "9" * 5_000)),
        ("<answer> Kirk </answer>", ("answer", "Kirk")),
        ("go to shelf 1 (quickly)", ("", "go to shelf 1 (quickly)")),
    ],
)
def test_an_action_is_shortened_to_what_a_person_reads(action: str, said: tuple[str, str]) -> None:
    assert short_action(action) == said
