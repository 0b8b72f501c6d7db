"""Judges one household command beside the demonstrated one by playing both (PivotRL, Algorithm 1, line 9).

A command is acceptable iff it is the demonstrated one, or

(a) it leads to the same physical state as the demonstration, and the demonstration changed that state; or
(b) it brings the goal nearer, by at least as much as the demonstration does (`distance`, with full knowledge); or
(c) what the player needs next has not been displayed yet, and the command shortens the search for it.

For (c): a player with a useless object in hand must first put it down, which is not a search. Otherwise the player
needs a target, unless one is in hand or displayed outside its destination; in a game of looking, with the target in
hand, it needs a lamp. `search_effort` is the number of commands still needed to see every place that may hide it: two
for a closed receptacle and one for any other, less the walk to the closed one where the player already stands. So
going to an unsearched place counts, and so does opening it, but not walking from one closed door to the next.

During a search (b) must not lengthen it. Then (effort, distance) falls lexicographically with every command that (b)
or (c) accepts, and without a search the distance falls. So accepted commands cannot repeat in a cycle. As long as the
goal is in reach there is always an accepted command, so a player that gives only accepted commands wins (tested).

A command that changes nothing, repeats or undoes has a reward of 0 unless it was demonstrated.
"""

from __future__ import annotations

from turntree.core.messages import Message
from turntree.core.protocols import TurnState, TurnVerifier
from turntree.core.verdict import Verdict
from turntree.verify.tool_call import Remembered
from turntree_worlds.household.distance import distance
from turntree_worlds.household.environment import command_of, prompt_of, read_as, state_at
from turntree_worlds.household.world import State, parse_command

INVALID = "invalid"


def action_kind(state: State, command: str) -> str:
    """The verb, or `INVALID`. Walking is told apart by whether something is in hand; `other` is slice and help."""
    parsed = parse_command(command)
    if parsed is None or not state.fork().step(command).valid:
        return INVALID
    if parsed[0] == "go to":
        return "go_search" if state.held is None else "go_holding"
    return "other" if parsed[0] in ("slice", "help") else parsed[0]


def judge(state: State, demonstrated: str, action: str) -> Verdict:
    """The verdict on `action` at `state`, where the demonstration went on with `demonstrated`; `state` is kept."""
    kind = action_kind(state, action)
    if action.strip() == demonstrated.strip():
        return Verdict(1.0, "demonstrated", kind)
    if kind == INVALID:
        return Verdict(0.0, "not possible here", kind)
    shown, tried = state.fork(), state.fork()
    demonstration, outcome = shown.step(demonstrated), tried.step(action)
    if demonstration.changed and tried.key() == shown.key():
        return Verdict(1.0, "same state as the demonstration", kind)
    shortened = search_effort(state) - search_effort(tried) if is_searching(state) else 0
    if shortened >= 0 and _nearer(state, tried) >= max(1, _nearer(state, shown)):
        return Verdict(1.0, "as near to the goal as the demonstration", kind)
    if shortened > 0:
        return Verdict(1.0, "searches a new place", kind)
    return Verdict(0.0, "no progress" if outcome.changed else "changes nothing", kind)


def _nearer(before: State, after: State) -> float:
    """How many commands `after` is nearer to the goal; minus infinity where the goal was lost or never in reach."""
    start, end = distance(before), distance(after)
    return float("-inf") if start is None or end is None else start - end


def is_searching(state: State) -> bool:
    """Whether the object that the goal needs next was not displayed yet."""
    game = state.game
    if state.held is not None:
        wants_lamp = state.held in game.goal_objects and game.goal.lamp_kind is not None
        return wants_lamp and not _displayed(state, game.lamps)
    delivered: set[str] = set()
    if game.goal.receptacle_kind is not None and game.goal.trait is None:
        fullest = max(game.goal_receptacles, key=lambda name: len(_targets_seen(state, name)), default=None)
        delivered = set() if fullest is None else _targets_seen(state, fullest)
    return not _displayed(state, game.goal_objects - delivered)


def _displayed(state: State, things: frozenset[str]) -> bool:
    return any(not things.isdisjoint(state.contents(name)) for name in state.searched)


def _targets_seen(state: State, receptacle: str) -> set[str]:
    return set(state.game.goal_objects.intersection(state.contents_seen(receptacle)))


def search_effort(state: State) -> int:
    """Commands a player still needs to see every place that may hide what it looks for.

    Where the goal is one untreated object in a kind of receptacle, that kind cannot hide it: the game would be won.
    """
    goal = state.game.goal
    ruled_out = goal.receptacle_kind if goal.trait is None and goal.count == 1 else None
    hidden = [
        name
        for name, receptacle in state.game.receptacles.items()
        if name not in state.searched and receptacle.kind != ruled_out
    ]
    doors = sum(not state.is_open(name) for name in hidden)
    return len(hidden) + doors - (state.location in hidden)


class HouseholdVerifier(TurnVerifier):
    """`judge` for turns of traces (protocol `TurnVerifier`): the state is rebuilt by replaying the trace's history.

    Rebuilt states are remembered, since a pivot is judged once per sample.
    """

    name = "household-functional/2"

    def __init__(self) -> None:
        self._states = Remembered[State](4096)

    def judge(self, state: TurnState, action: Message) -> Verdict:
        """Raises `InputError` where the trace names no game; a command of the policy never raises."""
        action = read_as(prompt_of(state), action)
        if action.tool_calls and not command_of(action):
            return Verdict(0.0, "a tool call is not a command", INVALID)
        rebuilt = self._states.of(state, lambda: state_at(state))
        return judge(rebuilt, command_of(state.demonstration), command_of(action))
