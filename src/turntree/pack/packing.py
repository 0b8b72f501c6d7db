"""Packing: credited trees to tensors, every unique token computed once.

A batch separates *slots* (unique token positions, with one policy and one reference log-probability) from *terms*
(one per trained token per sampling event, with the log-probability it was sampled at). Merging shares slots, never
terms (docs/design/architecture.md, "Slots and terms").

Shape suffixes
    B  rows of a batch                       L  slots of the longest row
    S  trained slots (unique)                T  terms
    A  actions (sampling events)             V  vocabulary
    R  bytes of a slot's routes
"""

from __future__ import annotations

import dataclasses
import heapq
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from turntree.core.cost import Additive
from turntree.core.errors import InputError
from turntree.core.labels import Credit, NodeCredit
from turntree.core.tree import RolloutTree
from turntree.pack.slots import Action, Segment, cut, longest_path, merged, path_segments, tree_segment

Row = list[Segment]


@dataclass(frozen=True, kw_only=True)
class PackingStats(Additive):
    """Additive counts of a batch. Flat batches carry fractions of trees; sums over all batches are exact."""

    trees: float = 0.0
    zero_variance_trees: float = 0.0
    untrained_trees: int = 0  # no scored leaf: nothing of them is in the batch
    rollouts: float = 0.0  # sum of leaf weights
    rollout_tokens: float = 0.0  # sum of leaf weight times trained tokens
    unique_tokens: int = 0  # slots that are computed, without padding
    flat_tokens: int = 0  # tokens computed with one row per rollout
    padding: int = 0
    recomputed_tokens: int = 0  # of the unique ones: ancestors that a cut tree computes again
    cut_trees: int = 0
    replayed_tokens: int = 0  # of the unique ones: routed as the sampler routed them

    @property
    def rho(self) -> float:
        """Flat tokens over unique tokens: the most that sharing prefixes can save."""
        return self.flat_tokens / self.unique_tokens if self.unique_tokens else 1.0


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """What one forward and backward pass needs. Slot q of a row sees slot k iff `k <= q < last[k]`."""

    tokens_BL: Tensor
    positions_BL: Tensor  # depth along the path
    last_BL: Tensor  # end of the subtree of each slot; padding attends to itself
    predecessor_S: Tensor  # flat index (row * L + slot) of the hidden state that predicts the slot
    target_S: Tensor  # token id at the slot
    slot_T: Tensor  # index into S
    action_T: Tensor  # index into A
    sampling_logprobs_T: Tensor  # by the engine
    old_logprobs_T: Tensor | None  # of pi_old: the sampling ones until recomputed; None: those of the pass that trains
    positive_A: Tensor
    negative_A: Tensor
    multiplicity_A: Tensor
    zero_variance_A: Tensor  # bool
    tree_A: Tensor  # index into the trees that were packed
    node_A: Tensor  # of that tree
    is_flat: bool  # no row branches: plain causal attention is exact
    longest: int  # tokens of the longest path
    stats: PackingStats
    reference_logprobs_S: Tensor | None = None
    routes_BLR: Tensor | None = None  # bytes (`core.completion.Completion`), all ones where none are known

    def to(self, device: torch.device | str) -> PackedBatch:
        moved = {
            f.name: value.to(device)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), Tensor)
        }
        return dataclasses.replace(self, **moved)

    def attention_mask(self) -> Tensor:
        """Boolean, [B, 1, L, L]; True where the query (third axis) sees the key (fourth)."""
        slots_L = torch.arange(self.last_BL.shape[1], device=self.last_BL.device)
        query_L1, key_1L = slots_L[:, None], slots_L[None, :]
        return (key_1L <= query_L1) & (query_L1 < self.last_BL[:, None, None, :])


def pack(
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    *,
    max_tokens: int,
    shared: bool = True,
    dense: bool = False,
) -> list[PackedBatch]:
    """Batches of at most `max_tokens` slots (padding included) that hold every trained tree exactly once.

    Trees that begin alike are merged (`pack.slots.merged`; `dense`: the model has a mask of all pairs of a row): what
    they share is computed once. Rows are filled first-fit in order of falling size: a tree has a row of its own unless
    it fits behind another in the length of the batch's longest. A tree above the budget is cut (`pack.slots.cut`): its
    ancestors are computed in every part, its terms counted in one. Raises `InputError` where one path alone is above
    the budget.

    Without `shared` the same objective has one row per rollout and plain causal attention, for models that cannot
    compute a tree, and as the baseline of every speed-up.
    """
    return pack_ranks(trees, credits, 1, max_tokens=max_tokens, shared=shared, dense=dense)[0]


