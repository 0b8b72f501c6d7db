"""Rewards of every type, as users' environments give them: numbers are taken, everything else is censored by name."""

from __future__ import annotations

import importlib
import os
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripted_engine import ScriptedEngine
from tiny_models import tiny_tokenizer
from turntree.core import scalars
from turntree.core.completion import Sampling
from turntree.core.config import Part
from turntree.core.messages import Message
from turntree.env.tasks import open_tasks
from turntree.render.template import ChatRenderer
from turntree.rollout.live import EpisodeConfig
from turntree.rollout.scheduler import Scheduler, SchedulerConfig

CASES = Path(os.environ.get("TURNTREE_CASES", Path(__file__).resolve().parents[3] / "shared" / "cases"))
ODD = CASES / "running" / "c01_reward_types"
RENDERER = ChatRenderer(tiny_tokenizer())
WORDS = [RENDERER.completion(Message("assistant", word)) for word in ("left", "right")]
TAKEN = ("bool", "np32", "np0d", "np1", "torch", "torchgrad", "dec", "frac")
CENSORED = ("none", "nan", "inf", "str", "list", "big", "huge", "complex")


@pytest.mark.skipif(not ODD.is_dir(), reason="the shared cases are not there")
@pytest.mark.parametrize("kind", [*TAKEN, *CENSORED])
def test_rewards_of_environments_are_numbers_or_censored_by_name(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ODD))
    importlib.invalidate_caches()
    episodes = EpisodeConfig(max_turns=1, sampling=Sampling(max_tokens=16))
    config = SchedulerConfig(episodes=episodes, group_size=4, max_retries=0)
    engine = ScriptedEngine(lambda prompt, seed: WORDS[seed % 2], RENDERER.stop_ids, vocab_size=4096)
    with open_tasks(Part("odd:tasks", {"kind": kind}), {"train": 2}) as opened:
        groups = list(Scheduler(engine, RENDERER, config).run(opened.of("train"), seed=0))
    verdicts = [verdict for group in groups for verdict in group.rewards.verdicts.values()]
    assert len(verdicts) == 8
    if kind in TAKEN:
        assert {verdict.reward for verdict in verdicts} <= {0.0, 1.0}
    else:
        failed = [verdict for verdict in verdicts if verdict.reward is None]
        assert failed and all("reward" in verdict.reason for verdict in failed)
        assert {verdict.reward for verdict in verdicts} <= {None, 0.0}, "10**400 times a failure is 0"


numbers = st.one_of(st.booleans(), st.integers(-(10**30), 10**30), st.floats(-1e38, 1e38))
odd = st.one_of(
    st.none(),
    st.text(),
    st.binary(),
    st.complex_numbers(),
    st.lists(st.floats(-1, 1)),
    st.dictionaries(st.text(max_size=3), st.floats(-1, 1)),
    st.sampled_from([float("nan"), float("inf"), -float("inf"), 10**400, 1e200, Decimal("NaN")]),
    st.text("0123456789.", min_size=1).map(np.str_),
    st.text("0123456789.", min_size=1).map(lambda text: np.array(text)),
    st.text("0123456789", min_size=1).map(lambda text: np.array(text, dtype=object)),
    st.binary().map(np.bytes_),
)


@given(numbers)
def test_a_number_is_read_as_itself_from_whatever_library(value: float) -> None:
    assert scalars.number(value) == float(value)
    assert scalars.number(np.float64(value)) == float(value)
    assert scalars.number(torch.tensor(float(value), dtype=torch.float64)) == float(value)
    assert scalars.number(Fraction(value)) == float(value) == scalars.number(Decimal(value))


@given(odd)
def test_nothing_else_is_a_number(value: object) -> None:
    with pytest.raises(ValueError):
        scalars.number(value)


@given(st.one_of(odd, st.integers(), st.floats(), st.sampled_from(["true", "false", "True", "", np.str_("True")])))
def test_only_true_and_false_are_truths(value: object) -> None:
    with pytest.raises(ValueError):
        scalars.truth(value)
    assert scalars.truth(np.bool_(True)) and not scalars.truth(torch.tensor(False))


class Violent:
    """A value that is foreign code."""

    def __init__(self, how: type[BaseException]) -> None:
        self.how = how

    def __float__(self) -> float:
        raise self.how

    def item(self) -> float:
        raise self.how


@pytest.mark.parametrize("how", [ValueError, SystemExit, GeneratorExit, MemoryError])
def test_a_value_that_fails_when_it_is_read_is_no_number_and_no_truth(how: type[BaseException]) -> None:
    for read in (scalars.number, scalars.truth):
        with pytest.raises(ValueError):
            read(Violent(how))
