"""The trees that a run kept: their totals, the one to draw, and its drawing."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from turntree.core.tree import Decision
from turntree.logs.groups import LoggedRollout, action_text
from turntree.logs.rollouts import depth_first, turns_of
from turntree.logs.rows import ReadReport
from turntree.logs.trees import FILE_NAME, KeptTree, read
from turntree.pivots.rows import message_text
from turntree.report.browser import MAX_NODES, PAGE
from turntree.report.figures import (
    BAD,
    BAD_SOFT,
    EDGE,
    FORK,
    GOOD,
    GOOD_SOFT,
    MUTED,
    WARN,
    WASH,
    Chart,
    drawing,
    literal,
)
from turntree.report.read import Run
from turntree.report.wording import number, plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
    branches = [(place, leaf) for place, end in enumerate(ends) for leaf in leaves_of if parts.get(leaf, leaf) == end]
    paths = [turns_of(tree.path(leaf)) for _, leaf in branches[:max_rollouts]]
    shared = _shared([[said[-1].id for said, _ in path] for path in paths])
    if max_turns is None:
        again = [tree[leaf].turn for leaf in local]  # one of them is drawn
        max_turns = max(FITTING_TURNS, min(MAX_TURNS, max(max(shared, default=0) + 1, min(again, default=0))))
    nodes: list[TurnNode] = []
    leaves: list[Leaf] = []
    places: dict[int, int] = {}
    paid: set[int] = set()
    for row, ((place, leaf), path) in enumerate(zip(branches, paths, strict=False)):
        parent = None
        for at, (said, _) in enumerate(path[:max_turns]):
            node = said[-1]
            if node.id not in places:
                places[node.id] = len(nodes)
                tokens = sum(len(one.token_ids) for one in said if one.id not in paid)
                action = "" if node.message is None else action_text(node.message)
                above = said[0].parent
                alike = () if above is None else local.intersection(tree.children(above))
                again = (kept.rewards.completions.get(leaf) for leaf in sorted(alike))
                nodes.append(TurnNode(node.id, row, at + 1, parent, action, tokens, tuple(again)))
            paid.update(one.id for one in said)
            parent = places[node.id]
        hidden, reason = max(0, len(path) - max_turns), kept.rewards.verdicts[ends[place]].reason
        told = Leaf(row, parent, hidden, shared[row], rollouts[place], reason, place + 1, leaf in parts)
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


# drawing from left to right: a column a turn, a row a rollout, what is shared drawn once; lengths are inches

COLUMN, ROW = 1.74, 0.66  # from turn to turn, from rollout to rollout
WIDTH, HEIGHT = 1.5, 0.52  # of a turn
LEFT, TOP, ENDING = 0.64, 0.3, 1.16  # room for the names of starts, the head, the last reward
CHARACTERS = 20  # of a line in a turn
DOTS = 16  # local rollouts that are drawn at a turn
ABOVE, BELOW, UNKNOWN = (GOOD_SOFT, GOOD), (BAD_SOFT, BAD), (WASH, MUTED)


def rollout_tree(kept: KeptTree) -> Chart:
    """The table beside the figure has the texts in full."""
    tree, scored = tree_of(kept), list(kept.rewards.scored().values())
    columns = max((node.turn for node in tree.nodes), default=0)
    width, height = LEFT + COLUMN * columns + ENDING, TOP + ROW * len(tree.leaves)
    mean = sum(scored) / len(scored) if scored else 0.0
    with drawing("tree", width, height, None) as (figure, made):
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for turn in range(1, columns + 1):
            axes.text(_x(turn), 0.16, f"turn {turn}", color=MUTED, fontsize=8.5)
        for node in tree.nodes:
            if node.parent is not None:
                _edge(axes, tree.nodes[node.parent], node.row, node.turn)
            _turn(axes, node)
        for leaf in tree.leaves:
            if not leaf.shared:
                _start(axes, leaf)
            _ending(axes, tree, leaf, mean)
    return Chart(made[0], _alternative(kept, tree), _caption(tree))


def short_action(action: str) -> tuple[str, str]:
    """A call as (tool, values without their keys), a tagged text as (tag, text), anything else as ("", text)."""
    if tagged := re.fullmatch(r"\s*<(\w+)>(.*)</\1>\s*", action, flags=re.DOTALL):
        return tagged[1], tagged[2].strip()
    first, *more = action.split("\n")
    name, bracket, rest = first.partition("(")
    if not (bracket and name.isidentifier() and rest.endswith(")")):
        return "", action
    further = f" (+ {plural(len(more), 'call')})" if more else ""
    try:
        values = json.loads(rest[:-1])
    except (ValueError, RecursionError):  # a number of thousands of digits, endless nesting
        return name + further, rest[:-1]
    text = ", ".join(str(value) for value in values.values()) if isinstance(values, dict) else str(values)
    return name + further, text


def _x(turn: int) -> float:
    return LEFT + COLUMN * (turn - 1)


def _y(row: int) -> float:
    """The middle of a row."""
    return TOP + ROW * row + HEIGHT / 2


def _edge(axes: Axes, above: TurnNode, row: int, column: int) -> None:
    """From the right side of a turn to the left side of what follows; a fork leaves it downwards."""
    x0, x1, y0, y1 = _x(above.turn) + WIDTH, _x(column), _y(above.row), _y(row)
    if above.row == row:
        axes.plot([x0, x1], [y0, y0], color=EDGE, linewidth=1.1)
        return
    middle = (x0 + x1) / 2
    axes.plot([x0, middle, middle, x1], [y0, y0, y1, y1], color=FORK, linewidth=1.5)
    axes.plot([middle], [y0], marker="o", ms=4, color=FORK)


def _turn(axes: Axes, node: TurnNode) -> None:
    tool, text = short_action(node.action)
    lines = textwrap.wrap(text, CHARACTERS, max_lines=2 if tool else 3, placeholder=" …") or ["(nothing)"]
    tool = tool[: CHARACTERS - 1] + "…" if len(tool) > CHARACTERS else tool
    x, y = _x(node.turn), _y(node.row)
    _box(axes, x, y, WIDTH, HEIGHT, WASH, EDGE)
    texts = [(tool, "bold", 8.5)] if tool else []
    texts += [(line, "normal", 8) for line in lines]
    for place, (line, weight, size) in enumerate(texts):
        at = y + 0.15 * (place - (len(texts) - 1) / 2)
        axes.text(x + 0.08, at, literal(line), fontsize=size, fontweight=weight, va="center")
    for place, reward in enumerate(node.local[:DOTS]):
        fill, tint = UNKNOWN if reward is None else ABOVE if reward > 0 else BELOW
        axes.plot([x + 0.1 + 0.09 * place], [y - HEIGHT / 2], marker="o", ms=5, mfc=fill, mec=tint)


def _box(axes: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str) -> None:
    """With its left side at `x` and its middle at `y`."""
    from matplotlib.patches import FancyBboxPatch

    shape = f"round,pad=0,rounding_size={0.05 if fill == WASH else height / 2}"
    axes.add_patch(FancyBboxPatch((x, y - height / 2), width, height, boxstyle=shape, fc=fill, ec=edge, linewidth=0.8))


def _start(axes: Axes, leaf: Leaf) -> None:
    name, tint = ("fork", FORK) if leaf.rollout.forked else ("start", MUTED)  # forked within its first turn
    if leaf.rollout.refill:
        name, tint = "refill", WARN
    axes.text(0, _y(leaf.row), name, color=tint, fontsize=8.5, fontweight="bold", va="center")
    dashes = "--" if leaf.rollout.refill else "-"
    axes.plot([LEFT - 0.2, LEFT], [_y(leaf.row)] * 2, color=tint, linewidth=1.1, linestyle=dashes)


def _ending(axes: Axes, tree: DrawnTree, leaf: Leaf, mean: float) -> None:
    column, y, reward = 1, _y(leaf.row), leaf.rollout.reward
    if leaf.parent is not None:
        above = tree.nodes[leaf.parent]
        column = above.turn + 1
        _edge(axes, above, leaf.row, column)
    fill, tint = UNKNOWN if reward is None or leaf.part else ABOVE if reward > mean else BELOW
    told = f"part of {leaf.number}" if leaf.part else "censored" if reward is None else f"reward {number(reward)}"
    _box(axes, _x(column), y, 0.88, 0.28, fill, tint)
    axes.text(_x(column) + 0.44, y, told, color=tint, fontsize=8.5, fontweight="bold", ha="center", va="center")
    if leaf.hidden:
        axes.text(_x(column), y + 0.22, plural(leaf.hidden, "more turn"), color=MUTED, fontsize=8, va="center")


def _alternative(kept: KeptTree, tree: DrawnTree) -> str:
    rollouts = [leaf.rollout for leaf in tree.leaves if not leaf.part]
    forks = sum(rollout.forked for rollout in rollouts)
    rewards = ", ".join("censored" if one.reward is None else number(one.reward) for one in rollouts)
    return (
        f"Rollout tree of task {kept.tree.task_id}: {plural(len(rollouts), 'rollout')}, {plural(forks, 'fork')}, "
        f"{plural(len(tree.nodes), 'turn')} drawn; rewards from top to bottom {rewards}."
    )


def _caption(tree: DrawnTree) -> str:
    leaves = tree.leaves
    parts = ", or a part of one: an agent's retry, sub-agent or rewritten history"
    sentences = {
        f"A row is a rollout{parts if any(leaf.part for leaf in leaves) else ''}.": True,
        "A blue line is a fork: what lies left of it was sampled once and is shared.": any(
            leaf.rollout.forked or (leaf.part and leaf.shared) for leaf in leaves
        ),
        "Green: reward above the mean of the group; orange: not above it.": True,
        "Dashed: a refill, begun after the others had ended.": any(leaf.rollout.refill for leaf in leaves),
        "Dots: this turn, sampled again and judged by itself (green: accepted).": any(
            node.local for node in tree.nodes
        ),
        f"Not drawn: {plural(tree.left_out, 'further row')}.": tree.left_out,
        "Long rollouts are drawn up to a turn; how many follow is written below their reward.": any(
            leaf.hidden for leaf in leaves
        ),
    }
    return " ".join(sentence for sentence, holds in sentences.items() if holds)


# the section of a page that draws one kept tree and leads to the rollout browser


def with_trees(run: Run) -> dict[str, Path]:
    """The folders of the training runs that kept trees, by arm; that of PivotRL first."""
    folders = {arm.name: arm.folder for arm in run.arms if arm.folder is not None}
    names = sorted(folders, key=lambda name: name != "pivotrl")
    return {name: folders[name] for name in names if (folders[name] / FILE_NAME).exists()}


def of_arms(run: Run, page: Path) -> dict[str, Any]:
    """The section of a page about several arms: a tree of the first that kept any, and where the others' are."""
    folders = with_trees(run)
    if not folders:
        absent = f"No training run in this folder kept its trees ({FILE_NAME})."
        return {"tree_arm": None, "tree": {"kept": None, "absent": absent}, "other_browsers": []}
    (name, folder), *others = folders.items()
    links = [(other, _link(path, page)) for other, path in others]
    return {"tree_arm": name, "tree": view(look(folder), folder, page), "other_browsers": links}


