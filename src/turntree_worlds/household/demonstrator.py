"""Expert play on household games as traces: demonstrations that use only what a player has seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, cast

from turntree.core import seeds
from turntree.core.config import Between, Bounded, Part, Positive, to_mapping
from turntree.core.errors import ConfigError
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.env.tasks import environment_record
from turntree.traces.schema import Split, Trace
from turntree.traces.splits import demonstrated_split
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.entry import Household
from turntree_worlds.household.environment import HouseholdEnvironment
from turntree_worlds.household.experts import UnreachableGoal, next_exploring_action, stumble
from turntree_worlds.household.world import Game, State


@dataclass(frozen=True, kw_only=True)
class HouseholdDemonstrator(Bounded):
    """Expert play on household games.

    The games are ALFWorld's, or generated ones in their format. Slips (random mistakes) lead to states that a policy
    reaches but an expert does not. A slip is part of the history of later turns; slips are marked in
    `meta["skip_turns"]`, so no stage learns from them.

    \b
    Example: turntree traces household --count 300 --out runs/traces.jsonl
             turntree traces household --games $ALFWORLD_DATA/json_2.1.1/train --count 500 --out runs/real.jsonl
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
    split: Split = "train"
    """Which games: train, dev or test; generated ones are drawn from it."""
    count: Positive = 200
    """How many games. The six task types alternate in generated ones; those of a file or folder are drawn."""
    expert: Literal["explore", "shortest"] = "explore"
    """"explore" uses only what was seen; "shortest" knows the room, so its search turns cannot be learned: nothing
    in the history tells where to look."""
    max_turns: int = 40
    """Longest game."""
    slips: Annotated[float, Between(0, 0.99)] = 0.0
    """Chance of a slip before a turn (noise injection, Laskey et al. 2017)."""
    dev: Annotated[float, Between(0, 0.99)] = 0.2
    """Share of the games to train on that is held out for development."""
    seed: int = 0
    """Of the draw of games from a file or folder, of experts, slips and splits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slips and self.expert == "shortest":
            raise ConfigError("goes with the exploring expert only", field="slips")
        if self.environment.prompt != "plain":
            raise ConfigError("must be plain: the expert gives bare commands", field="environment.prompt")

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Trace | str]:
        """Every game played once: the episode, or why there is none."""
        with self.environment.open({self.split: self.count}, seed=self.seed) as opened:
            for task in cast("Sequence[HouseholdEnvironment]", opened.of(self.split)):
                yield _play(task.world.game, self)


def teacher(environment: Environment, history: Sequence[Message]) -> Message | str:
    """What a player who has read the same texts does next (part `household` of kind `teachers`)."""
    if not isinstance(environment, HouseholdEnvironment):
        return "not a household game"
    try:
        command = next_exploring_action(environment.world)
        return Message("assistant", command if environment.prompt == "plain" else f"Action: {command}")
    except UnreachableGoal:
        return "goal out of reach"


def _play(game: Game, config: HouseholdDemonstrator) -> Trace | str:
    """One demonstrated episode, or why there is none."""
    state = game.reset()
    messages = [Message("user", game.intro)]
    skipped: dict[str, str] = {}
    try:
        for turn, (command, slipped) in enumerate(itertools.islice(_commands(state, config), config.max_turns)):
            if slipped:
                skipped[str(turn)] = "slip"
            messages += [Message("assistant", command), Message("user", state.step(command).observation)]
    except UnreachableGoal:
        return "goal out of reach"
    if not state.won:
        return f"not won in {config.max_turns} turns"
    marks = {"skip_turns": skipped} if skipped else {}
    return Trace(
        id=game.id,
        messages=tuple(messages),
        domain="household",
        split=demonstrated_split(config.split, game.id, config.seed, config.dev),
        success=True,
        environment=environment_record(
            Part("household", to_mapping(config.environment)), config.split, config.count, config.seed, game.id
        ),
        meta={"task_type": game.task_type, "expert": config.expert, **marks},
    )


def _commands(state: State, config: HouseholdDemonstrator) -> Iterator[tuple[str, bool]]:
    """What the player does next and whether it is a slip; the caller plays it before drawing the next."""
    if config.expert == "shortest":
        plan = shortest_plan(state)
        if plan is None:
            raise UnreachableGoal(f"game {state.game.id}: the goal is out of reach")
        yield from ((command, False) for command in plan)
        return
    rng = seeds.generator(config.seed, "expert", state.game.id)
    while not state.won:
        if config.slips > 0 and rng.random() < config.slips:
            yield from ((command, True) for command in stumble(state, rng))
        if not state.won:
            yield next_exploring_action(state, rng), False
