"""ALFWorld's household games as a small state machine: one `Game` of static facts, cheap mutable `State`s.

The rules are those of ALFWorld's PDDL domain (`alfred.pddl`) *as TextWorld plays it*, text included, so a policy
trained here meets the official games word for word. Where TextWorld's behaviour differs from what the PDDL text
suggests, TextWorld wins:

- there is no `go to` for a receptacle at the place where the player stands already;
- `examine OBJECT` is only possible for the held object;
- `look` at the start says "you see nothing" although the introduction lists every receptacle;
- objects and receptacles are listed in the order of their PDDL ids, in which the numbers count *down*;
- an object that was taken out of a receptacle counts as lying "next to" it (for `look`) when it comes back to that
  place inside another receptacle;
- `heat`, `cool` and `clean` need no open door; `use` never turns a lamp off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

NOTHING_HAPPENS = "Nothing happens."

# Appliances by what they do to a held object: (the ability it needs, the trait it gets, the traits it loses).
APPLIANCES: Mapping[str, tuple[frozenset[str], str, str, str | None]] = {
    "clean": (frozenset({"sinkbasin", "sink"}), "cleanable", "clean", None),
    "heat": (frozenset({"microwave"}), "heatable", "hot", "cool"),
    "cool": (frozenset({"fridge"}), "coolable", "cool", "hot"),
}
KNIVES = frozenset({"knife", "butterknife"})


@dataclass(frozen=True, slots=True)
class Receptacle:
    """A place that holds objects, for example "drawer 1" of kind "drawer". `place` is where to stand."""

    name: str
    kind: str
    place: str
    openable: bool
    contents: tuple[str, ...]  # at the start of the game


@dataclass(frozen=True, slots=True)
class Thing:
    """An object. `abilities` come from the PDDL facts: pickupable, cleanable, heatable, coolable, sliceable,
    toggleable, container; `place` is the PDDL's own note of where it lies (usually that of its receptacle)."""

    name: str
    kind: str
    abilities: frozenset[str]
    place: str | None
    inside: tuple[str, ...] = ()  # objects in a container such as a box or a bowl: only ever shown, never taken


@dataclass(frozen=True, slots=True)
class Goal:
    """What wins a game.

    Placing: `count` objects of `object_kind`, each with `trait` (None, "clean", "hot", "cool"), together in one
    receptacle of `receptacle_kind`. Looking: an object of `object_kind` in hand at a place with a switched-on
    lamp of `lamp_kind`.
    """

    object_kind: str
    receptacle_kind: str | None = None
    lamp_kind: str | None = None
    trait: str | None = None
    count: int = 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outcome.

    `valid`: the command was admissible (else the text is "Nothing happens."); `changed`: `State.key()` changed;
    `won`: the goal holds after the step.
    """

    observation: str
    valid: bool
    changed: bool
    won: bool


@dataclass(frozen=True)
class Game:
    """The static facts of one game; equal and hashable by `id`. `task` is the text after "Your task is to: "."""

    id: str
    task_type: str = field(compare=False)
    task: str = field(compare=False)
    goal: Goal = field(compare=False)
    receptacles: Mapping[str, Receptacle] = field(compare=False, repr=False)  # by name, in listing order
    things: Mapping[str, Thing] = field(compare=False, repr=False)  # by name, in listing order
    can_contain: Mapping[str, frozenset[str]] = field(compare=False, repr=False)  # receptacle kind: object kinds
    start: str = field(compare=False, repr=False)  # the place of the player, away from every receptacle
    traits: frozenset[tuple[str, str]] = field(compare=False, repr=False)  # (trait, object) at the start
    help_text: str = field(compare=False, repr=False, default=NOTHING_HAPPENS)

    def reset(self) -> State:
        """A fresh state at the start of the game."""
        return State(self)

    @cached_property
    def intro(self) -> str:
        """The official first observation, without TextWorld's banner line."""
        return (
            "You are in the middle of a room. Looking quickly around you, you see "
            f"{enumerate_names(self.receptacles)}.\n\nYour task is to: {self.task}"
        )

    @cached_property
    def places(self) -> Mapping[str, tuple[str, ...]]:
        """The receptacles of every place, in listing order (several drawers can share one place)."""
        at: dict[str, list[str]] = {}
        for receptacle in self.receptacles.values():
            at.setdefault(receptacle.place, []).append(receptacle.name)
        return {place: tuple(names) for place, names in at.items()}

    @cached_property
    def order(self) -> Mapping[str, int]:
        """The position of every object in listings."""
        return {name: rank for rank, name in enumerate(self.things)}

    @cached_property
    def initial_contents(self) -> Mapping[str, tuple[str, ...]]:
        return {receptacle.name: receptacle.contents for receptacle in self.receptacles.values()}

    @cached_property
    def initial_lying(self) -> frozenset[tuple[str, str]]:
        return frozenset((thing.name, thing.place) for thing in self.things.values() if thing.place)

    @cached_property
    def goal_receptacles(self) -> tuple[str, ...]:
        return tuple(r.name for r in self.receptacles.values() if r.kind == self.goal.receptacle_kind)

    @cached_property
    def goal_objects(self) -> frozenset[str]:
        return frozenset(thing.name for thing in self.things.values() if thing.kind == self.goal.object_kind)

    @cached_property
    def lamps(self) -> frozenset[str]:
        """The objects that can be switched on and that the goal asks for."""
        return frozenset(
            thing.name
            for thing in self.things.values()
            if thing.kind == self.goal.lamp_kind and "toggleable" in thing.abilities
        )

    def accepts(self, receptacle: str, thing: str) -> bool:
        """Whether `thing` may be put into `receptacle` (by their kinds)."""
        return self.things[thing].kind in self.can_contain.get(self.receptacles[receptacle].kind, ())


