"""What a stage plays: household games, or questions with their tools."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core.errors import ConfigError
from turntree.core.protocols import Environment
from turntree.domains.household.environment import HouseholdEnvironment
from turntree.environments.pool import EnvironmentPool
from turntree.environments.processes import ProcessPool, ProcessPoolConfig
from turntree.observe.files import tree_hash
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
    contents: Mapping[str, str] = field(default_factory=dict[str, str])  # hashes of the files that it was read from


@contextlib.contextmanager
def open_arena(
    held_out: GamesConfig,
    questions: QuestionsConfig | None,
    *,
    train: GamesConfig | None = None,
    workers: ProcessPoolConfig | None = None,
) -> Iterator[Arena]:
    """The questions, where there are any, else the games; without `train` there are no games to train on. Games are
    stepped in `workers`, questions in threads, since they share their tools."""
    processes = workers is not None and workers.workers > 0
    if questions is None:
        files = {"held_out": held_out.source, **({"games": train.source} if train else {})}
        with ProcessPool(workers) if processes else contextlib.nullcontext() as pool:
            tasks = _household(train) if train else ()
            yield Arena(tasks, _household(held_out), pool, contents=_contents(files))
        return
    if processes:
        raise ConfigError(
            "must be 0 for questions, which are stepped in threads and share their tools",
            field="environments.workers",
            hint="set questions.threads",
        )
    files = {"questions": questions.source, "held_out": questions.held_out, "index": questions.index}
    with open_questions(questions) as opened:
        pool, read = opened.pool, opened.read
        yield Arena(opened.tasks, opened.held_out, pool, opened.figures, read, _contents(files))


def _contents(sources: Mapping[str, str | None]) -> dict[str, str]:
    """The hashes of the files and folders among `sources`."""
    named = {name: source for name, source in sources.items() if source is not None and source != "generated"}
    paths = {name: Path(os.path.expanduser(os.path.expandvars(source))) for name, source in named.items()}
    return {f"{name}_hash": tree_hash(path) for name, path in paths.items()}


def _household(config: GamesConfig) -> list[HouseholdEnvironment]:
    return [HouseholdEnvironment(game) for game, _ in games(config)]
