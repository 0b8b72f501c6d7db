"""`textarena:ID`: single-player games of TextArena.

The policy sees the game's own text: first the prompt, then the new text after each action (its own actions are not
echoed, because they are in the conversation already). The wrappers that TextArena puts around actions stay in place.
The reward is the game's, from -1 to 1. Success is a reward of 1.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number, given_truth
from turntree.core.seeds import derive
from turntree.env.adapted import AdaptedEnvironment, named, package


def tasks(split: str, count: int, *, seed: int, argument: str | None) -> list[AdaptedEnvironment]:
    """`count` games that differ in the seed of their `reset`."""
    name = named(argument, "textarena:ID")
    _open(name, 0)
    return [
        AdaptedEnvironment(
            partial(TextArenaGame, name, derive(seed, "textarena", split, i) % 2**31),
            task_id=f"{name}/{split}/{i}",
            seed=derive(seed, "textarena", split, i),
            task_type=name,
        )
        for i in range(count)
    ]


class TextArenaGame:
    def __init__(self, name: str, seed: int) -> None:
        self._name, self._seed = name, seed
        self._environment: Any = None

    def begin(self) -> tuple[Message, ...]:
        self._environment = _open(self._name, self._seed)
        return (Message("user", self._new()),)

    def act(self, action: Message) -> Observation:
        done, _ = self._environment.step(action=answer_text(action))
        told = self._new()
        if not given_truth("done", done):
            return Observation((Message("user", told or "Go on."),), done=False)
        rewards, about = self._environment.close()
        reward = given_number("reward", rewards[0])
        told = told or str(about[0].get("reason", "The game is over."))
        return Observation((Message("user", told),), done=True, success=reward >= 1, reward=reward)

    def _new(self) -> str:
        kind = package("textarena", "textarena").ObservationType
        told = self._environment.state.get_current_player_observation()
        return "\n".join(text for _, text, what in told if what != kind.PLAYER_ACTION).strip()


def _open(name: str, seed: int) -> Any:
    """A game after its reset. Raises `InputError` for one that is unknown, needs other players or cannot start."""
    textarena = package("textarena", "textarena")
    try:
        environment = textarena.make(name)
        environment.reset(num_players=1, seed=seed)
    except BaseException as error:
        problem = f"{name!r} did not start for one player ({reason_of(error)})"
        raise InputError(
            problem, field="environment", hint="check the id, and that the game is single-player"
        ) from error
    return environment
