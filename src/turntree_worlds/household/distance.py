"""How far is the goal: the least number of commands that win, with full knowledge of the room.

Every winning play of the six task types is a short list of *errands*, each one command at one receptacle: put down
what is in the way, take a target, treat it, put it where it belongs (or bring it to a lamp). Between two errands
the player walks at most once, since any receptacle is one `go to` away, and opens each closed receptacle at most
once; closing, looking and moving other objects never help. So the shortest play is the cheapest of the few errand
lists, found without a search over states, and it equals breadth-first search over `admissible()` and `key()`
(tested).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations, product

from turntree_worlds.household.world import APPLIANCES, State

VERB_OF_TRAIT = {gained: verb for verb, (_, _, gained, _) in APPLIANCES.items()}


@dataclass(frozen=True, slots=True)
class Errand:
    """One command to be given where `receptacle` stands ("" just goes there), with its door open if `opened`."""

    receptacle: str
    command: str
    opened: bool


Errands = tuple[Errand, ...]


def distance(state: State) -> int | None:
    """The least number of commands from here to a won game (0 when won); None where the goal is out of reach.

    Out of reach happens: an object that no receptacle admits, once taken, can never be put down.
    """
    costs = (len(_commands(state, errands)) for errands in _errand_lists(state))
    return 0 if state.won else min(costs, default=None)


def shortest_plan(state: State) -> list[str] | None:
    """One shortest list of commands that wins from here (the first of equals; [] when won), or None where there is
    none: an object is in hand that no receptacle takes, or a target does not exist."""
    if state.won:
        return []
    best = min(_errand_lists(state), key=lambda errands: len(_commands(state, errands)), default=None)
    return None if best is None else _commands(state, best)


def _commands(state: State, errands: Errands) -> list[str]:
    receptacles, place = state.game.receptacles, state.place
    opened: set[str] = set()
    commands: list[str] = []
    for errand in errands:
        name = errand.receptacle
        if receptacles[name].place != place:
            place = receptacles[name].place
            commands.append(f"go to {name}")
        if errand.opened and name not in opened and not state.is_open(name):
            opened.add(name)
            commands.append(f"open {name}")
        if errand.command:
            commands.append(errand.command)
    return commands


def _errand_lists(state: State) -> Iterator[Errands]:
    """Errand lists that win, at least one of the cheapest among them."""
    sources = _sources(state)
    if state.game.goal.receptacle_kind is None:
        return _to_a_lamp(state, sources)
    if state.game.goal.count == 1:
        return _deliver_one(state, sources)
    return _deliver_two(state, sources)


def _sources(state: State) -> dict[str, list[str]]:
    """Where every target can be had: its receptacles, or nowhere for the one in hand."""
    sources: dict[str, list[str]] = {state.held: []} if state.held in state.game.goal_objects else {}
    for name in state.game.receptacles:
        for thing in state.contents(name):
            if thing in state.game.goal_objects and thing != state.held:
                sources.setdefault(thing, []).append(name)
    return sources


def _to_a_lamp(state: State, sources: dict[str, list[str]]) -> Iterator[Errands]:
    lights = [
        Errand(name, "" if state.has("on", thing) else f"use {thing}", opened=False)
        for name in state.game.receptacles
        for thing in state.contents(name)
        if thing in state.game.lamps
    ]
    hands = _ways_to_empty_hands(state, [*_all(sources), *(light.receptacle for light in lights)])
    for target, places in sources.items():
        for fetch, light in product(_ways_to_fetch(state, target, places, hands), lights):
            yield (*fetch, light)


def _deliver_one(state: State, sources: dict[str, list[str]]) -> Iterator[Errands]:
    goals = state.game.goal_receptacles
    appliances = _appliances(state)
    destinations = _unlike(state, goals, [*_all(sources), *appliances])
    hands = _ways_to_empty_hands(state, [*_all(sources), *appliances, *destinations])
    for target, places in sources.items():
        treatments = _ways_to_treat(state, target, appliances)
        deliveries = _ways_to_put(state, target, destinations)
        for fetch, treat in product(_ways_to_fetch(state, target, places, hands), treatments):
            yield from ((*fetch, *treat, put) for put in deliveries)
            # Official files let an object lie in two receptacles at once: then it can be held and delivered.
            taken_from = fetch[-1].receptacle if fetch else None
            if any(target in state.contents(name) for name in goals if name != taken_from):
                yield (*fetch, *treat)


def _deliver_two(state: State, sources: dict[str, list[str]]) -> Iterator[Errands]:
    destinations = _unlike(state, state.game.goal_receptacles, _all(sources), sources)
    hands = _ways_to_empty_hands(state, [*_all(sources), *destinations])
    for destination in destinations:
        inside = state.contents(destination)
        missing = {thing: places for thing, places in sources.items() if thing not in inside}
        needed = 2 - (len(sources.keys() & set(inside)))
        for targets in permutations(missing, needed):
            if state.held in targets[1:]:
                continue  # what is in hand is delivered first
            legs = [
                [
                    (*fetch, put)
                    for fetch in _ways_to_fetch(state, target, missing[target], hands if i == 0 else [()])
                    for put in _ways_to_put(state, target, [destination])
                ]
                for i, target in enumerate(targets)
            ]
            for chosen in product(*legs):
                yield tuple(errand for leg in chosen for errand in leg)


def _ways_to_fetch(state: State, target: str, places: Iterable[str], hands: list[Errands]) -> list[Errands]:
    if target == state.held:
        return [()]
    takes = [Errand(name, f"take {target} from {name}", opened=True) for name in places]
    return [(*free, take) for free in hands for take in takes]


def _ways_to_treat(state: State, target: str, appliances: Iterable[str]) -> list[Errands]:
    trait = state.game.goal.trait
    if trait is None or state.has(trait, target):
        return [()]
    verb = VERB_OF_TRAIT[trait]
    if APPLIANCES[verb][1] not in state.game.things[target].abilities:
        return []
    return [(Errand(name, f"{verb} {target} with {name}", opened=False),) for name in appliances]


def _ways_to_put(state: State, target: str, destinations: Iterable[str]) -> list[Errand]:
    return [
        Errand(name, f"move {target} to {name}", opened=True)
        for name in destinations
        if state.game.accepts(name, target)
    ]


def _ways_to_empty_hands(state: State, stops: list[str]) -> list[Errands]:
    """Before taking anything, what is held must go somewhere: here, at a later stop, or anywhere open."""
    if state.held is None:
        return [()]
    accepting = [name for name in state.game.receptacles if state.game.accepts(name, state.held)]
    drops = _unlike(state, accepting, stops)
    return [(Errand(name, f"move {state.held} to {name}", opened=True),) for name in drops]


def _appliances(state: State) -> list[str]:
    trait = state.game.goal.trait
    kinds = APPLIANCES[VERB_OF_TRAIT[trait]][0] if trait else frozenset[str]()
    return [name for name, receptacle in state.game.receptacles.items() if receptacle.kind in kinds]


def _all(sources: dict[str, list[str]]) -> list[str]:
    return [name for places in sources.values() for name in places]


def _unlike(state: State, names: Iterable[str], stops: Iterable[str], targets: Iterable[str] = ()) -> list[str]:
    """Those of `names` that can cost differently.

    Receptacles that are not stops, and not at the place of the player or of a stop, cost the same if they are all open
    or all closed and hold equally many targets. The first of them represents the others.
    """
    receptacles, stops, targets = state.game.receptacles, set(stops), set(targets)
    places = {state.place, *(receptacles[name].place for name in stops)}
    first: dict[tuple[object, ...], str] = {}
    for name in names:
        place = receptacles[name].place
        known = len(targets.intersection(state.contents(name))) if targets else 0
        key = (name if name in stops else "", place if place in places else "", state.is_open(name), known)
        first.setdefault(key, name)
    return list(first.values())
