"""Slots: the merged token trie of one tree or of several, in depth-first order, and its cut into parts.

A *slot* is a unique token position, computed once. Siblings that begin with the same tokens share slots, whether
both were sampled or one is an untrained expert prefix. An *action* is one sampling event (a trained completion
node); its terms point at slots and are never merged, so two siblings that sampled the same tokens keep their own
log-probabilities and credit.

Trees that begin with the same tokens (pivots of one trace, tasks behind one long prompt) are merged in the same way:
what they share is computed once for all of them, and every action stays its own tree's.

A tree above the token budget is *cut* into parts that each fit. In depth-first order the slots before `a` that anything
from `a` on depends on are the path above `a`. So every interval [a, b) of slots, with that path computed once more in
front of it, is a tree of its own, and any partition of the order into intervals is a cut. Of all cuts after leaves, the
one with the fewest recomputed slots is taken.

An action belongs to the part that holds its last slot, where its whole path is present: each term is counted once, and
an action is never split (its ratio may be a product over all its tokens). The gradient that reaches shared ancestors
through the parts adds up to the uncut one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from itertools import pairwise

from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import Node, RolloutTree

ALIKE = 1 / 8  # of a segment's slots: with less in common it is not merged


@dataclass(frozen=True)
class Action:
    """One sampling event: its tree and node, the places of its tokens in the segment, the sampler's log-probabilities,
    the estimator's credit."""

    tree: int
    node: int
    slots: tuple[int, ...]
    sampling_logprobs: tuple[float, ...]
    credit: NodeCredit


@dataclass(frozen=True)
class Segment:
    """Slots that attend to nothing outside: whole trees, or one path of a tree. Four aligned sequences, depth-first.

    Slot q sees slot k iff `k <= q < last[k]`; `predecessors` is -1 where a path begins. `flat_tokens` is what one
    row per rollout would compute; `shares` are the parts of its trees that the segment stands for; `recomputed` of its
    slots are ancestors that another part of the tree computes too.
    """

    shares: tuple[tuple[int, float], ...]  # of (tree, part)
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    predecessors: tuple[int, ...]
    last: tuple[int, ...]
    actions: tuple[Action, ...]
    flat_tokens: int
    recomputed: int = 0
    routes: tuple[str | None, ...] = ()  # of every slot, where any is known (`core.completion.Completion`)

    def __len__(self) -> int:
        return len(self.tokens)


def tree_segment(tree: RolloutTree, credit: Credit, index: int) -> Segment | None:
    """The whole tree, every unique token once; None when nothing in it is trained.

    Nodes that no trained token depends on (branches of censored leaves, trailing observations) are left out.
    """
    paths = trained_paths(tree, credit)
    if not paths:
        return None
    needed = {node.id: node for path in paths for node in path}
    flat = sum(len(node.token_ids) for path in paths for node in path)
    return _segment(tree, [needed[n] for n in sorted(needed)], credit.nodes, index, flat, share=1.0)


def path_segments(tree: RolloutTree, credit: Credit, index: int) -> list[Segment]:
    """One segment per rollout, nothing shared: the flat layout that packing is measured against.

    A node's ratio is the same in every rollout through it, so its credit is divided equally among them and the
    objective is unchanged.
    """
    paths = trained_paths(tree, credit)
    through = Counter(node.id for path in paths for node in path)
    split = {n: NodeCredit(*(x / through[n] for x in astuple(c))) for n, c in credit.nodes.items() if n in through}
    flat = [sum(len(node.token_ids) for node in path) for path in paths]
    share = 1.0 / max(len(paths), 1)
    return [_segment(tree, path, split, index, tokens, share) for path, tokens in zip(paths, flat, strict=True)]


