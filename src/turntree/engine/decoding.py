"""Continuous batching: requests join and leave decoding at any step.

Every request in decoding is a *cell*: a place in tensors of fixed size. A step feeds the last token of all cells in
one forward, whatever their lengths and prefixes, and samples the next one. A cell that leaves frees its place at once;
the tensors are compacted when a quarter of the places in use is empty.

Shape suffixes: C places, R places in use, N requests, U rows, G lanes of a row, P prefix slots, T completion
positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.engine.attention import DecodingCache, Group, shared_prefix_attention
from turntree.engine.cache import Block, RowCache
from turntree.engine.prefix_cache import Entry, RowBlock
from turntree.engine.sampling import draw, ended, restricted, uniforms_of

_TAIL = 32  # slots of tails that are made ready at a time
_MAX_LANE_RATIO = 2  # rows of one group have lanes of similar number


Drawn = tuple[list[int], list[float], list[float]]  # token ids, their log-probabilities and entropies


@dataclass(eq=False)
class Prefix:
    """A prefilled row, which cells continue. `logits` [V] after each of its prompts let later siblings join without a
    forward; `extends` is the kept sequence that the row continues in place."""

    block: RowBlock
    row: int
    logits: dict[tuple[int, ...], Tensor]
    extends: Entry | None = None
    cells: int = 0

    @property
    def cache(self) -> RowCache:
        return self.block.cache


@dataclass(frozen=True)
class Home:
    """The row in which a sequence will be kept."""

    block: RowBlock
    row: int


@dataclass(eq=False)
class Cell:
    """One request in decoding: it continues the first `length` slots of a prefix with at most `limit` tokens.
    `prefilled` tokens of its prompt were computed for it, in `seconds`; the engine's clock was `joined` when decoding
    began."""

    ticket: int
    request: GenerationRequest
    prefix: Prefix
    limit: int
    home: Home | None
    prefilled: int
    joined: float
    seconds: float = field(default=0.0, init=False)
    by_text: bool = field(default=False, init=False)  # its guide ended it
    place: int = field(default=-1, init=False)
    born: int = field(default=0, init=False)  # the step before its first token was fed

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids)


@dataclass
class _State:
    """Per place: the sampled tokens, and what they are sampled with."""

    tokens_CT: Tensor
    logprobs_CT: Tensor
    entropies_CT: Tensor
    count_C: Tensor  # tokens drawn
    length_C: Tensor  # of the prompt
    limit_C: Tensor  # 0 marks an idle place
    temperature_C: Tensor
    uniform_CT: Tensor

    @classmethod
    def empty(cls, places: int, positions: int, device: torch.device) -> _State:
        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        return cls(
            tokens_CT=zeros(places, positions, dtype=torch.long),
            logprobs_CT=zeros(places, positions),
            entropies_CT=zeros(places, positions),
            count_C=zeros(places, dtype=torch.long),
            length_C=zeros(places, dtype=torch.long),
            limit_C=zeros(places, dtype=torch.long),
            temperature_C=zeros(places),
            uniform_CT=zeros(places, positions),
        )

    def tensors(self) -> list[Tensor]:
        return list(vars(self).values())

    def grown(self, places: int, positions: int) -> _State:
        """The same with room for more places or completion positions."""
        wider = _State.empty(places, positions, self.count_C.device)
        for new, old in zip(wider.tensors(), self.tensors(), strict=True):
            new[tuple(map(slice, old.shape))] = old
        return wider


class Decoder:
    """Up to `max_cells` cells over one model. `stop_ids` end a completion."""

    def __init__(self, model: PreTrainedModel, stop_ids: Collection[int], max_cells: int) -> None:
        self._model, self._max_cells = model, max_cells
        self._stops_V = torch.zeros(model.config.get_text_config().vocab_size, dtype=torch.bool, device=model.device)
        self._stops_V[sorted(stop_ids)] = True
        self._steps = 0
        self.clear()

    def clear(self) -> None:
        """Forget all cells and free their memory."""
        self._cells: dict[int, Cell] = {}  # by place
        self._state = _State.empty(0, 0, self._model.device)
        self._tails = RowCache(0, _TAIL)  # row by place: the tokens that were drawn and fed
        self._groups: dict[RowCache, list[Group]] = {}
        self._stale: dict[RowCache, None] = {}  # whose groups have to be formed again

    # coming and going

    def add(self, cells: Sequence[Cell], logits_NV: Tensor) -> list[Cell]:
        """Add cells with the logits after their prompts and sample their first tokens; returns the cells that are then
        done, in order of place. The caller removes them."""
        free = (place for place in range(self._max_cells) if place not in self._cells)
        for cell, place in zip(cells, free, strict=False):
            cell.place, cell.born = place, self._steps
            self._cells[place] = cell
            self._stale[cell.prefix.cache] = None
        self._write([cell.place for cell in cells], cells)
        return self._draw(torch.tensor([cell.place for cell in cells], device=self._model.device), logits_NV)

    def remove(self, cells: Sequence[Cell]) -> None:
        """Remove cells, whether they are done or not. Removing the last one frees all memory."""
        for cell in cells:
            del self._cells[cell.place]
            self._stale[cell.prefix.cache] = None
        if not self._cells:
            self.clear()
            return
        places = [cell.place for cell in cells]
        self._state.limit_C[places] = self._state.count_C[places] = 0

    def drawn(self, cells: Sequence[Cell]) -> list[Drawn]:
        """What cells have drawn so far."""
        places, longest = [cell.place for cell in cells], max(map(self.count, cells))
        state = self._state
        columns = (state.tokens_CT, state.logprobs_CT, state.entropies_CT)
        rows = zip(*(column[places, :longest].tolist() for column in columns), strict=True)
        return [
            (ids[:count], logprobs[:count], entropies[:count])
            for count, (ids, logprobs, entropies) in zip(map(self.count, cells), rows, strict=True)
        ]

    def count(self, cell: Cell) -> int:
        """Tokens drawn by a cell so far; all but the last one were fed."""
        return self._steps - cell.born + 1

    def tails(self, cells: Sequence[Cell]) -> RowCache:
        """A copy of the keys and values of the tokens that cells drew and fed, a row each."""
        return self._tails.select([cell.place for cell in cells], max(map(self.count, cells)) - 1)

    # a step

    def step(self) -> list[Cell]:
        """Feed the last token of every cell and draw the next one; returns the cells that are done, in order of
        place. The caller removes them."""
        width = max(map(self.count, self._cells.values()))
        self._tails.reserve(-(-width // _TAIL) * _TAIL, rows=max(self._cells) + 1)
        self._close_up()
        extent = max(self._cells) + 1
        state, places_R = self._state, self._arange(extent)
        fed_R = (state.count_C[:extent] - 1).clamp_min_(0)
        self._tails.expect(Block(places_R, fed_R[:, None], width, first=0))
        cache = DecodingCache(self._current_groups(), self._tails, self._hidden(fed_R, width))
        with shared_prefix_attention(self._model):
            logits_1RV = self._model(
                input_ids=state.tokens_CT[places_R, fed_R][None],
                position_ids=(state.length_C[:extent] + fed_R)[None],
                past_key_values=cache,
                use_cache=True,
            ).logits
        self._steps += 1
        return self._draw(places_R, logits_1RV[0])

    def _draw(self, places_N: Tensor, logits_NV: Tensor) -> list[Cell]:
        state = self._state
        position_N = state.count_C[places_N]
        guided = self._guided(places_N)
        guides = {row: guide for row, cell in guided.items() if (guide := cell.request.guide) is not None}
        drawn = draw(
            restricted(logits_NV, guides),
            state.temperature_C[places_N],
            state.uniform_CT[places_N, position_N],
            {cell.request.sampling.temperature for cell in self._cells.values()},
        )
        state.tokens_CT[places_N, position_N] = drawn.tokens
        state.logprobs_CT[places_N, position_N] = drawn.logprobs
        state.entropies_CT[places_N, position_N] = drawn.entropies
        limit_N = state.limit_C[places_N]
        state.count_C[places_N] += limit_N > 0
        done_N = (self._stops_V[drawn.tokens] | (position_N + 1 >= limit_N)) & (limit_N > 0)
        for row in ended(drawn.tokens, guides):
            guided[row].by_text = done_N[row] = True
        return [self._cells[place] for place in places_N[done_N].tolist()]

    def _guided(self, places_N: Tensor) -> dict[int, Cell]:
        """The cells with a guide, by their row among these places."""
        if not any(cell.request.guide for cell in self._cells.values()):
            return {}
        cells = [self._cells.get(place) for place in places_N.tolist()]
        return {row: cell for row, cell in enumerate(cells) if cell is not None and cell.request.guide is not None}

    def _hidden(self, fed_R: Tensor, width: int) -> Tensor | None:
        """The tail slots beyond each cell's own."""
        oldest, newest = (pick(cell.born for cell in self._cells.values()) for pick in (min, max))
        if oldest == newest and len(self._cells) == len(fed_R):
            return None
        return self._arange(width) > fed_R[:, None]

    def _arange(self, count: int) -> Tensor:
        return torch.arange(count, device=self._model.device)

    # places

    def _write(self, places: list[int], cells: Sequence[Cell]) -> None:
        """Set the state of the places of new cells."""
        limits, state = [cell.limit for cell in cells], self._state
        held, needed = state.tokens_CT.shape, (max(places) + 1, max(limits))
        if needed[0] > held[0] or needed[1] > held[1]:
            sizes = [have if have >= need else max(need, 2 * have) for have, need in zip(held, needed, strict=True)]
            self._state = state = state.grown(*sizes)
        device = self._model.device
        state.count_C[places] = 0
        state.length_C[places] = torch.tensor([cell.length for cell in cells], device=device)
        state.limit_C[places] = torch.tensor(limits, device=device)
        requests = [cell.request for cell in cells]
        temperatures = [float(request.sampling.temperature) for request in requests]
        state.temperature_C[places] = torch.tensor(temperatures, device=device)
        state.uniform_CT[places, : max(limits)] = uniforms_of(requests, limits).to(device)

    def _close_up(self) -> None:
        """Move the last cells to empty places where there are many of them."""
        extent, count = max(self._cells) + 1, len(self._cells)
        if 4 * count > 3 * extent:
            return
        empty = [place for place in range(count) if place not in self._cells]
        late = sorted(place for place in self._cells if place >= count)
        origin, target = (torch.tensor(places, device=self._model.device) for places in (late, empty))
        for tensor in self._state.tensors():
            tensor[target] = tensor[origin]
        self._state.limit_C[origin] = 0
        self._tails.move(origin, target)
        for old, new in zip(late, empty, strict=True):
            cell = self._cells[new] = self._cells.pop(old)
            cell.place = new
            self._stale[cell.prefix.cache] = None

    # groups

    def _current_groups(self) -> list[Group]:
        """The cells by what they continue."""
        if self._stale:
            by_cache: dict[RowCache, dict[int, list[Cell]]] = {cache: {} for cache in self._stale}
            for place in sorted(self._cells):
                cell = self._cells[place]
                if cell.prefix.cache in by_cache:
                    by_cache[cell.prefix.cache].setdefault(cell.prefix.row, []).append(cell)
            for cache, rows in by_cache.items():
                self._groups.pop(cache, None)
                if rows:
                    self._groups[cache] = [_group(cache, run) for run in _runs(rows)]
            self._stale.clear()
        return [group for groups in self._groups.values() for group in groups]


