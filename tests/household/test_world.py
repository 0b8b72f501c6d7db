"""The engine: ALFWorld's rules and wording, exactly; forks that never leak; keys that mean the same future."""

from __future__ import annotations

import json
import lzma
import random
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree_worlds.household.games import playable_games
from turntree_worlds.household.generate import HARD, generate_game
from turntree_worlds.household.parse import parse_game
from turntree_worlds.household.world import Game, State

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
GRAMMAR = """grammar :: \"\"\"{"task": [{"rhs": "Your task is to: put a clean mug in drawer."}]}\"\"\";
action PutObject { template :: "move {o} to {r}"; }
action help { template :: "help"; feedback :: "
Available commands: ...
"; }"""
PROBLEM = """(define (problem p) (:domain alfred) (:objects agent1 - agent) (:init
 (atLocation agent1 loc_bar_0)
 (receptacleType Desk_bar_1 DeskType) (receptacleAtLocation Desk_bar_1 loc_bar_1)
 (receptacleType Drawer_bar_1 DrawerType) (receptacleAtLocation Drawer_bar_1 loc_bar_1) (openable Drawer_bar_1)
 (receptacleType Drawer_bar_2 DrawerType) (receptacleAtLocation Drawer_bar_2 loc_bar_2) (openable Drawer_bar_2)
 (receptacleType Sink_bar_1_bar_SinkBasin SinkBasinType) (receptacleAtLocation Sink_bar_1_bar_SinkBasin loc_bar_3)
 (receptacleType Microwave_bar_1 MicrowaveType) (receptacleAtLocation Microwave_bar_1 loc_bar_4)
 (openable Microwave_bar_1) (receptacleType Fridge_bar_1 FridgeType) (receptacleAtLocation Fridge_bar_1 loc_bar_5)
 (openable Fridge_bar_1)
 (objectType Mug_bar_1 MugType) (pickupable Mug_bar_1) (cleanable Mug_bar_1) (heatable Mug_bar_1)
 (coolable Mug_bar_1) (isReceptacleObject Mug_bar_1)
 (objectType Mug_bar_2 MugType) (pickupable Mug_bar_2) (cleanable Mug_bar_2)
 (objectType Apple_bar_1 AppleType) (pickupable Apple_bar_1) (cleanable Apple_bar_1) (heatable Apple_bar_1)
 (coolable Apple_bar_1) (sliceable Apple_bar_1) (isCool Apple_bar_1)
 (objectType Knife_bar_1 KnifeType) (pickupable Knife_bar_1)
 (objectType DeskLamp_bar_1 DeskLampType) (toggleable DeskLamp_bar_1)
 (objectType Pen_bar_1 PenType) (inReceptacleObject Pen_bar_1 Mug_bar_1)
 (objectType Window_bar_1 WindowType) (objectAtLocation Window_bar_1 loc_bar_1)
 (canContain DeskType MugType) (canContain DrawerType MugType) (canContain DeskType AppleType)
 (canContain SinkBasinType AppleType) (canContain DeskType KnifeType) (canContain DrawerType KnifeType)
 (inReceptacle Mug_bar_1 Desk_bar_1) (objectAtLocation Mug_bar_1 loc_bar_1)
 (inReceptacle Mug_bar_2 Drawer_bar_2) (objectAtLocation Mug_bar_2 loc_bar_2)
 (inReceptacle Apple_bar_1 Desk_bar_1) (objectAtLocation Apple_bar_1 loc_bar_1)
 (inReceptacle Knife_bar_1 Drawer_bar_1) (objectAtLocation Knife_bar_1 loc_bar_1)
 (inReceptacle DeskLamp_bar_1 Desk_bar_1) (objectAtLocation DeskLamp_bar_1 loc_bar_1)
) (:goal (and (exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o) (objectType ?o MugType)
 (receptacleType ?r DrawerType) (isClean ?o) (inReceptacle ?o ?r)))))))"""


@cache
def kitchen() -> Game:
    return parse_game(PROBLEM, GRAMMAR, id="kitchen", task_type="pick_clean_then_place_in_recep")


def play(state: State, *commands: str) -> list[str]:
    return [state.step(command).observation for command in commands]


def test_the_introduction_lists_every_receptacle_with_numbers_counting_down() -> None:
    assert kitchen().intro == (
        "You are in the middle of a room. Looking quickly around you, you see a desk 1, a drawer 2, a drawer 1, "
        "a fridge 1, a microwave 1, and a sinkbasin 1.\n\nYour task is to: put a clean mug in drawer."
    )


