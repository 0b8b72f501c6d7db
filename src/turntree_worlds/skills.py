"""Small text skills that the embedded policies were taught beside their worlds, to measure forgetting.

Each skill makes question and answer pairs from a seed. `chance` is the accuracy of the best answer that does not read
the question's content (measured over the generator's own distribution where it is not obvious); a figure
only means something where the base policy starts well above it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from turntree.core import seeds
from turntree.core.messages import Message

_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_NAMES = ("amy", "bob", "carl", "dina", "eva", "finn", "gus", "hana")
_COLORS = ("red", "blue", "green", "black", "white", "pink", "brown", "gray")
_THINGS = ("hat", "kite", "drum", "coat", "bike", "ball", "lamp", "flag")
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTHS = (
    *("january", "february", "march", "april", "may", "june"),
    *("july", "august", "september", "october", "november", "december"),
)
# Synthetic facts, which are stored in the weights only and are forgotten first.
_LANDS = ("arlia", "boren", "cavos", "delim", "estor", "fanor", "gilda", "hovar", "istan", "jorum", "kelda", "lomar")
_CAPITALS = ("velm", "tusk", "orin", "pell", "sarn", "quil", "rask", "mond", "neve", "ulto", "wick", "zand")


@dataclass(frozen=True)
class Question:
    skill: str
    prompt: str
    answer: str
    chance: float  # of the skill

    @property
    def messages(self) -> tuple[Message, ...]:
        return (Message("user", self.prompt),)

    def correct(self, reply: str) -> bool:
        """Exact match up to white space."""
        return reply.split() == self.answer.split()


@dataclass(frozen=True)
class Skill:
    name: str
    make: Callable[[random.Random], tuple[str, str]]
    chance: float
    asked: bool = True  # False: taught, but accuracy is too low to measure forgetting


def _reverse(rng: random.Random) -> tuple[str, str]:
    letters = rng.sample(_LETTERS, rng.randint(3, 5))
    return f"reverse {' '.join(letters)}", " ".join(reversed(letters))


def _sort(rng: random.Random) -> tuple[str, str]:
    letters = rng.sample(_LETTERS, 3)
    return f"sort {' '.join(letters)}", " ".join(sorted(letters))


def _larger(rng: random.Random) -> tuple[str, str]:
    one, other = rng.sample(range(1, 100), 2)
    return f"which is larger , {one} or {other} ?", str(max(one, other))


def _add(rng: random.Random) -> tuple[str, str]:
    one, other = rng.randint(0, 9), rng.randint(0, 9)
    return f"{one} plus {other} ?", str(one + other)


def _owner(rng: random.Random) -> tuple[str, str]:
    names, colors, things = rng.sample(_NAMES, 3), rng.sample(_COLORS, 3), rng.sample(_THINGS, 3)
    facts = " . ".join(f"{n} has a {c} {t}" for n, c, t in zip(names, colors, things, strict=True))
    asked = rng.randrange(3)
    return f"{facts} . what has {names[asked]} ?", f"a {colors[asked]} {things[asked]}"


def _repeat(rng: random.Random) -> tuple[str, str]:
    words = _COLORS + _THINGS + _NAMES + _DAYS
    said = " , ".join(f"{rng.choice(words)} {rng.randint(1, 12)}" for _ in range(rng.randint(2, 6)))
    return f"repeat {said}", said


def _calendar(rng: random.Random) -> tuple[str, str]:
    cycle = rng.choice((_DAYS, _MONTHS))
    here = rng.randrange(len(cycle))
    step, word = rng.choice(((1, "after"), (-1, "before")))
    return f"what comes {word} {cycle[here]} ?", cycle[(here + step) % len(cycle)]


def _capital(rng: random.Random) -> tuple[str, str]:
    here = rng.randrange(len(_LANDS))
    if rng.random() < 0.5:
        return f"what is the capital of {_LANDS[here]} ?", _CAPITALS[here]
    return f"{_CAPITALS[here]} is the capital of which land ?", _LANDS[here]


SKILLS: tuple[Skill, ...] = (
    Skill("reverse", _reverse, 0.0),
    Skill("repeat", _repeat, 0.0),
    Skill("sort", _sort, 1 / 6),  # any order of the three letters
    Skill("larger", _larger, 0.5, asked=False),  # either number; the embedded policy answers 66%
    Skill("add", _add, 0.1),  # always "9"
    Skill("owner", _owner, 1 / 3),  # any of the three owners' things
    Skill("calendar", _calendar, 1 / 12),  # about: always one day
    Skill("capital", _capital, 1 / 24),
)


def questions(seed: int, per_skill: int) -> Iterator[Question]:
    """`per_skill` questions of every skill that is asked, the same for the same seed."""
    for skill in SKILLS:
        if not skill.asked:
            continue
        rng = seeds.generator(seed, "skill", skill.name)
        for _ in range(per_skill):
            prompt, answer = skill.make(rng)
            yield Question(skill.name, prompt, answer, skill.chance)