_COMMAND = re.compile(
    r"(?P<verb>go to|open|close|use|examine) (?P<name>.+)"
    r"|(?P<verb2>take|move|clean|heat|cool|slice) (?P<first>.+?) (?P<joint>from|to|with) (?P<second>.+)"
    r"|(?P<verb0>look|inventory|help)"
)
_JOINTS = {"take": "from", "move": "to", "clean": "with", "heat": "with", "cool": "with", "slice": "with"}


def parse_command(command: str) -> tuple[str, str, str] | None:
    """(verb, first name, second name), "" for a missing one, or None where no such form of command exists."""
    match = _COMMAND.fullmatch(command.strip())
    if match is None:
        return None
    if match["verb0"]:
        return match["verb0"], "", ""
    if match["verb"]:
        return match["verb"], match["name"], ""
    verb = match["verb2"]
    return (verb, match["first"], match["second"]) if match["joint"] == _JOINTS[verb] else None


def enumerate_names(names: Iterable[str], article: str = "a ") -> str:
    """TextWorld's list: "nothing", "a bed 1", "a bed 2, and a bed 1"."""
    listed = [article + name for name in names]
    return f"{', '.join(listed[:-1])}, and {listed[-1]}" if len(listed) > 1 else (listed or ["nothing"])[0]