def test_a_whole_game_reads_as_alfworld_writes_it() -> None:
    state = kitchen().reset()
    commands = [
        "look",
        "go to drawer 1",
        "open drawer 1",
        "close drawer 1",
        "go to desk 1",
        "take mug 2 from desk 1",
    ]
    assert play(state, *commands) == [
        "You are in the middle of a room. Looking quickly around you, you see nothing.",
        "You arrive at drawer 1. The drawer 1 is closed.",
        "You open the drawer 1. The drawer 1 is open. In it, you see a mug 1.",
        "You close the drawer 1.",
        "You arrive at desk 1. On the desk 1, you see a apple 1, a desklamp 1, and a mug 2.",
        "You pick up the mug 2 from the desk 1.",
    ]
    commands = ["inventory", "look", "go to sinkbasin 1", "clean mug 2 with sinkbasin 1", "go to drawer 2"]
    assert play(state, *commands) == [
        "You are carrying: a mug 2.",
        "You are facing the desk 1, and drawer 2. Next to it, you see nothing.",
        "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.",
        "You clean the mug 2 using the sinkbasin 1.",
        "You arrive at drawer 2. The drawer 2 is closed.",
    ]
    assert play(state, "open drawer 2") == ["You open the drawer 2. The drawer 2 is open. In it, you see a knife 1."]
    assert not state.won
    last = state.step("move mug 2 to drawer 2")
    assert (last.observation, last.valid, last.changed, last.won) == (
        "You move the mug 2 to the drawer 2.",
        True,
        True,
        True,
    )


def test_what_treatments_say_and_do() -> None:
    state = kitchen().reset()
    play(state, "go to desk 1", "take apple 1 from desk 1")
    assert play(state, "examine apple 1") == ["This is a cold apple 1."]
    assert play(state, "go to microwave 1", "heat apple 1 with microwave 1", "examine apple 1")[1:] == [
        "You heat the apple 1 using the microwave 1.",  # through a closed door, as in TextWorld
        "This is a hot apple 1.",
    ]
    assert play(state, "go to sinkbasin 1", "clean apple 1 with sinkbasin 1", "examine apple 1")[2] == (
        "This is a hot and clean apple 1."
    )
    assert play(state, "go to fridge 1", "cool apple 1 with fridge 1", "examine apple 1")[2] == (
        "This is a cool and clean apple 1."
    )
    play(state, "go to desk 1", "move apple 1 to desk 1", "open drawer 2", "take knife 1 from drawer 2")
    assert play(state, "examine knife 1", "slice apple 1 with knife 1") == [
        "There's nothing special about knife 1.",
        "You sliced the apple 1 with the knife 1.",
    ]
    play(state, "move knife 1 to desk 1", "take apple 1 from desk 1")
    assert play(state, "examine apple 1") == ["This is a cool and clean sliced apple 1."]


def test_a_lamp_only_ever_turns_on() -> None:
    state = kitchen().reset()
    play(state, "go to drawer 2")
    assert state.step("use desklamp 1").changed
    again = state.step("use desklamp 1")
    assert (again.observation, again.changed) == ("You turn on the desklamp 1.", False)


def test_a_container_shows_what_is_in_it_for_ever() -> None:
    state = kitchen().reset()
    play(state, "go to desk 1", "take mug 2 from desk 1")
    assert play(state, "examine mug 2") == ["This is a normal mug 2. In it, you see a pen 1."]


def test_what_was_taken_from_a_receptacle_lies_next_to_it_when_it_comes_back_beside_it() -> None:
    state = kitchen().reset()
    play(state, "go to desk 1", "take mug 2 from desk 1", "open drawer 2", "move mug 2 to drawer 2")
    assert play(state, "look") == ["You are facing the desk 1, and drawer 2. Next to it, you see a mug 2."]
    play(state, "take mug 2 from drawer 2", "move mug 2 to desk 1")
    # Now it was taken from the drawer, so that is what it lies next to.
    assert play(state, "look") == ["You are facing the desk 1, and drawer 2. Next to it, you see a mug 2."]


def test_help_is_the_text_of_the_game_file() -> None:
    assert play(kitchen().reset(), "help") == ["Available commands: ...\n"]


@pytest.mark.parametrize(
    "command",
    [
        "",
        "dance",
        "go to desk",
        "go to desk 2",
        "examine desk 1",
        "take mug 2 from desk 1",
        "open drawer 1",
        "go desk 1",
    ],
)
def test_what_is_not_possible_changes_nothing(command: str) -> None:
    state = kitchen().reset()
    result = state.step(command)
    assert (result.observation, result.valid, result.changed) == ("Nothing happens.", False, False)
    assert state.key() == kitchen().reset().key()


def test_there_is_no_way_to_go_where_one_stands() -> None:
    state = kitchen().reset()
    play(state, "go to desk 1")
    assert state.location == "desk 1" and state.here == ("desk 1", "drawer 2")
    assert not state.step("go to drawer 2").valid
    assert "examine drawer 2" in state.admissible()


