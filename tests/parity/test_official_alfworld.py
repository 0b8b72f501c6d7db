"""Parity with the official package: `make test-alfworld` plays the same commands in both engines.

Needs the extra `alfworld` (TextWorld under it) and the game files; skipped where either is absent. Every game is
played twice, by the exploring expert and by a player of random admissible and impossible commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from turntree.core import seeds
from turntree_worlds.household.experts import UnreachableGoal, next_exploring_action
from turntree_worlds.household.games import Record, playable_games
from turntree_worlds.household.world import State

textworld = pytest.importorskip("textworld", reason="needs turntree[alfworld]")
environment = pytest.importorskip("alfworld.agents.environment.alfred_tw_env", reason="needs turntree[alfworld]")

BANNER = "-= Welcome to TextWorld, ALFRED! =-\n\n"
GAMES = {"valid_seen": 140, "valid_unseen": 134, "train": 60}
STEPS = 25
pytestmark = [pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]


class Official:
    """One game in TextWorld, as AlfredTWEnv opens it."""

    def __init__(self, record: Record, folder: Path, domain: str) -> None:
        path = folder / "game.tw-pddl"
        texts = {name: record.text(name) for name in ("grammar", "pddl_problem")}
        path.write_text(json.dumps({"pddl_domain": domain, "solvable": True, **texts}))
        asked = textworld.EnvInfos(won=True, admissible_commands=True)
        self._env = textworld.start(str(path), asked, [environment.AlfredDemangler()])

    def reset(self) -> str:
        self._state = self._env.reset()
        return self._state.feedback.removeprefix(BANNER)

    def step(self, command: str) -> tuple[str, bool]:
        self._state, _, _ = self._env.step(command)
        return self._state.feedback, bool(self._state.won)

    @property
    def admissible(self) -> list[str]:
        return sorted(self._state.admissible_commands)


def records(folder: Path, split: str) -> Iterator[Record]:
    yield from islice(playable_games(folder / f"{split}.jsonl.xz"), GAMES[split])


def explorer(state: State, rng: Any) -> str:
    return next_exploring_action(state, rng)


def wanderer(state: State, rng: Any) -> str:
    """Random admissible commands, every tenth one impossible."""
    if rng.random() < 0.1:
        return rng.choice(["go to nowhere 1", "take mug 99 from desk 1", "open", "inventory now", "dance"])
    return rng.choice([command for command in state.admissible() if command != "help"])


@pytest.mark.parametrize("split", GAMES)
def test_observations_admissible_commands_and_success_are_those_of_the_official_engine(
    split: str, shared_data: Path, tmp_path: Path
) -> None:
    domain = (shared_data / "alfworld" / "alfred.pddl").read_text()
    played = won = steps = 0
    for record in records(shared_data / "alfworld", split):
        game, theirs = record.game(), Official(record, tmp_path, domain)
        for player in (explorer, wanderer):
            ours, rng = game.reset(), seeds.generator(0, "parity", player.__name__, game.id)
            assert theirs.reset() == game.intro, game.id
            steps += play_both(ours, theirs, player, rng)
            won += ours.won
        played += 1
    print(f"{split}: {played} games twice, {steps} steps, {won} won, no difference")
    assert played == GAMES[split]
    assert won > played / 4  # success was compared, not only failure


def play_both(ours: State, theirs: Official, player: Any, rng: Any) -> int:
    """The same commands in both; the number of steps."""
    for step in range(STEPS):
        assert sorted(ours.admissible()) == theirs.admissible, (ours.game.id, step)
        try:
            command = player(ours, rng)
        except UnreachableGoal:  # the wanderer's room, or a task that asks for more than there is
            return step
        mine = ours.step(command)
        assert (mine.observation, mine.won) == theirs.step(command), (ours.game.id, step, command)
        if mine.won:
            return step + 1
    return STEPS
