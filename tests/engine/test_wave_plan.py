"""The plan of a wave, and the memory of earlier ones, without a model."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from plain_model import ask

from turntree.engine.cache import Block, RowCache
from turntree.engine.prefill import Pool, Row, pools_of, rows_of
from turntree.engine.prefix_cache import STRIDE, PrefixCache, RowBlock

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


@given(prompts)
def test_pools_hold_every_row_once_and_rows_of_one_pool_are_alike(asked: list[tuple[int, ...]]) -> None:
    asked += [ids * 40 for ids in asked[::2]]
    rows = rows_of([ask(ids) for ids in asked], lambda _: None)
    pools = pools_of(rows)
    assert sorted(row.ids for pool in pools for row in pool.rows) == sorted(row.ids for row in rows)
    for pool in pools:
        lanes, lengths = [row.lanes for row in pool.rows], [len(row.ids) for row in pool.rows]
        assert max(lanes) < 2 * min(lanes) or max(lanes) == min(lanes)
        assert max(lengths) <= 2 * min(lengths) + 64


def test_rows_that_extend_a_kept_sequence_go_on_in_place_unless_it_is_busy() -> None:
    kept = PrefixCache(10**6)
    block = RowBlock(filled(3, 20), busy={1})
    sequences = [tuple(range(100 * row, 100 * row + 20)) for row in range(3)]
    kept.add(block, [(row, ids) for row, ids in enumerate(sequences)])
    extended = [(*ids, 7) for ids in sequences] + [(*sequences[0], 8), (*sequences[2][:18], 9)]
    in_place, copied = pools_of(rows_of([ask(ids) for ids in extended], kept.find))
    assert (in_place.block, copied.block) == (block, None)
    assert [(row.ids, place) for row, place in zip(in_place.rows, in_place.places, strict=True)] == [
        (extended[3], 0),  # of two that extend one sequence the other is copied
        (extended[2], 2),
    ]
    assert sorted(row.ids for row in copied.rows) == sorted([extended[0], extended[1], extended[4]])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 100))
def test_micro_batches_cut_the_pool_into_bounded_blocks(missing: list[int], max_tokens: int) -> None:
    rows = tuple(Row(rows_of([ask((k,) * size)], lambda _: None)[0].prompts, None) for k, size in enumerate(missing))
    parts = list(Pool(rows).micro_batches(max_tokens))
    assert [row for part in parts for row in rows[part]] == list(rows)
    for part in parts:
        block = rows[part]
        assert len(block) == 1 or len(block) * max(row.missing for row in block) <= max_tokens


def test_the_longest_kept_prefix_is_found_to_the_token() -> None:
    kept = PrefixCache(10**6)
    trunk = tuple(range(2 * STRIDE))
    one, other = (*trunk, 100, 101, 102, 103), (*trunk, 100, 101, 200, 201, 202)
    kept.add(RowBlock(filled(2, 40)), [(0, one), (1, other)])
    found = [kept.find(ids) for ids in ((*one, 7), (*other, 7), (*trunk, 100, 9), (*trunk[:20], 9), (9, *trunk))]
    assert [(m.row, m.length) if m else None for m in found[:2]] == [(0, len(one)), (1, len(other))]
    assert [m.length if m else None for m in found] == [len(one), len(other), 2 * STRIDE + 1, 20, None]
    assert [m.whole for m in found[:3] if m] == [True, True, False]
    exact = kept.find(one)
    assert exact is not None
    assert exact.length == len(one) - 1, "the logits after the last token are still to be computed"


def test_a_mostly_dead_block_is_copied_down_and_its_matches_still_read_the_same() -> None:
    kept = PrefixCache(10**6)
    sequences = [tuple(range(100 * row, 100 * row + 20)) for row in range(4)]
    kept.add(RowBlock(filled(4, 20)), [(row, ids) for row, ids in enumerate(sequences)])
    before = kept.find((*sequences[2], 1))
    assert before is not None
    for row in (0, 1, 3):
        match = kept.find((*sequences[row], 1))
        assert match is not None
        kept.drop(match.entry)
    kept.compact()
    after = kept.find((*sequences[2], 1))
    assert after is not None
    assert (before.cache.rows, after.cache.rows) == (4, 1)
    assert contents(after.cache, after.row, 20) == contents(before.cache, before.row, 20) == list(range(2000, 2020))
    assert kept.find((*sequences[0], 1)) is None
    assert kept.held_tokens == 20


def test_the_bound_drops_whole_blocks_oldest_first() -> None:
    kept = PrefixCache(100)
    sequences = [tuple(range(100 * k, 100 * k + 40)) for k in range(3)]
    for ids in sequences:
        kept.add(RowBlock(filled(1, 40)), [(0, ids)])
        kept.compact()
    assert [kept.find((*ids, 1)) is not None for ids in sequences] == [False, True, True]
    assert kept.held_tokens == 80
    kept.clear()
    assert len(kept) == kept.held_tokens == 0


def test_a_block_larger_than_the_bound_keeps_the_rows_that_fit() -> None:
    kept = PrefixCache(100)
    sequences = [tuple(range(100 * row, 100 * row + 20)) for row in range(8)]
    kept.add(RowBlock(filled(8, 20)), [(row, ids) for row, ids in enumerate(sequences)])
    kept.compact()
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
    picked = cache.select([2, 0, 2], 4)
    assert contents(picked, 0, 4) == contents(picked, 2, 4) == [2000, 2001, 2002, 2003]
    target = filled(4, 10)
    target.load([1, 2], cache, [2, 0], 5)
    assert contents(target, 1, 6) == [2000, 2001, 2002, 2003, 2004, 1005]
    assert contents(target, 2, 2) == [0, 1]
    target.load([3, 0], cache, [1, 1], 2)
    assert contents(target, 3, 3) == [*contents(target, 0, 2), 3002] == [1000, 1001, 3002]
    target.write(torch.tensor([3, 0]), torch.tensor([[2, 3], [2, target.trash]]), filled(2, 5))
    assert contents(target, 3, 4) == [1000, 1001, 0, 1]
    assert contents(target, 0, 4) == [1000, 1001, 1000, 3]
    target.ensure(10, rows=9)
    assert contents(target, 8, 6) == [0] * 6, "rows that were never written are zero, not garbage"
    target.move(torch.tensor([3]), torch.tensor([8]))
    assert contents(target, 8, 4) == contents(target, 3, 4) == [1000, 1001, 0, 1]


def test_a_busy_block_is_neither_moved_nor_forgotten() -> None:
    kept = PrefixCache(30)
    block = RowBlock(filled(4, 20), busy={3})
    kept.add(block, [(0, tuple(range(20)))])
    before = block.cache
    kept.compact()
    assert block.cache is before
    assert kept.held_tokens == 80
    block.busy.clear()
    kept.compact()
    assert kept.held_tokens == 20


def test_equal_sequences_are_kept_once() -> None:
    kept = PrefixCache(10**6)
    ids = tuple(range(20))
    for _ in range(2):
        kept.add(RowBlock(filled(1, 20)), [(0, ids)])
    kept.compact()
    assert len(kept) == 1
    assert kept.held_tokens == 20