def view(kept: KeptTrees | None, folder: Path, page: Path) -> dict[str, Any]:
    """What the macro `tree_section` shows of the run in `folder`, on a page that will lie at `page`; without trees the
    sentence why there is none."""
    if kept is None:
        return {"kept": None, "absent": f"This run kept no trees: there is no {FILE_NAME} in its folder."}
    shown = {"kept": kept, "link": _link(folder, page), "most_nodes": MAX_NODES, "note": _note(kept, folder)}
    chosen = kept.chosen
    if chosen is None:
        return {**shown, "chosen": None, "absent": "No group has two different rewards, so none is drawn."}
    drawn = tree_of(chosen)
    root = chosen.tree[chosen.tree.roots[0]]
    return {
        **shown,
        "chosen": chosen,
        "asked": "" if root.message is None else message_text(root.message),
        "demonstrated": chosen.meta.get("demonstrated"),
        "chart": rollout_tree(chosen),
        "drawn": drawn,
        "rollouts": len(chosen.rewards.verdicts),
        "forks": sum(leaf.rollout.forked for leaf in drawn.leaves),
        "deciding": deciding_forks(chosen),
    }


def _link(folder: Path, page: Path) -> str:
    """To the browser of a run; a folder may be called `lr=1e-3#2`."""
    return quote(os.path.relpath(folder / PAGE, page.parent))


def _note(kept: KeptTrees, folder: Path) -> str:
    size = (folder / FILE_NAME).stat().st_size
    unread = f"; {plural(kept.unread, 'line')} could not be read" if kept.unread else ""
    return (
        f"{FILE_NAME} holds {plural(kept.groups, 'group')} of {plural(len(kept.iterations), 'iteration')} "
        f"({size / 1e6:,.1f} MB{unread})."
    )
