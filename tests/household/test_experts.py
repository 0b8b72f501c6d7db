"""The experts: no play is shorter than the plan; the explorer wins everywhere and never reads what it was not shown."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from household_players import explore, games_in, noisy_explore
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.experts import (
    UnreachableGoal,
    next_exploring_action,
)
from turntree_worlds.household.generate import EASY, HARD, MEDIUM, Difficulty, generate_game
from turntree_worlds.household.world import Game, State

TINY = Difficulty("tiny", (6, 6), (5, 5), closed_fraction=0.5, shared_location=0.2)
DOING = {"go", "open", "take", "move", "clean", "heat", "cool", "use"}


def play(state: State, commands: Iterator[str], most: int) -> int:
    """Steps `state` with each command as it is drawn; the number of commands."""
    played = 0
    for command in islice(commands, most):
        assert state.step(command).valid, (state.game.id, command)
        played += 1
    return played


def wander(state: State, rng: random.Random, steps: int) -> State:
    for _ in range(steps):
        state.step(rng.choice(state.admissible()))
    return state


def least_commands(state: State, at_most: int) -> int | None:
    """Breadth-first search over every admissible command: the oracle that knows nothing about household games."""
    queue, seen = deque([(0, state)]), {state.key()}
    while queue:
        depth, here = queue.popleft()
        if here.won:
            return depth
        for command in here.admissible() if depth < at_most else ():
            after = here.fork()
            if after.step(command).changed and after.key() not in seen:
                seen.add(after.key())
                queue.append((depth + 1, after))
    return None


def lower_bound(state: State) -> int:
    """Commands that no winning play can do without, whatever the places: a take and a move or treatment each."""
    goal = state.game.goal
    if state.won:
        return 0
    holding = state.held in state.game.goal_objects
    if goal.receptacle_kind is None:
        dark = not any(state.has("on", lamp) for lamp in state.game.lamps)
        return max(1, (not holding) + dark)
    done = max(sum(map(state.counts, state.contents(name))) for name in state.game.goal_receptacles)
    return 2 * (goal.count - done) - holding


def shorter_exists(state: State, than: int) -> bool:
    """Exhaustive A* for a win in fewer than `than` commands, over all commands that act on goal objects or places."""
    ties = count()
    seen, heap = {state.key(): 0}, [(lower_bound(state), next(ties), 0, state)]
    while heap:
        _, _, depth, here = heapq.heappop(heap)
        if here.won:
            return True
        for command in here.admissible() if seen[here.key()] == depth else ():
            verb, _, rest = command.partition(" ")
            if verb not in DOING or (verb == "take" and rest.split(" from ")[0] not in here.game.goal_objects):
                continue
            after = here.fork()
            after.step(command)
            bound = depth + 1 + lower_bound(after)
            if bound < than and depth + 1 < seen.get(after.key(), than):
                seen[after.key()] = depth + 1
                heapq.heappush(heap, (bound, next(ties), depth + 1, after))
    return False


def assert_wins(state: State, plan: list[str]) -> None:
    for command in plan:
        assert not state.won
        assert state.step(command).changed, (state.game.id, command)
    assert state.won


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_on_small_games_the_plan_is_as_short_as_breadth_first_search_over_everything(seed: int) -> None:
    state = wander(generate_game(seed, difficulty=TINY).parse().reset(), random.Random(seed), seed % 5)
    # Near the goal the full search is affordable; the first steps of a plan are covered by the next test.
    for command in (shortest_plan(state) or [])[:-4]:
        state.step(command)
    plan = shortest_plan(state)
    assert least_commands(state, len(plan)) == len(plan)
    assert_wins(state, plan)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_on_generated_games_no_play_is_shorter_than_the_plan(seed: int) -> None:
    state = wander(generate_game(seed, difficulty=EASY).parse().reset(), random.Random(seed), seed % 12)
    plan = shortest_plan(state)
    if plan is None:
        return
    assert not shorter_exists(state, len(plan))
    assert_wins(state, plan)


def test_on_official_games_no_play_is_shorter_than_the_plan(shared_data: Path) -> None:
    games = list(games_in(shared_data / "alfworld" / "valid_seen.jsonl.xz"))
    rng = random.Random(0)
    for game in rng.sample(games, 8):
        state = wander(game.reset(), rng, rng.randrange(10))
        plan = shortest_plan(state)
        assert not shorter_exists(state, len(plan)), game.id
        assert_wins(state, plan)


def test_a_won_game_needs_no_commands() -> None:
    state = generate_game(1).parse().reset()
    assert_wins(state, shortest_plan(state))
    assert shortest_plan(state) == list(explore(state)) == []
    with pytest.raises(ValueError, match="is won"):
        next_exploring_action(state)


@pytest.mark.parametrize("difficulty", [EASY, MEDIUM, HARD], ids=lambda level: level.name)
@pytest.mark.parametrize("ordered", [True, False], ids=["listed order", "random order"])
def test_the_explorer_wins_generated_games(difficulty: Difficulty, ordered: bool) -> None:
    for seed in range(60):
        state = generate_game(seed, difficulty=difficulty).parse().reset()
        # Each receptacle costs at most a walk and a door; targets, appliance and destination some more.
        most = 2 * len(state.game.receptacles) + 14
        play(state, explore(state, None if ordered else random.Random(seed)), most)
        assert state.won, state.game.id


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 40), st.floats(0, 0.6))
def test_the_explorers_win_from_wherever_they_are_put(seed: int, steps: int, epsilon: float) -> None:
    rng = random.Random(seed)
    state = generate_game(seed, difficulty=MEDIUM).parse().reset()
    play(state, noisy_explore(state, rng, 1.0), steps)
    twin = state.fork()
    play(state, explore(state, rng), 2 * len(state.game.receptacles) + 20)
    assert state.won
    play(twin, noisy_explore(twin, rng, epsilon), 1000)
    assert twin.won


def with_other_secrets(state: State, rng: random.Random) -> State:
    """The same to the player: what lies in receptacles whose contents were never displayed is dealt anew."""
    twin = state.fork()
    unseen = [name for name in state.game.receptacles if name not in state.searched]
    things = [thing for name in unseen for thing in state.contents(name)]
    dealt: dict[str, list[str]] = {name: [] for name in unseen}
    for thing in things:
        dealt[rng.choice(unseen)].append(thing)
    twin._contents.update({name: tuple(sorted(things)) for name, things in dealt.items()})
    return twin


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_the_explorer_never_uses_what_it_was_not_shown(seed: int) -> None:
    rng = random.Random(seed)
    state = generate_game(seed, difficulty=MEDIUM).parse().reset()
    for command in noisy_explore(state, rng, 0.3):
        twin = with_other_secrets(state, rng)
        if not twin.won:
            assert next_exploring_action(state) == next_exploring_action(twin)
            asked = rng.random()
            same = [next_exploring_action(s, random.Random(asked)) for s in (state, twin)]
            assert same[0] == same[1]
        state.step(command)


def official_games(shared_data: Path, split: str) -> list[Game]:
    return list(games_in(shared_data / "alfworld" / f"{split}.jsonl.xz"))


@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen", "valid_train"])
def test_the_explorers_win_every_official_game(shared_data: Path, split: str) -> None:
    lengths: list[int] = []
    for game in official_games(shared_data, split):
        for rng in (None, random.Random(7)):
            state = game.reset()
            lengths.append(play(state, explore(state, rng), 2 * len(game.receptacles) + 14))
            assert state.won, game.id
        noisy = game.reset()
        play(noisy, noisy_explore(noisy, random.Random(7), 0.2), 400)
        assert noisy.won, game.id
    assert sum(lengths) / len(lengths) < 25


def test_an_object_that_no_receptacle_takes_is_a_dead_end(shared_data: Path) -> None:
    """Official bathrooms hold such things (a plunger): once in hand they can never be put down."""
    traps = 0
    for game in official_games(shared_data, "valid_seen"):
        for receptacle in game.receptacles.values():
            for thing in receptacle.contents:
                command = f"take {thing} from {receptacle.name}"
                if any(game.accepts(name, thing) for name in game.receptacles):
                    continue
                state = game.reset()
                state.step(f"go to {receptacle.name}"), state.step(f"open {receptacle.name}")
                if state.step(command).valid:
                    traps += 1
                    assert shortest_plan(state) is None
                    with pytest.raises(UnreachableGoal, match=f"no receptacle takes the {thing}"):
                        next_exploring_action(state)
    assert traps == 38


def test_noise_never_picks_up_what_cannot_be_put_down(shared_data: Path) -> None:
    bathrooms = [game for game in official_games(shared_data, "valid_seen") if "toilet 1" in game.receptacles]
    for game in bathrooms:
        state = game.reset()
        for command in islice(noisy_explore(state, random.Random(3), 1.0), 200):
            state.step(command)
            held = state.held
            assert held is None or any(game.accepts(name, held) for name in game.receptacles), game.id
    assert len(bathrooms) > 20