def pack_ranks(
    trees: Sequence[RolloutTree],
    credits: Sequence[Credit],
    ranks: int,
    *,
    max_tokens: int,
    shared: bool = True,
    dense: bool = False,
) -> list[list[PackedBatch]]:
    """The batches of each rank, as `pack` makes them: a tree (a rollout without `shared`) is on one rank, and ranks are
    alike in their unique tokens (`partition`). All have as many batches, because ranks make their passes
    together: blank ones fill up, which add zero to every sum. No batches where nothing is trained."""
    segments = _segments(trees, credits, shared)
    found = [segment for of_tree in segments for segment in of_tree]
    cut_trees = sum(len(segment) > max_tokens for segment in found)
    if shared:  # no longer than a rank's share of the work
        found = merged(found, min(max_tokens, -(-sum(map(len, found)) // ranks)), dense=dense)
    dealt: list[list[PackedBatch]] = []
    for part in partition([len(segment) for segment in found], ranks):
        pieces = [piece for number in part for piece in _cut(trees, found[number], max_tokens)]
        dealt.append([_tensors(rows, credits) for rows in _place(pieces, max_tokens, share_rows=shared)])
    passes = max(map(len, dealt))
    dealt = [batches + [_blank()] * (passes - len(batches)) for batches in dealt]
    if passes:  # counts that belong to no segment
        counts = dealt[0][0].stats + PackingStats(untrained_trees=segments.count([]), cut_trees=cut_trees)
        dealt[0][0] = dataclasses.replace(dealt[0][0], stats=counts)
    return dealt


def partition(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """The numbers of the items of each rank: each item on one rank, ranks alike in their sum of sizes.

    Longest first, each to the rank with the least so far (Graham 1969): the largest sum is at most 4/3 of the best
    possible one. Ties go to the lower number, so the same sizes give the same parts. Ranks may stay without an item.
    """
    loads = [(0, rank) for rank in range(ranks)]
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        load, rank = heapq.heappop(loads)
        parts[rank].append(item)
        heapq.heappush(loads, (load + sizes[item], rank))
    return [sorted(part) for part in parts]


flat_batches = partial(pack, shared=False)


def _segments(trees: Sequence[RolloutTree], credits: Sequence[Credit], shared: bool) -> list[list[Segment]]:
    """Of each tree itself or its paths; of one in which nothing is trained none."""
    found: list[list[Segment]] = []
    for number, (tree, credit) in enumerate(zip(trees, credits, strict=True)):
        if shared:
            whole = tree_segment(tree, credit, number)
            found.append([] if whole is None else [whole])
        else:
            found.append(path_segments(tree, credit, number))
    return found


def _cut(trees: Sequence[RolloutTree], segment: Segment, max_tokens: int) -> list[Segment]:
    parts = cut(segment, max_tokens)
    if parts is None:
        longest = longest_path(segment)
        raise InputError(
            f"a path of {trees[segment.shares[0][0]].task_id!r} has {longest} tokens, above {max_tokens}",
            field="max_tokens",
            hint=f"raise max_tokens to at least {longest} (--set train.max_tokens={longest}), or leave it out",
        )
    return parts


def _place(segments: Sequence[Segment], max_tokens: int, *, share_rows: bool) -> list[list[Row]]:
    """First-fit decreasing: the longest segment left opens a batch and sets its row length."""
    left = sorted(segments, key=lambda segment: (-len(segment), segment.shares[0]))
    batches: list[list[Row]] = []
    while left:
        length = len(left[0])
        rows: list[Row] = []
        free: list[int] = []
        waiting: list[Segment] = []
        for segment in left:
            fit = next((r for r, space in enumerate(free) if share_rows and len(segment) <= space), None)
            if fit is not None:
                rows[fit].append(segment)
                free[fit] -= len(segment)
            elif (len(rows) + 1) * length <= max_tokens:
                rows.append([segment])
                free.append(length - len(segment))
            else:
                waiting.append(segment)
        batches.append(rows)
        left = waiting
    return batches


def _tensors(rows: Sequence[Row], credits: Sequence[Credit]) -> PackedBatch:
    length = max(sum(len(segment) for segment in row) for row in rows)
    # without a branch, plain causal attention and positions 0, 1, 2, ... are exact
    is_flat = all(len(row) == 1 and all(end == len(row[0]) for end in row[0].last) for row in rows)
    grid = [_row(row, length, counting=is_flat) for row in rows]
    placed = [(b * length + start, segment) for b, row in enumerate(rows) for start, segment in _starts(row)]
    events = [(offset, segment, action) for offset, segment in placed for action in segment.actions]
    slots_T = [offset + slot for offset, _, action in events for slot in action.slots]
    trained_S = sorted(set(slots_T))
    index = {slot: i for i, slot in enumerate(trained_S)}
    before = {offset + k: offset + p for offset, s in placed for k, p in enumerate(s.predecessors)}
    tokens_BL = torch.tensor([tokens for tokens, _, _ in grid])
    actions: list[Action] = [action for _, _, action in events]
    logprobs_T = torch.tensor([lp for a in actions for lp in a.sampling_logprobs], dtype=torch.float64)
    return PackedBatch(
        tokens_BL=tokens_BL,
        positions_BL=torch.tensor([positions for _, positions, _ in grid]),
        last_BL=torch.tensor([last for _, _, last in grid]),
        predecessor_S=torch.tensor([before[slot] for slot in trained_S]),
        target_S=tokens_BL.flatten()[torch.tensor(trained_S)],
        slot_T=torch.tensor([index[slot] for slot in slots_T]),
        action_T=torch.tensor([i for i, action in enumerate(actions) for _ in action.slots]),
        sampling_logprobs_T=logprobs_T,
        old_logprobs_T=logprobs_T,
        positive_A=torch.tensor([a.credit.positive for a in actions], dtype=torch.float64),
        negative_A=torch.tensor([a.credit.negative for a in actions], dtype=torch.float64),
        multiplicity_A=torch.tensor([a.credit.multiplicity for a in actions], dtype=torch.float64),
        zero_variance_A=torch.tensor([credits[action.tree].zero_variance for action in actions]),
        tree_A=torch.tensor([action.tree for action in actions]),
        node_A=torch.tensor([action.node for action in actions]),
        is_flat=is_flat,
        longest=max(longest_path(segment) for row in rows for segment in row),
        stats=_stats(rows, credits, padding=len(rows) * length - sum(len(s) for row in rows for s in row)),
        routes_BLR=_routes(rows, length),
    )


def _routes(rows: Sequence[Row], length: int) -> Tensor | None:
    known = next((route for row in rows for segment in row for route in segment.routes if route), None)
    if known is None:
        return None
    size = len(b64decode(known))
    unknown = b64encode(b"\xff" * size).decode()
    told = [[route or unknown for s in row for route in s.routes or [None] * len(s)] for row in rows]
    joined = b"".join(b64decode(each) for row in told for each in [*row, *[unknown] * (length - len(row))])
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(rows), length, size)


def _blank() -> PackedBatch:
    """A batch of two slots, the second trained with weight zero: a pass over it adds zero to loss and gradient."""
    trained = Action(0, 0, (1,), (0.0,), NodeCredit(0.0, 0.0, 0.0))
    segment = Segment((), (0, 0), (0, 1), (-1, 0), (2, 2), (trained,), flat_tokens=0)
    batch = _tensors([[segment]], [Credit({}, rollout_tokens=0.0, rollouts=0.0, zero_variance=False)])
    return dataclasses.replace(batch, tree_A=batch.tree_A - 1, stats=PackingStats())  # of no tree


def _starts(row: Row) -> list[tuple[int, Segment]]:
    """The segments of a row with the slot at which each begins."""
    return list(zip(accumulate(map(len, row), initial=0), row, strict=False))


def _row(row: Row, length: int, *, counting: bool) -> tuple[list[int], list[int], list[int]]:
    """Tokens, positions and subtree ends of one row. Positions count on through the padding of a flat row, because
    without a mask Transformers reads positions that restart as packed documents."""
    tokens = [token for segment in row for token in segment.tokens]
    positions = [depth for segment in row for depth in segment.depths]
    last = [start + end for start, segment in _starts(row) for end in segment.last]
    padding = range(len(tokens), length)
    positions += [slot if counting else 0 for slot in padding]
    return tokens + [0] * len(padding), positions, last + [slot + 1 for slot in padding]


def _stats(rows: Sequence[Row], credits: Sequence[Credit], padding: int) -> PackingStats:
    total = PackingStats(padding=padding)
    for segment in (s for row in rows for s in row):
        for tree, share in segment.shares:
            credit = credits[tree]
            total += PackingStats(
                trees=share,
                zero_variance_trees=share * credit.zero_variance,
                rollouts=share * credit.rollouts,
                rollout_tokens=share * credit.rollout_tokens,
            )
        total += PackingStats(
            unique_tokens=len(segment),
            flat_tokens=segment.flat_tokens,
            recomputed_tokens=segment.recomputed,
            replayed_tokens=sum(route is not None for route in segment.routes),
        )
    return total
