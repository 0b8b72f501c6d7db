"""What every brancher promises, over all that ship and one of a user's own."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixed_brancher import FixedBrancher
from turntree.core.protocols import BranchDecision, Brancher, ForkMoment
from turntree.decide.branching.published import ArpoBrancher, ReleasedArpoBrancher
from turntree.decide.branching.rules import EntropyBrancher, RandomBrancher


class WhereUnsure:
    """A user's own: forks where the first token after a tool result is less likely than it was before."""

    def decide(self, moment: ForkMoment) -> BranchDecision | None:
        now, before = moment.entropies[-1][0], moment.entropies[-2][0]
        branches = 2 if now > before and moment.budget else 1
        return BranchDecision(branches=branches, reason="compared", numbers={"now": now, "before": before})

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass


@dataclass(frozen=True)
class Kind:
    """`shown` tokens of a turn are what its decision may depend on: all but the last of them are shared."""

    make: Callable[[], Brancher]
    shown: int = 1


KINDS = {
    "entropy": Kind(lambda: EntropyBrancher(vocabulary=9, probe_tokens=3, tau=0.5), shown=3),
    "entropy, first token": Kind(lambda: EntropyBrancher(vocabulary=9, probe_tokens=1, tau=0.5, branches=3)),
    "entropy, paced": Kind(lambda: EntropyBrancher(vocabulary=9, probe_tokens=2), shown=2),
    "random": Kind(lambda: RandomBrancher(rate=0.5, probe_tokens=2), shown=2),
    "random, paced": Kind(lambda: RandomBrancher(rate=None, branches=3, probe_tokens=1)),
    "fixed": Kind(lambda: FixedBrancher(turns=(2, 4))),
    "as printed": Kind(lambda: ArpoBrancher(vocabulary=9, probe_tokens=2), shown=2),
    "as released": Kind(lambda: ReleasedArpoBrancher(vocabulary=9)),
    "a user's": Kind(WhereUnsure),
}

ENTROPIES = st.lists(st.floats(0, math.log(9)), min_size=1, max_size=6).map(tuple)
KEYS = st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple)


@st.composite
def fork_moments(draw: st.DrawFn, iterations: int = 1) -> ForkMoment:
    turns = draw(st.lists(ENTROPIES, min_size=2, max_size=5))
    return ForkMoment(
        task_id=draw(st.sampled_from("ab")),
        key=draw(KEYS),
        turn=len(turns),
        max_turns=8,
        budget=draw(st.integers(0, 3)),
        entropies=tuple(turns),
        seed=draw(st.integers(0, 9)),
        iteration=draw(st.integers(0, iterations - 1)),
    )


def in_iterations(least: int = 1) -> st.SearchStrategy[list[ForkMoment]]:
    """What is asked in up to three iterations, one after the other."""
    asked = st.lists(fork_moments(3), min_size=least, max_size=30)
    return asked.map(lambda moments: sorted(moments, key=lambda moment: moment.iteration))


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(moments=in_iterations())
def test_a_decision_is_bounded_reasoned_and_finite(name: str, moments: list[ForkMoment]) -> None:
    brancher = KINDS[name].make()
    for moment in moments:
        decision = brancher.decide(moment)
        if decision is None:
            continue
        assert 1 <= decision.branches <= moment.budget + 1
        assert decision.reason
        assert all(math.isfinite(value) for value in decision.numbers.values())
        assert decision.branches == 1 or decision.shared < len(moment.entropies[-1])


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(moments=in_iterations(), other=ENTROPIES)
def test_a_decision_depends_on_nothing_that_its_branches_do_not_share(
    name: str, moments: list[ForkMoment], other: tuple[float, ...]
) -> None:
    """The entropy of the token at the fork is that of a distribution from which nothing was drawn yet; what came
    after it may be anything else, or nothing."""
    kind = KINDS[name]
    one, another = kind.make(), kind.make()
    for moment in moments:
        *before, last = moment.entropies
        tail = other[: moment.turn % 3] if len(last) >= kind.shown else ()  # a shorter turn is history, all of it
        changed = (*last[: kind.shown], *tail)
        decision = one.decide(moment)
        assert decision == another.decide(dataclasses.replace(moment, entropies=(*before, changed)))
        assert decision is None or decision.branches == 1 or decision.shared == kind.shown - 1


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(moments=in_iterations(), draw=st.randoms(use_true_random=False))
def test_decisions_do_not_depend_on_the_order_of_the_calls_within_an_iteration(
    name: str, moments: list[ForkMoment], draw: Any
) -> None:
    shuffled = sorted(draw.sample(moments, len(moments)), key=lambda moment: moment.iteration)
    one, another = KINDS[name].make(), KINDS[name].make()
    decisions = [(moment, one.decide(moment)) for moment in moments]
    again = [(moment, another.decide(moment)) for moment in shuffled]
    assert sorted(map(repr, decisions)) == sorted(map(repr, again))
    assert one.state() == another.state()


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(moments=in_iterations(least=3))
def test_a_restored_brancher_goes_on_as_the_one_whose_state_it_was_given(name: str, moments: list[ForkMoment]) -> None:
    """After each iteration, as a checkpoint does, through JSON."""
    calm, again = KINDS[name].make(), KINDS[name].make()
    for iteration in range(3):
        for moment in (moment for moment in moments if moment.iteration == iteration):
            assert again.decide(moment) == calm.decide(moment)
        state = json.loads(json.dumps(calm.state(), allow_nan=False))
        assert json.loads(json.dumps(again.state())) == state
        again = KINDS[name].make()
        again.restore(state)
