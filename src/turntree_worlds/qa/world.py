"""A generated world: people, firms, towns and countries, their relations, and documents that state them.

Names are combined from small pools of words: a tiny tokenizer holds each word as one token, and a search for one
person finds others who share a name.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from turntree.core import seeds
from turntree_worlds.documents import Document

Kind = Literal["person", "firm", "town", "country", "number"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FIRST_NAMES = _words(
    "Ada Alma Bea Cora Dora Edda Ella Emma Freya Gwen Hana Ida Iris Jana Kira Lena Lily Lucy Mara Maya Mina Nora Olga "
    "Petra Rita Rosa Ruth Sara Tina Vera Wanda Zoe Abel Adam Axel Ben Carl Dan Emil Eric Finn Fred Gary Hugo Ivan Jack "
    "Jon Karl Leo Lars Luke Max Milo Nick Noel Omar Otto Paul Ralf Sean Theo Tom Victor Yuri"
)
WOMEN = frozenset(FIRST_NAMES[:32])
LAST_NAMES = _words(
    "Abbott Adler Barton Becker Blake Bowen Brask Burke Carver Cole Conrad Cross Dalton Doyle Drake Dunn Eaton Ellis "
    "Farrow Finch Fisher Foster Garner Gibbs Grant Hale Hardy Harlow Hayes Holt Hudson Irving Jarvis Keller Kemp Lang "
    "Larkin Lowell Marsh Mercer Morrow Nash Nolan Orwell Osborn Parker Pryce Quill Ramsey Reed Rowan Sawyer Sharp "
    "Slater Stone Tanner Thorne Tucker Vance Wade Walsh Webber Weller York"
)
FIRM_WORDS = _words("Mills Works Bank Press Foods Glass Motors Steel")
_TOWN_NAMES = _words(
    "Alden Arbor Ashby Avon Balin Barrow Belmar Birk Calder Carrick Colby Corvin Dorn Dunmore Elgin Elsted Fallow "
    "Farley Galway Gorst Halden Harrow Hexham Inver Jarrow Kelby Kirk Lanark Linden Lorne Malden Marlow Milford "
    "Norwell Oakham Orford Penrith Quorn Redcar Rugby Selby Stroud Tarn Thirsk Ulster Wells Whitby Yarm"
)
_COUNTRY_NAMES = _words("Arland Borvia Cadia Dravia Estmark Fenland Gallia Hestia Istria Jutia Kelland Lumia")

PEOPLE, FIRMS, TOWNS, COUNTRIES = 160, 40, 30, 8  # how many entities of each kind there are
TOLD = 3  # least number of facts that are told of a person
RELATIONS: dict[Kind, dict[str, Kind]] = {
    "person": {
        "mother": "person",
        "father": "person",
        "spouse": "person",
        "teacher": "person",
        "employer": "firm",
        "birthplace": "town",
        "birth year": "number",
    },
    "firm": {"founder": "person", "seat": "town", "founding year": "number"},
    "town": {"mayor": "person", "country": "country", "population": "number"},
    "country": {"capital": "town", "leader": "person"},
}


@dataclass(frozen=True)
class World:
    """`told` is a function, and so is a chain of relations."""

    seed: int
    kinds: dict[str, Kind]  # of every entity, by name
    told: dict[str, dict[str, str]]  # {subject: {relation: value}}; a value is the name of an entity, or digits

    @functools.cached_property
    def numbers(self) -> frozenset[str]:
        """Every number that a document tells."""
        values = (value for facts in self.told.values() for value in facts.values())
        return frozenset(value for value in values if value not in self.kinds)

    def documents(self) -> Iterator[Document]:
        """One for each entity, in sentences `The RELATION is VALUE.`"""
        for subject, facts in self.told.items():
            sentences = (f"The {relation} is {value}." for relation, value in facts.items())
            yield Document(subject, subject, " ".join(sentences))


def generate_world(seed: int) -> World:
    """The world of a seed. Parents and teachers are older, marriages mutual, founders grown up, names unique."""
    rng = seeds.generator(seed, "qa", "world")
    people = _names(rng, PEOPLE, FIRST_NAMES, LAST_NAMES)
    firms = _names(rng, FIRMS, LAST_NAMES, FIRM_WORDS)
    towns, countries = rng.sample(_TOWN_NAMES, TOWNS), rng.sample(_COUNTRY_NAMES, COUNTRIES)
    born = {name: rng.randint(1900, 1985) for name in people}
    told = {name: _life(rng, name, born, firms, towns, TOLD) for name in people}
    _marry(rng, people, told)
    for name in firms:
        founder = rng.choice(people)
        told[name] = {
            "founder": founder,
            "seat": rng.choice(towns),
            "founding year": str(born[founder] + rng.randint(20, 35)),
        }
    for name in towns:
        people_of = f"{rng.randint(1, 9)}{rng.randint(1, 9)}000"
        told[name] = {"mayor": rng.choice(people), "country": rng.choice(countries), "population": people_of}
    for name in countries:
        told[name] = {"capital": rng.choice(towns), "leader": rng.choice(people)}
    kinds: dict[str, Kind] = {
        **dict.fromkeys(people, "person"),
        **dict.fromkeys(firms, "firm"),
        **dict.fromkeys(towns, "town"),
        **dict.fromkeys(countries, "country"),
    }
    return World(seed, kinds, {name: _shuffled(rng, told[name]) for name in kinds})


def _names(rng: random.Random, count: int, first: Sequence[str], second: Sequence[str]) -> list[str]:
    numbers = rng.sample(range(len(first) * len(second)), count)
    return [f"{first[number % len(first)]} {second[number // len(first)]}" for number in numbers]


def _life(
    rng: random.Random, name: str, born: dict[str, int], firms: Sequence[str], towns: Sequence[str], count: int
) -> dict[str, str]:
    """`count` facts of a person, drawn from those that there can be."""
    elders = [other for other, year in born.items() if 18 <= born[name] - year <= 50]
    women = [other for other in elders if other.split()[0] in WOMEN]
    men = [other for other in elders if other.split()[0] not in WOMEN]
    sources: dict[str, Sequence[str]] = {
        "mother": women,
        "father": men,
        "teacher": elders,
        "employer": firms,
        "birthplace": towns,
        "birth year": [str(born[name])],
    }
    possible = [relation for relation, values in sources.items() if values]
    return {relation: rng.choice(sources[relation]) for relation in rng.sample(possible, min(count, len(possible)))}


def _marry(rng: random.Random, people: Sequence[str], told: dict[str, dict[str, str]]) -> None:
    """Marry half of the people, in couples. The fact about the spouse replaces another fact of the person."""
    single = list(people)
    rng.shuffle(single)
    for one, other in zip(single[0 : len(single) // 2 : 2], single[1 : len(single) // 2 : 2], strict=False):
        for name, spouse in ((one, other), (other, one)):
            told[name].pop(rng.choice(list(told[name])))
            told[name]["spouse"] = spouse


def _shuffled(rng: random.Random, facts: dict[str, str]) -> dict[str, str]:
    listed = list(facts.items())
    rng.shuffle(listed)
    return dict(listed)
