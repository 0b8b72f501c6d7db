"""pass@k and pass^k against every choice of k episodes, enumerated."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.stages.evaluate import at_k

GAMES = st.lists(st.lists(st.sampled_from([0.0, 1.0]), max_size=5), min_size=1, max_size=4)


@given(games=GAMES)
def test_they_are_the_shares_of_all_choices_of_k_episodes_with_one_success_and_with_k(games: list[list[float]]) -> None:
    found = at_k(games, 5)
    for k in range(1, 6):
        chosen = [list(combinations(game, k)) for game in games if len(game) >= k]
        for name, wins in (("pass_at_k", any), ("pass_hat_k", all)):
            shares = [sum(wins(episodes) for episodes in one) / len(one) for one in chosen]
            value = found[name].get(str(k))
            assert value == (pytest.approx(sum(shares) / len(shares)) if shares else None)


def test_at_one_both_are_the_mean_and_one_episode_a_task_has_neither() -> None:
    assert at_k([[1.0, 0.0], [1.0, 1.0]], 2)["pass_at_k"]["1"] == at_k([[1.0, 0.0], [1.0, 1.0]], 2)["pass_hat_k"]["1"]
    assert at_k([[1.0]], 1) == {}
