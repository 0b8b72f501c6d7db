"""ALFWorld's six task types: what is drawn for a game, how the task is worded, and what has to hold at the end."""

from __future__ import annotations

import random
from dataclasses import dataclass

from turntree_worlds.household.catalogue import LAMP_HOLDERS, LAMP_KIND, ROOMS, ObjectKind, Room

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

    count: how many targets the goal needs; treatment, appliance, treated: what must be done to the target, with
    which receptacle kind, and the fact that it leaves ("" when nothing is done); by_lamp: whether the goal is to
    hold the target beside a lit lamp.
    """

    rooms: tuple[str, ...]
    sentences: tuple[str, ...]
    count: int = 1
    treatment: str = ""
    appliance: str = ""
    treated: str = ""
    by_lamp: bool = False


_EVERY_ROOM = tuple(ROOMS)
TASK_KINDS = {
    "pick_and_place_simple": TaskKind(_EVERY_ROOM, ("put a {o} in {r}.", "put some {o} on {r}.")),
    "look_at_obj_in_light": TaskKind(
        ("bedroom", "livingroom"),
        ("look at {o} under the {r}.", "examine the {o} with the {r}."),
        by_lamp=True,
    ),
    "pick_clean_then_place_in_recep": TaskKind(
        ("kitchen", "bathroom"),
        ("put a clean {o} in {r}.", "clean some {o} and put it in {r}."),
        treatment="clean",
        appliance="SinkBasin",
        treated="isClean",
    ),
    "pick_heat_then_place_in_recep": TaskKind(
        ("kitchen",),
        ("put a hot {o} in {r}.", "heat some {o} and put it in {r}."),
        treatment="heat",
        appliance="Microwave",
        treated="isHot",
    ),
    "pick_cool_then_place_in_recep": TaskKind(
        ("kitchen",),
        ("put a cool {o} in {r}.", "cool some {o} and put it in {r}."),
        treatment="cool",
        appliance="Fridge",
        treated="isCool",
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

    def goal(self) -> str:
        """The PDDL goal, in the shapes of the official games."""
        if self.kind.by_lamp:
            return (
                "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and"
                f" (objectType ?ot {LAMP_KIND}Type) (toggleable ?ot) (isToggled ?ot)"
                " (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
                f" (exists (?o - object ?a - agent) (and (objectType ?o {self.target.name}Type) (holds ?a ?o))))"
            )
        if self.kind.count == 2:
            second = f"(exists (?o2 - object) (and (not (= ?o1 ?o2)) {self._delivered('?o2')}))"
            inner = f"(exists (?o1 - object) (and {self._delivered('?o1')} {second}))"
        else:
            inner = f"(exists (?o - object) (and {self._delivered('?o')}))"
        return f"(and (exists (?r - receptacle) {inner}))"

    def _delivered(self, variable: str) -> str:
        """That `variable` is a target, treated as asked, inside a destination ?r."""
        facts = [
            ("objectType", variable, f"{self.target.name}Type"),
            ("receptacleType", "?r", f"{self.destination}Type"),
        ]
        if self.kind.treatment:
            facts += [(PROPERTY_FACTS[self.kind.treatment], variable), (self.kind.treated, variable)]
        facts.append(("inReceptacle", variable, "?r"))
        return " ".join(f"({' '.join(fact)})" for fact in facts)


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
