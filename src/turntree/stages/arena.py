"""What a stage plays: household games, or questions with their tools."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.core.protocols import Environment
from turntree.domains.household.environment import HouseholdEnvironment
from turntree.environments.pool import EnvironmentPool
from turntree.stages.questions import QuestionsConfig, open_questions
from turntree.stages.tasks import GamesConfig, games


@dataclass(frozen=True)
class Arena:
    """What is played: to train on, to check on, where it is stepped (None: in this process), what its tools did."""

    tasks: Sequence[Environment]
    held_out: Sequence[Environment]
    pool: EnvironmentPool | None = None
    figures: Callable[[], dict[str, Any]] = dict
    read: Sequence[dict[str, Any]] = ()  # what reading question files counted


@contextlib.contextmanager
def open_arena(
    held_out: GamesConfig, questions: QuestionsConfig | None, *, train: GamesConfig | None = None
) -> Iterator[Arena]:
    """The questions, where there are any, else the games; without `train` there are no games to train on."""
    if questions is None:
        yield Arena(_household(train) if train else (), _household(held_out))
        return
    with open_questions(questions) as opened:
        yield Arena(opened.tasks, opened.held_out, opened.pool, opened.figures, opened.read)


def _household(config: GamesConfig) -> list[HouseholdEnvironment]:
    return [HouseholdEnvironment(game) for game, _ in games(config)]
