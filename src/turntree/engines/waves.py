"""The plan of a wave: which sequences to prefill, and which requests continue which of them.

A prompt is computed once. Requests with equal prompts are *lanes* of one row, and so are requests whose prompt is a
prefix of another prompt of the wave (states of one trace, say): they see only the slots of their own prompt. Rows are
then grouped into pools that are prefilled together and decoded as a grid of rows x lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from turntree.core.completion import GenerationRequest
from turntree.engines.kept import Match


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
    def lanes(self) -> int:
        return sum(len(prompt.requests) for prompt in self.prompts)


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


def pools_of(rows: Sequence[Row], max_batch_rows: int, max_lanes: int) -> list[list[Row]]:
    """Group rows of similar shape into grids of about `max_batch_rows` lanes; inside a pool, sort by the number of
    tokens to prefill."""
    pools: list[list[Row]] = []
    cells = 0
    for row in sorted(rows, key=lambda row: (-row.lanes, len(row.ids), row.ids)):
        width = min(pools[-1][0].lanes, max_lanes) if pools else 0  # the widest row of a pool comes first
        taken = -(-row.lanes // max_lanes) * width
        if not pools or cells + taken > max_batch_rows:
            pools.append([])
            cells, taken = 0, -(-row.lanes // max_lanes) * min(row.lanes, max_lanes)
        pools[-1].append(row)
        cells += taken
    return [sorted(pool, key=lambda row: (len(row.ids) - row.start, len(row.ids), row.ids)) for pool in pools]