def test_searched_is_what_was_displayed() -> None:
    state = kitchen().reset()
    play(state, "go to drawer 1")
    assert state.searched == frozenset() and state.contents_seen("drawer 1") == ()
    play(state, "open drawer 1")
    assert state.searched == {"drawer 1"} and state.contents_seen("drawer 1") == ("mug 1",)
    play(state, "go to drawer 2", "examine desk 1")
    assert state.searched == {"drawer 1", "desk 1"}


def test_admissible_commands_are_sorted_and_complete() -> None:
    state = kitchen().reset()
    away = ["go to drawer 1", "go to fridge 1", "go to microwave 1", "go to sinkbasin 1"]
    everywhere = ["help", "inventory", "look"]
    assert state.admissible() == tuple(sorted([*away, *everywhere, "go to desk 1", "go to drawer 2"]))
    play(state, "go to desk 1", "open drawer 2", "take knife 1 from drawer 2")
    here = ["close drawer 2", "examine desk 1", "examine drawer 2", "examine knife 1", "use desklamp 1"]
    here += ["move knife 1 to desk 1", "move knife 1 to drawer 2", "slice apple 1 with knife 1"]
    assert state.admissible() == tuple(sorted([*away, *everywhere, *here]))


def test_games_are_equal_and_hashed_by_id() -> None:
    other = parse_game(PROBLEM, GRAMMAR, id="another")
    twin = parse_game(PROBLEM, GRAMMAR, id="kitchen")
    assert kitchen() == twin != other and len({kitchen(), twin, other}) == 2


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("(:goal", "(:gaol", r"the PDDL problem has no \(:goal"),
        ("(:init", "(:unit", r"the PDDL problem has no \(:init"),
        ("(atLocation agent1 loc_bar_0)", "", "0 times the player's"),
        ("(atLocation agent1 loc_bar_0)", "(atLocation agent1 loc_bar_1)", "starts at a receptacle"),
        ("(receptacleAtLocation Desk_bar_1 loc_bar_1)", "", "desk_bar_1 has no"),
        ("(receptacleType Desk_bar_1 DeskType)", "", "desk_bar_1 holds mug_bar_1"),
        ("(openable Drawer_bar_2)", "(openable)", "openable takes 1"),
        ("(isClean ?o)", "(isSliced ?o)", "the goal uses 'issliced'"),
        ("(receptacleType ?r DrawerType)", "", r"0 times \(receptacleType"),
        ("(objectType ?o MugType)", "", "no .objectType"),
    ],
)
def test_a_broken_problem_is_named_in_one_line(old: str, new: str, said: str) -> None:
    assert old in PROBLEM
    with pytest.raises(InputError, match=f"game broken: .*{said}") as caught:
        parse_game(PROBLEM.replace(old, new), GRAMMAR, id="broken")
    assert "\n" not in str(caught.value)


def test_a_grammar_without_task_or_of_an_old_alfworld_is_refused() -> None:
    with pytest.raises(InputError, match=r"field 'grammar': game g: .*Your task is to"):
        parse_game(PROBLEM, GRAMMAR.replace("Your task", "The task"), id="g")
    with pytest.raises(InputError, match=r"before 0\.4; download the games anew"):
        parse_game(PROBLEM, GRAMMAR.replace("move {o} to {r}", "put {o} in/on {r}"), id="g")


# Laws, on random walks through generated games.


@cache
def generated(seed: int) -> Game:
    return generate_game(seed, difficulty=HARD).parse() if seed % 3 == 0 else generate_game(seed).parse()


def walk(state: State, rng: random.Random, steps: int) -> State:
    for _ in range(steps):
        # Doing is preferred to walking, or a walk would only visit places.
        options = state.admissible()
        doing = [command for command in options if not command.startswith(("go to", "help", "inventory"))]
        state.step(rng.choice(doing if doing and rng.random() < 0.6 else options))
    return state


WALKS = st.builds(
    lambda seed, steps, choices: (walk(generated(seed).reset(), random.Random(choices), steps), random.Random(seed)),
    st.integers(0, 30),
    st.integers(0, 60),
    st.integers(0, 10**6),
)


def snapshot(state: State) -> tuple[object, ...]:
    contents = tuple(state.contents(name) for name in state.game.receptacles)
    return (
        state.key(),
        state.searched,
        state.location,
        contents,
        state.admissible(),
        state.fork().step("look"),
    )


@settings(max_examples=150, deadline=None)
@given(WALKS)
def test_a_fork_and_its_origin_never_touch_each_other(case: tuple[State, random.Random]) -> None:
    state, rng = case
    before, twin = snapshot(state), state.fork()
    assert snapshot(twin) == before
    walk(twin, rng, 20)
    assert snapshot(state) == before
    after = snapshot(twin)
    walk(state, rng, 20)
    assert snapshot(twin) == after


