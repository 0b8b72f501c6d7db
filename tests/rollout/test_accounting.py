"""What branching saved, counted by hand, and what leaves are worth, on sets whose law is known."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from turntree.core.cost import Cost
from turntree.core.labels import Rewards
from turntree.core.messages import Message, ToolCall
from turntree.core.tree import NodeKind, Role, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.rollout.accounting import TreeAccount, account, effective_leaves, intraclass_correlation


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
    tree.mark(third, Role.REFILL)
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


def scored(*starts: Sequence[float | None]) -> tuple[RolloutTree, Rewards]:
    """A tree whose starts have leaves with these rewards."""
    tree = RolloutTree("task")
    prompt = tree.add(None, NodeKind.PROMPT, (1,)).id
    verdicts: dict[int, Verdict] = {}
    for rewards in starts:
        seen = hear(tree, say(tree, prompt, 1))
        for reward in rewards:
            leaf = say(tree, seen, 1)
            tree.stop(leaf, StopReason.ENGINE_ERROR if reward is None else StopReason.COMPLETED)
            verdicts[leaf] = Verdict(reward, "")
    return tree, Rewards(verdicts)


def test_leaves_are_worth_their_number_when_independent_and_their_starts_when_copies() -> None:
    tree, rewards = scored([1.0, 0.0, 1.0], [1.0, 1.0, 0.0])
    assert effective_leaves(tree, rewards, 0.0) == 6
    assert effective_leaves(tree, rewards, 1.0) == pytest.approx(2)
    assert effective_leaves(tree, rewards, 0.5) == pytest.approx(36 / (2 * (3 + 6 * 0.5)))
    uneven = scored([1.0, 0.0, 1.0], [1.0])
    assert effective_leaves(*uneven, 1.0) == pytest.approx(16 / (9 + 1))
    assert effective_leaves(*scored([None], [None]), 0.5) == 0.0


def test_a_censored_leaf_is_worth_nothing() -> None:
    assert effective_leaves(*scored([1.0, None, 0.0], [1.0]), 1.0) == pytest.approx(9 / (4 + 1))


def test_the_correlation_is_one_for_copies_and_nothing_without_company_or_variance() -> None:
    assert intraclass_correlation([scored([1.0, 1.0], [0.0, 0.0])]) == 1.0
    assert intraclass_correlation([scored([1.0, 0.0], [1.0, 0.0])]) == -1.0, "left below 0, so that means are right"
    assert intraclass_correlation([scored([1.0], [0.0])]) is None
    assert intraclass_correlation([scored([1.0, 0.0])]) is None, "nothing to compare a lone start with"
    assert intraclass_correlation([scored([1.0, 1.0], [1.0, 1.0])]) is None
    assert intraclass_correlation([]) is None


def test_a_task_that_left_no_room_is_worth_no_rollout_and_says_nothing() -> None:
    tree = RolloutTree("no room")
    tree.stop(tree.add(None, NodeKind.PROMPT, (1,)).id, StopReason.MAX_TOKENS)
    rewards = Rewards({0: Verdict(0.0, "no room")})
    assert effective_leaves(tree, rewards, 0.5) == 0.0
    assert intraclass_correlation([(tree, rewards)]) is None
    told = [scored([1.0, 0.0], [0.0, 0.0]), scored([1.0, 1.0], [0.0, 1.0])]
    lone = [(tree, rewards), scored([1.0]), scored([None], [None])]
    assert intraclass_correlation([*told, *lone]) == intraclass_correlation(told)


def test_a_lone_start_tells_how_alike_its_leaves_are_and_nothing_of_other_starts() -> None:
    """By hand: 2 starts of 2 leaves with 1/2 within (2 free) and 1/4 between (1 free), and 1/2 within (1 free)."""
    told = [scored([1.0, 0.0], [0.0, 0.0]), scored([1.0, 0.0])]
    within, between = (0.5 + 0.5) / 3, 0.25 / 1
    assert intraclass_correlation(told) == pytest.approx((between - within) / (between + within))


def drawn(between: float, within: float, sizes: Sequence[int], seed: int) -> list[tuple[RolloutTree, Rewards]]:
    """Trees of different difficulty, whose starts differ by `between` and leaves by `within` (standard deviations)."""
    draw = random.Random(seed)
    found: list[tuple[RolloutTree, Rewards]] = []
    for _ in range(150):
        hard = draw.gauss(0.0, 5.0)
        starts = [hard + draw.gauss(0.0, between) for _ in sizes]
        found.append(
            scored(*([s + draw.gauss(0.0, within) for _ in range(m)] for s, m in zip(starts, sizes, strict=True)))
        )
    return found


@pytest.mark.parametrize("sizes", [(2, 2), (3, 3, 3), (5, 1), (4, 2, 1, 1)], ids=str)
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8])
def test_the_correlation_within_starts_is_found_whatever_trees_have_in_common(
    correlation: float, sizes: tuple[int, ...]
) -> None:
    trees = drawn(math.sqrt(correlation), math.sqrt(1 - correlation), sizes, seed=len(sizes))
    assert intraclass_correlation(trees) == pytest.approx(correlation, abs=0.12)


def test_the_variance_of_a_mean_of_leaves_is_that_of_as_many_independent_ones_as_they_are_worth() -> None:
    draw = random.Random(5)
    means: list[float] = []
    for _ in range(4000):
        starts = [draw.gauss(0.0, math.sqrt(0.4)) for _ in range(2)]
        leaves = [s + draw.gauss(0.0, math.sqrt(0.6)) for s, m in zip(starts, (4, 2), strict=True) for _ in range(m)]
        means.append(sum(leaves) / 6)
    variance = sum(mean**2 for mean in means) / len(means)
    tree, rewards = scored([0.0] * 4, [0.0] * 2)
    assert 1 / variance == pytest.approx(effective_leaves(tree, rewards, 0.4), rel=0.1)
