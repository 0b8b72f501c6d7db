"""Expert play on household games as traces: demonstrations that use only what a player has seen."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from turntree.core import seeds
from turntree.core.config import Between
from turntree.core.errors import ConfigError
from turntree.core.messages import Message
from turntree.core.protocols import Environment
from turntree.traces.schema import Trace
from turntree.traces.splits import demonstrated_split
from turntree_worlds.household.distance import shortest_plan
from turntree_worlds.household.entry import GamesConfig, games
from turntree_worlds.household.environment import HouseholdEnvironment
from turntree_worlds.household.experts import UnreachableGoal, next_exploring_action, stumble
from turntree_worlds.household.world import Game, State


@dataclass(frozen=True, kw_only=True)
class HouseholdDemonstrator:
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
        "--games": "games.source",
        "--split": "games.split",
        "--count": "games.count",
        "--difficulty": "games.difficulty",
        "--expert": "expert",
        "--slips": "slips",
        "--seed": "seed",
    }

    games: GamesConfig = field(default_factory=GamesConfig)
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
        if self.slips and self.expert == "shortest":
            raise ConfigError("goes with the exploring expert only", field="slips")

    def __len__(self) -> int:
        return self.games.count

    def __iter__(self) -> Iterator[Trace | str]:
        """Every game played once: the episode, or why there is none."""
        return (_play(game, source, self) for game, source in games(self.games, self.seed))


def teacher(environment: Environment, history: Sequence[Message]) -> Message | str:
    """What a player who has read the same texts does next (part `household` of kind `teachers`)."""
    if not isinstance(environment, HouseholdEnvironment):
        return "not a household game"
    try:
        command = next_exploring_action(environment.world)
        return Message("assistant", command if environment.prompt == "plain" else f"Action: {command}")
    except UnreachableGoal:
        return "goal out of reach"


def _play(game: Game, source: dict[str, Any], config: HouseholdDemonstrator) -> Trace | str:
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
        split=demonstrated_split(config.games.split, game.id, config.seed, config.dev),
        success=True,
        environment=source,
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
