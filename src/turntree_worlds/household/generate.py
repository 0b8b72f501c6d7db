"""Seeded household games of graded difficulty, made of the facts that ALFWorld's own game files state.

Every game is solvable by construction: the target lies outside its destination, the destination admits it, and
the appliance or lamp that the task needs is in the room. A game is a function of (seed, task type, difficulty).
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree_worlds.household.catalogue import LAMP_HOLDERS, LAMP_KIND, OBJECT_KINDS, OPENABLE_KINDS, ObjectKind
from turntree_worlds.household.parse import game_of_facts
from turntree_worlds.household.tasks import PROPERTY_FACTS, TASK_KINDS, TASK_TYPES, Task, draw_task
from turntree_worlds.household.world import Game, Goal


@dataclass(frozen=True)
class Difficulty:
    """How much there is to search. Ranges are inclusive.

    closed_fraction: share of the freely drawn receptacles that open and close (they all start closed).
    extra_target: chance of one more object of the target's kind than the task needs.
    shared_location: chance that a receptacle stands at the same spot as the one of its kind before it.
    """

    name: str
    receptacles: tuple[int, int]
    objects: tuple[int, int]
    closed_fraction: float = 0.3
    extra_target: float = 0.3
    shared_location: float = 0.0


EASY = Difficulty("easy", (6, 9), (5, 9), closed_fraction=0.25)
MEDIUM = Difficulty("medium", (10, 14), (10, 16), closed_fraction=0.4, shared_location=0.05)
HARD = Difficulty("hard", (20, 30), (20, 36), closed_fraction=0.55, shared_location=0.1)


@dataclass(frozen=True)
class GeneratedGame:
    """The initial facts of one game (predicate, arguments), its goal, and the sentence that says it."""

    id: str
    task_type: str
    facts: tuple[tuple[str, ...], ...]
    goal: Goal
    task: str

    def parse(self) -> Game:
        facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
        for predicate, *arguments in self.facts:
            facts[predicate.lower()].append(tuple(argument.lower() for argument in arguments))
        return game_of_facts(facts, self.goal, self.task, _HELP, id=self.id, task_type=self.task_type)


def generate_game(seed: int, *, task_type: str | None = None, difficulty: Difficulty = EASY) -> GeneratedGame:
    """The game of this seed. Without `task_type` the seed also draws one of `TASK_TYPES`, all equally likely."""
    if task_type is not None and task_type not in TASK_KINDS:
        raise InputError(
            f"unknown task type {task_type!r}", field="task_type", hint=f"use one of {', '.join(TASK_TYPES)}"
        )
    rng = seeds.generator(seed, "household game", repr(difficulty), task_type or "any")
    task_type = task_type or rng.choice(TASK_TYPES)
    task = draw_task(rng, TASK_KINDS[task_type])
    furniture = _furnish(rng, task, difficulty)
    facts = _facts(rng, furniture, _fill(rng, task, furniture, difficulty), difficulty)
    name = f"{task_type}-{task.target.name}-None-{task.goal_name}-{task.room.name}"
    return GeneratedGame(
        id=f"{difficulty.name}/{name}/seed_{seed}",
        task_type=task_type,
        facts=tuple(facts),
        goal=task.goal,
        task=task.sentence(rng),
    )


def _furnish(rng: random.Random, task: Task, difficulty: Difficulty) -> list[str]:
    """Receptacle kinds of the room: what the task needs, then free draws up to the wanted number."""
    limits = task.room.receptacles
    starts = [place for place in task.target.places if place in limits and task.may_start(place)]
    kinds = [task.destination]
    for needed in (task.kind.appliance, _likely(rng, starts)):
        if needed and needed not in kinds:
            kinds.append(needed)
    for _ in range(rng.randint(*difficulty.receptacles) - len(kinds)):
        closed = rng.random() < difficulty.closed_fraction
        spare = [kind for kind in limits if kinds.count(kind) < limits[kind][1]]
        pool = [kind for kind in spare if (kind in OPENABLE_KINDS) == closed] or spare
        if pool:
            kinds.append(rng.choices(pool, [limits[kind][0] for kind in pool])[0])
    return sorted(kinds)


def _likely(rng: random.Random, places: Sequence[str]) -> str:
    """One of `places`, the earlier the likelier (weights 1, 1/2, 1/3, ...)."""
    return rng.choices(places, [1 / (rank + 1) for rank in range(len(places))])[0]


def _fill(rng: random.Random, task: Task, furniture: list[str], difficulty: Difficulty) -> list[tuple[str, int]]:
    """Objects as (kind, index of the receptacle): targets first, then others, then the lamp."""

    def place(kind: ObjectKind, allowed: set[str]) -> tuple[str, int]:
        chosen = _likely(rng, [p for p in kind.places if p in allowed])
        return kind.name, rng.choice([i for i, f in enumerate(furniture) if f == chosen])

    present = set(furniture)
    starts = {kind for kind in present if task.may_start(kind)}
    wanted = max(rng.randint(*difficulty.objects), task.kind.count)
    filled = [place(task.target, starts) for _ in range(task.kind.count)]
    if len(filled) < wanted and rng.random() < difficulty.extra_target:
        # An untreated copy at the destination wins nothing, so treated tasks may start with one there.
        filled.append(place(task.target, present if task.kind.treatment else starts))
    others = [o for o in task.room.objects if o != task.target and present.intersection(o.places)]
    if others:
        filled += [place(rng.choice(others), present) for _ in range(wanted - len(filled))]
    holders = [i for i, kind in enumerate(furniture) if kind in LAMP_HOLDERS]
    if task.kind.by_lamp:
        filled.append((LAMP_KIND, furniture.index(task.destination)))
    elif holders and task.room.name in TASK_KINDS["look_at_obj_in_light"].rooms and rng.random() < 0.5:
        filled.append((LAMP_KIND, rng.choice(holders)))
    return filled


def _number(value: int) -> str:
    return f"{'_minus' if value < 0 else '_plus'}_{abs(value) // 100:02d}_dot_{abs(value) % 100:02d}"


def _entity(rng: random.Random, kind: str, taken: set[str]) -> str:
    """A fresh identifier in ALFRED's style: the kind and three coordinates, in centimetres before mangling."""
    parent = kind.removesuffix("Basin")
    while True:
        coordinates = "_bar_".join(_number(rng.randint(-low, 500)) for low in (400, 0, 400))
        name = f"{parent}_bar_{coordinates}" + (f"_bar_{kind}" if parent != kind else "")
        if name not in taken:
            taken.add(name)
            return name


