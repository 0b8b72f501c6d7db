"""The laws stated in `turntree.core.tree` and `turntree.core.cost`, on random histories of growth."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rollout_view import rollouts_of
from turntree.core.cost import NO_COST, Cost
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import Decision, NodeKind, RolloutTree, StopReason

tokens = st.lists(st.integers(0, 5), max_size=4).map(tuple)
costs = st.builds(
    Cost,
    turns=st.integers(0, 9),
    decoded_tokens=st.integers(0, 999),
    prefilled_tokens=st.integers(0, 999),
    reused_tokens=st.integers(0, 999),
    tool_calls=st.integers(0, 9),
    trained_tokens=st.integers(0, 999),
    engine_seconds=st.floats(0, 9),
    environment_seconds=st.floats(0, 9),
    training_seconds=st.floats(0, 9),
)
calls = st.builds(ToolCall, st.sampled_from(["go", "take"]), st.dictionaries(st.text(max_size=3), st.integers()))
one_message = st.builds(
    Message,
    role=st.sampled_from(["user", "assistant", "tool"]),
    content=st.text(max_size=9),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | st.text(min_size=1, max_size=3),
)
messages = st.lists(one_message, max_size=3).map(tuple)


class Growth(RuleBasedStateMachine):
    """Any sequence of add, stop, mark and record; what an engine would have seen is kept beside the tree."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = RolloutTree("task")
        self.seen: list[tuple[int, ...]] = []  # the whole sequence at each node, as an engine would hold it
        self.frozen: list = []  # each node as it was when appended
        self.sampled: list[tuple[bool, ...]] = []
        self.ended: dict[int, StopReason] = {}
        self.refills: set[int] = set()

    def grow(self, parent: int | None, kind: NodeKind, ids: tuple[int, ...], messages, cost) -> None:
        given = kind is not NodeKind.COMPLETION
        node = self.tree.add(
            parent,
            kind,
            ids,
            logprobs=None if given else tuple(-0.1 * t for t in ids),
            entropies=None if given else tuple(0.5 for _ in ids),
            policy_version=None if given else len(self.seen),
            messages=messages,
            cost=cost,
        )
        self.frozen.append(dataclasses.replace(node))
        self.seen.append((self.seen[parent] if parent is not None else ()) + ids)
        self.sampled.append((self.sampled[parent] if parent is not None else ()) + (not given,) * len(ids))

    @rule(ids=tokens, cost=costs)
    def plant(self, ids, cost) -> None:
        self.grow(None, NodeKind.PROMPT, ids, (), cost)

    @precondition(lambda self: any(n not in self.ended for n in range(len(self.seen))))
    @rule(data=st.data(), kind=st.sampled_from(NodeKind), ids=tokens, messages=messages, cost=costs)
    def extend(self, data, kind, ids, messages, cost) -> None:
        parent = data.draw(st.sampled_from([n for n in range(len(self.seen)) if n not in self.ended]))
        self.grow(parent, kind, ids, messages, cost)

    @precondition(lambda self: any(leaf not in self.ended for leaf in self.tree.leaves()))
    @rule(data=st.data(), reason=st.sampled_from(StopReason))
    def stop(self, data, reason) -> None:
        leaf = data.draw(st.sampled_from([leaf for leaf in self.tree.leaves() if leaf not in self.ended]))
        self.tree.stop(leaf, reason)
        self.ended[leaf] = reason

    @precondition(lambda self: len(self.seen) > 0)
    @rule(data=st.data(), number=st.floats(-1, 1))
    def decide(self, data, number) -> None:
        node = data.draw(st.integers(0, len(self.seen) - 1))
        self.tree.record(Decision("brancher", node, "fork", "torn", {"entropy": number}))

    @precondition(lambda self: len(self.seen) > 0)
    @rule(data=st.data())
    def refill(self, data) -> None:
        node = data.draw(st.integers(0, len(self.seen) - 1))
        if node in self.tree.starts():
            self.tree.mark_refill(node)
            self.refills.add(node)
        else:
            with pytest.raises(ValueError, match="cannot be a refill"):
                self.tree.mark_refill(node)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), ids=tokens)
    def a_stopped_leaf_never_grows_and_never_stops_again(self, data, ids) -> None:
        leaf = data.draw(st.sampled_from(sorted(self.ended)))
        with pytest.raises(ValueError, match="is stopped"):
            self.tree.add(leaf, NodeKind.OBSERVATION, ids)
        with pytest.raises(ValueError, match="already stopped"):
            self.tree.stop(leaf, StopReason.COMPLETED)

    @invariant()
    def nodes_never_change_and_parents_come_first(self) -> None:
        assert list(self.tree) == self.frozen
        assert all(node.parent is None or node.parent < node.id for node in self.tree)
        assert [node.id for node in self.tree] == list(range(len(self.tree)))

    @invariant()
    def every_path_is_what_the_engine_saw(self) -> None:
        for rollout in rollouts_of(self.tree):
            assert rollout.token_ids == self.seen[rollout.leaf]
            assert rollout.loss_mask == self.sampled[rollout.leaf]
            assert tuple(logprob is not None for logprob in rollout.logprobs) == rollout.loss_mask
            assert rollout.stop == self.ended.get(rollout.leaf)
            speaks = [node.sampled for node in rollout.nodes]
            assert rollout.turns == sum(now and not before for before, now in itertools.pairwise([False, *speaks]))

    @invariant()
    def leaves_roots_and_children_agree(self) -> None:
        parents = {node.parent for node in self.tree}
        assert set(self.tree.leaves()) == {node.id for node in self.tree} - parents
        assert self.tree.roots == tuple(node.id for node in self.tree if node.parent is None)
        below = [child for node in self.tree for child in self.tree.children(node.id)]
        assert sorted((*below, *self.tree.roots)) == list(range(len(self.tree)))

    @invariant()
    def every_sampled_node_lies_at_or_below_exactly_one_start(self) -> None:
        starts = set(self.tree.starts())
        for node in self.tree:
            above = {n.id for n in self.tree.path(node.id)}
            assert len(above & starts) == any(n.sampled for n in self.tree.path(node.id))
        assert self.tree.refills() == self.refills

    @invariant()
    def sampling_forks_below_starts_and_never_above_them(self) -> None:
        forks = set(self.tree.branch_points())
        for node in self.tree:
            below_a_start = any(n.sampled for n in self.tree.path(node.id))
            assert (node.id in forks) == (below_a_start and len(self.tree.children(node.id)) > 1)

    @invariant()
    def the_cost_of_the_tree_is_that_of_its_nodes_each_once(self) -> None:
        for name in NO_COST.counts():
            assert getattr(self.tree.cost, name) == sum(getattr(node.cost, name) for node in self.frozen)

    @invariant()
    def json_restores_it_exactly(self) -> None:
        value = json.loads(json.dumps(self.tree.to_json()))
        again = RolloutTree.from_json(value)
        assert list(again) == list(self.tree) and again.decisions == self.tree.decisions
        assert rollouts_of(again) == rollouts_of(self.tree) and again.task_id == self.tree.task_id
        assert again.to_json() == value


