"""The plan of a wave: which sequences to prefill, and which requests continue which of them; then their prefill.

A prompt is computed once. Requests with equal prompts are *lanes* of one row, and so are requests whose prompt is a
prefix of another prompt of the wave (states of one trace, say): they see only the slots of their own prompt. Rows are
then grouped into pools that are prefilled together and decoded as a grid of rows x lanes.

Shape suffixes: B rows, Q tokens of a block, K distinct last positions, P distinct prompts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.core.completion import GenerationRequest
from turntree.engine.cache import Block, RowCache, prefix_mask
from turntree.engine.prefix_cache import Match, RowBlock


@dataclass(frozen=True)
class Prompt:
    """A distinct prompt and the requests (indices into the wave) that ask for it."""

    ids: tuple[int, ...]
    requests: tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One sequence to prefill: `prompts[0]` is all of it, the other prompts are prefixes of that."""

    prompts: tuple[Prompt, ...]
    match: Match | None

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompts[0].ids

    @property
    def start(self) -> int:
        """How many of its tokens are already computed."""
        return 0 if self.match is None else self.match.length

    @property
    def missing(self) -> int:
        return len(self.ids) - self.start

    @property
    def lanes(self) -> int:
        return sum(len(prompt.requests) for prompt in self.prompts)


@dataclass(frozen=True)
class Pool:
    """Rows that are prefilled together; with `block`, each continues in place at its kept sequence."""

    rows: tuple[Row, ...]
    block: RowBlock | None = None

    @property
    def requests(self) -> list[int]:
        """The requests of the pool, by row, then prompt."""
        return [index for row in self.rows for prompt in row.prompts for index in prompt.requests]

    @property
    def places(self) -> list[int]:
        """Where each row lies, or will lie, in its cache."""
        matched = [row.match.row for row in self.rows if row.match]
        return list(range(len(self.rows))) if self.block is None else matched

    def micro_batches(self, max_tokens: int) -> Iterator[slice]:
        """Consecutive rows whose padded block has at most `max_tokens` tokens, and little more padding than tokens."""
        first, widest, real = 0, 0, 0
        for index, row in enumerate(self.rows):
            widest, real = max(widest, row.missing), real + row.missing
            padded = widest * (index + 1 - first)
            if index > first and (padded > max_tokens or padded > 2 * real + 256):
                yield slice(first, index)
                first, widest, real = index, row.missing, row.missing
        yield slice(first, len(self.rows))


def rows_of(requests: Sequence[GenerationRequest], find: Callable[[tuple[int, ...]], Match | None]) -> list[Row]:
    """The fewest rows that hold every prompt. A prefix that ends inside the reused part of a longer prompt gets a
    row of its own, because the logits after its last token have to be computed."""
    asked: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        asked.setdefault(request.prompt_ids, []).append(index)
    rows: list[Row] = []
    for ids in sorted(asked, reverse=True):  # an extension of a prompt comes just before it
        prompt = Prompt(ids, tuple(asked[ids]))
        if rows and rows[-1].start < len(ids) and rows[-1].ids[: len(ids)] == ids:
            rows[-1] = Row((*rows[-1].prompts, prompt), rows[-1].match)
        else:
            rows.append(Row((prompt,), find(ids)))
    return rows


def pools_of(rows: Sequence[Row]) -> list[Pool]:
    """First the rows that continue in place at their kept sequence (nothing is copied); then the others, similar shapes
    together."""
    in_place: dict[RowBlock, dict[int, Row]] = {}
    others: list[Row] = []
    for row in rows:
        block = row.match.entry.block if row.match else None
        if row.match and block and row.match.whole and row.match.row not in block.busy | in_place.get(block, {}).keys():
            in_place.setdefault(block, {})[row.match.row] = row
        else:
            others.append(row)
    pools = [Pool(tuple(sorted(mine.values(), key=_by_missing)), block) for block, mine in in_place.items()]
    return pools + [Pool(tuple(_by_source(group))) for group in _similar(others)]


