"""Sampling from a stock Transformers decoder with shared prefixes and continuous batching.

No position whose keys and values are held is computed again: equal prompts are prefilled once, a prompt that is a
prefix of another needs no prefill of its own, a late sibling joins those in decoding, and kept sequences of earlier
requests (`retain`) are extended at their end. All requests in decoding share one forward per step. Models that cannot
be run so have `engines.plain`.

Shape suffixes: P distinct prompts, N requests, V vocabulary.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.engines.compatibility import check_attention, context_of
from turntree.engines.decoding import Cell, Decoder, Home, Prefix
from turntree.engines.kept import Entry, KeptBlock, KeptSequences
from turntree.engines.limits import EngineConfig
from turntree.engines.local import LocalEngine
from turntree.engines.requests import cost_of
from turntree.engines.retention import bring_home, homes_of, release_row
from turntree.engines.waves import Pool, Row, pools_of, prefill, rows_of

_ROOM = 64  # slots set aside behind a prompt for what may follow it in place


@dataclass(eq=False)
class _Shared:
    """A row that cells continue. `logits` [V] after each of its prompts let later siblings join without a forward."""

    prefix: Prefix
    block: KeptBlock
    logits: dict[tuple[int, ...], Tensor]
    extends: Entry | None  # the kept sequence that the row continues in place
    cells: int = 0


@dataclass(eq=False)
class _Flight:
    """A request in decoding. `prefilled` tokens of its prompt were computed for it, in `seconds`."""

    ticket: int
    cell: Cell
    shared: _Shared
    prefilled: int
    seconds: float
    joined: float  # the engine's clock when decoding began


@dataclass(frozen=True)
class _Asked:
    ticket: int
    request: GenerationRequest


class HFEngine(LocalEngine):
    """Requests are admitted as soon as there is room for all that wait or for an eighth of `max_batch_rows` (every
    admission interrupts those in decoding for a prefill).

    Raises `InputError` for a model whose keys and values cannot be shared by position (see `compatibility`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: Collection[int],
        config: EngineConfig | None = None,
        *,
        pad_id: int = 0,
        policy_version: int = 0,
    ) -> None:
        config = config or EngineConfig()
        own = context_of(model)
        super().__init__(model, stop_ids, config, own=own, pad_id=pad_id, policy_version=policy_version)
        check_attention(model, self.max_context)
        self._kept = KeptSequences(config.max_kept_tokens)
        self._decoder = Decoder(model, stop_ids, config.max_batch_rows)
        self._waiting: Counter[tuple[int, ...]] = Counter()  # prompts in the queue
        self._flights: dict[Cell, _Flight] = {}
        self._shared: dict[tuple[int, ...], _Shared] = {}  # by prompt
        self._clock = 0.0  # seconds of decoding that one request was charged, had it been there all the time
        self._check("with shared prefixes")
        self._kept.clear()

    def _forget(self) -> None:
        self._kept.clear()

    def cancel(self, ticket: int) -> Cost:
        if ticket in self._done:
            return self._done.pop(ticket).cost
        if (request := self._queue.pop(ticket, None)) is not None:
            self._waiting[request.prompt_ids] -= 1
            if (shared := self._shared.get(request.prompt_ids)) is not None:
                self._release(shared)
            return NO_COST
        flight = next((flight for flight in self._flights.values() if flight.ticket == ticket), None)
        if flight is None:
            return NO_COST
        cost = self._cost(flight)
        with torch.inference_mode():
            self._leave([flight])
        return cost

    # a step

    @property
    def _decoding(self) -> int:
        return len(self._flights)

    @property
    def _holds(self) -> bool:
        return bool(len(self._kept) or self._flights)

    def _step(self) -> None:
        self._admit()
        if self._flights:
            started, count = time.perf_counter(), len(self._flights)
            done = self._decoder.step()
            self._clock += (time.perf_counter() - started) / count
            self._finish(done)

    def _enqueue(self, request: GenerationRequest) -> int:
        self._waiting[request.prompt_ids] += 1
        return super()._enqueue(request)

    # admission

    def _admit(self) -> None:
        rows = self.config.max_batch_rows
        room = rows - len(self._flights)
        if room < min(len(self._queue), max(1, rows // 8)) or not self._queue:
            return
        admitted = [_Asked(ticket, request) for ticket, request in list(self._queue.items())[:room]]
        joining = [asked for asked in admitted if asked.request.prompt_ids in self._shared]
        starting = [asked for asked in admitted if asked.request.prompt_ids not in self._shared]
        for asked in admitted:
            del self._queue[asked.ticket]
            self._waiting[asked.request.prompt_ids] -= 1
        if joining:
            self._join(joining)
        for pool in pools_of(rows_of([asked.request for asked in starting], self._kept.find)):
            self._start(pool, [starting[index] for index in pool.requests])

    def _join(self, asked: Sequence[_Asked]) -> None:
        """Let requests continue prompts that others are continuing already."""
        shared = [self._shared[one.request.prompt_ids] for one in asked]
        logits_NV = torch.stack([row.logits[one.request.prompt_ids] for one, row in zip(asked, shared, strict=True)])
        homes = homes_of([one.request for one in asked], [None] * len(asked))
        self._take_off(asked, shared, homes, [0] * len(asked), logits_NV, time.perf_counter())

    def _start(self, pool: Pool, asked: Sequence[_Asked]) -> None:
        """Prefill a pool and begin to decode its requests, given in order of `pool.requests`. The first request of a
        row's longest prompt pays for its prefill; all others reuse."""
        started = time.perf_counter()
        tokens, pad = self.config.max_prefill_tokens, self._pad
        cache, logits_PV = prefill(self._model, pool, room=_ROOM, max_tokens=tokens, pad_id=pad)
        block = pool.block or KeptBlock(cache)
        after = iter(logits_PV)
        shared: list[_Shared] = []
        rows: list[Home | None] = []
        prefilled: list[int] = []
        for place, row in zip(pool.places, pool.rows, strict=True):
            mine = self._share(row, block, place, after)
            for prompt in row.prompts:
                shared += [mine] * len(prompt.requests)
                rows += [Home(block, mine.prefix.row) if prompt is row.prompts[0] else None] * len(prompt.requests)
            prefilled += [row.missing] + [0] * (row.lanes - 1)
        copies = torch.tensor([len(prompt.requests) for row in pool.rows for prompt in row.prompts])
        logits_NV = logits_PV.repeat_interleave(copies.to(logits_PV.device), dim=0)
        homes = homes_of([one.request for one in asked], rows)
        self._take_off(asked, shared, homes, prefilled, logits_NV, started)

    def _share(self, row: Row, block: KeptBlock, place: int, logits: Iterator[Tensor]) -> _Shared:
        """Open a prefilled row to requests for its prompts."""
        extends = row.match.entry if row.match is not None and row.match.entry.block is block else None
        shared = _Shared(Prefix(block.cache, place), block, {p.ids: next(logits) for p in row.prompts}, extends)
        block.busy.add(place)
        self._shared.update(dict.fromkeys(shared.logits, shared))
        return shared

    def _take_off(
        self,
        asked: Sequence[_Asked],
        shared: Sequence[_Shared],
        homes: Sequence[Home | None],
        prefilled: Sequence[int],
        logits_NV: Tensor,
        started: float,
    ) -> None:
        """Begin to decode."""
        cells: list[Cell] = []
        for one, row, home, new in zip(asked, shared, homes, prefilled, strict=True):
            limit = min(one.request.sampling.max_tokens, self.max_context - len(one.request.prompt_ids))
            cells.append(Cell(one.request, row.prefix, limit, home))
            self._flights[cells[-1]] = _Flight(one.ticket, cells[-1], row, new, 0.0, self._clock)
            row.cells += 1
        done = self._decoder.add(cells, logits_NV)
        seconds = (time.perf_counter() - started) / len(cells)
        for cell in cells:
            self._flights[cell].seconds = seconds
        self._finish(done)

    # the end of a request

    def _finish(self, cells: Sequence[Cell]) -> None:
        if not cells:
            return
        flights = [self._flights[cell] for cell in cells]
        drawn = self._decoder.sampled(cells)
        for flight, sampled in zip(flights, drawn, strict=True):
            said = (sampled.tokens, sampled.logprobs, sampled.entropies)
            self._done[flight.ticket] = self._completed(*said, self._cost(flight))
        staying = [(cell, sampled.tokens) for cell, sampled in zip(cells, drawn, strict=True) if cell.home]
        if staying:
            bring_home(self._decoder, self._kept, *zip(*staying, strict=True))
            for flight in flights:  # what a longer sequence in the same row contains is forgotten
                if (entry := flight.shared.extends) and flight.cell.home == Home(entry.block, entry.row):
                    self._kept.drop(entry)
        self._leave(flights)

    def _leave(self, flights: Sequence[_Flight]) -> None:
        """Free the places of requests that are done or cancelled, and the memory that no other request needs."""
        self._decoder.remove([flight.cell for flight in flights])
        for flight in flights:
            del self._flights[flight.cell]
            flight.shared.cells -= 1
            release_row(flight.cell)
            self._release(flight.shared)
        self._kept.compact()

    def _release(self, shared: _Shared) -> None:
        """Close a row that no request continues or waits to continue."""
        if shared.cells or any(self._waiting[ids] for ids in shared.logits):
            return
        for ids in shared.logits:
            self._shared.pop(ids, None)
        shared.block.busy.discard(shared.prefix.row)

    def _cost(self, flight: _Flight) -> Cost:
        seconds = flight.seconds + self._clock - flight.joined
        decoded = self._decoder.count(flight.cell)
        return cost_of(flight.cell.request, decoded=decoded, prefilled=flight.prefilled, seconds=seconds)

    def _abandon(self) -> None:
        """Every row may be half written."""
        super()._abandon()
        for holder in (self._waiting, self._flights, self._shared):
            holder.clear()
        self._decoder.clear()
        self._kept.clear()