@dataclass
class _Trie:
    """Tokens keyed by (parent, token); -1 is the empty prefix above all roots. Children keep order of arrival."""

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])
    children: dict[int, dict[int, int]] = field(default_factory=lambda: {-1: {}})

    def extend(self, at: int, token_ids: Iterable[int]) -> list[int]:
        """Walk down from `at`, adding what is new; the entry of every token."""
        entries: list[int] = []
        for token in token_ids:
            below = self.children[at]
            if token not in below:
                below[token] = len(self.tokens)
                self.children[len(self.tokens)] = {}
                self.tokens.append(token)
                self.parents.append(at)
            at = below[token]
            entries.append(at)
        return entries

    def add(self, segment: Segment) -> list[int]:
        """All slots of a segment; the entry of each."""
        entries: list[int] = []
        for start, end in chains(segment.last):
            before = segment.predecessors[start]
            entries += self.extend(-1 if before < 0 else entries[before], segment.tokens[start:end])
        return entries

    def shared(self, segment: Segment) -> int:
        """The slots of a segment that are there."""
        entries: list[int | None] = []
        for token, before in zip(segment.tokens, segment.predecessors, strict=True):
            at = -1 if before < 0 else entries[before]
            entries.append(None if at is None else self.children[at].get(token))
        return len(entries) - entries.count(None)

    def depth_first(self) -> list[int]:
        """The entries in depth-first order, first arrivals first."""
        order: list[int] = []
        stack = list(reversed(self.children[-1].values()))
        while stack:
            entry = stack.pop()
            order.append(entry)
            stack.extend(reversed(self.children[entry].values()))
        return order


def _segment(
    tree: RolloutTree, nodes: Sequence[Node], credits: Mapping[int, NodeCredit], index: int, flat: int, share: float
) -> Segment:
    """Merge `nodes` (parents before children) into a trie, and number its entries depth-first."""
    trie, entries, ends, routes = _Trie(), dict[int, list[int]](), dict[int, int](), dict[int, str]()
    for node in nodes:
        at = -1 if node.parent is None else ends[node.parent]
        entries[node.id] = trie.extend(at, node.token_ids)
        ends[node.id] = entries[node.id][-1] if node.token_ids else at
        for entry, route in zip(entries[node.id], tree.routes(node.id), strict=False):
            routes.setdefault(entry, route)
    actions = [
        Action(index, node.id, tuple(entries[node.id]), node.logprobs or (), credits[node.id])
        for node in nodes
        if node.id in credits and node.token_ids
    ]
    if any(trie.parents[action.slots[0]] < 0 for action in actions):
        raise begins_sampled(tree)
    return _numbered(trie, actions, routes, ((index, share),), flat)


def merged(segments: Sequence[Segment], most: int, *, dense: bool = False) -> list[Segment]:
    """Segments that begin alike, in one of at most `most` slots. One that shares less than `ALIKE` of its slots stays
    apart: what little it shares would not pay for its place in a longer row. Under a `dense` mask, which costs the
    square of a row, they are merged only while they have no more query-key pairs together than apart. Those with routes
    stay apart: two policy versions may have sent one prefix to different experts."""
    found: list[Segment] = []
    together: list[tuple[Segment, list[int]]] = []  # with the entry of every slot
    trie = _Trie()
    for segment in sorted(segments, key=lambda segment: segment.tokens):  # who begin alike are neighbours
        shared = trie.shared(segment)
        after = len(trie.tokens) + len(segment) - shared
        apart = [segment, *(each for each, _ in together)]
        fits = after <= most and (not dense or after**2 <= sum(len(each) ** 2 for each in apart))
        if together and (shared < ALIKE * len(segment) or not fits or any(each.routes for each in apart)):
            found.append(_joined(trie, together))
            together, trie = [], _Trie()
        together.append((segment, trie.add(segment)))
    return [*found, _joined(trie, together)] if together else found


def _joined(trie: _Trie, together: Sequence[tuple[Segment, list[int]]]) -> Segment:
    if len(together) == 1:
        return together[0][0]
    actions = [
        replace(action, slots=tuple(entries[slot] for slot in action.slots))
        for segment, entries in together
        for action in segment.actions
    ]
    shares = tuple(share for segment, _ in together for share in segment.shares)
    return _numbered(trie, actions, {}, shares, sum(segment.flat_tokens for segment, _ in together))


