"""`distance` is the length of a shortest winning play: checked against every reachable state of small games."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from household_players import generate_games
from turntree_worlds.household.distance import distance, shortest_plan
from turntree_worlds.household.games import playable_games
from turntree_worlds.household.generate import (
    EASY,
    HARD,
    MEDIUM,
    TASK_TYPES,
    Difficulty,
    generate_game,
)
from turntree_worlds.household.world import Game, State

TINY = Difficulty("tiny", (4, 5), (2, 3), closed_fraction=0.5, extra_target=0.4, shared_location=0.4)
MOST_STATES = 2500


def brute_force(start: State) -> list[tuple[State, int | None]] | None:
    """Every reachable state with its distance to a win, by breadth-first search backwards over `admissible()` and
    `key()`; None for a game of more than MOST_STATES states."""
    states: dict[Hashable, State] = {start.key(): start}
    before: defaultdict[Hashable, list[Hashable]] = defaultdict(list)
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for command in state.admissible():
            after = state.fork()
            if not after.step(command).changed:
                continue
            before[after.key()].append(state.key())
            if after.key() not in states:
                if len(states) == MOST_STATES:
                    return None
                states[after.key()] = after
                queue.append(after)
    far = {key: 0 for key, state in states.items() if state.won}
    backwards = deque(far)
    while backwards:
        key = backwards.popleft()
        for earlier in before[key]:
            if earlier not in far:
                far[earlier] = far[key] + 1
                backwards.append(earlier)
    return [(state, far.get(key)) for key, state in states.items()]


def plays(state: State, plan: list[str] | None) -> bool:
    """Whether the plan wins, at its last command and not before."""
    state = state.fork()
    wins = [state.won, *(state.step(command).won for command in plan or ())]
    return wins == [False] * (len(wins) - 1) + [True]


@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 10**6), task_type=st.sampled_from(TASK_TYPES))
def test_distance_equals_breadth_first_search_from_every_reachable_state(seed: int, task_type: str) -> None:
    found = brute_force(generate_game(seed, task_type=task_type, difficulty=TINY).parse().reset())
    assume(found is not None)
    for state, expected in found or ():
        assert distance(state) == expected
        assert expected is None or (len(shortest_plan(state) or ()) == expected and plays(state, shortest_plan(state)))


def disturb(game: Game, rng: random.Random) -> Game:
    """The same game with what official files also have: objects that lie in two receptacles at once, objects that
    some receptacle (or every one) refuses, objects already treated, and here doors that no longer exist."""
    portable = [thing.name for thing in game.things.values() if "pickupable" in thing.abilities]
    receptacles = dict(game.receptacles)
    for name in rng.choices(list(receptacles), k=rng.randint(0, 2)):
        contents = {*receptacles[name].contents, rng.choice(portable)}
        ordered = tuple(sorted(contents, key=game.order.__getitem__))
        receptacles[name] = replace(receptacles[name], contents=ordered, openable=rng.random() < 0.5)
    can_contain = {
        kind: frozenset(held for held in kinds if rng.random() < 0.85) for kind, kinds in game.can_contain.items()
    }
    traits = frozenset((rng.choice(("hot", "cool", "clean")), name) for name in portable if rng.random() < 0.2)
    return replace(game, receptacles=receptacles, can_contain=can_contain, traits=traits)


@settings(max_examples=16, deadline=None)
@given(seed=st.integers(0, 10**6), task_type=st.sampled_from(TASK_TYPES))
def test_distance_equals_breadth_first_search_on_disturbed_games(seed: int, task_type: str) -> None:
    game = generate_game(seed, task_type=task_type, difficulty=TINY).parse()
    found = brute_force(disturb(game, random.Random(seed)).reset())
    assume(found is not None)
    for state, expected in found or ():
        assert distance(state) == expected


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), difficulty=st.sampled_from([EASY, MEDIUM, HARD]))
def test_one_command_changes_the_distance_by_at_most_one_forwards(seed: int, difficulty: Difficulty) -> None:
    rng = random.Random(seed)
    state = generate_game(seed, difficulty=difficulty).parse().reset()
    for _ in range(25):
        before = distance(state)
        result = state.step(rng.choice(state.admissible()))
        after = distance(state)
        assert before is not None  # generated games have no dead ends: everything can be put down somewhere
        assert after is not None and after >= before - 1
        assert (after == 0) == result.won == state.won
        assert result.changed or after == before


def test_every_command_of_a_shortest_plan_brings_the_goal_nearer_by_one() -> None:
    for generated in generate_games(0, 60, difficulty=HARD):
        state = generated.parse().reset()
        plan = shortest_plan(state)
        assert plan is not None and distance(state) == len(plan)
        for i, command in enumerate(plan):
            assert distance(state) == len(plan) - i
            assert state.step(command).changed
        assert state.won and distance(state) == 0 and shortest_plan(state) == []


def test_a_goal_out_of_reach_has_no_distance() -> None:
    game = generate_game(0, task_type="pick_and_place_simple").parse()
    stuck = replace(game, can_contain={}).reset()
    assert distance(stuck) is None
    assert shortest_plan(stuck) is None


@pytest.mark.parametrize(("split", "games"), [("valid_seen", 140), ("valid_unseen", 134)])
def test_distance_equals_the_planner_walkthroughs_of_the_official_games(
    shared_data: Path, split: str, games: int
) -> None:
    records = list(playable_games(shared_data / "alfworld" / f"{split}.jsonl.xz"))
    assert len(records) == games
    assert [distance(each.game().reset()) for each in records] == [len(each.fields["walkthrough"]) for each in records]
