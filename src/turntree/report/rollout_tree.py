"""One pass over the trees that a run kept: their totals, and the one to draw."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from turntree.core.tree import Decision
from turntree.logs.groups import LoggedRollout, action_text
from turntree.logs.rollouts import depth_first, turns_of
from turntree.logs.rows import ReadReport
from turntree.logs.trees import FILE_NAME, KeptTree, read

MAX_ROLLOUTS, MAX_TURNS = 16, 8  # what is drawn of a group
FITTING_TURNS = 5  # as many columns as the page is wide


@dataclass
class KeptTrees:
    """Totals over the trees of one run folder. `chosen` is the one to draw (None: every group has one reward),
    `decisions` are the brancher's, `unread` counts lines that hold no tree."""

    groups: int = 0
    mixed: int = 0
    iterations: set[int] = field(default_factory=set[int])
    decisions: list[Decision] = field(default_factory=list[Decision])
    chosen: KeptTree | None = None
    unread: int = 0


def look(folder: Path) -> KeptTrees | None:
    """One pass over the trees of a run folder; None where it kept none."""
    path = folder / FILE_NAME
    if not path.exists():
        return None
    report = ReadReport("trees")
    found = summed(read(path, report))
    found.unread = report.dropped.total()
    return found


def summed(trees: Iterable[KeptTree]) -> KeptTrees:
    found = KeptTrees()
    best: tuple[bool, bool, int, int, int, int] | None = None
    for kept in trees:
        found.groups += 1
        found.iterations.add(kept.iteration)
        found.decisions += [decision for decision in kept.tree.decisions if decision.actor == "brancher"]
        if len(set(kept.rewards.scored().values())) < 2:
            continue
        found.mixed += 1
        worth = _worth(kept)
        if best is None or worth > best:
            best, found.chosen = worth, kept
    return found


@dataclass(frozen=True)
class TurnNode:
    """A turn. `node` is the tree's own node that holds its message, `row` the first rollout that took it; `turn` counts
    from 1, `parent` is an index into the drawn nodes. `tokens` are those that this turn was sampled for, `local` the
    rewards of local rollouts at its state."""

    node: int
    row: int
    turn: int
    parent: int | None
    action: str
    observation: str
    tokens: int
    local: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Leaf:
    """The end of a branch: of a rollout, or of a part of it (`RolloutTree.parts`) where it went on in another branch.
    `number` counts rollouts from 1. `parent` is the last turn that is drawn (None: it has none), `hidden` counts those
    after it; `shared` its turns that an earlier branch took too; `reason` is the verdict's."""

    row: int
    parent: int | None
    hidden: int
    shared: int
    rollout: LoggedRollout
    reason: str
    number: int
    part: bool = False


@dataclass(frozen=True)
class DrawnTree:
    nodes: tuple[TurnNode, ...]
    leaves: tuple[Leaf, ...]
    left_out: int  # branches beyond those that are drawn


def tree_of(kept: KeptTree, max_rollouts: int = MAX_ROLLOUTS, max_turns: int | None = None) -> DrawnTree:
    """The tree by turns: one that forked half-way is each branch's own. Unless it is said how many turns are drawn, as
    many as fit, and more where a fork or the first local rollout comes later."""
    tree, rollouts = kept.tree, kept.group().rollouts
    ends, parts, local = list(depth_first(tree)), tree.parts(), tree.local_rollouts()
    leaves_of = list(depth_first(tree, parts=True))
    branches = [(number, leaf) for number, end in enumerate(ends) for leaf in leaves_of if parts.get(leaf, leaf) == end]
    paths = [turns_of(tree.path(leaf)) for _, leaf in branches[:max_rollouts]]
    shared = _shared([[said[-1].id for said, _ in path] for path in paths])
    if max_turns is None:
        again = [tree[leaf].turn for leaf in local]  # one of them is drawn
        max_turns = max(FITTING_TURNS, min(MAX_TURNS, max(max(shared, default=0) + 1, min(again, default=0))))
    nodes: list[TurnNode] = []
    leaves: list[Leaf] = []
    places: dict[int, int] = {}
    paid: set[int] = set()
    for row, ((number, leaf), path) in enumerate(zip(branches, paths, strict=False)):
        parent = None
        for at, (said, seen) in enumerate(path[:max_turns]):
            node = said[-1]
            if node.id not in places:
                places[node.id] = len(nodes)
                tokens = sum(len(one.token_ids) for one in said if one.id not in paid)
                action = "" if node.message is None else action_text(node.message)
                above = said[0].parent
                again = () if above is None else (local[n] for n in tree.children(above) if n in local)
                nodes.append(TurnNode(node.id, row, at + 1, parent, action, seen, tokens, tuple(again)))
            paid.update(one.id for one in said)
            parent = places[node.id]
        hidden, reason = max(0, len(path) - max_turns), kept.rewards.verdicts[ends[number]].reason
        told = Leaf(row, parent, hidden, shared[row], rollouts[number], reason, number + 1, leaf in parts)
        leaves.append(told)
    return DrawnTree(tuple(nodes), tuple(leaves), len(branches) - len(leaves))


def _shared(paths: list[list[int]]) -> list[int]:
    """Of every path how many of its turns an earlier one took."""
    taken: set[int] = set()
    counts: list[int] = []
    for path in paths:
        counts.append(sum(node in taken for node in path))
        taken.update(path)
    return counts


def _worth(kept: KeptTree) -> tuple[bool, bool, int, int, int, int]:
    """Of mixed groups the one to draw: of those that fit on the page one with forks that changed the reward and at
    least two rollouts on either side of the mean, then the one whose forks lie at most different turns, then the one
    with most different actions, then the latest."""
    tree, group = kept.tree, kept.group()
    turns = max(len(rollout.actions) for rollout in group.rollouts)
    fits = len(group.rollouts) <= MAX_ROLLOUTS and turns <= FITTING_TURNS
    places = len({tree[point].turn for point in tree.branch_points()})
    actions = len({action for rollout in group.rollouts for action in rollout.actions})
    mean = sum(group.scored) / len(group.scored)
    above = sum(reward > mean for reward in group.scored)
    balance = min(2, above, len(group.scored) - above)
    return fits, deciding_forks(kept) > 0, balance, places, actions, kept.iteration


def deciding_forks(kept: KeptTree) -> int:
    """Branches whose reward is not that of the rollout that they left at the fork."""
    tree, count = kept.tree, 0
    for point in tree.branch_points():
        incumbent, *branches = (kept.rewards.of(tree.first_leaf(child)) for child in tree.grown(point))
        count += sum(None not in (incumbent, branch) and incumbent != branch for branch in branches)
    return count
