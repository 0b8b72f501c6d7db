"""Sequences whose keys and values outlive their wave, found again by their tokens.

A sequence is registered under a chained hash of every prefix whose length is a multiple of `STRIDE`, so that the
longest kept prefix of a prompt is found with one dictionary look-up per stride, whoever sampled it: the next turn of
a conversation, a fork from the middle of another rollout, a new task under the same system message. A hit is always
confirmed token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from turntree.engines.cache import RowCache

STRIDE = 16


@dataclass(eq=False)
class KeptBlock:
    """Kept rows that share tensors."""

    cache: RowCache
    entries: list[Entry]


@dataclass(eq=False)
class Entry:
    """One kept sequence: the first `length` of `ids` lie in the first slots of `row`."""

    ids: tuple[int, ...]
    length: int
    row: int
    block: KeptBlock
    hashes: tuple[int, ...]


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
        return self.length == self.entry.length


@dataclass(frozen=True)
class Retained:
    """The first `length` of `ids` were computed in `row`."""

    row: int
    ids: tuple[int, ...]
    length: int


class KeptSequences:
    """Bounded memory of kept sequences; the least recently extended are dropped first, whole blocks at a time.

    The bound counts allocated slots (rows x slots of every block), of which padding is a part.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self._blocks: list[KeptBlock] = []  # oldest first
        self._index: dict[int, Entry] = {}

    def __len__(self) -> int:
        return sum(len(block.entries) for block in self._blocks)

    @property
    def held_tokens(self) -> int:
        return sum(block.cache.rows * block.cache.slots for block in self._blocks)

    def find(self, ids: tuple[int, ...]) -> Match | None:
        """The longest kept prefix of `ids`, to the stride and then to the token; at least the last token is left
        over, because the logits after it have to be computed."""
        if not self._index:
            return None
        for hashed in reversed(_chain(ids[:-1])):
            entry = self._index.get(hashed)
            if entry is not None:
                length = _common_prefix(ids, entry.ids, min(entry.length, len(ids) - 1))
                return Match(entry, entry.block.cache, entry.row, length) if length else None
        return None

    def add(self, cache: RowCache, rows: Sequence[Retained]) -> None:
        """Keep rows of a cache that is handed over: the caller writes to it no more."""
        self.extend(KeptBlock(cache, []), rows)

    def extend(self, block: KeptBlock, rows: Sequence[Retained]) -> None:
        """Keep more sequences in the rows of a block, which becomes the newest."""
        for kept in rows:
            entry = Entry(kept.ids, kept.length, kept.row, block, _chain(kept.ids[: kept.length]))
            block.entries.append(entry)
            self._index.update(dict.fromkeys(entry.hashes, entry))
        self._blocks = [other for other in self._blocks if other is not block] + [block]

    def drop(self, entry: Entry) -> None:
        """Forget one sequence, for example because another one now contains it."""
        if entry in entry.block.entries:
            entry.block.entries.remove(entry)
            self._unlist(entry)

    def settle(self) -> None:
        """Free blocks without entries, copy the living rows out of blocks that are mostly dead, respect the bound."""
        self._blocks = [block for block in self._blocks if block.entries]
        for block in self._blocks:
            _compact(block)
        while self.held_tokens > self.max_tokens:
            for entry in self._blocks.pop(0).entries:
                self._unlist(entry)

    def clear(self) -> None:
        self._blocks.clear()
        self._index.clear()

    def _unlist(self, entry: Entry) -> None:
        for hashed in entry.hashes:
            if self._index.get(hashed) is entry:
                del self._index[hashed]


def _compact(block: KeptBlock) -> None:
    used = sorted({entry.row for entry in block.entries})
    if 2 * len(used) > block.cache.rows:
        return
    longest = max(entry.length for entry in block.entries)
    block.cache = block.cache.select(torch.tensor(used, device=block.cache.device), longest)
    for entry in block.entries:
        entry.row = used.index(entry.row)


def _chain(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The chained hashes of the prefixes of length STRIDE, 2 STRIDE, ... (ints hash alike in every process)."""
    hashes: list[int] = []
    for end in range(STRIDE, len(ids) + 1, STRIDE):
        hashes.append(hash((hashes[-1] if hashes else end, ids[end - STRIDE : end])))
    return tuple(hashes)


def _common_prefix(one: tuple[int, ...], other: tuple[int, ...], limit: int) -> int:
    """How many of the first `limit` tokens agree, by halving."""
    if one[:limit] == other[:limit]:
        return limit
    low, high = 0, limit - 1  # the first `low` agree, the first `high + 1` do not
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
