"""`reasoning_gym:NAME`: questions of Reasoning Gym, answered in one turn and scored by the dataset itself.

The answer is what stands between `<answer>` and `</answer>`, or the whole message where there are no such tags (the
embedded policies know none). The reward is `score_answer`, from 0 to 1. Success is a reward of 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import partial
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import reason_of
from turntree.core.messages import Message, answer_text
from turntree.core.protocols import Observation
from turntree.core.scalars import given_number
from turntree.core.seeds import derive
from turntree.env.adapted import AdaptedEnvironment, named, of_split, package

DRAWN_PER_TASK = 100  # how many questions are drawn for each that is wanted, before a dataset counts as too small


def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    config: Mapping[str, Any] | None = None,
    system: str | None = None,
) -> list[AdaptedEnvironment]:
    """`count` different questions.

    A question is in the split that its text is assigned to by hash, so what is trained on is never asked in a test.
    Raises `InputError` for a dataset that does not have `count` different questions in the split.

    Args:
        config: Options of the dataset, as {"max_terms": 3}.
        system: A system prompt: the text, or the name of one of Reasoning Gym's own ("default", "direct", ...).
    """
    gym = package("reasoning_gym", "reasoning-gym")
    name = named(argument, "reasoning_gym:NAME")
    drawn = DRAWN_PER_TASK * count
    try:
        dataset = gym.create_dataset(name, seed=derive(seed, "reasoning_gym") % 2**31, size=drawn, **(config or {}))
    except BaseException as error:
        problem = f"dataset {name!r} was not made ({reason_of(error)})"
        raise InputError(problem, field="environment", hint="check the name and environment.config") from error
    entries = itertools.islice(dataset, drawn)
    found = of_split(entries, split, count, seed=None, where=name, key=lambda entry: str(entry["question"]))
    if len(found) < count:
        problem = (
            f"{name} has {len(found)} different questions for split {split!r} in {drawn} drawn, {count} are asked for"
        )
        raise InputError(problem, field="environment", hint="ask for fewer, or widen environment.config")
    opening = () if system is None else (Message("system", gym.utils.SYSTEM_PROMPTS.get(system, system)),)
    return [
        AdaptedEnvironment(
            partial(Question, dataset, entry, opening), task_id=f"{name}/{derive(0, key):016x}", task_type=name
        )
        for key, entry in found
    ]


class Question:
    def __init__(self, dataset: Any, entry: dict[str, Any], opening: tuple[Message, ...]) -> None:
        self._dataset, self._entry, self._opening = dataset, entry, opening

    def begin(self) -> tuple[Message, ...]:
        return (*self._opening, Message("user", self._entry["question"]))

    def act(self, action: Message) -> Observation:
        utils = package("reasoning_gym.utils", "reasoning-gym")
        tagged = utils.extract_answer(answer_text(action))
        answer = answer_text(action) if tagged is None else tagged
        reward = given_number("reward", self._dataset.score_answer(answer=answer, entry=self._entry))
        told = Message("user", "Right." if reward >= 1 else "Wrong.")
        return Observation((told,), done=True, success=reward >= 1, reward=reward)
