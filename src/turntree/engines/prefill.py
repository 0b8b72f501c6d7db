"""Computing the missing tokens of a pool of rows.

Shape suffixes: B rows, Q tokens of a block, K distinct last positions, P distinct prompts, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from turntree.engines.cache import Block, RowCache, prefix_mask
from turntree.engines.waves import Pool, Row


def prefill(model: PreTrainedModel, pool: Pool, *, room: int, max_tokens: int, pad_id: int) -> tuple[RowCache, Tensor]:
    """The keys and values of every row, with `room` slots more, and the logits [P, V] after every distinct prompt.

    Prompts are in order of row. A block of rows has at most `max_tokens` padded tokens (or one row).
    """
    slots = max(len(row.ids) for row in pool.rows) + room
    if pool.block is None:
        cache = RowCache(len(pool.rows), slots)
        _load_kept(cache, pool.rows)
    else:
        cache = pool.block.cache
        cache.ensure(slots)
    places, parts = pool.places, pool.micro_batches(max_tokens)
    return cache, torch.cat([_prefill_rows(model, cache, places[p], pool.rows[p], pad_id) for p in parts])


def _load_kept(cache: RowCache, rows: Sequence[Row]) -> None:
    """Copy the reused part of every row; rows of one source are side by side."""
    numbered = list(enumerate(rows))
    for _, group in itertools.groupby(numbered, key=lambda item: item[1].match and id(item[1].match.cache)):
        found = [(place, row.match) for place, row in group if row.match is not None]
        if found:
            places, matches = zip(*found, strict=True)
            longest = max(match.length for match in matches)
            cache.load(places, matches[0].cache, [match.row for match in matches], longest)


def _prefill_rows(
    model: PreTrainedModel, cache: RowCache, places: Sequence[int], rows: Sequence[Row], pad_id: int
) -> Tensor:
    """Compute the missing tokens of rows that lie at `places`; the logits [P, V] after each distinct prompt."""
    longest = max(row.missing for row in rows)
    tokens_BQ = np.full((len(rows), longest), pad_id)
    slots_BQ = np.full((len(rows), longest), cache.trash)
    positions_BQ = np.zeros((len(rows), longest), dtype=np.int64)
    for index, row in enumerate(rows):
        tokens_BQ[index, : row.missing] = row.ids[row.start :]
        slots_BQ[index, : row.missing] = np.arange(row.start, len(row.ids))
        positions_BQ[index, : row.missing] = slots_BQ[index, : row.missing]
    positions = torch.from_numpy(positions_BQ).to(model.device)
    block = Block(
        rows_B=torch.tensor(places, device=model.device),
        slots_BQ=torch.from_numpy(slots_BQ).to(model.device),
        width=max(len(row.ids) for row in rows),
        first=places[0] if list(places) == list(range(places[0], places[0] + len(rows))) else None,
        fresh=all(row.start == 0 for row in rows),
    )
    cache.expect(block)
    ends = [(b, len(prompt.ids) - 1 - row.start) for b, row in enumerate(rows) for prompt in row.prompts]
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
