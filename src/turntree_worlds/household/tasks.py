"""ALFWorld's six task types: what is drawn for a game, how the task is worded, and what has to hold at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from turntree_worlds.household.catalogue import LAMP_HOLDERS, LAMP_KIND, ROOMS, ObjectKind, Room
from turntree_worlds.household.world import APPLIANCES, Goal

# What can be done to an object kind -> the fact that says so in a game file.
PROPERTY_FACTS = {
    "clean": "cleanable",
    "heat": "heatable",
    "cool": "coolable",
    "slice": "sliceable",
    "bowl": "isReceptacleObject",
}


@dataclass(frozen=True)
class TaskKind:
    """A task type. `{o}` and `{r}` of a sentence are the target and its destination (or the lamp).

    count: how many targets the goal needs; treatment, appliance: what must be done to the target ("" for nothing), and
    with which receptacle kind; by_lamp: whether the goal is to hold the target beside a lit lamp.
    """

    rooms: tuple[str, ...]
    sentences: tuple[str, ...]
    count: int = 1
    treatment: str = ""
    appliance: str = ""
    by_lamp: bool = False


_EVERY_ROOM = tuple(ROOMS)
TASK_KINDS = {
    "pick_and_place_simple": TaskKind(_EVERY_ROOM, ("put a {o} in {r}.", "put some {o} on {r}.")),
    "look_at_obj_in_light": TaskKind(
        ("bedroom", "livingroom"), ("look at {o} under the {r}.", "examine the {o} with the {r}."), by_lamp=True
    ),
    "pick_clean_then_place_in_recep": TaskKind(
        ("kitchen", "bathroom"),
        ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."),
        treatment="clean",
        appliance="SinkBasin",
    ),
    "pick_heat_then_place_in_recep": TaskKind(
        ("kitchen",),
        ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."),
        treatment="heat",
        appliance="Microwave",
    ),
    "pick_cool_then_place_in_recep": TaskKind(
        ("kitchen",),
        ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."),
        treatment="cool",
        appliance="Fridge",
    ),
    "pick_two_obj_and_place": TaskKind(
        _EVERY_ROOM, ("put two {o} in {r}.", "find two {o} and put them in {r}."), count=2
    ),
}
TASK_TYPES = tuple(TASK_KINDS)


@dataclass(frozen=True)
class Task:
    """A drawn task. `destination` is the receptacle kind where the target goes, or where the lamp stands."""

    kind: TaskKind
    room: Room
    target: ObjectKind
    destination: str

    @property
    def goal_name(self) -> str:
        """The kind that the task sentence names beside the target."""
        return LAMP_KIND if self.kind.by_lamp else self.destination

    def may_start(self, receptacle: str) -> bool:
        """Whether a target may lie in this receptacle kind at the start without winning part of the game."""
        return receptacle in self.target.places and (self.kind.by_lamp or receptacle != self.destination)

    def sentence(self, rng: random.Random) -> str:
        return rng.choice(self.kind.sentences).format(o=self.target.name.lower(), r=self.goal_name.lower())

    @property
    def goal(self) -> Goal:
        if self.kind.by_lamp:
            return Goal(self.target.name.lower(), lamp_kind=LAMP_KIND.lower())
        trait = APPLIANCES[self.kind.treatment][2] if self.kind.treatment else None
        return Goal(self.target.name.lower(), self.destination.lower(), trait=trait, count=self.kind.count)


def draw_task(rng: random.Random, kind: TaskKind) -> Task:
    """Draw room, target and destination, such that the target has somewhere else to start from."""
    room = ROOMS[rng.choice(kind.rooms)]
    pool = [o for o in room.objects if not kind.treatment or kind.treatment in o.properties]
    for target in rng.sample(pool, len(pool)):
        places = [place for place in target.places if place in room.receptacles]
        if kind.by_lamp:
            return Task(kind, room, target, rng.choice([h for h in LAMP_HOLDERS if h in room.receptacles]))
        goals = [place for place in places if place != kind.appliance]
        if goals and len(places) > 1:
            return Task(kind, room, target, rng.choice(goals))
    raise AssertionError(f"the catalogue has no target for {kind.sentences[0]!r} in the {room.name}")
