"""The trees that a run kept: their totals, the one to draw, and its drawing."""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turntree.core.tree import Decision
from turntree.logs.groups import LoggedRollout, action_text
from turntree.logs.rollouts import depth_first, turns_of
from turntree.logs.rows import ReadReport
from turntree.logs.trees import FILE_NAME, KeptTree, read
from turntree.profiling.rows import message_text
from turntree.report import svg
from turntree.report.browser import MAX_NODES, PAGE
from turntree.report.read import Run
from turntree.report.svg import Chart
from turntree.report.wording import number, plural

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
        for at, (said, seen) in enumerate(path[:max_turns]):
            node = said[-1]
            if node.id not in places:
                places[node.id] = len(nodes)
                tokens = sum(len(one.token_ids) for one in said if one.id not in paid)
                action = "" if node.message is None else action_text(node.message)
                above = said[0].parent
                alike = () if above is None else local.intersection(tree.children(above))
                again = (kept.rewards.completions.get(leaf) for leaf in sorted(alike))
                nodes.append(TurnNode(node.id, row, at + 1, parent, action, seen, tokens, tuple(again)))
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


# drawing from left to right: a column a turn, a row a rollout, what is shared drawn once

COLUMN, ROW = 174, 66  # pixels from turn to turn, from rollout to rollout
WIDTH, HEIGHT = 150, 52  # of a turn
LEFT, TOP, ENDING = 64, 30, 116  # room for the names of starts, the head, the last reward
CHARACTERS = 20  # of a line in a turn
DOTS = 16  # local rollouts that are drawn at a turn
INK, MUTED, EDGE, WASH, FORK, WARN = map(svg.themed, (svg.INK, svg.MUTED, svg.EDGE, svg.WASH, svg.FORK, svg.WARN))
GOOD, BAD, GOOD_SOFT, BAD_SOFT = map(svg.themed, (svg.GOOD, svg.BAD, svg.GOOD_SOFT, svg.BAD_SOFT))
ABOVE, BELOW, UNKNOWN = (GOOD_SOFT, GOOD), (BAD_SOFT, BAD), (WASH, MUTED)


def rollout_tree(kept: KeptTree) -> Chart:
    """Full texts appear when a turn is pointed at; the table beside the figure has them too."""
    tree, scored = tree_of(kept), list(kept.rewards.scored().values())
    columns = max((node.turn for node in tree.nodes), default=0)
    width, height = LEFT + COLUMN * columns + ENDING, TOP + ROW * len(tree.leaves)
    mean = sum(scored) / len(scored) if scored else 0.0
    parts = [
        *(_head(turn) for turn in range(1, columns + 1)),
        *(_edge(tree, node.parent, node.row, node.turn) for node in tree.nodes if node.parent is not None),
        *(_turn(node) for node in tree.nodes),
        *(_start(leaf) for leaf in tree.leaves if not leaf.shared),
        *(_ending(tree, leaf, mean) for leaf in tree.leaves),
    ]
    opening = (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" class="tree" '
        'aria-hidden="true" focusable="false">'
    )
    return Chart(opening + "\n".join(parts) + "</svg>", _said(kept, tree), _caption(tree))


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
    said = ", ".join(str(value) for value in values.values()) if isinstance(values, dict) else str(values)
    return name + further, said


def _lines(action: str) -> tuple[str, list[str]]:
    tool, said = short_action(action)
    room = 2 if tool else 3
    lines = textwrap.wrap(said, CHARACTERS, max_lines=room, placeholder=" …") or ["(nothing)"]
    return tool[: CHARACTERS - 1] + "…" if len(tool) > CHARACTERS else tool, lines


def _x(turn: int) -> int:
    return LEFT + COLUMN * (turn - 1)


def _y(row: int) -> int:
    return TOP + ROW * row


def _head(turn: int) -> str:
    return f'<text x="{_x(turn)}" y="16" fill="{MUTED}" font-size="12">turn {turn}</text>'


def _edge(tree: DrawnTree, parent: int, row: int, column: int) -> str:
    """From the right side of a turn to the left side of what follows; a fork leaves it downwards."""
    above = tree.nodes[parent]
    x0, y0 = _x(above.turn) + WIDTH, _y(above.row) + HEIGHT // 2
    x1, y1 = _x(column), _y(row) + HEIGHT // 2
    if above.row == row:
        return f'<path d="M{x0} {y0}H{x1}" fill="none" stroke="{EDGE}" stroke-width="1.5"/>'
    middle = (x0 + x1) // 2
    path = f"M{x0} {y0}H{middle - 6}Q{middle} {y0} {middle} {y0 + 6}V{y1 - 6}Q{middle} {y1} {middle + 6} {y1}H{x1}"
    dot = f'<circle cx="{middle - 6}" cy="{y0}" r="3.5" fill="{FORK}"/>'
    return f'<path d="{path}" fill="none" stroke="{FORK}" stroke-width="2"/>{dot}'


