"""Expert play on household games as traces: demonstrations that use only what a player has seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, cast

from turntree.core import seeds
from turntree.core.config import Between, Part, to_mapping
from turntree.core.errors import ConfigError
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.stages.gold import Demonstrations
from turntree.traces.schema import Trace
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.entry import Household
from turntree_worlds.household.environment import HouseholdEnvironment
from turntree_worlds.household.experts import UnreachableGoal, next_exploring_action, stumble


@dataclass(frozen=True, kw_only=True)
class HouseholdDemonstrator(Demonstrations):
    """Expert play on household games.

    The games are ALFWorld's, or generated ones in their format. Slips (random mistakes) lead to states that a policy
    reaches but an expert does not. A slip is part of the history of later turns; slips are marked in
    `meta["skip_turns"]`, so no stage learns from them.

    \b
    Example: turntree traces household --count 300 --out runs/traces.jsonl
             turntree traces household --games $ALFWORLD_DATA/json_2.1.1/train \\
                 --out runs/real.jsonl
    """

    noun: ClassVar[str] = "games"
    short: ClassVar[dict[str, str]] = {
        "--games": "environment.games",
        "--split": "split",
        "--count": "count",
        "--difficulty": "environment.difficulty",
        "--expert": "expert",
        "--slips": "slips",
        "--seed": "seed",
    }

    environment: Household = field(default_factory=Household)
    expert: Literal["explore", "shortest"] = "explore"
    """"explore" uses only what was seen; "shortest" knows the room, so its search turns cannot be learned: nothing
    in the history tells where to look."""
    max_turns: int = 40
    """Longest game."""
    slips: Annotated[float, Between(0, 0.99)] = 0.0
    """Chance of a slip before a turn (noise injection, Laskey et al. 2017)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slips and self.expert == "shortest":
            raise ConfigError("goes with the exploring expert only", field="slips")

    def __iter__(self) -> Iterator[Trace | str]:
        """Every game played once: the episode, or why there is none."""
        with self.environment.open({self.split: self.count}, seed=self.seed) as opened:
            yield from map(self._played, cast("Sequence[HouseholdEnvironment]", opened.of(self.split)))

    def _played(self, task: HouseholdEnvironment) -> Trace | str:
        messages, slips, won = list(task.reset()), set[int](), False
        try:
            for message, slipped in itertools.islice(_turns(task, self), self.max_turns):
                if slipped:
                    slips.add(len(messages))
                observation = task.step(message)
                messages += [message, *observation.messages]
                if won := observation.done:
                    break
        except UnreachableGoal:
            return "goal out of reach"
        if not won:
            return f"not won in {self.max_turns} turns"
        environment = Part("household", to_mapping(self.environment))
        return self.trace(task, messages, environment, slips=slips, expert=self.expert)


def teacher(environment: Environment, history: Sequence[Message]) -> Message | str:
    """What a player who has read the same texts does next (part `household` of kind `teachers`)."""
    if not isinstance(environment, HouseholdEnvironment):
        return "not a household game"
    try:
        return _said(environment, next_exploring_action(environment.world))
    except UnreachableGoal:
        return "goal out of reach"


def _said(environment: HouseholdEnvironment, command: str) -> Message:
    return Message("assistant", command if environment.prompt == "plain" else f"Action: {command}")


def _turns(task: HouseholdEnvironment, config: HouseholdDemonstrator) -> Iterator[tuple[Message, bool]]:
    """What the player says next and whether it is a slip; the caller plays it before drawing the next."""
    if config.expert == "shortest":
        plan = shortest_plan(task.world)
        if plan is None:
            raise UnreachableGoal(f"game {task.task_id}: the goal is out of reach")
        yield from ((_said(task, command), False) for command in plan)
        return
    rng = seeds.generator(config.seed, "expert", task.task_id)
    while True:
        if config.slips > 0 and rng.random() < config.slips:
            yield from ((_said(task, command), True) for command in stumble(task.world, rng))
        yield _said(task, next_exploring_action(task.world, rng)), False
