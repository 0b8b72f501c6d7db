"""Sampling from a stock Transformers decoder with shared prefixes and continuous batching.

No position whose keys and values are held is computed again: equal prompts are prefilled once, a prompt that is a
prefix of another needs no prefill of its own, a late sibling joins those in decoding, and kept sequences of earlier
requests (`retain`) are extended at their end. All requests in decoding share one forward per step. Models that cannot
be run so have `engine.plain`.

A request with `retain` that alone continues its prompt's row stays there when it is done: its tokens are appended to
the row, and the next turn continues in place. Siblings share that row, so each gets a row of its own, in a block
reserved for requests that were admitted together (most of them also continue together).

Shape suffixes: P distinct prompts, N requests, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.engine.cache import RowCache
from turntree.engine.compatibility import check_attention, context_of
from turntree.engine.decoding import Cell, Decoder, Drawn, Home, Prefix
from turntree.engine.limits import EngineConfig
from turntree.engine.local import LocalEngine
from turntree.engine.prefill import Pool, Row, pools_of, prefill, rows_of
from turntree.engine.prefix_cache import PrefixCache, RowBlock
from turntree.engine.requests import cost_of

_ROOM = 64  # slots set aside behind a prompt for what may follow it in place

Ticketed = tuple[int, GenerationRequest]


class HFEngine(LocalEngine):
    """Requests are admitted as soon as there is room for all that wait or for an eighth of `max_batch_rows` (every
    admission interrupts those in decoding for a prefill).

    Raises `InputError` for a model whose keys and values cannot be shared by position (see `compatibility`).
    """

    def __init__(self, model: PreTrainedModel, stop_ids: Collection[int], config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        super().__init__(model, stop_ids, config, positions=context_of(model))
        check_attention(model, self.max_context)
        self._kept = PrefixCache()
        self._decoder = Decoder(model, stop_ids, config.max_batch_rows)
        self._waiting: Counter[tuple[int, ...]] = Counter()  # prompts in the queue
        self._cells: dict[int, Cell] = {}  # by ticket
        self._prefixes: dict[tuple[int, ...], Prefix] = {}  # by prompt
        self._clock = 0.0  # seconds of decoding that one request was charged, had it been there all the time
        self._check("with shared prefixes")
        self._kept.clear()

    # a step

    @property
    def _decoding(self) -> int:
        return len(self._cells)

    @property
    def _holds(self) -> bool:
        return bool(len(self._kept) or self._cells)

    def _forget(self) -> None:
        self._kept.clear()

    def _step(self) -> None:
        self._admit()
        if self._cells:
            started, count = time.perf_counter(), len(self._cells)
            done = self._decoder.step()
            self._clock += (time.perf_counter() - started) / count
            self._finish(done)

    def _enqueue(self, request: GenerationRequest) -> int:
        self._waiting[request.prompt_ids] += 1
        return super()._enqueue(request)

    def _one_fewer(self, prompt: tuple[int, ...]) -> None:
        self._waiting[prompt] -= 1
        if not self._waiting[prompt]:
            del self._waiting[prompt]

    def _dequeued(self, request: GenerationRequest) -> None:
        self._one_fewer(request.prompt_ids)
        if (prefix := self._prefixes.get(request.prompt_ids)) is not None:
            self._release(prefix)

    def _stop(self, ticket: int) -> Cost:
        if (cell := self._cells.get(ticket)) is None:
            return NO_COST
        cost = self._cost(cell)
        self._leave([cell])
        return cost

    # admission

    def _admit(self) -> None:
        rows = self.config.max_batch_rows
        room = rows - len(self._cells)
        if room < min(len(self._queue), max(1, rows // 8)) or not self._queue:
            return
        joining: list[Ticketed] = []
        starting: list[Ticketed] = []
        for ticket, request in list(self._queue.items())[:room]:
            (joining if request.prompt_ids in self._prefixes else starting).append((ticket, request))
            del self._queue[ticket]
            self._one_fewer(request.prompt_ids)
        if joining:
            self._join(joining)
        pools = pools_of(rows_of([request for _, request in starting], self._kept.find))
        for pool in pools:  # what ends while an earlier pool begins must not move their rows
            if pool.block is not None:
                pool.block.busy.update(pool.places)
        for pool in pools:
            self._start(pool, [starting[index] for index in pool.requests])

    def _join(self, asked: Sequence[Ticketed]) -> None:
        """Let requests continue prompts that others are continuing already."""
        started = time.perf_counter()
        prefixes = [self._prefixes[request.prompt_ids] for _, request in asked]
        pairs = zip(asked, prefixes, strict=True)
        logits_NV = torch.stack([prefix.logits[request.prompt_ids] for (_, request), prefix in pairs])
        homes = _homes_of(asked, [None] * len(asked))
        self._decode(self._cells_of(asked, prefixes, homes, [0] * len(asked)), logits_NV, started)

    def _start(self, pool: Pool, asked: Sequence[Ticketed]) -> None:
        """Prefill a pool and begin to decode its requests, given in order of `pool.requests`. The first request of a
        row's longest prompt pays for its prefill; all others reuse."""
        started = time.perf_counter()
        cache, logits_PV = prefill(self.model, pool, room=_ROOM, max_tokens=self.config.max_prefill_tokens)
        block = pool.block or RowBlock(cache)
        after = iter(logits_PV)
        prefixes: list[Prefix] = []
        rows: list[Home | None] = []
        prefilled: list[int] = []
        for place, row in zip(pool.places, pool.rows, strict=True):
            whole = len(row.prompts[0].requests)
            prefixes += [self._open(row, block, place, after)] * row.lanes
            rows += [Home(block, place)] * whole + [None] * (row.lanes - whole)
            prefilled += [row.missing] + [0] * (row.lanes - 1)
        copies = torch.tensor([len(prompt.requests) for row in pool.rows for prompt in row.prompts])
        logits_NV = logits_PV.repeat_interleave(copies.to(logits_PV.device), dim=0)
        self._decode(self._cells_of(asked, prefixes, _homes_of(asked, rows), prefilled), logits_NV, started)

    def _open(self, row: Row, block: RowBlock, place: int, logits: Iterator[Tensor]) -> Prefix:
        """A prefilled row, for all requests that have its prompts."""
        extends = row.match.entry if row.match is not None and row.match.entry.block is block else None
        prefix = Prefix(block, place, {prompt.ids: next(logits) for prompt in row.prompts}, extends)
        block.busy.add(place)
        self._prefixes.update(dict.fromkeys(prefix.logits, prefix))
        return prefix

    def _cells_of(
        self,
        asked: Sequence[Ticketed],
        prefixes: Sequence[Prefix],
        homes: Sequence[Home | None],
        prefilled: Sequence[int],
    ) -> list[Cell]:
        cells: list[Cell] = []
        for (ticket, request), prefix, home, new in zip(asked, prefixes, homes, prefilled, strict=True):
            limit = request.longest(self.max_context)
            cells.append(Cell(ticket, request, prefix, limit, home, new, self._clock))
            self._cells[ticket] = cells[-1]
            prefix.cells += 1
        return cells

    def _decode(self, cells: Sequence[Cell], logits_NV: Tensor, started: float) -> None:
        """Draw their first tokens."""
        done = self._decoder.add(cells, logits_NV)
        seconds = (time.perf_counter() - started) / len(cells)
        for cell in cells:
            cell.seconds = seconds
        self._finish(done)

    # the end of a request

    def _finish(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        drawn = self._decoder.drawn(cells)
        for cell, sampled in zip(cells, drawn, strict=True):
            self._done[cell.ticket] = self._completed(*sampled, self._cost(cell), by_text=cell.by_text)
        self._retain(cells, drawn)
        self._leave(cells)

    def _leave(self, cells: Sequence[Cell]) -> None:
        """Free the places of requests that are done or cancelled, and the memory that no other request needs."""
        self._decoder.remove(cells)
        for cell in cells:
            del self._cells[cell.ticket]
            cell.prefix.cells -= 1
            if cell.home is not None and cell.home.block is not cell.prefix.block:
                cell.home.block.busy.discard(cell.home.row)
            self._release(cell.prefix)
        self._kept.compact()

    def _release(self, prefix: Prefix) -> None:
        """Close a row that no request continues or waits to continue."""
        if prefix.cells or any(self._waiting[ids] for ids in prefix.logits):
            return
        for ids in prefix.logits:
            self._prefixes.pop(ids, None)
        prefix.block.busy.discard(prefix.row)

    def _cost(self, cell: Cell) -> Cost:
        seconds = cell.seconds + self._clock - cell.joined
        return cost_of(cell.request, decoded=self._decoder.count(cell), prefilled=cell.prefilled, seconds=seconds)

    def _abandon(self) -> None:
        """Every row may be half written."""
        super()._abandon()
        for holder in (self._waiting, self._cells, self._prefixes):
            holder.clear()
        self._decoder.clear()
        self._kept.clear()

    # what is kept

    def _retain(self, cells: Sequence[Cell], drawn: Sequence[Drawn]) -> None:
        """Keep the sequences of cells that are done and have a home. The last token was drawn but not fed: its keys and
        values are not part of what is kept."""
        by_block: dict[RowBlock, list[tuple[Cell, Home, tuple[int, ...]]]] = {}
        for cell, (tokens, _, _) in zip(cells, drawn, strict=True):
            if (home := cell.home) is not None:
                by_block.setdefault(home.block, []).append((cell, home, cell.request.prompt_ids + tuple(tokens[:-1])))
        for block, members in by_block.items():
            staying = [(cell, home.row) for cell, home, _ in members]
            siblings = [(row, cell) for cell, row in staying if cell.prefix.cache is not block.cache]
            block.cache.gather((row, cell.prefix.cache, cell.prefix.row, cell.length) for row, cell in siblings)
            self._append_tails(block.cache, staying)
            self._kept.add(block, [(home.row, ids) for _, home, ids in members])
        for cell in cells:  # what a longer sequence in the same row contains is forgotten
            if (entry := cell.prefix.extends) and cell.home == Home(entry.block, entry.row):
                self._kept.drop(entry)

    def _append_tails(self, cache: RowCache, cells: Sequence[tuple[Cell, int]]) -> None:
        """Write the tokens that cells drew and fed behind their prompts, in their rows."""
        fed = [self._decoder.count(cell) - 1 for cell, _ in cells]
        if not any(fed):
            return
        lengths = [cell.length for cell, _ in cells]
        cache.reserve(max(map(sum, zip(lengths, fed, strict=True))))
        slot_Q = torch.arange(max(fed))
        slots_BQ = torch.tensor(lengths)[:, None] + slot_Q
        slots_BQ.masked_fill_(slot_Q >= torch.tensor(fed)[:, None], cache.trash)
        rows_B = torch.tensor([row for _, row in cells], device=cache.device)
        cache.write(rows_B, slots_BQ.to(cache.device), self._decoder.tails([cell for cell, _ in cells]))


def _homes_of(asked: Sequence[Ticketed], rows: Sequence[Home | None]) -> list[Home | None]:
    """A home for every request that retains. `rows[n]` is the row whose whole prompt request n continues (None where
    it continues a part of it, or where the row is not its own): n stays there if no other request would."""
    requests = [request for _, request in asked]
    claims = Counter(row for row, request in zip(rows, requests, strict=True) if request.retain)
    homes = [row if request.retain and claims[row] == 1 else None for row, request in zip(rows, requests, strict=True)]
    moving = [n for n, request in enumerate(requests) if request.retain and homes[n] is None]
    slots = _ROOM + max((len(requests[n].prompt_ids) for n in moving), default=0)
    block = RowBlock(RowCache(len(moving), slots), busy=set(range(len(moving))))
    for row, n in enumerate(moving):
        homes[n] = Home(block, row)
    return homes
