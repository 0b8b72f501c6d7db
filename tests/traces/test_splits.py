"""Splits: by group, by hash, and never two turns of one trajectory apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message
from turntree.traces.schema import SPLITS, Split, Trace
from turntree.traces.splits import assign_split, assign_splits


def a_trace(trace_id: str, group: str | None = None, split: Split | None = None) -> Trace:
    meta = {} if group is None else {"group": group}
    return Trace(id=trace_id, messages=(Message("user", "hi"), Message("assistant", "x")), split=split, meta=meta)


def split_all(traces: Sequence[Trace], seed: int, *shares: Mapping[Split, float]) -> list[Split]:
    return assign_splits([(trace.id, trace.group, trace.split) for trace in traces], seed, *shares)


groups = st.lists(st.sampled_from(["a", "b", "c", "d", None]), max_size=12)


class TestLaws:
    @settings(max_examples=100, deadline=None)
    @given(groups, st.integers(), st.sampled_from([(0.5, 0.25, 0.25), (1.0, 0.0, 0.0), (0.0, 0.5, 0.5)]))
    def test_one_group_is_in_one_split(self, names: list[str | None], seed: int, shares: tuple[float, ...]) -> None:
        traces = [a_trace(str(i), name) for i, name in enumerate(names)]
        done = split_all(traces, seed, dict(zip(SPLITS, shares, strict=True)))
        by_group: dict[str, set[str]] = {}
        for trace, split in zip(traces, done, strict=True):
            by_group.setdefault(trace.group, set()).add(split)
        assert all(len(splits) == 1 and splits <= set(SPLITS) for splits in by_group.values())

    @given(groups, st.integers(0, 10))
    def test_a_trace_keeps_its_split_whatever_other_traces_there_are(self, names: list[str | None], seed: int) -> None:
        traces = [a_trace(str(i), name) for i, name in enumerate(names)]
        assert [split_all([trace], seed)[0] for trace in traces] == split_all(traces, seed)


class TestShares:
    def test_the_shares_are_met_and_the_seed_matters(self) -> None:
        keys = [f"task {i}" for i in range(4000)]
        first = [assign_split(key, 0) for key in keys]
        assert 0.88 < first.count("train") / 4000 < 0.92
        assert 0.04 < first.count("dev") / 4000 < 0.06
        assert 0.04 < first.count("test") / 4000 < 0.06
        assert first != [assign_split(key, 1) for key in keys]

    def test_the_assignment_never_changes_between_versions(self) -> None:
        thirds: dict[Split, float] = {"train": 0.4, "dev": 0.3, "test": 0.3}
        assert (
            " ".join(assign_split(key, 5, thirds) for key in "abcdefgh") == "dev dev train train train test dev train"
        )

    def test_a_share_of_zero_gets_nothing(self) -> None:
        halves: dict[Split, float] = {"train": 0.5, "dev": 0.5}
        assert {assign_split(str(i), 0, halves) for i in range(200)} == {"train", "dev"}

    @pytest.mark.parametrize("shares", [{"train": 0.9}, {"train": 1.5, "dev": -0.5}, {"train": 0.5, "valid": 0.5}])
    def test_impossible_shares_are_refused(self, shares: dict[Split, float]) -> None:
        with pytest.raises(ConfigError, match="fractions"):
            assign_split("a", 0, shares)


class TestDeclared:
    def test_a_declared_split_is_kept_and_shared_by_its_group(self) -> None:
        only_train: dict[Split, float] = {"train": 1.0}
        done = split_all([a_trace("1", "g"), a_trace("2", "g", "test"), a_trace("3")], 0, only_train)
        assert done == ["test", "test", "train"]

    def test_a_group_with_two_declared_splits_is_refused(self) -> None:
        with pytest.raises(InputError, match="'2' is 'test', but its group 'g' is also in 'train'"):
            split_all([a_trace("1", "g", "train"), a_trace("2", "g", "test")], 0)
