"""Questions about a generated world: chains of relations, and arithmetic over the numbers at their ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from turntree.core import seeds
from turntree.core.config import Bounded, Share
from turntree.core.errors import ConfigError
from turntree_worlds.qa.questions import Question
from turntree_worlds.qa.world import RELATIONS, World

Split = Literal["train", "dev", "test"]
Operation = Literal["none", "difference", "sum"]

_SHARES: dict[Split, int] = {"train": 6, "dev": 2, "test": 2}  # of the entities that questions start from, in tenths
_YEARS = ("birth year", "founding year")
_COUNTS = ("population",)
_NUMBERS = (*_YEARS, *_COUNTS)
_PEOPLE = frozenset({"mother", "father", "spouse", "teacher", "founder", "mayor", "leader"})
_ENTITIES = tuple(relation for told in RELATIONS.values() for relation, kind in told.items() if kind != "number")
_TRIES = 50  # draws of chains for one question
_PATIENCE = 300  # draws of questions without a new one


@dataclass(frozen=True)
class Chain:
    """`relations` in the order in which they are looked up, the first one of `start`, and the `values` found."""

    start: str
    relations: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        return "".join(f"the {relation} of " for relation in reversed(self.relations)) + self.start


@dataclass(frozen=True)
class Posed:
    """A question with the way to its answer: what to look up, and what to do with the numbers found."""

    question: Question
    chains: tuple[Chain, ...]
    operation: Operation = "none"


@dataclass(frozen=True, kw_only=True)
class QuestionMix(Bounded):
    """What is asked."""

    hops: tuple[tuple[int, float], ...] = ((2, 0.35), (3, 0.3), (4, 0.2), (5, 0.1), (6, 0.05))
    """Shares of questions by how many look-ups they take: [look-ups, share] each."""
    arithmetic: Share = 0.35
    """Share of those with arithmetic, which take two look-ups at least."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.hops or any(hops < 1 or share < 0 for hops, share in self.hops):
            raise ConfigError(f"impossible shares {self.hops}", field="hops", hint="[hops >= 1, share >= 0] each")
        if sum(share for _, share in self.hops) <= 0:
            raise ConfigError("all shares are 0", field="hops")


def generate_questions(world: World, split: Split, count: int, mix: QuestionMix | None = None) -> tuple[Posed, ...]:
    """The first `count` questions of a split, no two alike. Every chain of a split starts from entities of its own, so
    that no two splits share a question. Raises `ConfigError` when the world is too small for this many."""
    mix = mix or QuestionMix()
    starts = split_entities(world, split)
    posed: dict[str, Posed] = {}  # by the key of its question
    number = last = 0  # of the draw, and of the last one that was new
    while len(posed) < count:
        if number - last > _PATIENCE:
            raise ConfigError(f"this world has only {len(posed)} of {count} {split} questions", hint="ask for fewer")
        rng = seeds.generator(world.seed, "qa", "question", split, number)
        found = _draw(world, starts, rng, mix, f"qa-{world.seed}-{split}-{len(posed)}")
        if found is not None and found.question.key not in posed:
            posed[found.question.key], last = found, number
        number += 1
    return tuple(posed.values())


def split_entities(world: World, split: Split) -> list[str]:
    """The entities that questions of a split start from."""
    if split not in get_args(Split):
        raise ConfigError(f"unknown split {split!r}", field="split", hint=f"use one of {', '.join(get_args(Split))}")
    names = sorted(world.kinds)
    seeds.generator(world.seed, "qa", "splits").shuffle(names)
    splits = [name for name, share in _SHARES.items() for _ in range(share)]
    return [name for place, name in enumerate(names) if splits[place % len(splits)] == split]


def _draw(world: World, starts: Sequence[str], rng: random.Random, mix: QuestionMix, id: str) -> Posed | None:
    """A question of a drawn length and kind, or None where so few tries find none."""
    (hops,) = rng.choices([hops for hops, _ in mix.hops], [share for _, share in mix.hops])
    operation: Operation = "none"
    if hops > 1 and rng.random() < mix.arithmetic:
        operation = rng.choice(("difference", "difference", "sum"))
    ends = {"none": (*_ENTITIES, *_NUMBERS), "difference": _YEARS, "sum": _COUNTS}[operation]
    for _ in range(_TRIES):
        first = rng.randint(1, hops - 1) if operation != "none" else hops
        lengths = [first] if first == hops else [first, hops - first]
        chains = [_walk(world, rng, rng.choice(starts), length, ends) for length in lengths]
        whole = tuple(chain for chain in chains if chain is not None)
        if len(whole) == len(lengths):
            posed = _posed(world, whole, operation, id)
            if posed is not None:
                return posed
    return None


def _walk(world: World, rng: random.Random, start: str, hops: int, ends: Sequence[str]) -> Chain | None:
    """A chain that meets no entity twice and ends with one of the relations `ends`."""
    seen, relations = [start], list[str]()
    for left in range(hops, 0, -1):
        allowed = ends if left == 1 else _ENTITIES
        steps = [
            (relation, value)
            for relation, value in world.told[seen[-1]].items()
            if relation in allowed and value not in seen
        ]
        if not steps:
            return None
        relation, value = rng.choice(steps)
        relations.append(relation)
        seen.append(value)
    return Chain(start, tuple(relations), tuple(seen[1:]))


def _posed(world: World, chains: tuple[Chain, ...], operation: Operation, id: str) -> Posed | None:
    """The question that the chains ask, unless its answer is in the question itself or, with arithmetic, in any
    document."""
    last, answer = chains[0].relations[-1], chains[0].values[-1]
    if operation == "difference":
        text = f"How many years lie between {chains[0].text} and {chains[1].text}?"
        answer = str(abs(int(answer) - int(chains[1].values[-1])))
    elif operation == "sum":
        text = f"What is the sum of {chains[0].text} and {chains[1].text}?"
        answer = str(int(answer) + int(chains[1].values[-1]))
    else:
        text = f"{'Who' if last in _PEOPLE else 'What'} is {chains[0].text}?"
    if answer in text:
        return None
    if operation != "none" and (answer in world.numbers or len(answer) < 2):  # search results are numbered
        return None
    question = Question(
        id=id,
        text=text,
        answers=(answer,),
        answer_type="number" if last in _NUMBERS else "span",
        kind=operation if operation != "none" else "number" if last in _NUMBERS else "chain",
    )
    return Posed(question, chains, operation)