def _locations(rng: random.Random, furniture: list[str], shared: float) -> list[str]:
    """One spot per receptacle, plus (last) the one where the player starts."""
    spots = [(x, z) for x in range(1, 13) for z in range(1, 13)]
    drawn = rng.sample(spots, len(furniture) + 1)
    names = [f"loc_bar_{x}_bar__minus_{z}_bar_{rng.randint(0, 3)}_bar_{rng.choice((30, 45, 60))}" for x, z in drawn]
    for i, (before, kind) in enumerate(pairwise(furniture), start=1):
        if before == kind and rng.random() < shared:
            names[i] = names[i - 1]
    return names


def _facts(
    rng: random.Random, furniture: list[str], contents: list[tuple[str, int]], difficulty: Difficulty
) -> list[tuple[str, ...]]:
    """What is where: `contents` are objects by their kind and the index of their receptacle."""
    taken: set[str] = set()
    receptacles = [_entity(rng, kind, taken) for kind in furniture]
    objects = [_entity(rng, kind, taken) for kind, _ in contents]
    spots = _locations(rng, furniture, difficulty.shared_location)
    facts: list[tuple[str, ...]] = [("atLocation", "agent1", spots[-1])]
    for entity, kind, spot in zip(receptacles, furniture, spots, strict=False):
        facts += [("receptacleType", entity, f"{kind}Type"), ("receptacleAtLocation", entity, spot)]
        if kind in OPENABLE_KINDS:
            facts.append(("openable", entity))
    for entity, (kind, i) in zip(objects, contents, strict=True):
        facts += [("objectType", entity, f"{kind}Type"), ("inReceptacle", entity, receptacles[i])]
        facts.append(("objectAtLocation", entity, spots[i]))
        if kind == LAMP_KIND:
            facts.append(("toggleable", entity))
        else:
            facts.append(("pickupable", entity))
            facts += [(PROPERTY_FACTS[p], entity) for p in sorted(OBJECT_KINDS[kind].properties)]
    present = set(furniture)
    for kind in sorted({kind for kind, _ in contents} - {LAMP_KIND}):
        places = sorted(present.intersection(OBJECT_KINDS[kind].places))
        facts += [("canContain", f"{place}Type", f"{kind}Type") for place in places]
    return facts


_HELP = "Available commands:\n" + "\n".join(
    f"  {command}"
    for command in (
        "look",
        "inventory",
        "go to (receptacle)",
        "open (receptacle)",
        "close (receptacle)",
        "take (object) from (receptacle)",
        "move (object) to (receptacle)",
        "examine (something)",
        "use (object)",
        "heat (object) with (receptacle)",
        "clean (object) with (receptacle)",
        "cool (object) with (receptacle)",
        "slice (object) with (object)",
    )
)
