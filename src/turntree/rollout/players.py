"""Who plays tasks: the scheduler, or an outside program that drives itself (an agent behind a gateway)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from turntree.core.errors import ConfigError, InputError
from turntree.core.labels import Rewards
from turntree.core.messages import Message
from turntree.core.protocols import Brancher, Environment, Gate, Observation, Renderer, StreamingEngine, Task, task_of
from turntree.core.tree import RolloutTree, StopReason
from turntree.env.local import LocalPool
from turntree.rollout.accounting import Usage
from turntree.rollout.groups import GrownGroup
from turntree.rollout.live import EpisodeConfig, judged
from turntree.rollout.rewards import RewardSum
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

DECIDING = ("gate", "brancher")


class Player(Protocol):
    """Turns tasks into finished groups: the law of `Scheduler.run`."""

    usage: Usage
    rendered: bool

    def run(
        self, tasks: Iterable[Environment], *, seed: int, iteration: int = 0, begun: Counter[str] | None = None
    ) -> Iterator[GrownGroup]: ...


Plays = Callable[..., Player]
"""The attribute `player` of tasks that are played by a program of their own: it takes the arguments of `Scheduler`, a
gate and a brancher only for a task that `replays`."""


class PlayedTask(Task, ABC):
    """A task (protocol `Environment`) that only its `player` can play: whoever steps it gets its `refusal`."""

    replays: bool = False
    """Whether its player can cut its groups, and fork its rollouts by playing them again."""

    @abstractmethod
    def refusal(self) -> InputError:
        """Why it cannot be stepped, and what to do."""

    def reset(self) -> tuple[Message, ...]:
        raise self.refusal()

    def step(self, action: Message) -> Observation:
        raise self.refusal()

    def fork(self) -> Environment:
        raise self.refusal()


def require_steppable(tasks: Sequence[Environment], needed: str) -> None:
    """Raise `ConfigError` for tasks that play themselves, where the configuration key `needed` steps environments. A
    gate and a brancher also take tasks whose player `replays` them."""
    decides = needed in DECIDING and tasks and isinstance(tasks[0], PlayedTask) and tasks[0].replays
    if tasks and task_of(tasks[0]).player is not None and not decides:
        problem = "steps environments, and these tasks play themselves: turntree cannot stop or copy them at a turn"
        raise ConfigError(problem, field=needed, hint="leave it out")


def require_rendered(grown: Sequence[tuple[RolloutTree, Rewards]]) -> None:
    """Raise `InputError` where every rollout ended because its messages could not be rendered: the model and the tasks
    do not fit."""
    ends = [(tree, end, rewards) for tree, rewards in grown for end in tree.ends()]
    if ends and all(tree.stop_reason(end) is StopReason.RENDERER_ERROR for tree, end, _ in ends):
        _, end, rewards = ends[0]
        raise InputError(rewards.verdicts[end].reason, hint="see turntree check model")


def player_of(
    tasks: Sequence[Environment],
    engine: StreamingEngine,
    renderer: Renderer,
    config: SchedulerConfig,
    *,
    pool: LocalPool | None = None,
    gate: Gate | None = None,
    brancher: Brancher | None = None,
    rewards: RewardSum | None = None,
) -> Player:
    """The tasks' own player where they have one, else the scheduler. Raises `ConfigError` for a gate or a brancher with
    tasks whose player can neither cut nor fork them."""
    own: Plays | None = task_of(tasks[0]).player if tasks else None
    if own is None:
        return Scheduler(engine, renderer, config, pool=pool, gate=gate, brancher=brancher, rewards=rewards)
    deciding: dict[str, Any] = {n: p for n, p in zip(DECIDING, (gate, brancher), strict=True) if p is not None}
    for name in deciding:
        require_steppable(tasks, name)
    return own(engine, renderer, config, rewards, **deciding)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and for whom tasks are played."""

    pool: LocalPool | None = None
    functions: RewardSum | None = None
    places: int = 256  # rollouts at once
    finished: Callable[[int], object] | None = None  # told how many rollouts ended, task by task


def grow(
    tasks: Sequence[Environment],
    engine: StreamingEngine,
    renderer: Renderer,
    config: EpisodeConfig,
    *,
    seed: int,
    group_size: int = 1,
    setting: Setting = Setting(),
) -> list[tuple[RolloutTree, Rewards]]:
    """Play `group_size` episodes of every task to the end: a tree and its rewards for each, in order.

    The reward of a leaf is the one that its environment gave, or else 1.0 for success and 0.0 for an episode that ended
    without it (turn and context limits included); None where the episode failed. With functions it is theirs; they
    judge when all episodes have ended. The draws of (task, sample, turn) depend on `seed` only, and of a task that
    comes again on how often it came before. Raises `InputError` where no task can be rendered.
    """
    settings = SchedulerConfig(episodes=config, group_size=group_size)
    alone = bool(tasks) and task_of(tasks[0]).player is not None
    if not alone:  # nothing in this process could be stopped by a limit of time
        settings = replace(settings, max_live_rollouts=setting.places, rollout_seconds=math.inf, group_seconds=math.inf)
    rewards = setting.functions if alone else None
    player = player_of(tasks, engine, renderer, settings, pool=setting.pool, rewards=rewards)
    player.rendered = not alone  # one task that cannot be rendered is censored
    groups: list[GrownGroup] = []
    for group in player.run(tasks, seed=seed):
        groups.append(group)
        if setting.finished is not None:
            setting.finished(group_size)
    grown = [(group.tree, group.rewards) for group in groups]
    require_rendered(grown)
    if alone or setting.functions is None:
        return grown
    judgements = judged([group.endings for group in groups], setting.functions)
    return [(group.tree, given) for group, given in zip(groups, judgements, strict=True)]