TestGrowth = Growth.TestCase
TestGrowth.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


@given(tokens.filter(len), st.integers(1, 5))
def test_one_node_per_sampling_event_even_when_siblings_say_the_same(ids: tuple[int, ...], times: int) -> None:
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    for version in range(times):
        tree.add(root, NodeKind.COMPLETION, ids, logprobs=(-0.5,) * len(ids), policy_version=version)
    assert len(tree.leaves()) == times
    assert [tree[leaf].policy_version for leaf in tree.leaves()] == list(range(times))


def test_nodes_are_immutable() -> None:
    tree = RolloutTree("task")
    node = tree.add(None, NodeKind.PROMPT, [1, 2])  # a list is copied into a tuple
    assert node.token_ids == (1, 2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.token_ids = (3,)


@pytest.mark.parametrize("kind", list(NodeKind))
def test_log_probabilities_belong_to_completions_and_only_to_them(kind: NodeKind) -> None:
    logprobs = None if kind is NodeKind.COMPLETION else (-1.0,)
    with pytest.raises(ValueError, match="belong to completions"):
        RolloutTree("task").add(None, kind, (1,), logprobs=logprobs)


def test_statistics_must_align_with_tokens() -> None:
    with pytest.raises(ValueError, match="1 logprobs for 2 tokens"):
        RolloutTree("task").add(None, NodeKind.COMPLETION, (1, 2), logprobs=(-1.0,))


def test_a_node_with_children_cannot_be_stopped() -> None:
    tree = RolloutTree("task")
    root = tree.add(None, NodeKind.PROMPT, (1,)).id
    tree.add(root, NodeKind.OBSERVATION, (2,))
    with pytest.raises(ValueError, match="has children"):
        tree.stop(root, StopReason.COMPLETED)


@pytest.mark.parametrize("missing", [-1, 1])
def test_a_node_that_does_not_exist_is_an_error_everywhere(missing: int) -> None:
    tree = RolloutTree("task")
    tree.add(None, NodeKind.PROMPT, (1,))
    for use in (
        lambda: tree[missing],
        lambda: tree.path(missing),
        lambda: tree.children(missing),
        lambda: tree.stop(missing, StopReason.COMPLETED),
        lambda: tree.add(missing, NodeKind.OBSERVATION, ()),
        lambda: tree.record(Decision("gate", missing, "stop", "")),
    ):
        with pytest.raises(ValueError, match=f"has no node {missing}"):
            use()


def test_the_fan_out_of_a_prompt_is_no_fork_and_a_refill_is_marked_where_it_starts() -> None:
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1,)).id
    first, second, third = (tree.add(prompt, NodeKind.COMPLETION, (t,), logprobs=(0.0,)).id for t in (2, 3, 4))
    tree.mark_refill(third)
    seen = tree.add(first, NodeKind.OBSERVATION, (5,)).id
    for token in (6, 7):
        tree.add(seen, NodeKind.COMPLETION, (token,), logprobs=(0.0,))
    assert tree.starts() == (first, second, third) and tree.refills() == {third}
    assert tree.branch_points() == (seen,)


