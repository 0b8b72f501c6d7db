"""Sequences whose keys and values are kept after their wave and found again by their tokens.

A sequence is registered under a chained hash of every prefix whose length is a multiple of `STRIDE`, so that the
longest kept prefix of a prompt is found with one dictionary look-up per stride. It may come from the previous turn of
a conversation, a fork from the middle of another rollout, a new task under the same system message. Among sequences
that agree up to the same stride (siblings) the best is chosen token by token, which also confirms the hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from turntree.engine.cache import RowCache
from turntree.engine.requests import hashes_of_prefixes

STRIDE = 16
_BYTES, _SLOTS = 1 << 32, 1 << 19
_CANDIDATES = 64  # sequences compared when many agree up to the same stride; the newest


@dataclass(eq=False)
class RowBlock:
    """Kept rows that share tensors. `busy` rows are being written: the block stays as it is until they are done."""

    cache: RowCache
    entries: list[Entry] = field(default_factory=list)
    busy: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Entry:
    """One kept sequence: the keys and values of `ids` lie in the first slots of `row`."""

    ids: tuple[int, ...]
    row: int
    block: RowBlock = field(repr=False)
    hashes: tuple[int, ...] = field(repr=False)


@dataclass(frozen=True)
class Match:
    """`length` tokens of a prompt lie in `row` of `cache`, whatever happens to the entry meanwhile."""

    entry: Entry
    cache: RowCache
    row: int
    length: int

    @property
    def whole(self) -> bool:
        """Everything that the entry holds is a prefix of the prompt."""
        return self.length == len(self.entry.ids)


class PrefixCache:
    """Bounded memory of kept sequences; the least recently extended blocks are dropped first.

    The bound counts the slots in use, rows x longest row of every block: padding is a part of it. It is `max_tokens`,
    and `_BYTES` of keys and values.
    """

    def __init__(self, max_tokens: int = _SLOTS) -> None:
        self.max_tokens = max_tokens
        self._blocks: list[RowBlock] = []  # oldest first
        self._index: dict[int, dict[Entry, None]] = {}  # by hash, oldest first
        self._whole: dict[tuple[int, ...], Entry] = {}

    def __len__(self) -> int:
        return sum(len(block.entries) for block in self._blocks)

    @property
    def held_tokens(self) -> int:
        return sum(block.cache.rows * block.cache.shown for block in self._blocks)

    @property
    def _bound(self) -> int:
        """Of the blocks, of which there are some."""
        return min(self.max_tokens, _BYTES // self._blocks[0].cache.slot_bytes)

    def find(self, ids: tuple[int, ...]) -> Match | None:
        """The longest kept prefix of `ids`, to the stride and then to the token; at least the last token is left
        over, because the logits after it have to be computed."""
        if not self._index:
            return None
        hashes = hashes_of_prefixes(ids[:-1], STRIDE)
        for stride, hashed in zip(range(len(hashes), 0, -1), reversed(hashes), strict=True):
            agreeing = list(itertools.islice(reversed(self._index.get(hashed, {})), _CANDIDATES))
            if agreeing:
                entry = max(agreeing, key=lambda entry: _common_prefix(ids, entry, stride * STRIDE))
                length = _common_prefix(ids, entry, 0)
                return Match(entry, entry.block.cache, entry.row, length) if length else None
        return None

    def add(self, block: RowBlock, rows: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        """Keep more sequences, given with their rows of a block, which becomes the newest. Of equal ones the newest is
        kept."""
        for row, ids in rows:
            if (equal := self._whole.get(ids)) is not None:
                self.drop(equal)
            entry = Entry(ids, row, block, tuple(hashes_of_prefixes(ids, STRIDE)))
            block.entries.append(entry)
            self._whole[ids] = entry
            for hashed in entry.hashes:
                self._index.setdefault(hashed, {})[entry] = None
        self._blocks = [other for other in self._blocks if other is not block] + [block]

    def drop(self, entry: Entry) -> None:
        """Forget one sequence, for example because another one now contains it."""
        if entry in entry.block.entries:
            entry.block.entries.remove(entry)
            self._unlist(entry)

    def compact(self) -> None:
        """Free blocks without entries, copy the living rows out of blocks that are mostly dead, respect the bound.
        Blocks with busy rows are left alone."""
        self._blocks = [block for block in self._blocks if block.entries]
        for block in self._blocks:
            if not block.busy and 2 * len({entry.row for entry in block.entries}) <= block.cache.rows:
                _copy_down(block)
        while self._blocks and self.held_tokens > self._bound:
            oldest = next((block for block in self._blocks if not block.busy), None)
            if oldest is None:
                return
            self._evict(oldest)

    def _evict(self, oldest: RowBlock) -> None:
        """Drop the oldest block. Of the only block, keep the rows that fit, so that a bound that is slightly too small
        costs little."""
        fitting = self._bound // max(len(entry.ids) for entry in oldest.entries) if len(self._blocks) == 1 else 0
        while len(oldest.entries) > fitting:
            self._unlist(oldest.entries.pop(0))
        if oldest.entries:
            _copy_down(oldest)
        else:
            self._blocks.remove(oldest)

    def clear(self) -> None:
        self._blocks.clear()
        self._index.clear()
        self._whole.clear()

    def _unlist(self, entry: Entry) -> None:
        del self._whole[entry.ids]
        for hashed in entry.hashes:
            self._index[hashed].pop(entry)
            if not self._index[hashed]:
                del self._index[hashed]


def _copy_down(block: RowBlock) -> None:
    """Move the living rows of a block to a cache of their own."""
    used = sorted({entry.row for entry in block.entries})
    longest = max(len(entry.ids) for entry in block.entries)
    block.cache = block.cache.select(used, longest)
    for entry in block.entries:
        entry.row = used.index(entry.row)


def _common_prefix(ids: tuple[int, ...], entry: Entry, agreed: int) -> int:
    """How many tokens of a prompt but the last lie at the start of an entry, given that `agreed` do. By halving."""
    low, high = agreed, min(len(entry.ids), len(ids) - 1)  # the first `low` agree; at most `high` can
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if ids[low:middle] == entry.ids[low:middle] else (low, middle - 1)
    return low
