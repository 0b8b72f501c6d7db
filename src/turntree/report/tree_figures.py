"""A rollout tree drawn from left to right: a column a turn, a row a rollout, what is shared drawn once."""

from __future__ import annotations

import json
import re
import textwrap
from html import escape

from turntree.logs.trees import KeptTree
from turntree.report import svg
from turntree.report.rollout_tree import DrawnTree, Leaf, TurnNode, tree_of
from turntree.report.svg import Chart
from turntree.report.wording import number, plural

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
