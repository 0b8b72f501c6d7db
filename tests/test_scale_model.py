"""The simulated run on workers: its times are those that can be computed by hand, and nothing is lost or made up."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from scale_events import REFILL, Cluster, Costs, Engine, Group, Rollout, Run, Turn, figures
from scale_model import MODES, Workload, branched, drawn, gated

FREE = Costs(engine=Engine(step=0.0), trained=0.0)


def group(*rollouts: Sequence[Turn], prompt: float = 0.0) -> Group:
    return Group(prompt=prompt, rollouts=[Rollout(turns=turns) for turns in rollouts])


def step_seconds(costs: Costs, cluster: Cluster, groups: list[Group], steps: int = 6) -> float:
    """Between two updates, when the run has settled."""
    ended = [step.ended for step in Run(costs, cluster, lambda _: groups, steps).steps]
    return ended[steps - 1 - cluster.staleness] - ended[steps - 2 - cluster.staleness]


@pytest.mark.parametrize("count", [1, 3, 8])
def test_sequences_share_a_replica_and_each_makes_a_step_longer(count: int) -> None:
    engine = Engine(step=0.5, sequence=0.25, prefill=0.1)
    run = Run(Costs(engine=engine, trained=0.0), Cluster(replicas=1), lambda _: [group(*[[(0, 10, 0.0)]] * count)], 1)
    assert run.steps[0].ended == pytest.approx(10 * (0.5 + 0.25 * count))
    assert run.replicas[0].worked() == pytest.approx(run.steps[0].ended) and run.replicas[0].sampled == 10 * count


def test_a_prompt_stops_the_others_and_long_contexts_make_steps_longer() -> None:
    engine = Engine(step=1.0, context=0.01, prefill=0.1)
    run = Run(Costs(engine=engine, trained=0.0), Cluster(replicas=1), lambda _: [group([(0, 4, 0.0)], prompt=100)], 1)
    assert run.steps[0].ended == pytest.approx(100 * 0.1 + 4 * (1.0 + 0.01 * (100 + 2)))


def test_one_worker_with_inline_tools_takes_the_sum_and_others_overlap_their_tools() -> None:
    groups = [group([(0, 2, 1.0), (0, 2, 3.0)], [(0, 2, 2.0)]), group([(0, 2, 4.0)])]
    costs = replace(FREE, engine=Engine(step=0.5), update=7.0, unit=0.25, inline_tools=True)
    engine = 0.5 * (2 + 2 + 2)  # the first turns of a group decode together, the third turn alone
    assert step_seconds(costs, Cluster(replicas=1), groups) == pytest.approx(10.0 + engine + 2 * 0.25 + 7.0)
    overlapped = replace(costs, inline_tools=False)
    longest = max(1.0 + 1.0 + 1.0 + 3.0, 1.0 + 4.0) + 0.25  # on two workers
    assert step_seconds(overlapped, Cluster(replicas=2), groups) == pytest.approx(longest + 7.0)


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_rollouts_that_are_played_ahead_hide_the_shorter_of_sampling_and_training(staleness: int) -> None:
    groups = [group([(0, 0, 3.0)])] * 4
    for update in (2.0, 20.0):
        costs = replace(FREE, update=update)
        assert step_seconds(costs, Cluster(replicas=2), groups, 12) == pytest.approx(6.0 + update)
        ahead = Cluster(replicas=2, staleness=staleness)
        assert step_seconds(costs, ahead, groups, 12) == pytest.approx(max(6.0, update))


def test_new_weights_stop_a_replica_once_an_update() -> None:
    costs = replace(FREE, update=1.0, sync=5.0, engine=Engine(step=1.0))
    run = Run(costs, Cluster(replicas=1, workers=2), lambda _: [group([(0, 2, 0.0)])] * 4, 4)
    assert [step.ended - step.begun - 1.0 for step in run.steps] == pytest.approx([4.0, 9.0, 9.0, 9.0])


def test_an_update_takes_as_long_as_its_fullest_rank_and_cut_trees_compute_paths_again() -> None:
    groups = [group([(0, 60, 0.0)]), group([(0, 30, 0.0)]), group([(0, 30, 0.0)])]
    costs = replace(FREE, trained=0.1, scored=0.05)
    first = Run(costs, Cluster(replicas=3, trainers=2), lambda _: groups, 1).steps[0]
    assert (first.update, first.balance) == (pytest.approx(6.0), pytest.approx(1.0))
    four = Run(costs, Cluster(replicas=3, trainers=4), lambda _: groups, 1).steps[0]
    assert (four.update, four.balance) == (pytest.approx(6.0), pytest.approx(0.5))
    stale = Run(costs, Cluster(replicas=3, trainers=2, staleness=1), lambda _: groups, 2).steps[0]
    assert stale.update == pytest.approx(9.0)
    cut = Run(costs, Cluster(replicas=3, trainers=4, max_tokens=40), lambda _: groups, 1).steps[0]
    assert cut.tokens == pytest.approx(120 + 30) and cut.update == pytest.approx(4.5)


def test_a_branch_begins_at_its_fork_and_a_refill_after_all_others() -> None:
    turns = [(0, 0, 1.0), (0, 0, 1.0), (0, 0, 1.0)]
    starts = [Rollout(turns=turns), Rollout(turns=turns[:1])]
    branch = Rollout(turns=[(0, 0, 5.0)], parent=0, fork=2)
    refill = Rollout(turns=turns[:2], parent=REFILL)
    run = Run(FREE, Cluster(replicas=1), lambda _: [Group(prompt=0, rollouts=[*starts, branch, refill])], 1)
    assert run.steps[0].rollouts == pytest.approx([1.0, 3.0, 1.0 + 5.0, 6.0 + 2.0])


WORKLOAD = Workload(tasks=[[[(0, 5), (3, 4), (2, 6)], [(0, 7)]], [[(0, 3)] * 14]], prompt=20, tool_seconds=0.5)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(MODES), st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.integers(0, 9))
def test_every_rollout_ends_once_and_every_token_is_sampled_once(
    mode: str, replicas: int, workers: int, staleness: int, seed: int
) -> None:
    draw = drawn(WORKLOAD, mode, 1 + seed % 5, seed)  # pyright: ignore[reportArgumentType]
    costs = Costs(engine=Engine(step=0.1, sequence=0.01, prefill=0.001), trained=1e-3, sync=0.3, unit=0.1)
    run = Run(costs, Cluster(replicas=replicas, workers=workers, staleness=staleness), draw, 4 + staleness)
    played = [draw(number) for number in range(4 + staleness)]
    assert [len(step.rollouts) for step in run.steps] == [sum(len(g.rollouts) for g in groups) for groups in played]
    sampled = sum(turn[1] for groups in played for g in groups for one in g.rollouts for turn in one.turns)
    assert sum(one.sampled for one in run.replicas) == pytest.approx(sampled)
    assert [step.tokens for step in run.steps] == pytest.approx(
        [sum(g.tokens for g in gs if g.trained) for gs in played]
    )
    shares = {name: value for name, value in figures(run).items() if name != "seconds"}
    assert all(-1e-9 <= value <= 1 + 1e-9 for value in shares.values()), shares


def test_a_gate_and_branches_take_away_turns_and_nothing_else() -> None:
    draw = random.Random(0)
    plain = [WORKLOAD.group(draw) for _ in range(200)]
    cut = [gated(one, draw, turn=10, share=0.5) for one in plain]
    assert {one.trained for one in cut} == {True, False}
    assert all(max(len(r.turns) for r in one.rollouts) == 10 for one in cut if not one.trained)
    forked = [branched(one, draw) for one in plain]
    assert all(len(one.rollouts) == len(other.rollouts) for one, other in zip(forked, plain, strict=True))
    assert sum(one.tokens for one in forked) < sum(one.tokens for one in plain)
    kinds = [r.parent for one in forked for r in one.rollouts]
    assert None in kinds and REFILL in kinds and 0 in kinds