def test_a_tree_written_when_decisions_had_one_field_more_can_be_read() -> None:
    tree = RolloutTree("task")
    tree.add(None, NodeKind.PROMPT, (1,))
    tree.record(Decision("gate", 0, "stop", "converged"))
    value = tree.to_json()
    value["decisions"][0] = value["decisions"][0] | {"saw": None}
    assert RolloutTree.from_json(value).decisions == tree.decisions


def test_which_endings_censor() -> None:
    scored = {StopReason.COMPLETED, StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.MAX_SECONDS}
    assert {reason for reason in StopReason if not reason.censors} == scored


@given(costs, costs, costs)
def test_costs_add_up_in_any_order(a: Cost, b: Cost, c: Cost) -> None:
    assert a + NO_COST == a == NO_COST + a
    assert a + b == b + a
    assert ((a + b) + c).counts() == (a + (b + c)).counts()
    assert ((a + b) + c).seconds == pytest.approx((a + (b + c)).seconds)
    assert (a + b).seconds == pytest.approx(a.seconds + b.seconds)


@given(st.lists(costs, max_size=6))
def test_a_cost_is_its_counts_and_its_timing(many: list[Cost]) -> None:
    total = functools.reduce(Cost.__add__, many, NO_COST)
    assert Cost(**total.counts(), **total.timing()) == total
    for name, value in total.counts().items():
        assert value == sum(getattr(cost, name) for cost in many)
