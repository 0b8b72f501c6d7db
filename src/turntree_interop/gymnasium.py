"""`gymnasium:ID`: environments of Gymnasium, read and played as text.

An observation is written by its space, and an action read by its space, in the same way:

| space | text |
|---|---|
| Discrete | the number (an action also by its name, where `actions` names them) |
| Box, MultiDiscrete, MultiBinary | a JSON list of numbers, rounded to 4 decimals |
| Text | the text |
| Tuple | its parts, separated by "; " |
| Dict | `name: part`, separated by "; " |

With `ansi` the environment's own drawing (`render_mode="ansi"`) is shown in place of the observation. A message that is
not an action is answered with a description of actions, and uses a turn. The reward of an episode is the sum of the
rewards. Success is a sum of at least `success` (default: the `reward_threshold` of the registration, else above 0).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import needs, package, reason_of
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number, given_truth
from turntree.core.seeds import derive
from turntree.env.adapted import AdaptedEnvironment, named

NAMES = {  # how the documentation of toy-text games calls their actions
    "FrozenLake": ("left", "down", "right", "up"),
    "CliffWalking": ("up", "right", "down", "left"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
    "Blackjack": ("stick", "hit"),
}


@needs("gymnasium", "gymnasium")
def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    make: Mapping[str, Any] | None = None,
    actions: tuple[str, ...] = (),
    instructions: str | None = None,
    ansi: bool = False,
    success: float | None = None,
) -> list[AdaptedEnvironment]:
    """`count` episodes that differ in the seed of their `reset`.

    Args:
        make: Keyword arguments of `gymnasium.make`.
        actions: Names of the actions, where they are discrete (default: those of the toy-text games).
        instructions: What the policy is told (default: the name of the game, and how an action is written).
        ansi: Show the environment's own drawing in place of the observation.
        success: Sum of rewards from which an episode is a success (default: its registration's, else above 0).
    """
    gymnasium = package("gymnasium", "gymnasium")
    name = named(argument, "gymnasium:ID")
    arguments = {**(make or {}), **({"render_mode": "ansi"} if ansi else {})}
    try:
        first = gymnasium.make(name, **arguments)
    except BaseException as error:
        problem = f"gymnasium.make({name!r}) raised {reason_of(error)}"
        raise InputError(problem, field="environment", hint="check the id and environment.make") from error
    with contextlib.closing(first):  # refused before any episode: all of them would be censored
        names = _names(first.action_space, name, actions)
        if success is None and first.spec is not None:
            success = first.spec.reward_threshold
        asked = described(first.action_space, names)
        modes = first.metadata.get("render_modes") or ()
        if ansi and "ansi" not in modes:
            problem = f"{name!r} cannot draw as text (its render modes: {', '.join(modes) or 'none'})"
            raise InputError(problem, field="environment.ansi", hint="leave it out: observations are written as text")
        if not ansi:
            written(first.observation_space, first.observation_space.sample())
    told = instructions or f"You play {name}. Reply with {asked}."
    return [
        AdaptedEnvironment(
            partial(GymnasiumGame, name, arguments, names, told, ansi, success, derive(seed, "gym", split, i) % 2**31),
            task_id=f"{name}/{split}/{i}",
            seed=derive(seed, "gym", split, i),
            task_type=name,
        )
        for i in range(count)
    ]


def _names(space: Any, name: str, given: tuple[str, ...]) -> tuple[str, ...]:
    """The names of the actions, one for each. Raises `InputError` where others than the game has are `given`."""
    count = int(space.n) if type(space).__name__ == "Discrete" else 0
    if given and len(given) != count:
        has = f"{count} actions" if count else f"actions of space {type(space).__name__}, which have no names"
        hint = "name every action, in the order of their numbers" if count else "leave it out"
        raise InputError(f"names {len(given)} actions, and {name!r} has {has}", field="environment.actions", hint=hint)
    known = NAMES.get(re.split(r"[-_\d]", name.rpartition("/")[2])[0], ())
    return given or (known if len(known) == count else ())


@dataclass(eq=False)
class GymnasiumGame:
    name: str
    arguments: Mapping[str, Any]
    names: Sequence[str]
    told: str
    ansi: bool
    success: float | None
    seed: int

    def __post_init__(self) -> None:
        self._environment = package("gymnasium", "gymnasium").make(self.name, **self.arguments)
        self._total = 0.0

    def begin(self) -> tuple[Message, ...]:
        observation, _ = self._environment.reset(seed=self.seed)
        return (Message("user", f"{self.told}\n{self._shown(observation)}"),)

    def act(self, action: Message) -> Observation:
        space = self._environment.action_space
        try:
            chosen = read(space, answer_text(action), self.names)
        except ValueError:
            answer = f"That is not an action. Reply with {described(space, self.names)}."
            return Observation((Message("user", answer),), done=False, reward=self._total)
        observation, reward, terminated, truncated, _ = self._environment.step(chosen)
        self._total += given_number("reward", reward)
        done = given_truth("terminated", terminated) | given_truth("truncated", truncated)
        enough = self._total > 0 if self.success is None else self._total >= self.success
        message = Message("user", self._shown(observation))
        return Observation((message,), done, success=enough if done else None, reward=self._total)

    def close(self) -> None:
        self._environment.close()

    def _shown(self, observation: Any) -> str:
        if not self.ansi:
            return written(self._environment.observation_space, observation)
        drawn = str(self._environment.render())
        return re.sub(r"\x1b\[[\d;]*m", "", re.sub(r"\x1b\[4\dm(.*?)\x1b\[0m", r"[\1]", drawn)).strip()


def written(space: Any, value: Any) -> str:
    """An observation as text, by its space."""
    match type(space).__name__:
        case "Tuple":
            return "; ".join(written(part, item) for part, item in zip(space.spaces, value, strict=True))
        case "Dict":
            return "; ".join(f"{name}: {written(part, value[name])}" for name, part in space.spaces.items())
        case "Discrete":
            return str(int(value))
        case "Text":
            return str(value)
        case "Box" | "MultiDiscrete" | "MultiBinary":
            return json.dumps(_rounded(value.tolist()))
        case other:
            raise InputError(f"observations of space {other} have no text", field="environment", hint="wrap it")


def read(space: Any, text: str, names: Sequence[str] = ()) -> Any:
    """An action from text, by its space. Raises `ValueError` for any other text."""
    text = text.strip()
    match type(space).__name__:
        case "Discrete":
            lowered = [name.lower() for name in names]
            chosen = lowered.index(text.lower()) + int(space.start) if text.lower() in lowered else int(text)
        case "Text":
            chosen = text
        case "Tuple":
            parts = text.split(";")
            if len(parts) != len(space.spaces):
                raise ValueError("another number of parts")
            chosen = tuple(read(part, item) for part, item in zip(space.spaces, parts, strict=True))
        case "Box" | "MultiDiscrete" | "MultiBinary":
            import numpy as np

            try:
                given = np.asarray(json.loads(text))
                with np.errstate(all="ignore"):
                    chosen = given.astype(space.dtype).reshape(space.shape)
                if np.issubdtype(space.dtype, np.integer) and (given.ravel() != chosen.ravel()).any():
                    raise ValueError("not whole numbers of this type")
            except (TypeError, OverflowError, RecursionError) as error:
                raise ValueError("not a list of numbers") from error
        case other:
            raise InputError(f"actions of space {other} cannot be read from text", field="environment", hint="wrap it")
    if not space.contains(chosen):
        raise ValueError("outside of the space")
    return chosen


def described(space: Any, names: Sequence[str] = ()) -> str:
    match type(space).__name__:
        case "Discrete" if names:
            return f"one action: {', '.join(names)}"
        case "Discrete":
            return f"one number from {int(space.start)} to {int(space.start + space.n - 1)}"
        case "Tuple":
            for part in space.spaces:
                described(part)
            return f"{len(space.spaces)} parts separated by ';'"
        case "Text":
            return "a text"
        case "Box" | "MultiDiscrete" | "MultiBinary":
            return f"a JSON list of numbers of shape {list(space.shape)}"
        case other:
            raise InputError(f"actions of space {other} cannot be read from text", field="environment", hint="wrap it")


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]  # pyright: ignore[reportUnknownVariableType]
    return round(value, 4) if isinstance(value, float) else value
