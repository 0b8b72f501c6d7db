"""Where the sequences of requests with `retain` are kept when they are done.

A request that alone continues its prompt's row stays there: its tokens are appended to the row, and the next turn
continues in place. Siblings share that row, so each gets a separate row, in a block reserved for requests that were
admitted together (most of them also continue together).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from turntree.core.completion import GenerationRequest
from turntree.engines.cache import RowCache
from turntree.engines.decoding import Cell, Decoder, Home
from turntree.engines.kept import KeptBlock, KeptSequences, Retained

_ROOM = 64  # slots for own tokens set aside in a nursery


def homes_of(requests: Sequence[GenerationRequest], rows: Sequence[Home | None]) -> list[Home | None]:
    """A home for every request that retains. `rows[n]` is the row whose whole prompt request n continues (None where
    it continues a part of it, or where the row is not its own): n stays there if no other request would."""
    claims = Counter(row for row, request in zip(rows, requests, strict=True) if request.retain)
    homes = [row if request.retain and claims[row] == 1 else None for row, request in zip(rows, requests, strict=True)]
    moving = [n for n, request in enumerate(requests) if request.retain and homes[n] is None]
    slots = _ROOM + max((len(requests[n].prompt_ids) for n in moving), default=0)
    nursery = KeptBlock(RowCache(len(moving), slots), busy=set(range(len(moving))))
    for row, n in enumerate(moving):
        homes[n] = Home(nursery, row)
    return homes


def bring_home(decoder: Decoder, kept: KeptSequences, cells: Sequence[Cell], tokens: Sequence[Sequence[int]]) -> None:
    """Keep the sequences of cells that are done and have drawn `tokens`. The last token was drawn but not fed: its
    keys and values are not part of what is kept."""
    by_block: dict[KeptBlock, list[tuple[Cell, Sequence[int]]]] = {}
    for cell, drawn in zip(cells, tokens, strict=True):
        assert cell.home is not None
        by_block.setdefault(cell.home.block, []).append((cell, drawn))
    for block, members in by_block.items():
        _load_prefixes(block, [cell for cell, _ in members])
        _append_tails(decoder, block, [cell for cell, _ in members])
        sequences = [(cell, cell.request.prompt_ids + tuple(drawn)) for cell, drawn in members]
        kept.add(block, [Retained(cell.home.row, ids, len(ids) - 1) for cell, ids in sequences if cell.home])


def release_row(cell: Cell) -> None:
    """Mark that the cell no longer writes to its home. A row of its own prefix stays busy while others continue it."""
    if cell.home is not None and cell.home.block.cache is not cell.prefix.cache:
        cell.home.block.busy.discard(cell.home.row)


def _load_prefixes(block: KeptBlock, cells: Sequence[Cell]) -> None:
    """Copy the prefixes of siblings to their homes."""
    by_source: dict[RowCache, list[Cell]] = {}
    for cell in cells:
        if cell.prefix.cache is not block.cache:
            by_source.setdefault(cell.prefix.cache, []).append(cell)
    for source, members in by_source.items():
        rows = [cell.prefix.row for cell in members]
        block.cache.load(_homes(members), source, rows, max(cell.length for cell in members))


def _append_tails(decoder: Decoder, block: KeptBlock, cells: Sequence[Cell]) -> None:
    fed = [decoder.count(cell) - 1 for cell in cells]
    if not any(fed):
        return
    cache = block.cache
    cache.reserve(max(cell.length + count for cell, count in zip(cells, fed, strict=True)))
    slot_Q = torch.arange(max(fed))
    length_B, fed_B = torch.tensor([cell.length for cell in cells]), torch.tensor(fed)
    slots_BQ = (length_B[:, None] + slot_Q).masked_fill_(slot_Q >= fed_B[:, None], cache.trash)
    homes_B = torch.tensor(_homes(cells), device=cache.device)
    cache.write(homes_B, slots_BQ.to(cache.device), *decoder.tails(cells))


def _homes(cells: Sequence[Cell]) -> list[int]:
    return [cell.home.row for cell in cells if cell.home]
