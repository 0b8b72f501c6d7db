"""Cutting: a tree above the token budget, in parts that each fit.

In depth-first order the slots before `a` that anything from `a` on depends on are the path above `a`. So every
interval [a, b) of slots, with that path computed once more in front of it, is a tree of its own, and any partition of
the order into intervals is a cut. Of all cuts after leaves, the one with the fewest recomputed slots is taken.

An action belongs to the part that holds its last slot, where its whole path is present: each term is counted once, and
an action is never split (its ratio may be a product over all its tokens). The gradient that reaches shared ancestors
through the parts adds up to the uncut one.
"""

from __future__ import annotations

from dataclasses import replace

from turntree.training.slots import Segment


def cut(segment: Segment, max_tokens: int) -> list[Segment] | None:
    """The parts of `segment`, at most `max_tokens` slots each; None where one path alone is longer.

    `share` and `flat_tokens` are divided so that sums over the parts are exact.
    """
    if len(segment) <= max_tokens:
        return [segment]
    starts = _starts(segment, max_tokens)
    if starts is None:
        return None
    ends = [*starts[1:], len(segment)]
    count = len(starts)
    flat = [segment.flat_tokens * part // count for part in range(count + 1)]
    return [
        replace(_part(segment, start, end), flat_tokens=flat[i + 1] - flat[i], share=segment.share / count)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def longest_path(segment: Segment) -> int:
    """Slots on the longest path: the smallest budget that `cut` can meet."""
    return max(segment.depths) + 1


def _starts(segment: Segment, max_tokens: int) -> list[int] | None:
    """Where the parts begin, by dynamic programming over the slots that follow a leaf."""
    size = len(segment)
    edges = [0, *(s for s in range(1, size) if segment.predecessors[s] != s - 1), size]
    best: list[tuple[int, int] | None] = [(0, 0)]  # (slots recomputed up to this edge, edge before it)
    for j in range(1, len(edges)):
        found: tuple[int, int] | None = None
        for i in range(j - 1, -1, -1):
            above = segment.depths[edges[i]]
            if edges[j] - edges[i] > max_tokens:
                break
            if (reached := best[i]) is not None and above + edges[j] - edges[i] <= max_tokens:
                found = min(found or (size * size, 0), (reached[0] + above, i))
        best.append(found)
    starts: list[int] = []
    at = len(edges) - 1
    while at:
        step = best[at]
        if step is None:
            return None
        at = step[1]
        starts.append(edges[at])
    return starts[::-1]


def _part(segment: Segment, start: int, end: int) -> Segment:
    """The slots [start, end) below their path, renumbered."""
    above = [slot for slot in range(start) if segment.last[slot] > start]
    kept = above + list(range(start, end))
    new = {slot: position for position, slot in enumerate(kept)} | {-1: -1}
    last = [min(segment.last[slot], end) - start + len(above) for slot in kept]
    return replace(
        segment,
        tokens=tuple(segment.tokens[slot] for slot in kept),
        depths=tuple(segment.depths[slot] for slot in kept),
        predecessors=tuple(new[segment.predecessors[slot]] for slot in kept),
        last=tuple(last),
        actions=tuple(
            replace(action, slots=tuple(new[slot] for slot in action.slots))
            for action in segment.actions
            if start <= action.slots[-1] < end
        ),
        recomputed=len(above),
    )
