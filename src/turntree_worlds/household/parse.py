"""Reads one ALFWorld game: the PDDL problem (facts and goal) and the TextWorld grammar (task and help text)."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

from turntree.core.errors import InputError
from turntree_worlds.household.world import NOTHING_HAPPENS, Game, Goal, Receptacle, Thing

_OWN_ABILITIES = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable")
_ABILITIES = {**{name: name for name in _OWN_ABILITIES}, "isreceptacleobject": "container"}
_TRAITS = {"isclean": "clean", "ishot": "hot", "iscool": "cool", "issliced": "sliced", "istoggled": "on"}
_ARITY = {
    **dict.fromkeys(["openable", *_ABILITIES, *_TRAITS], 1),
    **dict.fromkeys(["atlocation", "receptacletype", "receptacleatlocation", "objecttype", "objectatlocation"], 2),
    **dict.fromkeys(["inreceptacle", "inreceptacleobject", "cancontain"], 2),
}
_GOAL_TRAITS = {"isclean": "clean", "ishot": "hot", "iscool": "cool"}
# Goal predicates that add nothing to the six official goal shapes.
_GOAL_SCAFFOLD = {
    "cleanable",
    "heatable",
    "coolable",
    "toggleable",
    "receptacleatlocation",
    "atlocation",
    "=",
}

_FACT = re.compile(r"\(([^()]+)\)")
_TASK = re.compile(r'"Your task is to: ((?:[^"\\]|\\.)*)"')
_PUT = re.compile(r'action\s+PutObject\s*\{\s*template\s*::\s*"([^"]*)"')
_HELP = re.compile(r'action\s+help\s*\{.*?feedback\s*::\s*"([^"]*)"', re.DOTALL)
_HELP_RULE = re.compile(r'"help\.feedback":\s*\[\s*\{\s*"rhs":\s*"((?:[^"\\]|\\.)*)"')

Facts = Mapping[str, list[tuple[str, ...]]]  # predicate: its argument tuples


def parse_game(pddl_problem: str, grammar: str, *, id: str, task_type: str = "") -> Game:
    """The game of a `game.tw-pddl` file's "pddl_problem" and "grammar" fields.

    Raises InputError naming the game and the missing or unsupported part.
    """
    try:
        facts, task, goal = _parse_facts(pddl_problem), _parse_task(grammar), _parse_goal(pddl_problem)
        return game_of_facts(facts, goal, task, _parse_help(grammar), id=id, task_type=task_type)
    except InputError as error:
        raise InputError(f"game {id}: {error.problem}", field=error.field, hint=error.hint) from error


def game_of_facts(facts: Facts, goal: Goal, task: str, help_text: str, *, id: str, task_type: str) -> Game:
    """The game whose initial facts these are, by predicate, all in lower case. Raises `InputError`."""
    names = _readable_names(facts)
    receptacles = _parse_receptacles(facts, names)
    things = _parse_things(facts, names)
    start = _only(facts["atlocation"], "the player's (atLocation agent place)")[1]
    if any(receptacle.place == start for receptacle in receptacles.values()):
        raise InputError("the player starts at a receptacle", hint="start at a place of its own")
    return Game(
        id=id,
        task_type=task_type,
        task=task,
        goal=goal,
        receptacles=receptacles,
        things=things,
        can_contain=_parse_can_contain(facts, receptacles, things),
        start=start,
        traits=frozenset((trait, names[i]) for fact, trait in _TRAITS.items() for i in _ones(facts, fact)),
        help_text=help_text,
    )


def _section(problem: str, opening: str) -> tuple[int, int]:
    """Where the section's text begins and where the next one (or the end) begins."""
    begin = problem.find(opening)
    if begin < 0:
        raise InputError(f"the PDDL problem has no {opening} ...)", field="pddl_problem")
    following = problem.find("(:", begin + len(opening))
    return begin + len(opening), following if following >= 0 else len(problem)


def _parse_facts(problem: str) -> Facts:
    """The initial facts by lower-cased predicate; TextWorld lower-cases every name too."""
    text = problem.lower()
    begin, end = _section(text, "(:init")
    facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for words in dict.fromkeys(_FACT.findall(text, begin, end)):  # official files repeat facts
        predicate, *arguments = words.split()
        if len(arguments) != _ARITY.get(predicate, len(arguments)):
            hint = f"{predicate} takes {_ARITY[predicate]} arguments"
            raise InputError(f"cannot read the fact ({words})", field="pddl_problem", hint=hint)
        facts[predicate].append(tuple(arguments))
    return facts


def _ones(facts: Facts, predicate: str) -> list[str]:
    return [fact[0] for fact in facts[predicate]]


def _pairs(facts: Facts, predicate: str) -> list[tuple[str, str]]:
    return [(fact[0], fact[1]) for fact in facts[predicate]]


def _readable_names(facts: Facts) -> dict[str, str]:
    """ALFWorld's names, "drawer 2" for a PDDL id such as "drawer_bar__minus_02_...".

    The ids of one kind are numbered in reverse sorted order: the last one is number 1.
    """
    ids = {argument for arguments in facts.values() for fact in arguments for argument in fact}
    ranked = sorted(identifier for identifier in ids if "_bar_" in identifier)
    heads = {i: i.split("_bar_", 1)[0] + ("basin" if "basin" in i else "") for i in ranked}
    left = Counter(heads.values())
    names: dict[str, str] = {}
    for identifier, head in heads.items():
        names[identifier] = f"{head} {left[head]}"
        left[head] -= 1
    return names


def _kind(type_name: str) -> str:
    return type_name.removesuffix("type")


