"""Household games as an environment (`--environment household`), and the choice of games.

Generated games are named by split and number; the games of a file or folder are ALFWorld's own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from turntree.core.config import Bounded, Positive
from turntree.core.errors import ConfigError
from turntree.env.tasks import TRAIN, TaskSet, contents
from turntree.traces.schema import Split
from turntree_worlds.household.environment import (
    HouseholdEnvironment,
    Level,
    Prompt,
    build_game,
    file_source,
    generated_source,
)
from turntree_worlds.household.games import draw_games
from turntree_worlds.household.generate import TASK_TYPES
from turntree_worlds.household.world import Game

POLICY = Path(__file__).resolve().parents[1] / "models" / "household_tiny"  # plays easy games badly
GENERATED = "generated"

# Disjoint ranges of generated seeds: no game is in two splits.
SPLIT_SIZE = 1_000_000
SPLIT_SEEDS = {"train": 1 * SPLIT_SIZE, "dev": 2 * SPLIT_SIZE, "test": 3 * SPLIT_SIZE}


@dataclass(frozen=True, kw_only=True)
class GamesConfig(Bounded):
    """Which games. The six task types alternate in generated ones; those of a file or folder are drawn by a seed."""

    source: str = GENERATED
    """'generated', a packed games file (JSONL), or a folder of game.tw-pddl files."""
    split: Split = "train"
    """Which games: train, dev or test; generated ones are drawn from it."""
    count: Positive = 200
    """How many games."""
    offset: int = 0
    """Skip this many of the split's games."""
    difficulty: Level = "easy"
    """Of generated games: how much there is to search."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset < 0 or self.offset + self.count > SPLIT_SIZE:
            raise ConfigError(
                f"games {self.offset} to {self.offset + self.count} leave the split",
                field="offset",
                hint=f"a split has {SPLIT_SIZE:,} games, and the next ones belong to another",
            )


def games(
    config: GamesConfig, seed: int = 0, read: list[dict[str, Any]] | None = None
) -> Iterator[tuple[Game, dict[str, Any]]]:
    """Each game with the source that a trace records to rebuild it. `seed` draws those of a file or folder, and what
    was drawn is added to `read`."""
    if config.source == GENERATED:
        start = SPLIT_SEEDS[config.split] + config.offset
        for number in range(start, start + config.count):
            source = generated_source(number, TASK_TYPES[number % len(TASK_TYPES)], config.difficulty)
            yield build_game(source), source
        return
    drawn, report = draw_games(config.source, config.count, offset=config.offset, seed=seed)
    if read is not None:
        read.append(report)
    for game in drawn:
        yield game, file_source(config.source, game.id)


@dataclass(frozen=True, kw_only=True)
class Household:
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
    offset: int = 0
    """Skip this many of the first games."""

    @contextlib.contextmanager
    def open(self, splits: Mapping[str, int], *, seed: int) -> Iterator[TaskSet]:
        """`seed` draws the games of a file or folder; a generated one is defined by its split and number."""
        read: list[dict[str, Any]] = []
        alone = TRAIN not in splits and self.held_out == GENERATED
        chosen = {split: self._games(split, count, alone or split == TRAIN) for split, count in splits.items()}
        tasks = {
            split: [HouseholdEnvironment(game, prompt=self.prompt) for game, _ in games(each, seed, read)]
            for split, each in chosen.items()
        }
        files = {split: each.source for split, each in chosen.items() if each.source != GENERATED}
        yield TaskSet(tasks=tasks, read=read, contents=contents(files))

    def rebuild(self, record: Mapping[str, Any]) -> HouseholdEnvironment:
        """The task of a trace of `turntree traces household`."""
        return HouseholdEnvironment(build_game(record))

    @staticmethod
    def options(record: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options under which there are games like that of a trace; None for a game of a file, which may be one
        that was trained on."""
        return {"difficulty": record["difficulty"]} if "difficulty" in record else None

    def _games(self, split: str, count: int, first: bool) -> GamesConfig:
        source, offset = (self.games, self.offset) if first else (self.held_out, 0)
        return GamesConfig(
            source=source, split=cast(Split, split), count=count, offset=offset, difficulty=self.difficulty
        )
