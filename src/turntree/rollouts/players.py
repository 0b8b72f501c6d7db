"""Who plays tasks: the scheduler, or an outside program that drives itself (an agent behind a gateway)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from turntree.core.errors import ConfigError
from turntree.core.labels import Rewards
from turntree.core.protocols import Brancher, Environment, Gate, Renderer, StreamingEngine
from turntree.core.tree import RolloutTree
from turntree.environments.pool import EnvironmentPool
from turntree.rollouts import episodes
from turntree.rollouts.accounting import Usage
from turntree.rollouts.episodes import EpisodeConfig
from turntree.rollouts.groups import GrownGroup
from turntree.rollouts.rewards import RewardSum
from turntree.rollouts.scheduler import Order, Scheduler, SchedulerConfig


class Player(Protocol):
    """Turns tasks into finished groups: the law of `Scheduler.run`."""

    usage: Usage
    rendered: bool

    def run(
        self,
        tasks: Iterable[Environment],
        *,
        seed: int,
        iteration: int = 0,
        order: Order = "task",
        begun: Counter[str] | None = None,
        sizes: Iterable[int] | None = None,
    ) -> Iterator[GrownGroup]: ...


class Plays(Protocol):
    """The attribute `player` of tasks that are played by a program of their own."""

    def __call__(
        self, engine: StreamingEngine, renderer: Renderer, config: SchedulerConfig, rewards: RewardSum | None
    ) -> Player: ...


def require_steppable(tasks: Sequence[Environment], needed: str) -> None:
    """Raise `ConfigError` for tasks that play themselves, where the configuration key `needed` steps environments."""
    if tasks and getattr(tasks[0], "player", None) is not None:
        hint = "leave it at 0: agents are processes of their own"
        raise ConfigError("steps environments, and these tasks are agents", field=needed, hint=hint)


def player_of(
    tasks: Sequence[Environment],
    engine: StreamingEngine,
    renderer: Renderer,
    config: SchedulerConfig,
    *,
    pool: EnvironmentPool | None = None,
    gate: Gate | None = None,
    brancher: Brancher | None = None,
    rewards: RewardSum | None = None,
) -> Player:
    """The tasks' own player where they have one, else the scheduler. Raises `ConfigError` for a gate or a brancher with
    tasks that play themselves: nobody can stop or copy such a rollout at a turn."""
    own: Plays | None = getattr(tasks[0], "player", None) if tasks else None
    if own is None:
        return Scheduler(engine, renderer, config, pool=pool, gate=gate, brancher=brancher, rewards=rewards)
    for name, part in (("gate", gate), ("brancher", brancher)):
        if part is not None:
            raise ConfigError("needs an environment that turntree steps itself", field=name, hint="leave it out")
    return own(engine, renderer, config, rewards)


def grow(
    tasks: Sequence[Environment],
    engine: StreamingEngine,
    renderer: Renderer,
    config: EpisodeConfig,
    *,
    group_size: int = 1,
    seed: int,
    finished: episodes.Finished | None = None,
    part: bool = False,
    functions: RewardSum | None = None,
) -> list[tuple[RolloutTree, Rewards]]:
    """`episodes.grow`, or the same by the tasks' own player."""
    if not tasks or getattr(tasks[0], "player", None) is None:
        return episodes.grow(
            tasks,
            engine,
            renderer,
            config,
            group_size=group_size,
            seed=seed,
            finished=finished,
            part=part,
            functions=functions,
        )
    settings = SchedulerConfig(episodes=config, group_size=group_size)
    found: list[tuple[RolloutTree, Rewards]] = []
    for group in player_of(tasks, engine, renderer, settings, rewards=functions).run(tasks, seed=seed):
        found.append((group.tree, group.rewards))
        if finished is not None:
            finished(group_size)
    return found