def _parse_receptacles(facts: Facts, names: Mapping[str, str]) -> dict[str, Receptacle]:
    kinds = {receptacle: _kind(kind) for receptacle, kind in _pairs(facts, "receptacletype")}
    places = dict(_pairs(facts, "receptacleatlocation"))
    openable = set(_ones(facts, "openable"))
    contents: dict[str, list[str]] = {receptacle: [] for receptacle in kinds}
    for thing, receptacle in _pairs(facts, "inreceptacle"):
        if receptacle not in contents:
            raise InputError(f"{receptacle} holds {thing} but has no (receptacleType ...)")
        contents[receptacle].append(thing)
    if not kinds:
        raise InputError("the PDDL problem has no (receptacleType ...) fact", field="pddl_problem")
    homeless = sorted(kinds.keys() - places.keys())
    if homeless:
        raise InputError(f"{homeless[0]} has no (receptacleAtLocation ...) fact")
    return {
        names[i]: Receptacle(
            names[i], kinds[i], places[i], i in openable, tuple(names[thing] for thing in sorted(contents[i]))
        )
        for i in sorted(kinds)
    }


def _parse_things(facts: Facts, names: Mapping[str, str]) -> dict[str, Thing]:
    abilities: defaultdict[str, set[str]] = defaultdict(set)
    for predicate, ability in _ABILITIES.items():
        for thing in _ones(facts, predicate):
            abilities[thing].add(ability)
    places = dict(_pairs(facts, "objectatlocation"))
    inside: defaultdict[str, list[str]] = defaultdict(list)
    for inner, outer in sorted(_pairs(facts, "inreceptacleobject")):
        inside[outer].append(names[inner])
    return {
        names[i]: Thing(names[i], _kind(kind), frozenset(abilities[i]), places.get(i), tuple(inside[i]))
        for i, kind in sorted(_pairs(facts, "objecttype"))
    }


def _parse_can_contain(
    facts: Facts, receptacles: Mapping[str, Receptacle], things: Mapping[str, Thing]
) -> dict[str, frozenset[str]]:
    """Only the kinds that this game has, so that thousands of games stay small in memory."""
    here = {receptacle.kind for receptacle in receptacles.values()}
    kinds = {thing.kind for thing in things.values()}
    holds: defaultdict[str, set[str]] = defaultdict(set)
    for receptacle_type, object_type in _pairs(facts, "cancontain"):
        if _kind(receptacle_type) in here and _kind(object_type) in kinds:
            holds[_kind(receptacle_type)].add(_kind(object_type))
    return {kind: frozenset(held) for kind, held in holds.items()}


def _parse_goal(problem: str) -> Goal:
    """Recognises the six goal shapes of ALFWorld by their predicates; refuses every other one."""
    text = problem.lower()
    begin, end = _section(text, "(:goal")
    facts: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)
    for words in re.findall(r"\((=|[a-z]+) ((?:\?)[^()]*)\)", text[begin:end]):
        facts[words[0]].append(tuple(words[1].split()))
    known = {
        "objecttype",
        "receptacletype",
        "inreceptacle",
        "holds",
        "istoggled",
        *_GOAL_TRAITS,
        *_GOAL_SCAFFOLD,
    }
    unknown = sorted(facts.keys() - known)
    if unknown:
        raise InputError(f"the goal uses {unknown[0]!r}, which none of the six task types does")
    kinds = {variable: _kind(kind) for variable, kind in facts["objecttype"]}
    if facts["holds"]:
        return _looking_goal(facts, kinds)
    placed = {variable for variable, _ in facts["inreceptacle"]}
    object_kinds = {kinds.get(variable) for variable in placed}
    receptacle_kinds = {_kind(kind) for _, kind in facts["receptacletype"]}
    object_kind = _only(object_kinds, "kind of object in the goal")
    receptacle_kind = _only(receptacle_kinds, "(receptacleType ...) in the goal")
    traits = [trait for predicate, trait in _GOAL_TRAITS.items() if facts[predicate]]
    if object_kind is None or len(traits) > 1:
        raise InputError("the goal has no (objectType ...) or asks for two treatments")
    return Goal(object_kind, receptacle_kind, trait=traits[0] if traits else None, count=len(placed))


def _looking_goal(facts: Facts, kinds: Mapping[str, str]) -> Goal:
    held = _only({variable for _, variable in facts["holds"]}, "held object in the goal")
    lamp = _only({variable for (variable,) in facts["istoggled"]}, "lamp in the goal")
    if held not in kinds or lamp not in kinds:
        raise InputError("the goal has no (objectType ...) for its object or its lamp")
    return Goal(kinds[held], lamp_kind=kinds[lamp])


T = TypeVar("T")


def _only(values: Iterable[T], what: str) -> T:
    found = list(values)
    if len(found) != 1:
        raise InputError(f"{len(found)} times {what}; exactly one is needed", field="pddl_problem")
    return found[0]


def _parse_task(grammar: str) -> str:
    put = _PUT.search(grammar)
    if put is None or put[1] != "move {o} to {r}":
        found = "nothing" if put is None else repr(put[1])
        raise InputError(
            f"the grammar words putting an object as {found}, not 'move {{o}} to {{r}}'",
            field="grammar",
            hint="it was made by an ALFWorld before 0.4; download the games anew with alfworld-download",
        )
    task = _TASK.search(grammar)
    if task is None:
        raise InputError('the grammar has no "Your task is to: ..."', field="grammar")
    return json.loads(f'"{task[1]}"')


def _parse_help(grammar: str) -> str:
    action = _HELP.search(grammar)
    if action is None:
        return NOTHING_HAPPENS
    rule = _HELP_RULE.search(grammar)
    # TextWorld's grammar parser skips white space before the first word, and only there.
    return json.loads(f'"{rule[1]}"') if action[1] == "#help.feedback#" and rule else action[1].lstrip()
