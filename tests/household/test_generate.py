"""Generated games: deterministic, solvable, graded, and in the format of the official files."""

from __future__ import annotations

import random
import re
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from household_players import explore, generate_games
from turntree.core.errors import InputError
from turntree_worlds.household.catalogue import OBJECT_KINDS, ROOMS
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.generate import (
    EASY,
    HARD,
    MEDIUM,
    TASK_TYPES,
    Difficulty,
    generate_game,
)

# Official wordings by task type, with X and Y for the two names that change.
OFFICIAL_SENTENCES = {
    "pick_and_place_simple": {"put a X in Y.", "put some X on Y."},
    "look_at_obj_in_light": {"look at X under the Y.", "examine the X with the Y."},
    "pick_clean_then_place_in_recep": {"put a clean X in Y.", "clean some X and put it in Y."},
    "pick_heat_then_place_in_recep": {"put a hot X in Y.", "heat some X and put it in Y."},
    "pick_cool_then_place_in_recep": {"put a cool X in Y.", "cool some X and put it in Y."},
    "pick_two_obj_and_place": {"put two X in Y.", "find two X and put them in Y."},
}


def test_the_same_seed_gives_the_same_game_and_another_seed_another() -> None:
    assert generate_game(3) == generate_game(3)
    assert generate_game(3, difficulty=HARD) == generate_game(3, difficulty=HARD)
    assert len({game.facts for game in generate_games(0, 60)}) == 60
    assert len({game.id for game in generate_games(0, 60)}) == 60


def test_a_game_depends_on_its_seed_and_not_on_the_range_it_was_asked_in() -> None:
    assert list(generate_games(0, 20))[10:] == list(generate_games(10, 10))
    only_heat = list(generate_games(0, 4, task_types=["pick_heat_then_place_in_recep"]))
    assert only_heat[3] == generate_game(3, task_type="pick_heat_then_place_in_recep")


@pytest.mark.parametrize("difficulty", [EASY, MEDIUM, HARD], ids=lambda d: d.name)
def test_sizes_are_within_the_difficulty(difficulty: Difficulty) -> None:
    for generated in generate_games(0, 90, difficulty=difficulty):
        game = generated.parse()
        assert difficulty.receptacles[0] <= len(game.receptacles) <= difficulty.receptacles[1]
        portable = [t for t in game.things.values() if "pickupable" in t.abilities]
        assert difficulty.objects[0] <= len(portable) <= difficulty.objects[1]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9), difficulty=st.sampled_from([EASY, MEDIUM, HARD]))
def test_every_game_is_unsolved_at_the_start_and_has_what_its_goal_needs(seed: int, difficulty: Difficulty) -> None:
    game = generate_game(seed, difficulty=difficulty).parse()
    state = game.reset()
    assert not state.won
    goal = game.goal
    targets = [t for t in game.things.values() if t.kind == goal.object_kind]
    assert len(targets) >= goal.count
    if goal.lamp_kind:
        assert any(t.kind == goal.lamp_kind and "toggleable" in t.abilities for t in game.things.values())
        return
    destinations = [r for r in game.receptacles.values() if r.kind == goal.receptacle_kind]
    assert destinations and all(game.accepts(r.name, t.name) for r in destinations for t in targets)
    if goal.trait:
        appliance = {"clean": "sinkbasin", "hot": "microwave", "cool": "fridge"}[goal.trait]
        assert appliance in {r.kind for r in game.receptacles.values()}


def test_sentences_are_the_official_ones_and_all_of_them_occur() -> None:
    seen: dict[str, set[str]] = {task_type: set() for task_type in TASK_TYPES}
    for generated in generate_games(0, 240):
        game = generated.parse()
        place = game.goal.receptacle_kind or game.goal.lamp_kind or ""
        words = re.sub(rf"\b{game.goal.object_kind}\b", "X", game.task)
        seen[generated.task_type].add(re.sub(rf"\b{place}\b", "Y", words))
    assert seen == OFFICIAL_SENTENCES


def test_all_rooms_and_most_of_the_catalogue_occur() -> None:
    games = list(generate_games(0, 600, difficulty=MEDIUM))
    assert {game.id.split("/")[1].rsplit("-", 1)[1] for game in games} == set(ROOMS)
    kinds = {t.kind for game in games for t in game.parse().things.values()}
    assert {kind.lower() for kind in OBJECT_KINDS} <= kinds
    places = {r.kind for game in games for r in game.parse().receptacles.values()}
    assert places == {kind.lower() for room in ROOMS.values() for kind in room.receptacles}


def test_names_count_every_kind_from_one() -> None:
    for generated in generate_games(0, 30, difficulty=HARD):
        game = generated.parse()
        for names in (game.receptacles, game.things):
            by_kind: dict[str, list[int]] = {}
            for name in names:
                kind, number = name.rsplit(" ", 1)
                by_kind.setdefault(kind, []).append(int(number))
            assert all(sorted(numbers) == list(range(1, len(numbers) + 1)) for numbers in by_kind.values())


def _mean_lengths(difficulty: Difficulty, n: int = 180) -> tuple[float, float]:
    """Mean commands of the shortest play and of a player who explores."""
    shortest, explored = [], []
    for i, generated in enumerate(generate_games(0, n, difficulty=difficulty)):
        state = generated.parse().reset()
        shortest.append(len(shortest_plan(state) or ()))
        explored.append(sum(1 for command in explore(state, random.Random(i)) if state.step(command).valid))
        assert state.won
    return statistics.mean(shortest), statistics.mean(explored)


def test_difficulty_grades_the_search_and_every_game_is_won_by_exploring() -> None:
    easy, medium, hard = (_mean_lengths(difficulty) for difficulty in (EASY, MEDIUM, HARD))
    assert 8 < easy[1] < 11.5 < medium[1] < 16 < 20 < hard[1] < 32
    # The shortest play is as long as the official ones (5.9) at every level: the task fixes its errands, and only
    # what a player has to search grows.
    assert all(5.5 < shortest < 6.6 for shortest, _ in (easy, medium, hard))


def test_impossible_requests_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"unknown task type 'fly'; use one of pick_and_place_simple"):
        generate_game(0, task_type="fly")
