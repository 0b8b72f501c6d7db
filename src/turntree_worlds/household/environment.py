"""A household game as a chat environment: user messages are observations, an assistant message is one command."""

from __future__ import annotations

import functools
import re
from collections.abc import Hashable, Mapping
from typing import Any

from turntree.core.errors import InputError
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation, TurnState
from turntree_worlds.household.games import load_games
from turntree_worlds.household.generate import EASY, HARD, MEDIUM, TASK_TYPES, generate_game
from turntree_worlds.household.world import NOTHING_HAPPENS, Game, State

DIFFICULTIES = {level.name: level for level in (EASY, MEDIUM, HARD)}


class HouseholdEnvironment:
    """One episode of one game (protocol `Environment`). Forks in microseconds."""

    tools: tuple[dict[str, Any], ...] = ()

    def __init__(self, game: Game, state: State | None = None) -> None:
        self._game = game
        self._state = state if state is not None else game.reset()

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
        return (Message("user", self._game.intro),)

    def step(self, action: Message) -> Observation:
        result = self._state.step(answer_text(action))
        answer = (Message("user", result.observation),)
        metrics = {"invalid": float(result.observation == NOTHING_HAPPENS)}  # an impossible command
        return Observation(answer, done=result.won, success=True if result.won else None, metrics=metrics)

    def state(self) -> Hashable:
        return self._state.key()

    def fork(self) -> HouseholdEnvironment:
        return HouseholdEnvironment(self._game, self._state.fork())


def generated_source(seed: int, task_type: str, difficulty: str) -> dict[str, Any]:
    """The record by which a trace names its generated game."""
    return {"name": "household", "seed": seed, "task_type": task_type, "difficulty": difficulty}


def file_source(path: str, game: str) -> dict[str, Any]:
    """The record by which a trace names its game of a file or folder."""
    return {"name": "household", "path": path, "game": game}


def build_game(source: Mapping[str, Any] | None) -> Game:
    """The game that a trace's `environment` names. Raises `InputError` when it names none."""
    if source is not None and "task_id" in source:
        source = _recorded(source)
    if source is None or source.get("name") != "household":
        raise InputError(
            f"{source!r} is not a household game",
            field="environment",
            hint="use traces made by `turntree traces household`, or another verifier",
        )
    if "seed" in source:
        return _generated(int(source["seed"]), str(source["task_type"]), str(source["difficulty"]))
    games = _file(str(source["path"]))
    if source["game"] not in games:
        raise InputError(f"has no game {source['game']!r}", path=source["path"], field="environment.game")
    return games[source["game"]]


def _recorded(source: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The game of a trace of `turntree traces record`, which names the task and the options of the environment."""
    if source.get("name") not in ("household", "default"):
        return None
    if source.get("games") != "generated":
        return file_source(str(source.get("games")), str(source["task_id"]))
    difficulty, *_, number = re.split("[/_]", str(source["task_id"]))  # easy/NAME/seed_12
    return generated_source(int(number), TASK_TYPES[int(number) % len(TASK_TYPES)], difficulty)


@functools.lru_cache(maxsize=4096)
def _generated(seed: int, task_type: str, difficulty: str) -> Game:
    return generate_game(seed, task_type=task_type, difficulty=DIFFICULTIES[difficulty]).parse()


@functools.lru_cache(maxsize=8)
def _file(path: str) -> dict[str, Game]:
    return {game.id: game for game in load_games(path)}


def state_at(turn: TurnState) -> State:
    """The game's state just before a demonstrated turn, by replaying the demonstration. Raises `InputError` when the
    observations of the trace differ from those of the game: then it is another game."""
    state = build_game(turn.environment).reset()
    for action, answer in zip(turn.history, turn.history[1:], strict=False):
        if action.role != "assistant":
            continue
        observation = state.step(answer_text(action)).observation
        if answer.role == "user" and answer.content != observation:
            raise InputError(
                f"trace {turn.trace_id!r} does not fit its game: after {action.content!r} it says {answer.content!r}, "
                f"the game {observation!r}",
                field="environment",
                hint="name the game that was played",
            )
    return state
