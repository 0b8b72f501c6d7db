"""Parity with the official package: `make test-alfworld` plays the same commands in both engines.

Needs the extra `alfworld` (TextWorld under it) and the game files; skipped where either is absent. Every game is
played twice, by the exploring expert and by a player of random admissible and impossible commands.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from turntree.core import seeds
from turntree.domains.household.experts import UnreachableGoal, next_exploring_action
from turntree.domains.household.games import GameFiles, Record
from turntree.domains.household.world import State

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
    files = GameFiles(folder, split=split, limit=GAMES[split])
    yield from files.records


def explorer(state: State, rng: Any) -> str:
    return next_exploring_action(state, rng)


def wanderer(state: State, rng: Any) -> str:
    """Random admissible commands, every tenth one impossible."""
    if rng.random() < 0.1:
        return rng.choice(["go to nowhere 1", "take mug 99 from desk 1", "open", "inventory now", "dance"])
    return rng.choice([command for command in state.admissible() if command != "help"])


@pytest.mark.parametrize("player", [explorer, wanderer], ids=["expert", "random"])
@pytest.mark.parametrize("split", GAMES)
def test_observations_admissible_commands_and_success_are_those_of_the_official_engine(
    split: str, player: Any, shared_data: Path, tmp_path: Path
) -> None:
    domain = (shared_data / "alfworld" / "alfred.pddl").read_text()
    played = steps = 0
    for record in records(shared_data / "alfworld", split):
        game = record.game()
        ours, theirs = game.reset(), Official(record, tmp_path, domain)
        rng = seeds.generator(0, "parity", player.__name__, game.id)
        assert theirs.reset() == game.intro, game.id
        for step in range(STEPS):
            assert sorted(ours.admissible()) == theirs.admissible, (game.id, step)
            try:
                command = player(ours, rng)
            except UnreachableGoal:
                break
            mine = ours.step(command)
            assert (mine.observation, mine.won) == theirs.step(command), (game.id, step, command)
            steps += 1
            if mine.won:
                break
        played += 1
    print(f"{split}: {played} games, {steps} steps, no difference")
    assert played == GAMES[split]