def _turn(node: TurnNode) -> str:
    tool, lines = _lines(node.action)
    x, y = _x(node.turn), _y(node.row)
    told = [(tool, ' font-weight="600"')] if tool else []
    told += [(line, ' class="words"') for line in lines]
    first = y + (HEIGHT - 15 * len(told)) // 2 + 12
    texts = (
        f'<text x="{x + 8}" y="{first + 15 * index}" fill="{INK}" font-size="{11 if "words" in style else 12}"{style}>'
        f"{escape(text)}</text>"
        for index, (text, style) in enumerate(told)
    )
    seen = f"\nbefore it: {node.observation}" if node.observation else ""
    again = f"\nsampled again: {', '.join(map(_told, node.local))}" if node.local else ""
    about = f"turn {node.turn}, node {node.node}, {plural(node.tokens, 'token')}: {node.action}{seen}{again}"
    title = f"<title>{escape(about)}</title>"
    box = f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{WASH}" stroke="{EDGE}"/>'
    dots = (_dot(x + 10 + 9 * place, y, reward) for place, reward in enumerate(node.local[:DOTS]))
    return f"<g>{title}{box}{''.join(texts)}{''.join(dots)}</g>"


def _dot(x: int, y: int, reward: float | None) -> str:
    """A local rollout, on the upper side of its turn."""
    fill, tint = UNKNOWN if reward is None else ABOVE if reward > 0 else BELOW
    return f'<circle cx="{x}" cy="{y}" r="3.5" fill="{fill}" stroke="{tint}"/>'


def _told(reward: float | None) -> str:
    return "censored" if reward is None else number(reward)


def _start(leaf: Leaf) -> str:
    forked = ("fork", FORK) if leaf.rollout.forked else ("start", MUTED)  # forked within its first turn
    name, tint = ("refill", WARN) if leaf.rollout.refill else forked
    y = _y(leaf.row) + HEIGHT // 2
    dashes = ' stroke-dasharray="4 3"' if leaf.rollout.refill else ""
    line = f'<path d="M{LEFT - 22} {y}H{LEFT}" stroke="{tint}" stroke-width="1.5"{dashes}/>'
    return f'<text x="0" y="{y + 4}" fill="{tint}" font-size="12" font-weight="600">{name}</text>{line}'


def _ending(tree: DrawnTree, leaf: Leaf, mean: float) -> str:
    column = tree.nodes[leaf.parent].turn + 1 if leaf.parent is not None else 1
    x, y = _x(column), _y(leaf.row) + HEIGHT // 2
    edge = "" if leaf.parent is None else _edge(tree, leaf.parent, leaf.row, column)
    reward = leaf.rollout.reward
    fill, tint = UNKNOWN if reward is None or leaf.part else ABOVE if reward > mean else BELOW
    told = f"part of {leaf.number}" if leaf.part else "censored" if reward is None else f"reward {number(reward)}"
    hidden = (
        f'<text x="{x}" y="{y + 27}" fill="{MUTED}" font-size="11">{plural(leaf.hidden, "more turn")}</text>'
        if leaf.hidden
        else ""
    )
    because = f" ({leaf.reason})" if leaf.reason else ""
    ended = "went on in another branch" if leaf.part else f"ended: {leaf.rollout.stop}{because}"
    stop = f"<title>{escape(f'rollout {leaf.number} {ended}')}</title>"
    box = f'<rect x="{x}" y="{y - 14}" width="88" height="28" rx="14" fill="{fill}" stroke="{tint}"/>'
    text = f'<text x="{x + 44}" y="{y + 4}" fill="{tint}" font-size="12" font-weight="600" text-anchor="middle">{told}'
    return f"{edge}<g>{stop}{box}{text}</text></g>{hidden}"


def _said(kept: KeptTree, tree: DrawnTree) -> str:
    rollouts = [leaf.rollout for leaf in tree.leaves if not leaf.part]
    forks = sum(rollout.forked for rollout in rollouts)
    rewards = ", ".join("censored" if one.reward is None else number(one.reward) for one in rollouts)
    return (
        f"Rollout tree of task {kept.tree.task_id}: {plural(len(rollouts), 'rollout')}, {plural(forks, 'fork')}, "
        f"{plural(len(tree.nodes), 'turn')} drawn; rewards from top to bottom {rewards}."
    )


def _caption(tree: DrawnTree) -> str:
    told = "A row is a rollout."
    if any(leaf.part for leaf in tree.leaves):
        told = "A row is a rollout, or a part of one: an agent's retry, candidate, sub-agent or rewritten history."
    if any(leaf.rollout.forked or (leaf.part and leaf.shared) for leaf in tree.leaves):
        told += " A blue line is a fork: what lies left of it was sampled once and is shared."
    told += " Green: reward above the mean of the group; orange: not above it."
    if any(leaf.rollout.refill for leaf in tree.leaves):
        told += " Dashed: a refill, begun after the others had ended."
    if any(node.local for node in tree.nodes):
        told += " Dots: this turn, sampled again and judged by itself (green: accepted)."
    if tree.left_out:
        told += f" Not drawn: {plural(tree.left_out, 'further row')}."
    if any(leaf.hidden for leaf in tree.leaves):
        told += " Long rollouts are drawn up to a turn; how many follow is written below their reward."
    return told + " Point at a turn for its full text."


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
