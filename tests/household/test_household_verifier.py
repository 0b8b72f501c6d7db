"""The functional verifier: gold always scores 1, what leads nowhere scores 0, and no loop of accepted moves exists."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from household_players import explore, games_in, generate_games, noisy_explore
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.core.protocols import TurnState
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.environment import HouseholdEnvironment, generated
from turntree_worlds.household.experts import next_exploring_action
from turntree_worlds.household.generate import (
    EASY,
    HARD,
    MEDIUM,
    TASK_TYPES,
    Difficulty,
    generate_game,
)
from turntree_worlds.household.verifier import (
    HouseholdVerifier,
    action_kind,
    is_searching,
    judge,
    search_effort,
)
from turntree_worlds.household.world import Game, Goal, Receptacle, State, Thing

TINY = Difficulty("tiny", (4, 6), (2, 4), closed_fraction=0.5, extra_target=0.4, shared_location=0.4)
PORTABLE = frozenset({"pickupable", "cleanable"})


def room(goal: Goal, things: dict[str, str], task: str = "") -> Game:
    """A room by hand: drawers 1, 2 and 3 (closed), a desk 1, a shelf 1 and a sinkbasin 1 (open); name -> where."""
    names = ("drawer 1", "drawer 2", "drawer 3", "desk 1", "shelf 1", "sinkbasin 1")
    kinds = {name: name.split()[0] for name in (*names, *things)}
    return Game(
        id=f"{goal} {sorted(things.items())}",
        task_type="",
        task=task,
        goal=goal,
        receptacles={
            name: Receptacle(
                name,
                kinds[name],
                place=f"by {name}",
                openable=kinds[name] == "drawer",
                contents=tuple(thing for thing, where in things.items() if where == name),
            )
            for name in names
        },
        things={
            name: Thing(name, kinds[name], frozenset({"toggleable"}) if "lamp" in name else PORTABLE, f"by {where}")
            for name, where in things.items()
        },
        can_contain={kind: frozenset({"pen", "cup"}) for kind in ("drawer", "desk", "shelf", "sinkbasin")},
        start="middle",
        traits=frozenset(),
    )


def after(game: Game, *commands: str) -> State:
    state = game.reset()
    for command in commands:
        assert state.step(command).valid, command
    return state


PEN_ON_DESK = room(Goal("pen", "desk"), {"pen 1": "drawer 2", "cup 1": "shelf 1"})
CLEAN_PEN_ON_DESK = room(Goal("pen", "desk", trait="clean"), {"pen 1": "drawer 2", "cup 1": "shelf 1"})
PEN_BY_LAMP = room(Goal("pen", lamp_kind="desklamp"), {"pen 1": "shelf 1", "desklamp 1": "desk 1"})
TWO_PENS = room(Goal("pen", "desk", count=2), {"pen 1": "drawer 2", "pen 2": "shelf 1"})


@pytest.mark.parametrize("action", ["look", "inventory", "help", "fly away", "", "take pen 1 from drawer 2"])
def test_no_ops_and_impossible_commands_score_0(action: str) -> None:
    assert judge(PEN_ON_DESK.reset(), "go to drawer 2", action).reward == 0.0


@pytest.mark.parametrize("action", ["look", "inventory", "go to drawer 1", "go to drawer 1 ", "fly away"])
def test_what_was_demonstrated_scores_1_even_if_it_does_nothing(action: str) -> None:
    assert judge(PEN_ON_DESK.reset(), action.strip(), action).reward == 1.0


def test_a_react_turn_is_judged_by_its_command() -> None:
    game = generated(0, "easy")
    source = {"name": "household", "task_id": game.id}
    first, second, *_ = shortest_plan(game.reset())
    environment = HouseholdEnvironment(game, prompt="react")
    begun = environment.reset()
    said = [Message("assistant", f"Thought: on.\nAction: {command}") for command in (first, second)]
    (answer,) = environment.step(said[0]).messages
    state = TurnState("t", 1, (*begun, said[0], answer), said[1], environment=source)
    verifier = HouseholdVerifier()
    assert verifier.judge(state, Message("assistant", f"Thought: so.\nAction: {second}")).reward == 1
    assert verifier.judge(state, Message("assistant", second)).reward == 1
    false = replace(answer, content="You see a whale.")
    with pytest.raises(InputError) as error:
        verifier.judge(replace(state, history=(*begun, said[0], false)), said[1])
    assert error.value.field == "environment"


def test_a_no_op_is_not_excused_by_a_demonstration_that_does_nothing_either() -> None:
    assert judge(PEN_ON_DESK.reset(), "look", "inventory").reward == 0.0


class TestSameState:
    def test_another_command_with_the_same_outcome_scores_1(self) -> None:
        game = _game_with_shared_drawers()
        pair = next(names for names in game.places.values() if len(names) == 2)
        verdict = judge(game.reset(), f"go to {pair[0]}", f"go to {pair[1]}")
        assert (verdict.reward, verdict.reason) == (1.0, "same state as the demonstration")


def _game_with_shared_drawers() -> Game:
    game = generate_game(1, task_type="pick_two_obj_and_place", difficulty=HARD).parse()
    assert any(len(names) == 2 for names in game.places.values())
    return game


class TestNearer:
    FOUND = ("go to drawer 2", "open drawer 2")

    def test_the_other_order_of_two_errands_scores_1(self) -> None:
        pens = room(Goal("pen", "desk", count=2), {"pen 1": "drawer 2", "pen 2": "drawer 2"})
        verdict = judge(after(pens, *self.FOUND), "take pen 1 from drawer 2", "take pen 2 from drawer 2")
        assert (verdict.reward, verdict.reason) == (1.0, "as near to the goal as the demonstration")

    def test_a_detour_of_the_demonstration_does_not_forbid_the_straight_way(self) -> None:
        state = after(PEN_ON_DESK, *self.FOUND)
        assert judge(state, "go to drawer 1", "take pen 1 from drawer 2").reward == 1.0

    def test_closing_again_walking_off_and_putting_back_score_0(self) -> None:
        state = after(PEN_ON_DESK, *self.FOUND)
        assert judge(state, "take pen 1 from drawer 2", "close drawer 2").reward == 0.0
        assert judge(state, "take pen 1 from drawer 2", "go to desk 1").reward == 0.0
        state.step("take pen 1 from drawer 2")
        assert judge(state, "go to desk 1", "move pen 1 to drawer 2").reward == 0.0
        assert judge(state, "go to desk 1", "go to shelf 1").reward == 0.0

    def test_the_wrong_object_scores_0(self) -> None:
        state = after(PEN_ON_DESK, *self.FOUND, "go to shelf 1")
        assert judge(state, "go to drawer 2", "take cup 1 from shelf 1").reward == 0.0

    def test_delivering_untreated_scores_0_and_treating_scores_1(self) -> None:
        state = after(CLEAN_PEN_ON_DESK, *self.FOUND, "take pen 1 from drawer 2")
        assert judge(state, "go to drawer 3", "go to desk 1").reward == 0.0
        assert judge(state, "go to drawer 3", "go to sinkbasin 1").reward == 1.0
        state.step("go to sinkbasin 1")
        assert judge(state, "look", "clean pen 1 with sinkbasin 1").reward == 1.0
        state.step("clean pen 1 with sinkbasin 1")
        assert judge(state, "go to desk 1", "clean pen 1 with sinkbasin 1").reward == 0.0


class TestSearch:
    def test_every_unsearched_place_scores_1_and_a_searched_one_0(self) -> None:
        state = after(PEN_ON_DESK, "go to shelf 1")
        assert is_searching(state)
        for name in ("drawer 1", "drawer 3", "sinkbasin 1"):
            assert judge(state, "go to drawer 2", f"go to {name}").reason == "searches a new place"
        state.step("go to sinkbasin 1")
        assert judge(state, "go to drawer 2", "go to shelf 1").reward == 0.0

    def test_before_a_closed_door_opening_scores_1_and_walking_to_another_one_0(self) -> None:
        state = after(PEN_ON_DESK, "go to drawer 1")
        assert judge(state, "go to drawer 2", "open drawer 1").reward == 1.0
        assert judge(state, "open drawer 1", "go to drawer 3").reward == 0.0
        assert judge(state, "open drawer 1", "go to shelf 1").reward == 0.0

    def test_where_the_target_would_have_won_already_there_is_nothing_to_search(self) -> None:
        assert judge(PEN_ON_DESK.reset(), "go to drawer 2", "go to desk 1").reward == 0.0
        assert judge(CLEAN_PEN_ON_DESK.reset(), "go to drawer 2", "go to desk 1").reward == 1.0

    def test_searching_ends_when_a_target_is_displayed(self) -> None:
        state = after(PEN_ON_DESK, "go to drawer 2", "open drawer 2")
        assert not is_searching(state)
        assert judge(state, "take pen 1 from drawer 2", "go to drawer 1").reward == 0.0

    def test_with_something_useless_in_hand_putting_it_down_comes_first(self) -> None:
        state = after(PEN_ON_DESK, "go to shelf 1", "take cup 1 from shelf 1")
        assert not is_searching(state)
        assert judge(state, "go to drawer 2", "go to drawer 1").reward == 0.0
        assert judge(state, "go to drawer 2", "move cup 1 to shelf 1").reward == 1.0

    def test_a_delivered_object_is_no_longer_what_is_searched(self) -> None:
        state = after(TWO_PENS, "go to shelf 1", "take pen 2 from shelf 1")
        assert not is_searching(state)
        state.step("go to desk 1")
        state.step("move pen 2 to desk 1")
        assert is_searching(state)
        assert judge(state, "go to drawer 2", "go to drawer 1").reward == 1.0

    def test_with_the_target_in_hand_an_unseen_lamp_is_searched(self) -> None:
        state = after(PEN_BY_LAMP, "go to shelf 1")
        assert not is_searching(state)
        assert judge(state, "take pen 1 from shelf 1", "go to drawer 1").reward == 0.0
        state.step("take pen 1 from shelf 1")
        assert is_searching(state)
        assert judge(state, "go to drawer 1", "go to drawer 2").reward == 1.0
        state.step("go to desk 1")
        assert not is_searching(state)

    def test_effort_counts_two_commands_for_a_door_less_the_walk_already_made(self) -> None:
        assert search_effort(CLEAN_PEN_ON_DESK.reset()) == 3 * 2 + 3
        assert search_effort(PEN_ON_DESK.reset()) == 3 * 2 + 2  # not the desk
        assert search_effort(after(PEN_ON_DESK, "go to drawer 1")) == 7
        assert search_effort(after(PEN_ON_DESK, "go to drawer 1", "go to drawer 2")) == 7
        assert search_effort(after(PEN_ON_DESK, "go to drawer 1", "open drawer 1")) == 6


games = st.builds(
    lambda seed, task_type, difficulty: generate_game(seed, task_type=task_type, difficulty=difficulty).parse(),
    st.integers(0, 10**6),
    st.sampled_from(TASK_TYPES),
    st.sampled_from([EASY, MEDIUM]),
)


@settings(max_examples=25, deadline=None)
@given(game=games, seed=st.integers(0, 100), epsilon=st.sampled_from([0.0, 0.3]))
def test_gold_against_itself_scores_1_always(game: Game, seed: int, epsilon: float) -> None:
    state = game.reset()
    for command in noisy_explore(state, random.Random(seed), epsilon):
        assert judge(state, command, command).reward == 1.0
        state.step(command)


@settings(max_examples=25, deadline=None)
@given(game=games, seed=st.integers(0, 100))
def test_judging_leaves_the_state_alone_and_no_ops_never_score(game: Game, seed: int) -> None:
    rng = random.Random(seed)
    state = game.reset()
    for command in explore(state, rng):
        before = (state.key(), state.searched, state.admissible())
        for action in state.admissible():
            verdict = judge(state, command, action)
            outcome = state.fork().step(action)
            if not outcome.changed and verdict.reward == 1.0:
                # Only a shelf beside the player, whose contents no command but `examine` displays, may score so.
                assert action == command or action.startswith("examine")
        assert (state.key(), state.searched, state.admissible()) == before
        state.step(command)


@settings(max_examples=25, deadline=None)
@given(game=games, seed=st.integers(0, 100))
def test_an_optimal_command_scores_1_whatever_was_demonstrated(game: Game, seed: int) -> None:
    state = game.reset()
    for command in noisy_explore(state, random.Random(seed), 0.3):
        assert judge(state, command, shortest_plan(state)[0]).reward == 1.0
        state.step(command)


def moment(state: State) -> Hashable:
    """The physical state and all that the player knows."""
    return state.key(), state.searched, state.location


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), task_type=st.sampled_from(TASK_TYPES), steps=st.integers(0, 15))
def test_whoever_gives_only_accepted_commands_wins(seed: int, task_type: str, steps: int) -> None:
    """Wherever random play has led, and whatever accepted command is chosen each time (all are tried): some command
    is accepted, and no situation comes back. Nothing is demonstrated here but `look`."""
    rng = random.Random(seed)
    start = generate_game(seed, task_type=task_type, difficulty=TINY).parse().reset()
    for _ in range(steps):
        start.step(rng.choice(start.admissible()))
    on_path: set[Hashable] = set()
    finished: set[Hashable] = set()
    stack = [(start, True)]
    while stack:
        state, entering = stack.pop()
        here = moment(state)
        if not entering:
            on_path.remove(here)
            finished.add(here)
            continue
        assert here not in on_path, "accepted commands run in a circle"
        if here in finished or state.won:
            continue
        on_path.add(here)
        stack.append((state, False))
        accepted = [a for a in state.admissible() if a != "look" and judge(state, "look", a).reward == 1.0]
        assert accepted, "no command is accepted"
        for action in accepted:
            after_action = state.fork()
            after_action.step(action)
            stack.append((after_action, True))


def test_kinds_name_what_a_command_does_here() -> None:
    state = PEN_ON_DESK.reset()
    assert action_kind(state, "go to drawer 1") == "go_search"
    assert action_kind(state, "open drawer 1") == "invalid"
    assert action_kind(state, "") == "invalid"
    assert action_kind(state, "help") == "other"
    state = after(CLEAN_PEN_ON_DESK, "go to drawer 2", "open drawer 2", "take pen 1 from drawer 2")
    assert action_kind(state, "go to desk 1") == "go_holding"
    assert action_kind(state, "move pen 1 to drawer 2") == "move"
    state.step("go to sinkbasin 1")
    assert action_kind(state, "clean pen 1 with sinkbasin 1") == "clean"


class TestHouseholdVerifier:
    def turn(self, *history: str, demonstration: str, environment: dict | None = None) -> TurnState:
        game = generated(6, "easy")
        source = {"name": "household", "task_id": game.id} if environment is None else environment
        messages = [Message("user", "the room")]
        state = game.reset()
        for command in history:
            messages += [Message("assistant", command), Message("user", state.step(command).observation)]
        return TurnState("t", len(history), tuple(messages), Message("assistant", demonstration), environment=source)

    def test_it_judges_at_the_state_that_the_history_leads_to(self) -> None:
        game = generated(6, "easy")
        plan = shortest_plan(game.reset())
        verifier = HouseholdVerifier()
        for i, command in enumerate(plan):
            turn = self.turn(*plan[:i], demonstration=command)
            assert verifier.judge(turn, Message("assistant", command)).reward == 1.0
            assert verifier.judge(turn, Message("assistant", "look")).reward == 0.0
        last = self.turn(*plan[:-1], demonstration=plan[-1])
        assert verifier.judge(last, Message("assistant", plan[-1])).kind == "move"

    def test_a_thought_in_the_text_is_no_part_of_the_command(self) -> None:
        """As where the chat template has no place for thoughts: every turn of such a policy was impossible."""
        game = generated(6, "easy")
        first, second = shortest_plan(game.reset())[:2]
        thinking = [f"<think>Not go to the sea.</think>\n\n{command}" for command in (first, second)]
        plain, thoughtful = HouseholdEnvironment(game), HouseholdEnvironment(game)
        for command, thought in zip((first, second), thinking, strict=True):
            assert thoughtful.step(Message("assistant", thought)) == plain.step(Message("assistant", command))
        told = self.turn(first, demonstration=second).history
        history = tuple(replace(m, content=thinking[0]) if m.role == "assistant" else m for m in told)
        source = self.turn(demonstration=first).environment
        turn = TurnState("t", 1, history, Message("assistant", thinking[1]), environment=source)
        for said in (second, thinking[1]):
            verdict = HouseholdVerifier().judge(turn, Message("assistant", said))
            assert verdict.reward == 1.0 and verdict.kind != "invalid"

    def test_turns_that_share_an_id_are_not_mixed_up(self) -> None:
        game = generated(6, "easy")
        first, second = shortest_plan(game.reset())[:2]
        verifier = HouseholdVerifier()
        here = self.turn(demonstration=first)
        there = TurnState("t", 0, self.turn(first, demonstration=second).history, Message("assistant", second),
                          environment=here.environment)  # fmt: skip
        assert here.id == there.id
        assert verifier.judge(here, Message("assistant", second)).kind == "invalid"
        assert verifier.judge(there, Message("assistant", second)).kind != "invalid"

    def test_a_trace_of_another_world_is_refused(self) -> None:
        turn = self.turn(demonstration="look", environment={"name": "shop"})
        with pytest.raises(InputError, match="is not a household game"):
            HouseholdVerifier().judge(turn, Message("assistant", "look"))


PROPOSALS: dict[str, Callable[[State, str, random.Random], str]] = {
    "gold": lambda state, gold, rng: gold,
    "look": lambda state, gold, rng: "look",
    "inventory": lambda state, gold, rng: "inventory",
    "random admissible": lambda state, gold, rng: rng.choice(state.admissible()),
    "another explorer": lambda state, gold, rng: next_exploring_action(state, rng),
    "shortest plan": lambda state, gold, rng: shortest_plan(state)[0],
}


class TestAcceptance:
    """How often typical commands pass, at the states of an exploring expert."""

    def check(self, games: Iterable[Game]) -> dict[str, float]:
        rng = random.Random(0)
        judged, accepted = Counter[str](), Counter[tuple[str, str]]()
        for game in games:
            state = game.reset()
            for gold in explore(state, rng):
                kind = action_kind(state, gold)
                judged[kind] += 1
                for name, propose in PROPOSALS.items():
                    accepted[name, kind] += judge(state, gold, propose(state, gold, rng)).reward == 1.0
                state.step(gold)
        assert judged.total() >= 1000
        rates = {name: sum(accepted[name, kind] for kind in judged) / judged.total() for name in PROPOSALS}
        assert rates["gold"] == rates["shortest plan"] == 1.0
        assert rates["look"] == rates["inventory"] == 0.0
        assert rates["random admissible"] < 0.4
        assert rates["another explorer"] > 0.97  # not all: a destination that cannot hide the target
        for kind in ("take", "move", "clean", "heat", "cool"):
            assert judged[kind] > 0
            assert accepted["random admissible", kind] < 0.2 * judged[kind]
        return rates

    def test_on_generated_games(self) -> None:
        rates = self.check(game.parse() for game in generate_games(0, 150))
        assert rates["random admissible"] > 0.15  # a search step has many right answers

    def test_on_official_games(self, shared_data: Path) -> None:
        self.check(games_in(shared_data / "alfworld" / "valid_seen.jsonl.xz"))
