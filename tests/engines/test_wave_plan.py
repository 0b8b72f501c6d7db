"""The plan of a wave, and the memory of earlier ones, without a model."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_model import ask

from turntree.engines.cache import Block, RowCache
from turntree.engines.kept import STRIDE, KeptSequences, Retained
from turntree.engines.waves import Pool, Row, pools_of, rows_of

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=20)


def filled(rows: int, slots: int) -> RowCache:
    """A cache of one layer whose key at (row, slot) is 1000 row + slot."""
    cache = RowCache(rows, slots)
    index = torch.arange(rows)
    cache.expect(Block(index, torch.arange(slots).expand(rows, -1), slots, fresh=True))
    states = (1000 * index[:, None] + torch.arange(slots))[:, None, :, None].float()
    cache.update(states, states, 0)
    return cache


def contents(cache: RowCache, row: int, slots: int) -> list[float]:
    cache.expect(Block(torch.tensor([row]), torch.tensor([[cache.trash]]), slots))
    keys, _ = cache.update(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), 0)
    return keys[0, 0, :, 0].tolist()


@given(prompts)
def test_rows_hold_every_prompt_and_no_row_is_a_prefix_of_another(asked: list[tuple[int, ...]]) -> None:
    requests = [ask(ids) for ids in asked]
    rows = rows_of(requests, lambda _: None)
    for row in rows:
        for prompt in row.prompts:
            assert row.ids[: len(prompt.ids)] == prompt.ids
            assert all(requests[index].prompt_ids == prompt.ids for index in prompt.requests)
    served = [index for row in rows for prompt in row.prompts for index in prompt.requests]
    assert sorted(served) == list(range(len(requests)))
    assert not any(a is not b and b.ids[: len(a.ids)] == a.ids for a in rows for b in rows)


@given(prompts, st.integers(1, 12), st.integers(1, 4))
def test_pools_hold_every_row_once_in_grids_of_bounded_size(
    asked: list[tuple[int, ...]], cells: int, max_lanes: int
) -> None:
    rows = rows_of([ask(ids) for ids in asked], lambda _: None)
    pools = pools_of(rows, cells, max_lanes)
    assert sorted(row.ids for pool in pools for row in pool.rows) == sorted(row.ids for row in rows)
    for pool in pools:
        width = min(max(row.lanes for row in pool.rows), max_lanes)
        assert len(pool.rows) == 1 or width * sum(-(-row.lanes // max_lanes) for row in pool.rows) <= cells


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_micro_batches_cut_the_pool_into_bounded_blocks(missing: list[int], max_tokens: int) -> None:
    rows = tuple(Row(rows_of([ask((k,) * size)], lambda _: None)[0].prompts, None) for k, size in enumerate(missing))
    parts = list(Pool(rows).micro_batches(max_tokens))
    assert [row for part in parts for row in rows[part]] == list(rows)
    for part in parts:
        block = rows[part]
        assert len(block) == 1 or len(block) * max(row.missing for row in block) <= max_tokens


def test_the_longest_kept_prefix_is_found_to_the_token() -> None:
    kept = KeptSequences(10**6)
    trunk = tuple(range(2 * STRIDE))
    one, other = (*trunk, 100, 101, 102, 103), (*trunk, 100, 101, 200, 201, 202)
    kept.add(filled(2, 40), [Retained(0, one, len(one)), Retained(1, other, len(other))])
    found = [kept.find(ids) for ids in ((*one, 7), (*other, 7), (*trunk, 100, 9), (*trunk[:20], 9), (9, *trunk))]
    assert [(m.row, m.length) if m else None for m in found[:2]] == [(0, len(one)), (1, len(other))]
    assert [m.length if m else None for m in found] == [len(one), len(other), 2 * STRIDE + 1, 20, None]
    assert [m.whole for m in found[:3] if m] == [True, True, False]
    exact = kept.find(one)
    assert exact is not None
    assert exact.length == len(one) - 1, "the logits after the last token are still to be computed"


def test_a_mostly_dead_block_is_copied_down_and_its_matches_still_read_the_same() -> None:
    kept = KeptSequences(10**6)
    sequences = [tuple(range(100 * row, 100 * row + 20)) for row in range(4)]
    kept.add(filled(4, 20), [Retained(row, ids, 20) for row, ids in enumerate(sequences)])
    before = kept.find((*sequences[2], 1))
    assert before is not None
    for row in (0, 1, 3):
        match = kept.find((*sequences[row], 1))
        assert match is not None
        kept.drop(match.entry)
    kept.settle()
    after = kept.find((*sequences[2], 1))
    assert after is not None
    assert (before.cache.rows, after.cache.rows) == (4, 1)
    assert contents(after.cache, after.row, 20) == contents(before.cache, before.row, 20) == list(range(2000, 2020))
    assert kept.find((*sequences[0], 1)) is None
    assert kept.held_tokens == 20


def test_the_bound_drops_whole_blocks_oldest_first() -> None:
    kept = KeptSequences(100)
    sequences = [tuple(range(100 * k, 100 * k + 40)) for k in range(3)]
    for ids in sequences:
        kept.add(filled(1, 40), [Retained(0, ids, 40)])
        kept.settle()
    assert [kept.find((*ids, 1)) is not None for ids in sequences] == [False, True, True]
    assert kept.held_tokens == 80
    kept.clear()
    assert len(kept) == kept.held_tokens == 0


def test_a_block_larger_than_the_bound_keeps_the_rows_that_fit() -> None:
    kept = KeptSequences(100)
    sequences = [tuple(range(100 * row, 100 * row + 20)) for row in range(8)]
    kept.add(filled(8, 20), [Retained(row, ids, 20) for row, ids in enumerate(sequences)])
    kept.settle()
    assert [kept.find((*ids, 1)) is not None for ids in sequences] == [False] * 3 + [True] * 5
    last = kept.find((*sequences[7], 1))
    assert last is not None
    assert contents(last.cache, last.row, 20) == list(range(7000, 7020))
    assert kept.held_tokens == 100


def test_rows_move_without_losing_a_slot() -> None:
    cache = filled(3, 6)
    cache.ensure(50)
    assert contents(cache, 2, 6) == [2000, 2001, 2002, 2003, 2004, 2005]
    assert contents(cache, 2, 8)[6:] == [0, 0], "slots that were never written are zero, not garbage"
    picked = cache.select(torch.tensor([2, 0, 2]), 4)
    assert contents(picked, 0, 4) == contents(picked, 2, 4) == [2000, 2001, 2002, 2003]
    gathered = cache.gather(torch.tensor([1, 0]), torch.tensor([[5, 0], [3, 3]]))
    assert contents(gathered, 0, 2) == [1005, 1000]
    assert contents(gathered, 1, 2) == [3, 3]
    target = filled(4, 10)
    target.load(1, cache, [2, 0], 5)
    assert contents(target, 1, 6) == [2000, 2001, 2002, 2003, 2004, 1005]
    assert contents(target, 2, 2) == [0, 1]
    target.store(torch.tensor([3, 1]), picked.select(torch.tensor([0, 1]), 4), 1, 3)
    assert contents(target, 3, 4) == [3000, 2001, 2002, 3003]
    assert contents(target, 1, 4) == [2000, 1, 2, 2003]
