"""Rewards of an episode: named functions with weights, whose weighted sum takes the place of the environment's reward
(which `rollout.live` turns into a verdict).

A reward (`core.parts`, kind `rewards`) is a function `reward(episode) -> float | bool | Verdict | None`. It comes from
`module:object` or a registered name; its keyword-only parameters are its options, and `weight` (1 by default) is the
option that every reward has. The `parts` of a verdict are logged beside its reward (`rubric.NAME`). A function that
raises, or returns None or anything but a finite number, *censors* the rollout: it has no reward, and the reason names
the function. A failure is never a reward of 0.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any

from turntree.core import parts, scalars
from turntree.core.config import Between, Part, converted
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import Observation
from turntree.core.tree import StopReason
from turntree.core.verdict import Verdict
from turntree.run.means import mean

WEIGHT = "weight"
_Weight = Annotated[float, Between(-scalars.MOST_WEIGHT, scalars.MOST_WEIGHT)]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """A rollout that ended by itself, as a reward function sees it.

    `messages` are all of it, the task first. `observations[0]` is the task as well, `observations[t]` the answer to
    turn t, with the environment's `success`, `reward` and `progress`. `reward` is the environment's reward for the
    episode, else 1 for success and 0 for a failure; both are None where it does not say. An agent's calls are its
    turns, its prompts its observations.
    """

    task_id: str
    task_type: str | None
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    observations: tuple[Observation, ...]
    stop: StopReason
    reward: float | None
    success: bool | None

    @property
    def turns(self) -> tuple[Message, ...]:
        """What the policy said, turn by turn."""
        given = {id(message) for told in self.observations for message in told.messages}  # prompts may hold answers too
        return tuple(each for each in self.messages if each.role == "assistant" and id(each) not in given)

    @property
    def cut_turns(self) -> int:
        """How many of its turns the token limit cut."""
        return sum(message.cut for message in self.turns)

    @property
    def progress(self) -> float | None:
        """How far the task was done at the end, where the environment knows."""
        return self.observations[-1].progress


RewardFunction = Callable[[Episode], float | bool | Verdict | None]


@dataclass(frozen=True)
class WeightedReward:
    """One function of the sum, with its name in metrics and verdicts."""

    name: str
    weight: float
    function: RewardFunction


class RewardSum:
    """The weighted sum of some functions."""

    def __init__(self, functions: Sequence[WeightedReward]) -> None:
        self.functions = tuple(functions)
        self._reported: set[str] = set()

    def judge_all(self, episodes: Sequence[Episode], verdicts: Sequence[Verdict]) -> list[Verdict]:
        """The environment's `verdicts` with the sum in place of their rewards, and each value apart (None: it failed).
        A function that waits for a server says in `concurrency` how many episodes it judges at the same time."""
        found = [_each(one.function, episodes) for one in self.functions]
        return [self._summed(*each) for each in zip(episodes, verdicts, zip(*found, strict=True), strict=True)]

    def _summed(self, episode: Episode, verdict: Verdict, given: Sequence[Verdict]) -> Verdict:
        values: dict[str, float | None] = {}
        failed: list[str] = []
        for one, found in zip(self.functions, given, strict=True):
            values[one.name], problem = found.reward, found.reason if found.reward is None else ""
            values |= {f"{one.name}.{part}": value for part, value in found.parts.items()}
            if problem:
                failed.append(f"reward {one.name!r} {problem}")
                self._report(one.name, f"task {episode.task_id!r}: {failed[-1]}")
        if failed:
            return replace(verdict, reward=None, reason="; ".join(failed), parts=values)
        total = sum(one.weight * (values[one.name] or 0.0) for one in self.functions)
        try:
            return replace(verdict, reward=scalars.number(total), parts=values)
        except ValueError as error:
            return replace(verdict, reward=None, reason=f"the weighted sum of the rewards is {error}", parts=values)

    def close(self) -> None:
        """Close the functions that can be closed (a judge's connections and cache)."""
        for one in self.functions:
            close = getattr(one.function, "close", None)
            if callable(close):
                close()

    def _report(self, name: str, problem: str) -> None:
        """Print the first failure of each function, so that a function that always fails is noticed early."""
        if name not in self._reported:
            notice(f"warning: {problem} (rollouts that it fails on have no reward; metrics count them)")
        self._reported.add(name)


def build_rewards(named: Sequence[Part]) -> RewardSum | None:
    """The functions behind the parts; None where there are none. Raises `InputError` or `ConfigError` for a function
    that is asynchronous or cannot be found, for options that it does not have, and for two of one name."""
    built: dict[str, WeightedReward] = {}
    for number, part in enumerate(named):
        name, field = part.name.rpartition(":")[2], f"rewards.{number}"
        if name in built:
            hint = "a name tells the figures apart: call one of them by another name in your module"
            raise InputError(f"two functions have the name {name!r}", field="rewards", hint=hint)
        options = {key: value for key, value in part.options.items() if key != WEIGHT}
        weight = converted(_Weight, part.options.get(WEIGHT, 1.0), field=f"{field}.{WEIGHT}")
        function = parts.build("rewards", Part(part.name, options), field=field)
        _check_function(part.name, function)
        built[name] = WeightedReward(name, weight, function)
    return RewardSum(list(built.values())) if built else None


def identity(named: Sequence[Part], built: RewardSum | None) -> dict[str, Any]:
    """The code of the functions, and what each says of itself (`identity`: the contents of a rubric), for the identity
    of a run; empty without any."""
    if built is None:
        return {}
    own = [getattr(one.function, "identity", None) for one in built.functions]
    code = [parts.identity("rewards", part) for part in named]
    return {"rewards": [f"{a}+{b}" if isinstance(b, str) else a for a, b in zip(code, own, strict=True)]}


def parse_reward(text: str) -> Part:
    """`NAME` or `NAME=WEIGHT` of the command line."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return Part(text)
    try:
        return Part(name, {WEIGHT: converted(_Weight, float(weight), field=f"--reward {name}")})
    except ValueError:
        hint = "write --reward module:function=0.5"
        raise ConfigError(f"the weight of {name!r} is {weight!r}, not a number", field="--reward", hint=hint) from None


def figures(verdicts: Iterable[Verdict]) -> dict[str, Any]:
    """The mean of each function over the leaves that it judged (None: it judged none), and how many each failed on;
    nothing where no function judged."""
    values: dict[str, list[float | None]] = defaultdict(list)
    for verdict in verdicts:
        for name, value in verdict.parts.items():
            values[name].append(value)
    means = {name: mean(found) for name, found in values.items()}
    failed = {name: found.count(None) for name, found in values.items() if None in found}
    return ({"rewards": means} if means else {}) | ({"rewards_failed": failed} if failed else {})


# registered by name


def environment(episode: Episode) -> float | None:
    """What the episode is worth to its environment."""
    return episode.reward


def success(episode: Episode) -> float | None:
    """1 where the environment says that the task was solved, 0 where it says that it was not."""
    return None if episode.success is None else float(episode.success)


OF_THE_ENVIRONMENT = (environment, success)  # they judge nothing by themselves; a user's function may have their names


def _each(function: RewardFunction, episodes: Sequence[Episode]) -> list[Verdict]:
    threads = min(getattr(function, "concurrency", 1), len(episodes))
    if threads <= 1:
        return [_verdict(function, episode) for episode in episodes]
    with ThreadPoolExecutor(threads, thread_name_prefix="turntree-rewards") as pool:
        return list(pool.map(lambda episode: _verdict(function, episode), episodes))


def _verdict(function: RewardFunction, episode: Episode) -> Verdict:
    """What the function gives; without a reward the reason is what is wrong with it."""
    try:
        value: Any = function(episode)
        parts_of = scalars.known_numbers(value.parts) if isinstance(value, Verdict) else {}
        if isinstance(value, Verdict) and value.reward is None:
            return Verdict(None, f"did not judge: {value.reason}", parts=parts_of, cost=value.cost)
        value = value.reward if isinstance(value, Verdict) else value
    except BaseException as error:  # a bad rollout is data: the boundary to foreign code
        return Verdict(None, f"raised {reason_of(error)}")
    try:
        return Verdict(scalars.number(value), "", parts=parts_of)
    except ValueError as error:
        return Verdict(None, "gave None" if value is None else f"gave {error}")


def _check_function(name: str, function: Any) -> None:
    if not callable(function):
        raise InputError(f"{name!r} is {type(function).__name__}, not a function", field="reward")
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        hint = "write a plain function: it is called once, when a rollout has ended"
        raise InputError(f"{name!r} is asynchronous", field="reward", hint=hint)
