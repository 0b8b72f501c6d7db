"""Household games as an environment (`--environment household`).

Generated games are named by split and number; the games of a file or folder are ALFWorld's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.config import Bounded, Count
from turntree.core.errors import ConfigError
from turntree.env.tasks import TRAIN, TaskSet, contents
from turntree_worlds.household.environment import GENERATED, HouseholdEnvironment, Level, Prompt, generated
from turntree_worlds.household.games import draw_games
from turntree_worlds.household.world import Game

POLICY = Path(__file__).resolve().parents[1] / "models" / "household_tiny"  # plays easy games badly

# Disjoint ranges of generated seeds: no game is in two splits.
SPLIT_SIZE = 1_000_000
SPLIT_SEEDS = {"train": 1 * SPLIT_SIZE, "dev": 2 * SPLIT_SIZE, "test": 3 * SPLIT_SIZE}


@dataclass(frozen=True, kw_only=True)
class Household(Bounded):
    """Household games as an environment."""

    games: str = GENERATED
    """Games to train on, or, where nothing is trained and `held_out` names none, to play: 'generated', a packed games
    file, or a folder."""
    held_out: str = GENERATED
    """Games that training is checked on."""
    difficulty: Level = "easy"
    """Of generated games: how much there is to search."""
    prompt: Prompt = "plain"
    """plain: observations alone, and an action is a bare command. react: the ReAct prompt of Selective Rollout
    (appendix F), to be used with device.renderer.tool_format=react, so that a gate compares actions without thoughts.
    react_admissible: with the admissible actions, as in its released code."""
    offset: Count = 0
    """Skip this many of the first games."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """`seed` draws the games of a file or folder; a generated one is defined by its split and number."""
        read: list[dict[str, Any]] = []
        alone = TRAIN not in splits and self.held_out == GENERATED
        files: dict[str, str] = {}
        tasks: dict[str, list[HouseholdEnvironment]] = {}
        for split, count in splits.items():
            source, offset = (self.games, self.offset) if alone or split == TRAIN else (self.held_out, 0)
            if source == GENERATED:
                drawn = self._generated(split, count, offset)
            else:
                files[split] = source
                drawn, report = draw_games(source, count, offset=offset, seed=seed)
                read.append(report)
            tasks[split] = [HouseholdEnvironment(game, prompt=self.prompt) for game in drawn]
        yield TaskSet(tasks=tasks, read=read, contents=contents(files))

    def _generated(self, split: str, count: int, offset: int) -> list[Game]:
        """The six task types alternate."""
        if offset + count > SPLIT_SIZE:
            raise ConfigError(
                f"games {offset} to {offset + count} leave the split",
                field="offset",
                hint=f"a split has {SPLIT_SIZE:,} games, and the next ones belong to another",
            )
        start = SPLIT_SEEDS[split] + offset
        return [generated(number, self.difficulty) for number in range(start, start + count)]
