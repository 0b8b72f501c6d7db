"""An expert for household games that has to search like any player (`distance.shortest_plan` knows the room)."""

from __future__ import annotations

import random
from collections.abc import Iterable

from turntree.core.errors import TurntreeError
from turntree_worlds.household.distance import VERB_OF_TRAIT
from turntree_worlds.household.world import APPLIANCES, State


class UnreachableGoal(TurntreeError):
    """No command list wins from here: an object is in hand that no receptacle takes, or a target does not exist."""


def slip(state: State, rng: random.Random) -> str:
    """A mistake to recover from: a command that is possible but random, or (60%) one that names the wrong thing."""
    command = rng.choice(state.admissible())
    if rng.random() < 0.4:
        return command
    names = [*state.game.receptacles, *state.game.things]
    words = command.split()
    kind = rng.randrange(3)
    if kind == 0 and words[-1].isdigit():
        words[-1] = str(rng.randint(1, 4))
    elif kind == 1 and words[-1].isdigit():
        words[-2:] = rng.choice(names).split()
    else:
        words = [rng.choice(("go to", "take", "open", "move", "use")), rng.choice(names)]
    return " ".join(words)


def stumble(state: State, rng: random.Random) -> list[str]:
    """Up to three equal commands in a row, as a weak policy gives them. Half of the time it tries to take the object of
    the task whether or not it is there, and it repeats what just failed (over half of the impossible commands of the
    embedded policy repeat the previous one)."""
    command = slip(state, rng)
    if rng.random() < 0.5:
        place = state.location or rng.choice(list(state.game.receptacles))
        command = f"take {state.game.goal.object_kind} {rng.randint(1, 3)} from {place}"
    return [command] * rng.choice((1, 1, 2, 3))


def next_exploring_action(state: State, rng: random.Random | None = None) -> str:
    """What a player who has read only the texts so far does next.

    It knows the task and the receptacles (from the introduction), what is in hand and what was done to it, and the
    contents of every receptacle in `state.searched`; nothing moves unless the player moves it, so all of that is
    still true. It never reads contents that were not displayed. A known target comes first; otherwise it searches
    on: in the introduction's order without `rng`, evenly at random with it. Receptacles that share the player's
    place are left for later, since only `look` would tell that `go to` is refused there.

    Raises UnreachableGoal when everything was searched in vain; ValueError when the game is won already.
    """
    if state.won:
        raise ValueError(f"game {state.game.id} is won: there is no next action")
    if state.held is None:
        return _fetch(state, rng)
    if state.held not in state.game.goal_objects:
        return _put_down(state)
    goal = state.game.goal
    if goal.receptacle_kind is None:
        return _light(state, rng)
    if goal.trait is not None and not state.has(goal.trait, state.held):
        return _treat(state, VERB_OF_TRAIT[goal.trait])
    return _visit(state, _destination(state), f"move {state.held} to {{}}")


def _fetch(state: State, rng: random.Random | None) -> str:
    """Take a target that is known, one in reach first; else search."""
    done = _delivered(state, _destination(state)) if state.game.goal_receptacles else []
    targets = state.game.goal_objects.difference(done)
    known = [(thing, name) for thing, name in _seen(state) if thing in targets]
    if not known:
        return _search(state, rng)
    thing, name = min(known, key=lambda pair: pair[1] not in state.here)
    return _visit(state, name, f"take {thing} from {{}}")


def _light(state: State, rng: random.Random | None) -> str:
    """Bring the target in hand to a lamp that was seen, and switch it on; else search for one."""
    lamps = [(thing, name) for thing, name in _seen(state) if thing in state.game.lamps]
    if not lamps:
        return _search(state, rng)
    thing, name = min(lamps, key=lambda pair: pair[1] not in state.here)
    return f"use {thing}" if name in state.here else f"go to {name}"


def _treat(state: State, verb: str) -> str:
    kinds = APPLIANCES[verb][0]
    names = [r.name for r in state.game.receptacles.values() if r.kind in kinds]
    if not names:
        raise UnreachableGoal(f"game {state.game.id}: nothing here can {verb} {state.held}")
    name = _nearest(state, names)
    return f"{verb} {state.held} with {name}" if name in state.here else f"go to {name}"


def _put_down(state: State) -> str:
    """Free the hand of something useless: here if possible, else at the first receptacle that takes it."""
    names = [name for name in state.game.receptacles if state.game.accepts(name, state.held or "")]
    if not names:
        raise UnreachableGoal(f"game {state.game.id}: no receptacle takes the {state.held} in hand")
    easy = [name for name in names if name in state.here and state.is_open(name)]
    return _visit(state, (easy or [_nearest(state, names)])[0], f"move {state.held} to {{}}")


def _destination(state: State) -> str:
    """The goal receptacle with most of what the goal wants, as far as seen; the first of equals.

    With a target in hand one in reach wins a tie; with empty hands that would make two half-filled ones take turns.
    """

    def rank(name: str) -> tuple[int, bool]:
        return -len(_delivered(state, name)), state.held is not None and name not in state.here

    return min(state.game.goal_receptacles, key=rank)


def _delivered(state: State, name: str) -> list[str]:
    return [thing for thing in state.contents_seen(name) if state.counts(thing)]


def _seen(state: State) -> list[tuple[str, str]]:
    """(object, receptacle) of everything displayed so far."""
    return [(thing, name) for name in state.game.receptacles for thing in state.contents_seen(name)]


def _visit(state: State, name: str, command: str) -> str:
    """The next command on the way to `command` at the receptacle: go there, open it, do it."""
    if name not in state.here:
        return f"go to {name}"
    return command.format(name) if state.is_open(name) else f"open {name}"


def _search(state: State, rng: random.Random | None) -> str:
    """Open what the player stands before; else go to another unsearched receptacle."""
    unsearched = [name for name in state.game.receptacles if name not in state.searched]
    if state.location in unsearched:
        return _uncover(state, state.location)
    away = [name for name in unsearched if name not in state.here]
    if not unsearched:
        raise UnreachableGoal(f"game {state.game.id}: everything is searched and no target was seen")
    name = (away or unsearched)[0] if rng is None else rng.choice(away or unsearched)
    return f"go to {name}" if away else _uncover(state, name)


def _uncover(state: State, name: str) -> str:
    return f"examine {name}" if state.is_open(name) else f"open {name}"


def _nearest(state: State, names: Iterable[str]) -> str:
    return min(names, key=lambda name: name not in state.here)
