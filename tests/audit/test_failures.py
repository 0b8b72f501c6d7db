"""Failures that were counted as a reward are suspected, not assumed; intervals hold what they say."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.audit.audit import audit
from turntree.audit.config import AuditConfig
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.suspects import suspect_of
from turntree.run.statistics import ratio_interval

BROKEN = {
    "": "no answer",
    "Traceback (most recent call last):\n  boom": "a traceback",
    "asyncio.TimeoutError": "a time limit",
    "HTTP 503": "a server's error",
    "openai.APIConnectionError: Connection error.": "a server's error",
}


def group(number, *rollouts):
    made = tuple(LoggedRollout(actions=(said,), reward=reward) for said, reward in rollouts)
    return LoggedGroup(id=str(number), task=f"t{number}", rollouts=made)


@pytest.mark.parametrize(("said", "sign"), BROKEN.items())
def test_zeros_of_broken_rollouts_are_told_from_zeros_of_wrong_answers(said, sign):
    groups = [
        group(0, ("wrong", 0.0), ("false", 0.0)),
        group(1, (said, 0.0), (said, 0.0)),
        group(2, ("a", 1), ("b", 0)),
    ]
    found = audit(groups, AuditConfig())["failures"]
    assert found["why"] == {"all_succeed": 0, "all_fail": 1, "as_lowest": 1}
    assert found["suspects"]["by_sign"] == {sign: {"lowest": 2, "others": 0}}
    assert (found["without"]["zero_variance"], found["without"]["scored"]) == (1, 2)


@pytest.mark.parametrize("said", BROKEN)
def test_a_sign_that_good_rollouts_have_as_often_is_no_suspicion(said):
    found = audit([group(n, (said, 1.0), (said, 0.0)) for n in range(4)], AuditConfig())["failures"]
    assert found["suspects"]["rollouts"] == 0 and found["without"]["zero_variance_rate"] == 0.0


@given(st.text(alphabet="abcdefg 0123456789.,\n", min_size=1).filter(str.strip))
def test_words_and_numbers_alone_are_never_suspected(said):
    assert suspect_of(said) is None
    assert suspect_of(said, completed=False) == suspect_of(said, stop="length") == "cut by a limit"


def test_the_interval_of_a_ratio_covers_the_truth_as_often_as_it_says():
    rng, hits = np.random.default_rng(5), 0
    for _ in range(400):
        clusters = np.repeat(np.arange(30), 4)
        wholes = rng.integers(50, 150, 120)
        shares = rng.beta(2, 3, 30)[clusters]
        low, high = ratio_interval(shares * wholes, wholes, clusters) or (1, 0)
        hits += low <= 0.4 <= high
    assert 0.91 < hits / 400 <= 0.98


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=2, max_size=30))
def test_the_interval_of_a_ratio_holds_the_ratio_and_knows_when_there_is_none(rows):
    wholes, clusters = np.array([whole for whole, _ in rows]), np.array([one for _, one in rows])
    found = ratio_interval(wholes / 2, wholes, clusters)
    if found is None:
        assert wholes.sum() == 0 or clusters.max() == 0
    else:
        assert 0 <= found[0] < 0.5 < found[1] <= 1
