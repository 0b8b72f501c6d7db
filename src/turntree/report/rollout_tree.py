"""One logged group as the tree that it was: which turns its rollouts share, and which group is worth a look."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from turntree.logs.groups import LoggedGroup, LoggedRollout

MAX_ROLLOUTS, MAX_TURNS = 16, 8  # what is drawn of a group
FITTING_TURNS = 5  # as many columns as the page is wide


@dataclass(frozen=True)
class TurnNode:
    """A turn. `row` is the first rollout that took it, `turn` counts from 1, `parent` is an index into the nodes.
    `tokens` is None where the log does not say."""

    row: int
    turn: int
    parent: int | None
    action: str
    observation: str
    tokens: int | None


@dataclass(frozen=True)
class Leaf:
    """The end of a rollout. `parent` is its last turn that is drawn (None: it has none), `hidden` counts those after
    it; `shared` its turns that an earlier rollout paid for."""

    row: int
    parent: int | None
    hidden: int
    shared: int
    rollout: LoggedRollout


@dataclass(frozen=True)
class DrawnTree:
    nodes: tuple[TurnNode, ...]
    leaves: tuple[Leaf, ...]
    left_out: int  # rollouts beyond those that are drawn


def shared_turns(rollout: LoggedRollout) -> int:
    """How many whole turns at its start an earlier rollout paid for. A turn that forked half-way is its own."""
    if not rollout.forked or rollout.turn_tokens is None:
        return 0
    return next((turn for turn, tokens in enumerate(rollout.turn_tokens) if tokens), len(rollout.turn_tokens))


def tree_of(group: LoggedGroup, max_rollouts: int = MAX_ROLLOUTS, max_turns: int | None = None) -> DrawnTree:
    """The log keeps rollouts depth first, so a fork lies on the path of the rollout right before. Unless it is said
    how many turns are drawn, as many as fit, and more where a fork comes later."""
    if max_turns is None:
        latest = max((shared_turns(rollout) for rollout in group.rollouts[:max_rollouts]), default=0)
        max_turns = max(FITTING_TURNS, min(MAX_TURNS, latest + 1))
    nodes: list[TurnNode] = []
    leaves: list[Leaf] = []
    path: list[int] = []
    for row, rollout in enumerate(group.rollouts[:max_rollouts]):
        shared = shared_turns(rollout)
        path = path[:shared]
        drawn = min(len(rollout.actions), max_turns)
        for at in range(len(path), drawn):
            nodes.append(_node(rollout, row, at, path[-1] if path else None))
            path.append(len(nodes) - 1)
        leaves.append(Leaf(row, path[-1] if path else None, len(rollout.actions) - drawn, shared, rollout))
    return DrawnTree(tuple(nodes), tuple(leaves), len(group.rollouts) - len(leaves))


def _node(rollout: LoggedRollout, row: int, at: int, parent: int | None) -> TurnNode:
    return TurnNode(
        row=row,
        turn=at + 1,
        parent=parent,
        action=rollout.actions[at],
        observation=rollout.observations[at] if rollout.observations else "",
        tokens=rollout.turn_tokens[at] if rollout.turn_tokens else None,
    )


def choose(groups: Iterable[LoggedGroup]) -> LoggedGroup | None:
    """The mixed group to draw: of those that fit on the page one with forks that changed the reward and at least two
    rollouts on either side of the mean, then the one whose forks lie at most different turns, then the one with most
    different actions, then the latest. None where every group has one reward."""
    mixed = [group for group in groups if len(set(group.scored)) > 1]
    return max(mixed, key=_worth, default=None)


def _worth(group: LoggedGroup) -> tuple[bool, bool, int, int, int, int]:
    turns = max(len(rollout.actions) for rollout in group.rollouts)
    fits = len(group.rollouts) <= MAX_ROLLOUTS and turns <= FITTING_TURNS
    places = len({shared_turns(rollout) for rollout in group.rollouts if rollout.forked})
    actions = len({action for rollout in group.rollouts for action in rollout.actions})
    mean = sum(group.scored) / len(group.scored)
    above = sum(reward > mean for reward in group.scored)
    balance = min(2, above, len(group.scored) - above)
    return fits, deciding_forks(group.rollouts) > 0, balance, places, actions, group.iteration or 0


def deciding_forks(rollouts: Sequence[LoggedRollout]) -> int:
    """Forked rollouts whose reward is not that of the rollout before, with which they share turns."""
    return sum(
        after.forked and None not in (before.reward, after.reward) and before.reward != after.reward
        for before, after in itertools.pairwise(rollouts)
    )