class State:
    """One moment of one game: mutable through `step` alone, forked in about a microsecond."""

    __slots__ = (
        "_contents",
        "_left",
        "_lying",
        "game",
        "held",
        "location",
        "opened",
        "place",
        "searched",
        "traits",
    )

    def __init__(self, game: Game) -> None:
        self.game = game
        self.place: str = game.start
        self.location: str | None = None  # the receptacle last gone to; `here` names all that share its place
        self.held: str | None = None
        self.opened: frozenset[str] = frozenset()
        self.traits: frozenset[tuple[str, str]] = game.traits  # such as ("clean", "apple 1"), ("on", "desklamp 1")
        self.searched: frozenset[str] = frozenset()  # the player's knowledge: receptacles whose contents were shown
        self._contents: dict[str, tuple[str, ...]] = dict(game.initial_contents)
        # TextWorld's bookkeeping behind `look` and `slice`; never decides what else is possible.
        self._lying: frozenset[tuple[str, str]] = game.initial_lying  # (object, place)
        self._left: frozenset[tuple[str, str]] = frozenset()  # (object, receptacle that it was taken from)

    def fork(self) -> State:
        """An independent copy: steps on one never show on the other."""
        twin = State.__new__(State)
        twin.game, twin.place, twin.location, twin.held = self.game, self.place, self.location, self.held
        twin.opened, twin.traits, twin.searched = self.opened, self.traits, self.searched
        twin._contents, twin._lying, twin._left = self._contents.copy(), self._lying, self._left
        return twin

    def key(self) -> Hashable:
        """The physical state, equal for states that differ only in what was looked at.

        Left out on purpose: `searched`, and TextWorld's notes on where objects lie, which change the wording of
        `look` and what can be sliced, but no other command and no goal.
        """
        return (self.game.id, self.place, self.held, self.opened, self.traits, *self._contents.values())

    @property
    def here(self) -> tuple[str, ...]:
        """All receptacles at the player's place (none at the start)."""
        return self.game.places.get(self.place, ())

    def contents(self, receptacle: str) -> tuple[str, ...]:
        """What is in the receptacle, seen or not (a verifier may know; a player asks `searched` first)."""
        return self._contents[receptacle]

    def contents_seen(self, receptacle: str) -> tuple[str, ...]:
        """What the player knows to be in the receptacle: nothing before its contents were displayed."""
        return self._contents[receptacle] if receptacle in self.searched else ()

    def openable(self, receptacle: str) -> bool:
        return self.game.receptacles[receptacle].openable

    def is_open(self, receptacle: str) -> bool:
        """True where contents can be seen and reached: opened, or without a door."""
        return receptacle in self.opened or not self.game.receptacles[receptacle].openable

    def has(self, trait: str, thing: str) -> bool:
        """Traits: clean, hot, cool, sliced, on."""
        return (trait, thing) in self.traits

    @property
    def won(self) -> bool:
        goal = self.game.goal
        if goal.receptacle_kind is None:
            lit = (t for r in self.here for t in self._contents[r] if t in self.game.lamps and ("on", t) in self.traits)
            return self.held in self.game.goal_objects and next(lit, None) is not None
        return any(
            sum(self.counts(thing) for thing in self._contents[r]) >= goal.count for r in self.game.goal_receptacles
        )

    def counts(self, thing: str) -> bool:
        """Whether the object is of the goal's kind and has been treated as the goal asks."""
        trait = self.game.goal.trait
        return thing in self.game.goal_objects and (trait is None or (trait, thing) in self.traits)

    def step(self, command: str) -> StepResult:
        """Plays one command. An inadmissible one changes nothing and says "Nothing happens."."""
        parsed = parse_command(command)
        outcome = None if parsed is None else _HANDLERS[parsed[0]](self, *parsed)
        if outcome is None:
            return StepResult(NOTHING_HAPPENS, valid=False, changed=False, won=self.won)
        observation, changed = outcome
        return StepResult(observation, valid=True, changed=changed, won=self.won)

    def admissible(self) -> tuple[str, ...]:
        """Every command with an effect here, sorted: the official list and order."""
        game, here = self.game, self.here
        commands = ["look", "inventory", "help"]
        commands += [f"go to {r.name}" for r in game.receptacles.values() if r.place != self.place]
        commands += [f"examine {name}" for name in here]
        commands += [f"{'close' if name in self.opened else 'open'} {name}" for name in here if self.openable(name)]
        inside = [(thing, name) for name in here for thing in self._contents[name]]
        commands += [f"use {thing}" for thing, _ in inside if "toggleable" in game.things[thing].abilities]
        if self.held is None:
            commands += [f"take {thing} from {name}" for thing, name in inside if self._can_take(thing, name)]
        else:
            commands += self._admissible_with(self.held)
        return tuple(sorted(set(commands)))

    def _admissible_with(self, held: str) -> list[str]:
        game, here = self.game, self.here
        commands = [f"examine {held}"]
        commands += [f"move {held} to {name}" for name in here if self.is_open(name) and game.accepts(name, held)]
        for verb, (kinds, ability, _, _) in APPLIANCES.items():
            if ability in game.things[held].abilities:
                commands += [f"{verb} {held} with {name}" for name in here if game.receptacles[name].kind in kinds]
        if game.things[held].kind in KNIVES:
            near = (thing for thing, place in self._lying if place == self.place)
            commands += [f"slice {thing} with {held}" for thing in near if "sliceable" in game.things[thing].abilities]
        return commands

    def _can_take(self, thing: str, receptacle: str) -> bool:
        return self.is_open(receptacle) and "pickupable" in self.game.things[thing].abilities

    # The handlers of `step`: (verb, first name, second name) -> (observation, changed), or None if inadmissible.

    def _show(self, name: str) -> str:
        if not self.is_open(name):
            return f"The {name} is closed."
        self.searched |= {name}
        seen = enumerate_names(self._contents[name])
        where = f"The {name} is open. In it" if self.openable(name) else f"On the {name}"
        return f"{where}, you see {seen}."

    def _go(self, verb: str, name: str, _: str) -> tuple[str, bool] | None:
        receptacle = self.game.receptacles.get(name)
        if receptacle is None or receptacle.place == self.place:
            return None
        self.place, self.location = receptacle.place, name
        return f"You arrive at {name}. {self._show(name)}", True

    def _door(self, verb: str, name: str, _: str) -> tuple[str, bool] | None:
        if name not in self.here or not self.openable(name) or (name in self.opened) == (verb == "open"):
            return None
        self.opened ^= {name}
        return (f"You open the {name}. {self._show(name)}" if verb == "open" else f"You close the {name}."), True

    def _take(self, verb: str, thing: str, name: str) -> tuple[str, bool] | None:
        if self.held is not None or name not in self.here or thing not in self._contents[name]:
            return None
        if not self._can_take(thing, name):
            return None
        self._contents[name] = tuple(other for other in self._contents[name] if other != thing)
        self.held = thing
        self._lying -= {(thing, self.place)}
        self._left |= {(thing, name)}
        return f"You pick up the {thing} from the {name}.", True

    def _move(self, verb: str, thing: str, name: str) -> tuple[str, bool] | None:
        if thing != self.held or name not in self.here or not self.is_open(name) or not self.game.accepts(name, thing):
            return None
        self._contents[name] = tuple(sorted({*self._contents[name], thing}, key=self.game.order.__getitem__))
        self.held = None
        self._lying |= {(thing, self.place)}
        self._left -= {(thing, name)}
        return f"You move the {thing} to the {name}.", True

    def _treat(self, verb: str, thing: str, name: str) -> tuple[str, bool] | None:
        kinds, ability, gained, lost = APPLIANCES[verb]
        if thing != self.held or name not in self.here or self.game.receptacles[name].kind not in kinds:
            return None
        if ability not in self.game.things[thing].abilities:
            return None
        before = self.traits
        self.traits = (before | {(gained, thing)}) - ({(lost, thing)} if lost else set())
        return f"You {verb} the {thing} using the {name}.", self.traits != before

    def _slice(self, verb: str, thing: str, knife: str) -> tuple[str, bool] | None:
        if knife != self.held or self.game.things[knife].kind not in KNIVES or (thing, self.place) not in self._lying:
            return None
        if "sliceable" not in self.game.things[thing].abilities:
            return None
        before = self.traits
        self.traits |= {("sliced", thing)}
        return f"You sliced the {thing} with the {knife}.", self.traits != before

    def _use(self, verb: str, thing: str, _: str) -> tuple[str, bool] | None:
        if not any(thing in self._contents[name] for name in self.here):
            return None
        if "toggleable" not in self.game.things[thing].abilities:
            return None
        before = self.traits
        self.traits |= {("on", thing)}
        return f"You turn on the {thing}.", self.traits != before

    def _examine(self, verb: str, name: str, _: str) -> tuple[str, bool] | None:
        if name in self.here:
            return self._show(name), False
        return (self._describe(name), False) if name == self.held else None

    def _describe(self, thing: str) -> str:
        facts = self.game.things[thing]
        if "container" in facts.abilities:
            return f"This is a normal {thing}. In it, you see {enumerate_names(facts.inside)}."
        traits = [trait for trait in ("hot", "cool", "clean") if self.has(trait, thing)]
        sliced = "sliced" if self.has("sliced", thing) else ""
        if traits == ["cool"] and not sliced:
            traits = ["cold"]
        words = " ".join(filter(None, [" and ".join(traits), sliced, thing]))
        if words != thing:
            return f"This is a {words}."
        return f"This {thing} is on." if self.has("on", thing) else f"There's nothing special about {thing}."

    def _look(self, verb: str, _: str, __: str) -> tuple[str, bool]:
        if not self.here:
            return "You are in the middle of a room. Looking quickly around you, you see nothing.", False
        facing = enumerate_names(self.here, article="")
        near = sorted((t for t, place in self._lying if place == self.place), key=self.game.order.__getitem__)
        beside = [thing for thing in near for name in self.here if (thing, name) in self._left]
        return f"You are facing the {facing}. Next to it, you see {enumerate_names(beside)}.", False

    def _inventory(self, verb: str, _: str, __: str) -> tuple[str, bool]:
        carried = "You are not carrying anything." if self.held is None else f"You are carrying: a {self.held}."
        return carried, False

    def _help(self, verb: str, _: str, __: str) -> tuple[str, bool]:
        return self.game.help_text, False


_HANDLERS: Mapping[str, Callable[[State, str, str, str], tuple[str, bool] | None]] = {
    "go to": State._go, "open": State._door, "close": State._door, "take": State._take, "move": State._move,
    "clean": State._treat, "heat": State._treat, "cool": State._treat, "slice": State._slice, "use": State._use,
    "examine": State._examine, "look": State._look, "inventory": State._inventory, "help": State._help,
}  # fmt: skip
