"""The task stream: seeded epochs, GRESO's skips, and a place that can be gone back to."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from turntree.core import seeds
from turntree.decide.filters.greso import Greso, GresoConfig
from turntree.rollout.prompts import TaskStream
from turntree_worlds.household.environment import HouseholdEnvironment
from turntree_worlds.household.generate import generate_game

TASKS = [HouseholdEnvironment(generate_game(seed).parse()) for seed in range(6)]
NEVER = GresoConfig(easy_exploration=0.05, hard_exploration=0.05, keep_at_least=0.0)


def names(stream: TaskStream, count: int, iteration: int = 1) -> list[str]:
    return [task.task_id for task in stream.draw(count, iteration)[0]]


def hopeless(tasks: list[HouseholdEnvironment]) -> Greso:
    """A history in which these tasks failed altogether, so often that they are all but never played again."""
    greso = Greso(NEVER)
    for task in tasks:
        for _ in range(40):
            greso.record(task.task_id, [0.0, 0.0])
    return greso


def test_an_epoch_plays_every_task_once_and_the_next_in_another_order() -> None:
    stream = TaskStream(TASKS, seed=3)
    first, second = names(stream, 6), names(stream, 6)
    assert set(first) == set(second) == {task.task_id for task in TASKS}
    assert first != second
    assert names(TaskStream(TASKS, seed=3), 6) == first != names(TaskStream(TASKS, seed=4), 6)


@pytest.mark.parametrize("drawn", [1, 4, 6, 9])
def test_a_restored_stream_goes_on_where_it_stood(drawn: int) -> None:
    stream, other = TaskStream(TASKS, 3, [Greso()]), TaskStream(TASKS, 3, [Greso()])
    names(stream, drawn)
    other.restore(stream.state())
    assert names(stream, 7) == names(other, 7)


def test_a_restored_stream_skips_what_the_first_would_have_skipped() -> None:
    stream, other = TaskStream(TASKS, 3, [hopeless(TASKS[:4])]), TaskStream(TASKS, 3, [hopeless(TASKS[:4])])
    other.restore(json.loads(json.dumps(stream.state())))
    assert other.draw(6, 1) == stream.draw(6, 1)
    assert other.draw(6, 1)[1], "something was skipped"


def test_the_order_is_the_one_that_earlier_versions_drew() -> None:
    expected = []
    for epoch in range(2):
        order = list(range(6))
        seeds.generator(3, "task epoch", epoch).shuffle(order)
        expected += [TASKS[index].task_id for index in order]
    assert names(TaskStream(TASKS, 3), 12) == expected


def test_a_skip_is_drawn_anew_in_every_iteration() -> None:
    """A task that was skipped once is not skipped for good."""
    even = Greso(GresoConfig(hard_exploration=0.5, keep_at_least=0.0))
    for task in TASKS:
        even.record(task.task_id, [0.0, 0.0])
    skips = {str(TaskStream(TASKS, 3, [even]).draw(1, iteration)[1]) for iteration in range(20)}
    assert len(skips) > 1


def test_predicted_tasks_are_skipped_and_counted_and_the_others_fill_their_places() -> None:
    stream = TaskStream(TASKS, 3, [hopeless(TASKS[:4])])
    drawn, skipped = stream.draw(6, 1)
    assert Counter(task.task_id for task in drawn) == {TASKS[4].task_id: 3, TASKS[5].task_id: 3}
    assert set(skipped) == {(task.task_id, "predicted all_fail") for task in TASKS[:4]}
    assert len(skipped) >= 8  # two whole epochs' worth of four tasks, and what came before the last


def test_an_iteration_has_something_to_play_when_everything_is_predicted() -> None:
    drawn, skipped = TaskStream(TASKS, 3, [hopeless(TASKS)]).draw(2, 1)
    assert len(drawn) == 2
    assert len(skipped) == 2 * len(TASKS)
