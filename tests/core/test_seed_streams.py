"""Seeds are values: the same keys give the same draws on every machine, whatever else was drawn before."""

from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from turntree.core.seeds import derive, generator

keys = st.lists(st.integers(-10, 10) | st.text(max_size=4), max_size=4)


def test_derived_seeds_never_change() -> None:
    """A profile or a run recorded with one version must replay with the next."""
    assert derive(0) == 4761921975702974394
    assert derive(0, "rollout", "task", 3) == 2393522675429316348
    assert derive(123456789, "é") == 1380180733319729161
    assert [generator(7, "sft", 0).randrange(1000) for _ in range(2)] == [160, 160]


def test_another_process_with_another_hash_seed_derives_the_same() -> None:
    code = "from turntree.core.seeds import derive; print(derive(5, 'rollout', 'a', 1))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert int(found.stdout) == derive(5, "rollout", "a", 1)


@given(st.integers(0, 2**63 - 1), keys)
def test_seeds_fit_in_63_bits(seed: int, path: list) -> None:
    assert 0 <= derive(seed, *path) < 2**63


@given(keys, keys)
def test_different_keys_give_different_seeds(one: list, other: list) -> None:
    assert (derive(1, *one) == derive(1, *other)) == (one == other)


def test_a_number_and_its_text_are_different_keys() -> None:
    assert derive(0, 1) != derive(0, "1")


def test_a_stream_does_not_depend_on_draws_made_elsewhere() -> None:
    alone = generator(3, "b").random()
    generator(3, "a").random()
    assert generator(3, "b").random() == alone != generator(3, "a").random()