def _numbered(
    trie: _Trie,
    actions: Sequence[Action],
    routes: Mapping[int, str],
    shares: tuple[tuple[int, float], ...],
    flat_tokens: int,
) -> Segment:
    """The segment of a trie, whose entries the slots of `actions` are."""
    order = trie.depth_first()
    slot = {entry: position for position, entry in enumerate(order)} | {-1: -1}
    predecessors = tuple(slot[trie.parents[entry]] for entry in order)
    depths, last = _shape(predecessors)
    return Segment(
        shares,
        tuple(trie.tokens[entry] for entry in order),
        depths,
        predecessors,
        last,
        tuple(replace(action, slots=tuple(slot[entry] for entry in action.slots)) for action in actions),
        flat_tokens,
        routes=tuple(routes.get(entry) for entry in order) if routes else (),
    )


def begins_sampled(tree: RolloutTree) -> InputError:
    return InputError(
        f"the tree of {tree.task_id!r} begins with a sampled token, which nothing predicts",
        hint="give its root a prompt of at least one token",
    )


def _shape(predecessors: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Depth and subtree end of every slot, from the predecessors of a depth-first order."""
    depths = [0] * len(predecessors)
    last = list(range(1, len(predecessors) + 1))
    for slot, before in enumerate(predecessors):
        depths[slot] = 0 if before < 0 else depths[before] + 1
    for slot in range(len(predecessors) - 1, -1, -1):
        if predecessors[slot] >= 0:
            last[predecessors[slot]] = max(last[predecessors[slot]], last[slot])
    return tuple(depths), tuple(last)


def trained_paths(tree: RolloutTree, credit: Credit) -> list[tuple[Node, ...]]:
    """The path down to every trained node that has no trained node below it: one per rollout, cut after its last
    trained token."""
    trained = {n for n in credit.nodes if tree[n].token_ids}
    for n in trained:
        if not tree[n].sampled:
            raise ValueError(f"node {n} of {tree.task_id!r} was not sampled and cannot be trained")
    inner = {node.id for n in trained for node in tree.path(n)[:-1]}
    return [tree.path(n) for n in sorted(trained - inner)]


def cut(segment: Segment, max_tokens: int) -> list[Segment] | None:
    """The parts of `segment`, at most `max_tokens` slots each; None where one path alone is longer.

    `shares` and `flat_tokens` are divided so that sums over the parts are exact.
    """
    if len(segment) <= max_tokens:
        return [segment]
    starts = _starts(segment, max_tokens)
    if starts is None:
        return None
    ends = [*starts[1:], len(segment)]
    count = len(starts)
    flat = [segment.flat_tokens * part // count for part in range(count + 1)]
    shares = tuple((tree, share / count) for tree, share in segment.shares)
    return [
        replace(_part(segment, start, end), flat_tokens=flat[i + 1] - flat[i], shares=shares)
        for i, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]


def chains(last: Sequence[int]) -> list[tuple[int, int]]:
    """The chains [start, end) of a row with these ends of subtrees, in order: slots without a fork between them."""
    starts = [slot for slot in range(len(last)) if slot == 0 or last[slot] != last[slot - 1]]
    return list(pairwise([*starts, len(last)]))


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
    predecessors = tuple(new[segment.predecessors[slot]] for slot in kept)
    depths, last = _shape(predecessors)
    return replace(
        segment,
        tokens=tuple(segment.tokens[slot] for slot in kept),
        depths=depths,
        routes=tuple(segment.routes[slot] for slot in kept) if segment.routes else (),
        predecessors=predecessors,
        last=last,
        actions=tuple(
            replace(action, slots=tuple(new[slot] for slot in action.slots))
            for action in segment.actions
            if start <= action.slots[-1] < end
        ),
        recomputed=len(above),
    )
