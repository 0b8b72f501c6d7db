"""Players and games for the tests of the household world."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from turntree_worlds.household.experts import next_exploring_action
from turntree_worlds.household.games import playable_games
from turntree_worlds.household.generate import EASY, TASK_TYPES, Difficulty, GeneratedGame, generate_game
from turntree_worlds.household.world import Game, State, parse_command


def explore(state: State, rng: random.Random | None = None) -> Iterator[str]:
    """Commands of a player without knowledge until the game is won; step `state` with each before drawing the next."""
    while not state.won:
        yield next_exploring_action(state, rng)


def noisy_explore(state: State, rng: random.Random, epsilon: float) -> Iterator[str]:
    """`explore`, but with probability `epsilon` a command is any admissible one, drawn evenly, except picking up an
    object that no receptacle takes back."""
    while not state.won:
        if rng.random() < epsilon:
            yield rng.choice([command for command in state.admissible() if not _traps(state, command)])
        else:
            yield next_exploring_action(state, rng)


def _traps(state: State, command: str) -> bool:
    parsed = parse_command(command)
    if parsed is None or parsed[0] != "take":
        return False
    return not any(state.game.accepts(name, parsed[1]) for name in state.game.receptacles)


def generate_games(
    seed: int, n: int, *, task_types: Sequence[str] | None = None, difficulty: Difficulty = EASY
) -> Iterator[GeneratedGame]:
    """The games of the seeds `seed ... seed + n - 1`; seed s gets `task_types[s % len(task_types)]` (default: all)."""
    kinds = TASK_TYPES if task_types is None else tuple(task_types)
    for i in range(n):
        yield generate_game(seed + i, task_type=kinds[(seed + i) % len(kinds)], difficulty=difficulty)


def games_in(path: str | Path) -> Iterator[Game]:
    """The games of a file or folder, parsed one by one."""
    return (record.game() for record in playable_games(path))