@settings(max_examples=150, deadline=None)
@given(WALKS)
def test_admissible_is_exactly_what_step_accepts_and_changed_is_a_new_key(
    case: tuple[State, random.Random],
) -> None:
    state, rng = case
    names = [*state.game.receptacles, *state.game.things]
    verbs = ["open {}", "close {}", "go to {}", "use {}", "examine {}", "take {} from {}", "move {} to {}"]
    verbs += [f"{verb} {{}} with {{}}" for verb in ("clean", "heat", "cool", "slice")]
    made = [rng.choice(verbs).format(rng.choice(names), rng.choice(names)) for _ in range(200)]
    admissible = set(state.admissible())
    for command in [*admissible, *made]:
        twin = state.fork()
        result = twin.step(command)
        assert result.valid == (command in admissible), command
        assert result.changed == (twin.key() != state.key())
        assert result.won == twin.won
        assert result.valid or (result.observation == "Nothing happens." and snapshot(twin) == snapshot(state))


@settings(max_examples=150, deadline=None)
@given(WALKS)
def test_looking_around_never_changes_the_key(case: tuple[State, random.Random]) -> None:
    state, _ = case
    looks = [c for c in state.admissible() if c.split()[0] in {"look", "examine", "inventory", "help"}]
    before = state.key()
    assert len(looks) >= 3 and not any(state.step(command).changed for command in looks)
    assert state.key() == before


@settings(max_examples=150, deadline=None)
@given(WALKS)
def test_what_can_be_undone_gives_the_old_key_back(case: tuple[State, random.Random]) -> None:
    state, _ = case
    undone = 0
    for command in state.admissible():
        verb, _, rest = command.partition(" ")
        undo = {"open": f"close {rest}", "close": f"open {rest}", "take": f"move {rest.replace(' from ', ' to ')}"}
        back = undo.get(verb)
        twin = state.fork()
        if back is not None and twin.step(command).valid and twin.step(back).valid:
            undone += 1
            assert twin.key() == state.key(), command
    assert undone or not any(c.startswith(("open", "close")) for c in state.admissible())


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 30), st.integers(0, 10**6))
def test_equal_keys_mean_the_same_commands_and_the_same_next_keys(seed: int, choices: int) -> None:
    """Two walks that come to the same physical state cannot be told apart by acting (slicing aside, see `key`)."""
    rng = random.Random(choices)
    met: dict[object, State] = {}
    state = generated(seed).reset()
    for _ in range(60):
        walk(state, rng, 1)
        other = met.setdefault(state.key(), state.fork())
        mine, theirs = ({c for c in s.admissible() if not c.startswith("slice")} for s in (state, other))
        assert mine == theirs and state.won == other.won and hash(state.key()) == hash(other.key())
        for command in mine:
            one, two = state.fork(), other.fork()
            one.step(command), two.step(command)
            assert one.key() == two.key()


# Fidelity to the official engine, on its own recordings.


def official(shared_data: Path, split: str) -> dict[str, Game]:
    return {record.id: record.game() for record in playable_games(shared_data / "alfworld" / f"{split}.jsonl.xz")}


@pytest.mark.parametrize(("split", "trajectories", "steps"), [("valid_seen", 140, 3346), ("valid_unseen", 134, 2957)])
def test_recorded_official_play_replays_to_the_letter(
    shared_data: Path, split: str, trajectories: int, steps: int
) -> None:
    games = official(shared_data, split)
    path = shared_data / "alfworld" / "expert" / f"handcoded_{split}_{trajectories}.jsonl.xz"
    seen = played = 0
    for line in lzma.decompress(path.read_bytes()).decode().splitlines():
        recorded = json.loads(line)
        game = games[recorded["game"]]
        state = game.reset()
        assert BANNER + game.intro == recorded["initial"]
        for command, observation in recorded["steps"]:
            assert state.step(command).observation == observation, (game.id, command)
            played += 1
        assert state.won == recorded["won"], game.id
        seen += 1
    assert (seen, played) == (trajectories, steps)


@pytest.mark.parametrize(
    ("split", "limit", "count"),
    [("valid_seen", None, 140), ("valid_unseen", None, 134), ("valid_train", None, 200), ("train", 300, 300)],
)
def test_every_official_walkthrough_is_admissible_and_wins(
    shared_data: Path, split: str, limit: int | None, count: int
) -> None:
    won = 0
    for record in islice(playable_games(shared_data / "alfworld" / f"{split}.jsonl.xz"), limit):
        state = record.game().reset()
        for command in record.fields["walkthrough"]:
            assert not state.won
            assert command in state.admissible(), (record.id, command)
            assert state.step(command).valid
        assert state.won, record.id
        won += 1
    assert won == count
