"""A household game as a chat environment: user messages are observations, an assistant message is one command."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Mapping
from typing import Any, Literal

from turntree.core.errors import InputError
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation, TurnState
from turntree.render.tool_calls import ACT, parse_message
from turntree_worlds.household.distance import distance
from turntree_worlds.household.games import playable_games
from turntree_worlds.household.generate import EASY, HARD, MEDIUM, TASK_TYPES, generate_game
from turntree_worlds.household.world import NOTHING_HAPPENS, Game, State

Prompt = Literal["plain", "react", "react_admissible"]
REACT = """You are an agent in a household, described in text. Reach the goal of your task in as few steps as you can. \
At each step you are told what you see. First think about what to do, then give exactly one action, in this form:

Thought: what you think
Action: one of the actions below

Actions, with the names of things and places as you read them:
go to PLACE, open PLACE, close PLACE, take THING from PLACE, move THING to PLACE, examine THING, use THING,
heat THING with PLACE, clean THING with PLACE, cool THING with PLACE, slice THING with THING, look, inventory

An action that is not possible has no effect ("Nothing happens.") and still costs a step.

Example:

You are in the middle of a room. Looking quickly around you, you see a cabinet 1, a countertop 1, and a fridge 1.
Your task is to: put a cool tomato in cabinet.
Thought: A tomato may lie on the countertop. I look there first.
Action: go to countertop 1
You arrive at countertop 1. On the countertop 1, you see a tomato 2.
Thought: There it is. I take it.
Action: take tomato 2 from countertop 1
You pick up the tomato 2 from the countertop 1.
Thought: It has to be cool. The fridge cools it.
Action: go to fridge 1
You arrive at fridge 1. The fridge 1 is closed.
Thought: I cool the tomato here.
Action: cool tomato 2 with fridge 1
You cool the tomato 2 using the fridge 1.
Thought: Now I bring it to the cabinet.
Action: go to cabinet 1
You arrive at cabinet 1. On the cabinet 1, you see nothing.
Thought: I put it in.
Action: move tomato 2 to cabinet 1
You move the tomato 2 to the cabinet 1."""

GENERATED = "generated"
Level = Literal["easy", "medium", "hard"]
DIFFICULTIES = {level.name: level for level in (EASY, MEDIUM, HARD)}


class HouseholdEnvironment:
    """One episode of one game (protocol `Environment`). Forks in microseconds."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, game: Game, state: State | None = None, *, prompt: Prompt = "plain", way: int = 0) -> None:
        self._game = game
        self.prompt: Prompt = prompt
        self._state = state if state is not None else game.reset()
        self._way = way  # commands of the shortest way from the start to the goal (0: not looked for yet)

    @property
    def task_id(self) -> str:
        return self._game.id

    @property
    def task_type(self) -> str:
        return self._game.task_type

    @property
    def world(self) -> State:
        """The state of the game; step a `fork` of it."""
        return self._state

    def reset(self) -> tuple[Message, ...]:
        self._state = self._game.reset()
        system = () if self.prompt == "plain" else (Message("system", REACT),)
        return (*system, Message("user", told_as(self.prompt, self._state, self._game.intro)))

    def step(self, action: Message) -> Observation:
        action = read_as(self.prompt, action)
        result, calls = self._state.step(command_of(action)), action.tool_calls
        called: dict[str, Any] = {"tool_call_id": calls[0].id, "name": calls[0].name} if calls else {}
        told = told_as(self.prompt, self._state, result.observation)
        answer = (Message("tool" if calls else "user", told, **called),)
        metrics = {"invalid": float(result.observation == NOTHING_HAPPENS)}  # an impossible command
        self._way, left = self._way or distance(self._game.reset()) or 1, distance(self._state)
        progress = 0.0 if left is None else max(0.0, 1 - left / self._way)
        return Observation(answer, result.won, True if result.won else None, progress, metrics=metrics)

    def state(self) -> Hashable:
        return self._state.key()

    def fork(self) -> HouseholdEnvironment:
        return HouseholdEnvironment(self._game, self._state.fork(), prompt=self.prompt, way=self._way)


def read_as(prompt: Prompt, action: Message) -> Message:
    """A turn as it is read under a prompt; that of ReAct needs no renderer with the tool format `react`."""
    if prompt == "plain" or action.tool_calls:
        return action
    action = parse_message(answer_text(action), "react")
    return action if action.tool_calls else Message("assistant")


def told_as(prompt: Prompt, state: State, observation: str) -> str:
    if prompt != "react_admissible":
        return observation
    return f"{observation}\nAdmissible actions: {', '.join(state.admissible())}"


def prompt_of(turn: TurnState) -> Prompt:
    """The prompt under which a recorded game was played."""
    return (turn.environment or {}).get("prompt", "plain")


def command_of(action: Message) -> str:
    """What is played: the words, or the command of a ReAct turn; nothing of other calls."""
    if not action.tool_calls and re.search(r"^Action:", answer_text(action), re.MULTILINE):
        action = parse_message(answer_text(action), "react")
    if not action.tool_calls:
        return answer_text(action)
    call, *more = action.tool_calls
    return str(call.arguments.get("command", "")) if call.name == ACT and not more else ""


def build_game(record: Mapping[str, Any] | None) -> Game:
    """The game that a trace's `environment` names. Raises `InputError` when it names none."""
    if record is None or record.get("name") not in ("household", "default") or "task_id" not in record:
        hint = "name the verifier of these traces (--verifier tool_call, recommended, strict or module:function)"
        problem = f"a trace's environment, {record!r}, is not a household game, which the verifier judges"
        raise InputError(problem, field="environment", hint=hint)
    path, name = str(record.get("games", GENERATED)), str(record["task_id"])
    if path == GENERATED:
        difficulty, *_, number = re.split("[/_]", name)  # easy/NAME/seed_12
        return generated(int(number), difficulty)
    games = _file(path)
    if name not in games:
        raise InputError(f"has no game {name!r}", path=path, field="environment.task_id")
    return games[name]


@functools.lru_cache(maxsize=4096)
def generated(number: int, difficulty: str) -> Game:
    task_type = TASK_TYPES[number % len(TASK_TYPES)]
    return generate_game(number, task_type=task_type, difficulty=DIFFICULTIES[difficulty]).parse()


@functools.lru_cache(maxsize=8)
def _file(path: str) -> dict[str, Game]:
    return {record.id: record.game() for record in playable_games(path)}


def state_at(turn: TurnState) -> State:
    """The game's state just before a demonstrated turn, by replaying the demonstration. Raises `InputError` when the
    observations of the trace differ from those of the game: then it is another game."""
    state, prompt = build_game(turn.environment).reset(), prompt_of(turn)
    for action, answer in zip(turn.history, turn.history[1:], strict=False):
        if action.role != "assistant":
            continue
        observation = told_as(prompt, state, state.step(command_of(read_as(prompt, action))).observation)
        if answer.role in ("user", "tool") and answer.content != observation:
            raise InputError(
                f"trace {turn.trace_id!r} does not fit its game: after {action.content!r} it says {answer.content!r}, "
                f"the game {observation!r}",
                field="environment",
                hint="name the game that was played",
            )
    return state