def _similar(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows whose numbers of lanes and lengths are within a factor of two: little padding in memory and attention."""
    group: list[Row] = []
    for row in sorted(rows, key=lambda row: (-row.lanes.bit_length(), -len(row.ids), row.ids)):
        if group and (
            row.lanes.bit_length() < group[0].lanes.bit_length() or 2 * len(row.ids) + 64 < len(group[0].ids)
        ):
            yield group
            group = []
        group.append(row)
    if group:
        yield group


def _by_source(rows: Sequence[Row]) -> list[Row]:
    """Rows of one kept cache side by side (they are copied at once), fresh ones last; then by missing tokens."""
    sources: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.match is None):
        sources.setdefault(0 if row.match is None else id(row.match.cache), []).append(row)
    return [row for group in sources.values() for row in sorted(group, key=_by_missing)]


def _by_missing(row: Row) -> tuple[int, int, tuple[int, ...]]:
    return row.missing, len(row.ids), row.ids


def prefill(model: PreTrainedModel, pool: Pool, *, room: int, max_tokens: int) -> tuple[RowCache, Tensor]:
    """The keys and values of every row, with `room` slots more, and the logits [P, V] after every distinct prompt.

    Prompts are in order of row. A block of rows has at most `max_tokens` padded tokens (or one row).
    """
    slots = max(len(row.ids) for row in pool.rows) + room
    if pool.block is None:
        cache = RowCache(len(pool.rows), slots)
        kept = [(place, row.match) for place, row in enumerate(pool.rows) if row.match is not None]
        cache.gather((place, match.cache, match.row, match.length) for place, match in kept)
    else:
        cache = pool.block.cache
        cache.ensure(slots)
    places, parts = pool.places, pool.micro_batches(max_tokens)
    return cache, torch.cat([_prefill_rows(model, cache, places[p], pool.rows[p]) for p in parts])


def _prefill_rows(model: PreTrainedModel, cache: RowCache, places: Sequence[int], rows: Sequence[Row]) -> Tensor:
    """Compute the missing tokens of rows that lie at `places`; the logits [P, V] after each distinct prompt."""
    longest = max(row.missing for row in rows)
    tokens_BQ = np.zeros((len(rows), longest), dtype=np.int64)  # padding is masked
    slots_BQ = np.full((len(rows), longest), cache.trash)
    positions_BQ = np.zeros((len(rows), longest), dtype=np.int64)
    fresh = all(row.start == 0 for row in rows)
    before = [0 if fresh else longest - row.missing for row in rows]  # so that rows with one end have it in one column
    for index, row in enumerate(rows):
        here = slice(before[index], before[index] + row.missing)
        tokens_BQ[index, here] = row.ids[row.start :]
        slots_BQ[index, here] = positions_BQ[index, here] = np.arange(row.start, len(row.ids))
    positions = torch.from_numpy(positions_BQ).to(model.device)
    block = Block(
        rows_B=torch.tensor(places, device=model.device),
        slots_BQ=torch.from_numpy(slots_BQ).to(model.device),
        width=max(len(row.ids) for row in rows),
        first=places[0] if list(places) == list(range(places[0], places[0] + len(rows))) else None,
        fresh=fresh,
    )
    cache.expect(block)
    ends = [(b, before[b] + len(prompt.ids) - 1 - row.start) for b, row in enumerate(rows) for prompt in row.prompts]
    columns = {end: column for column, end in enumerate(sorted({end for _, end in ends}))}
    logits_BKV = model(
        input_ids=torch.from_numpy(tokens_BQ).to(model.device),
        attention_mask=None if block.fresh else prefix_mask(positions + 1, block.width, model.dtype)[:, None],
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=torch.tensor(list(columns), device=model.device),
    ).logits
    return logits_BKV[[b for b, _ in ends], [columns[end] for _, end in ends]]
