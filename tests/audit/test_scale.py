"""A log may be larger than the memory: work a group is constant, and no more than one group of texts is held."""

import gzip
import json
import lzma
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from logs_of_groups import FAIL, MIXED, group

from turntree.audit.played import play
from turntree.audit.remedies import Remedies, estimate
from turntree.audit.waste import by_task_type, over_time
from turntree.decide.filters.greso import GresoConfig
from turntree.decide.gates.signals import SIGNALS
from turntree.decide.gates.table import progress_at
from turntree.logs.generic import generic
from turntree.logs.grouping import by_rows
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.read import open_log
from turntree.logs.rows import ReadReport


class Counted(tuple):
    """A tuple that counts how often somebody walks over all of it."""

    walks = 0

    def __iter__(self):
        type(self).walks += 1
        return super().__iter__()


@pytest.mark.parametrize("judge", [over_time, by_task_type, None], ids=["over_time", "by_task_type", "remedies"])
def test_the_outcomes_of_a_log_are_walked_over_equally_often_however_long_it_is(judge):
    def walks(groups):
        log = [group(f"t{i % 3}", MIXED if i % 2 else FAIL, i, task_type=f"kind {i}") for i in range(groups)]
        played = play(log)
        object.__setattr__(played, "outcomes", Counted(played.outcomes))
        Counted.walks = 0
        if judge is None:
            estimate(played, Remedies(greso=GresoConfig(), dapo=True, pivots=0.6))
        else:
            judge(played)
        return Counted.walks

    assert walks(40) == walks(10)


def test_the_reader_holds_one_group_of_rows_however_long_and_scattered_the_log_is(tmp_path):
    size, groups = 4, 60
    rows = [{"group": f"g{g}", "reward": s, "iteration": g // 8} for s in range(size) for g in range(groups)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    alive, most = 0, 0

    def ended():
        nonlocal alive
        alive -= 1

    def read_row(row):
        nonlocal alive, most
        found = generic(row)
        alive += 1
        most = max(most, alive)
        weakref.finalize(found, ended)
        return found

    report = ReadReport("generic")
    rewards = [one.rewards for one in by_rows(read_row, [path], report)]
    assert rewards == [(0.0, 1.0, 2.0, 3.0)] * groups and report.lines == size * groups
    assert most <= 2 * size + 1


lines = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.sampled_from(["", " ", "\n"])), max_size=12)


@given(lines)
def test_packed_and_plain_logs_give_the_groups_that_holding_every_row_gives(tmp_path_factory, log):
    folder = tmp_path_factory.mktemp("logs")
    rows = [{"group": name, "iteration": i, "reward": n} for n, (name, i, _) in enumerate(log)]
    text = "".join(f"{blank}{json.dumps(row)}\n" for row, (*_, blank) in zip(rows, log, strict=True)).rstrip("\n")
    expected = {}
    for row in rows:
        expected.setdefault((row["iteration"], row["group"]), []).append(float(row["reward"]))
    in_order = sorted(expected, key=lambda key: key[0])
    for name, opened in (("a.jsonl", open), ("a.jsonl.gz", gzip.open), ("a.jsonl.xz", lzma.open)):
        with opened(folder / name, "wt") as handle:
            handle.write(text)
        if log:
            found = {(one.iteration, one.id.partition("/")[2]): list(one.rewards) for one in open_log([folder / name])}
            assert list(found) == in_order and found == expected


texts = st.sampled_from(["go", "look", "open", ""])


@st.composite
def rollouts(draw):
    turns = draw(st.integers(1, 4))
    words = st.lists(texts, min_size=turns, max_size=turns).map(tuple)
    return LoggedRollout(
        actions=draw(words),
        reward=draw(st.sampled_from([0.0, 1.0, None])),
        turn_tokens=draw(st.none() | st.just(tuple(range(300, 300 + turns)))),
        observations=draw(words),
        forked=draw(st.booleans()),
        refill=draw(st.booleans()),
    )


@given(st.lists(rollouts(), min_size=1, max_size=4), st.integers(1, 4))
def test_numbers_in_place_of_texts_give_every_signal_the_same_value(rolled, turn):
    told = LoggedGroup(id="g", task="t", rollouts=tuple(rolled), iteration=3, task_type="k")
    kept = play([told]).groups[0]
    for signal in SIGNALS.values():
        one, other = (signal(progress_at(each, list(each.rollouts), turn, 4), turn) for each in (told, kept))
        assert np.isclose(one, other)
    for name in ("reward", "turn_tokens", "forked", "refill", "turns"):
        assert [getattr(r, name) for r in kept.rollouts] == [getattr(r, name) for r in told.rollouts]
    assert (kept.task, kept.iteration, kept.task_type) == ("t", 3, "k")
