"""What branching saved, counted by hand."""

from __future__ import annotations

import pytest

from turntree.core.cost import Cost
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.rollout.accounting import TreeAccount, account


def say(tree: RolloutTree, parent: int, tokens: int, *, calls: int = 1, whole: bool = True) -> int:
    """`tokens` tokens of a turn with `calls` tool calls; its first part only unless `whole`."""
    made = tuple(ToolCall("search", {"n": n}) for n in range(calls))
    message = Message("assistant", "", tool_calls=made) if whole else None
    zeros = (0.0,) * tokens
    return tree.add(
        parent,
        NodeKind.COMPLETION,
        (5,) * tokens,
        logprobs=zeros,
        entropies=zeros,
        messages=() if message is None else (message,),
    ).id


def hear(tree: RolloutTree, parent: int) -> int:
    return tree.add(parent, NodeKind.OBSERVATION, (6, 6), messages=(Message("tool", "found"),)).id


def split() -> RolloutTree:
    """One start whose second turn forked after three tokens, one chain, and a refill of one turn:

    5 tokens, 2 calls - 3 tokens ... 4 tokens, 1 call - 2 tokens, no call
                                 ... 1 token, 3 calls
    7 tokens, 1 call - 6 tokens, no call
    8 tokens, 1 call
    """
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1,)).id
    first, second, third = say(tree, prompt, 5, calls=2), say(tree, prompt, 7), say(tree, prompt, 8)
    shared = say(tree, hear(tree, first), 3, whole=False)
    long, short = say(tree, shared, 4), say(tree, shared, 1, calls=3)
    hear(tree, say(tree, hear(tree, long), 2, calls=0))
    hear(tree, short)
    hear(tree, say(tree, hear(tree, second), 6, calls=0))
    hear(tree, third)
    for leaf in tree.leaves():
        tree.stop(leaf, StopReason.COMPLETED)
    tree.mark_refill(third)
    return tree


def test_a_turn_that_forked_half_way_is_a_turn_of_every_branch_and_its_shared_tokens_are_counted_once() -> None:
    assert account(split()) == TreeAccount(
        leaves=4,
        starts=3,
        refills=1,
        forks=1,
        calls_fresh=2 + 1 + 3 + 0 + 1 + 0 + 1,
        calls_chain=(2 + 1 + 0) + (2 + 3) + (1 + 0) + 1,
        turns_fresh=7,
        turns_chain=3 + 2 + 2 + 1,
        tokens_fresh=5 + 3 + 4 + 1 + 2 + 7 + 6 + 8,
        tokens_chain=(5 + 3 + 4 + 2) + (5 + 3 + 1) + (7 + 6) + 8,
    )


def test_the_structural_saving_is_one_minus_fresh_over_chain_calls() -> None:
    found = account(split())
    assert found.structural_saving == pytest.approx(1 - 8 / 10)
    assert (found + found).structural_saving == pytest.approx(1 - 8 / 10)
    assert found + TreeAccount() == found
    assert TreeAccount().structural_saving == 0.0
    assert TreeAccount(turns_fresh=3, turns_chain=4).structural_saving == 0.25, "of turns where no call was made"


def test_calls_that_no_environment_took_up_are_no_calls() -> None:
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1,)).id
    leaf = say(tree, prompt, 4, calls=2)
    tree.stop(leaf, StopReason.MAX_TOKENS)
    failed = say(tree, prompt, 4, calls=2)
    cost = tree.add(failed, NodeKind.OBSERVATION, (), cost=Cost(tool_calls=1)).id  # of a call that failed
    tree.stop(cost, StopReason.ENVIRONMENT_ERROR)
    found = account(tree)
    assert (found.calls_fresh, found.calls_chain, found.turns_fresh) == (0, 0, 2)


def test_chains_that_share_nothing_save_nothing() -> None:
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1,)).id
    for _ in range(3):
        tree.stop(hear(tree, say(tree, prompt, 4)), StopReason.COMPLETED)
    found = account(tree)
    assert found.calls_fresh == found.calls_chain == 3
    assert found.tokens_fresh == found.tokens_chain == 12
    assert found.structural_saving == 0.0
