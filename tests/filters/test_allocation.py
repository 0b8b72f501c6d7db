"""Allocation: the laws of the sizes, what a task is known for, and that unequal groups leave the gradient as it is."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.advantages.comparisons import Advantages, grpo_advantages, mean_centred, rloo
from turntree.advantages.credit import CreditRule
from turntree.core.errors import ConfigError
from turntree.core.labels import Credit, Rewards
from turntree.core.protocols import FinishedGroup
from turntree.core.tree import NodeKind, RolloutTree, StopReason
from turntree.core.verdict import Verdict
from turntree.filters.allocation import HOPELESS, SOLVED, Allocation, AllocationConfig, Beta, neyman

TASKS = "abcdef"
law = settings(max_examples=50, deadline=None)
rewards = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8).map(tuple)
histories = st.lists(st.lists(st.tuples(st.sampled_from(TASKS), rewards), max_size=6), max_size=8)
configs = st.builds(
    AllocationConfig,
    smallest=st.integers(2, 4),
    largest=st.integers(4, 9),
    discount=st.sampled_from([0.5, 0.9, 1.0]),
    prior=st.sampled_from([0.5, 1.0, 4.0]),
)
drawn = st.lists(st.sampled_from(TASKS), min_size=1, max_size=8)


def played(config: AllocationConfig, history: Sequence[Sequence[tuple[str, tuple[float | None, ...]]]]) -> Allocation:
    found = Allocation(config, 4)
    for iteration, groups in enumerate(history, start=1):
        learn(found, iteration, groups)
    return found


def learn(to: Allocation, iteration: int, groups: Sequence[tuple[str, tuple[float | None, ...]]]) -> None:
    for task, found in groups:
        to.finished(FinishedGroup(task_id=task, iteration=iteration, rewards=found))


@law
@given(config=configs, history=histories, tasks=drawn)
def test_all_rollouts_are_given_out_in_groups_between_the_bounds(config, history, tasks) -> None:
    allocation = played(config, history)
    found = allocation.allot(tasks, len(history) + 1)
    assert sum(found.sizes) == 4 * len(tasks)
    assert all(size == 0 or allocation.smallest <= size <= allocation.largest for size in found.sizes)
    assert [size == 0 for size in found.sizes] == [why in (HOPELESS, SOLVED) for why in found.reasons]
    assert 0 <= found.zero_variance <= 1


@law
@given(config=configs, history=histories)
def test_the_more_uncertain_of_two_known_tasks_never_gets_fewer(config, history) -> None:
    allocation, now = played(config, history), len(history) + 1
    sizes = dict(zip(TASKS, allocation.allot(TASKS, now).sizes, strict=True))
    deviation = {task: allocation.posterior(task, now).deviation for task in TASKS}
    for one, other in itertools.permutations(TASKS, 2):
        if deviation[one] > deviation[other] and sizes[one]:  # a task of which too little is known is always played
            assert sizes[one] >= sizes[other]


@law
@given(
    deviations=st.lists(st.floats(0.01, 0.5), min_size=2, max_size=4),
    smallest=st.integers(2, 3),
    extra=st.integers(0, 6),
)
def test_no_other_sizes_give_less_variance(deviations, smallest, extra) -> None:
    budget = smallest * len(deviations) + extra
    largest = smallest + 4
    budget = min(budget, largest * len(deviations))
    found = neyman(deviations, budget, smallest=smallest, largest=largest)

    def variance(sizes: Sequence[int]) -> float:
        return math.fsum(d * d / n for d, n in zip(deviations, sizes, strict=True))

    others = itertools.product(range(smallest, largest + 1), repeat=len(deviations))
    assert sum(found) == budget
    assert variance(found) <= min(variance(sizes) for sizes in others if sum(sizes) == budget) * (1 + 1e-12)


@law
@given(config=configs, before=histories, after=histories, tasks=drawn)
def test_what_is_restored_gives_the_same_sizes_from_then_on(config, before, after, tasks) -> None:
    first, second = played(config, before), Allocation(config, 4)
    second.restore(json.loads(json.dumps(first.state())))
    for iteration, groups in enumerate([*after, []], start=len(before) + 1):
        assert second.allot(tasks, iteration) == first.allot(tasks, iteration)
        learn(first, iteration, groups)
        learn(second, iteration, groups)
    assert second.state() == first.state()


@law
@given(config=configs, history=histories, tasks=drawn)
def test_the_order_in_which_groups_end_changes_no_size(config, history, tasks) -> None:
    turned = [sorted(groups, key=lambda group: group[0], reverse=True) for groups in history]
    now = len(history) + 1
    assert played(config, turned).allot(tasks, now) == played(config, history).allot(tasks, now)


@law
@given(history=histories, prior=st.sampled_from([0.5, 1.0, 4.0]))
def test_no_task_is_given_up(history, prior) -> None:
    """However hopeless: when what is known of it weighs less than the prior, it is played again."""
    allocation = played(AllocationConfig(smallest=4, discount=0.9, prior=prior), history)
    weight = max(sum(len(found) for groups in history for _, found in groups), 1)
    late = len(history) + math.ceil(math.log(prior / weight, 0.9)) + 1 if weight > prior else len(history) + 1
    assert all(allocation.allot(TASKS, late).sizes)


def test_many_for_the_uncertain_few_for_the_sure_none_for_the_hopeless_and_the_solved() -> None:
    known = {"lost": 0, "won": 24, "sure": 23, "even": 12, "hard": 8, "easy": 16}
    allocation = Allocation(AllocationConfig(), 8)
    learn(allocation, 1, [(task, (1.0,) * wins + (0.0,) * (24 - wins)) for task, wins in known.items()])
    found = allocation.allot(list(known), 2)
    lost, won, sure, even, hard, easy = found.sizes
    assert lost == won == 0 < sure < 8 < min(hard, easy) <= even
    assert found.reasons == (HOPELESS, SOLVED, None, None, None, None)


def test_without_history_and_when_all_is_forgotten_groups_are_equal() -> None:
    allocation = Allocation(AllocationConfig(discount=0.5), 8)
    assert allocation.allot("abc", 1).sizes == (8, 8, 8)
    learn(allocation, 1, [("a", (0.0,) * 8), ("b", (0.0, 1.0) * 4)])
    assert allocation.allot("abc", 2).sizes != (8, 8, 8) == allocation.allot("abc", 200).sizes


def test_a_new_task_starts_from_what_tasks_of_this_run_are_like() -> None:
    allocation = Allocation(AllocationConfig(), 8)
    learn(allocation, 1, [(f"t{i}", (0.0,) * 8) for i in range(10)])
    assert allocation.posterior("new", 2).mean < 0.1
    learn(allocation, 2, [(f"u{i}", (1.0,) * 8) for i in range(10)])
    assert allocation.posterior("new", 3).mean == pytest.approx(0.5)


def test_a_rollout_without_a_reward_is_no_evidence() -> None:
    one, other = Allocation(AllocationConfig(), 4), Allocation(AllocationConfig(), 4)
    learn(one, 1, [("a", (1.0, None, 0.0, None)), ("b", (None, None))])
    learn(other, 1, [("a", (1.0, 0.0))])
    assert one.state() == other.state()


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0), (1.3, 1.7), (8.2, 0.8), (3.0, 20.0)])
def test_the_posterior_is_integrated_exactly(a: float, b: float) -> None:
    p = (np.arange(400_000) + 0.5) / 400_000
    density = np.exp((a - 1) * np.log(p) + (b - 1) * np.log1p(-p))
    density /= density.sum()
    assert Beta(a, b).deviation == pytest.approx((density * np.sqrt(p * (1 - p))).sum(), rel=1e-3)
    assert Beta(a, b).zero_variance(5) == pytest.approx((density * (p**5 + (1 - p) ** 5)).sum(), rel=2e-3)
    assert Beta(0.5, 0.5).deviation == pytest.approx(1 / math.pi)


def test_the_gradient_has_less_noise_than_that_of_equal_groups() -> None:
    """48 tasks with rates that drift, 8 an iteration: the variance p (1 - p) / n of every group, and for a task without
    one the square of its whole gradient, which for p = sigmoid(theta) is p (1 - p)."""
    draw = np.random.default_rng(0)
    logits = draw.normal(-1.0, 3.0, 48)
    allocation, noise, equal = Allocation(AllocationConfig(), 8), 0.0, 0.0
    for iteration in range(1, 61):
        rates = 1 / (1 + np.exp(-logits))
        tasks = draw.choice(48, 8, replace=False)
        sizes = allocation.allot([str(task) for task in tasks], iteration).sizes
        for task, size in zip(tasks, sizes, strict=True):
            variance = rates[task] * (1 - rates[task])
            if iteration > 12:
                noise += variance / size if size else variance**2
                equal += variance / 8
            if size:
                rewards = tuple(float(won) for won in draw.random(size) < rates[task])
                learn(allocation, iteration, [(str(task), rewards)])
        logits += draw.normal(0.0, 0.1, 48)
    assert noise < 0.9 * equal, noise / equal


# the gradient, by enumeration: one-turn tasks, each with one parameter, p = sigmoid(theta), d log pi = reward - p


def group(size: int, wins: int) -> tuple[RolloutTree, Rewards]:
    tree = RolloutTree("bandit")
    prompt = tree.add(None, NodeKind.PROMPT, (9,)).id
    leaves = [tree.add(prompt, NodeKind.COMPLETION, (i,), logprobs=(0.0,)).id for i in range(size)]
    for leaf in leaves:
        tree.stop(leaf, StopReason.COMPLETED)
    return tree, Rewards({leaf: Verdict(float(i < wins), "bandit") for i, leaf in enumerate(leaves)})


def pushed(credit: Credit, wins: int, p: float) -> float:
    """The gradient that the objective has: the sum over rollouts of advantage times score."""
    each = [credit.nodes[node].positive + credit.nodes[node].negative for node in sorted(credit.nodes)]
    return math.fsum(push * (float(i < wins) - p) for i, push in enumerate(each))


def chance(size: int, wins: int, p: float) -> float:
    return math.comb(size, wins) * p**wins * (1 - p) ** (size - wins)


def expected(p: float, size: int, advantages: Advantages, allocation: Allocation | None = None) -> float:
    total = 0.0
    for wins in range(size + 1):
        credit = CreditRule(advantages=advantages)(*group(size, wins))
        if allocation is not None:
            credit = allocation.weighed(credit, size)
        total += chance(size, wins, p) * pushed(credit, wins, p)
    return total


@pytest.mark.parametrize("advantages", [rloo, mean_centred])
def test_sizes_from_earlier_iterations_leave_the_expected_gradient_as_equal_groups_have_it(advantages) -> None:
    """Over every history of one iteration and every outcome of the next."""
    rates, size = (0.5, 0.15), 3
    seen = set[tuple[int, ...]]()
    found = np.zeros(2)
    for history in itertools.product(range(size + 1), repeat=2):
        allocation = Allocation(AllocationConfig(smallest=2, largest=5), size, centred=advantages is mean_centred)
        learn(allocation, 1, [(t, (1.0,) * k + (0.0,) * (size - k)) for t, k in zip("ab", history, strict=True)])
        sizes = allocation.allot("ab", 2).sizes
        seen.add(sizes)
        happens = math.prod(chance(size, k, p) for k, p in zip(history, rates, strict=True))
        found += happens * np.array([expected(p, n, advantages, allocation) for p, n in zip(rates, sizes, strict=True)])
    equal = np.array([expected(p, size, advantages) for p in rates])
    assert len(seen) > 1 and min(min(sizes) for sizes in seen) > 0
    assert found == pytest.approx(equal, rel=1e-12)
    truth = np.array([p * (1 - p) for p in rates]) * (size if advantages is rloo else size - 1)
    assert equal == pytest.approx(truth, rel=1e-12)


def test_groups_weigh_alike_in_the_kl_term_and_in_every_normaliser() -> None:
    allocation = Allocation(AllocationConfig(), 4)
    plain, large = (CreditRule(advantages=rloo)(*group(n, n // 2)) for n in (4, 8))
    weighed = allocation.weighed(large, 8)
    assert allocation.weighed(plain, 4) == plain
    assert weighed.rollouts == plain.rollouts and weighed.rollout_tokens == plain.rollout_tokens
    assert sum(one.multiplicity for one in weighed.nodes.values()) == 4


def test_division_by_the_deviation_makes_the_gradient_depend_on_the_size() -> None:
    """Why the docs recommend rloo: no factor of the size alone puts this right for all tasks."""
    allocation = Allocation(AllocationConfig(), 8)
    ratios = [expected(p, 4, grpo_advantages, allocation) / expected(p, 8, grpo_advantages) for p in (0.5, 0.05)]
    assert ratios[1] < 0.7 < 0.8 < ratios[0] < 1


@pytest.mark.parametrize(
    "wrong", [{"smallest": 1}, {"discount": 0.0}, {"discount": 1.1}, {"prior": 0.0}, {"smallest": 9}, {"largest": 7}]
)
def test_impossible_settings_are_refused(wrong) -> None:
    with pytest.raises(ConfigError):
        Allocation(AllocationConfig(**wrong), 8)