def _runs(rows: dict[int, list[Cell]]) -> Iterator[dict[int, list[Cell]]]:
    """Rows that are computed together: side by side with at most one idle row between two (to pass over it costs as
    much as to compute it), and with similar numbers of lanes."""
    run: dict[int, list[Cell]] = {}
    for row in sorted(rows):
        if run:
            few, many = sorted((len(rows[row]), len(next(iter(run.values())))))
            if row - max(run) > 2 or many > _MAX_LANE_RATIO * few:
                yield run
                run = {}
        run[row] = rows[row]
    yield run


def _group(cache: RowCache, rows: dict[int, list[Cell]]) -> Group:
    first, last = min(rows), max(rows)
    lanes = max(map(len, rows.values()))
    cells: list[Cell | None] = []
    for row in range(first, last + 1):
        here = rows.get(row, [])
        cells += [*here, *[None] * (lanes - len(here))]
    lengths = [cell.length if cell else 0 for cell in cells]
    width = max(lengths)
    device = cache.device
    hidden_UGP = None
    if min(length or width for length in lengths) < width:
        lengths_UG = torch.tensor([length or width for length in lengths], device=device).view(-1, lanes)
        hidden_UGP = torch.arange(width, device=device) >= lengths_UG[..., None]
    return Group(
        cache=cache,
        first=first,
        rows=last + 1 - first,
        width=width,
        cells_UG=torch.tensor([cell.place if cell else 0 for cell in cells], device=device).view(-1, lanes),
        real_N=torch.tensor([k for k, cell in enumerate(cells) if cell], device=device),
        hidden_UGP=hidden_UGP,
    )
