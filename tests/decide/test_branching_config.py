"""Configurations of branching that cannot work are refused before anything is loaded, in one line."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.config import Part, from_mapping, to_mapping
from turntree.core.errors import ConfigError
from turntree.credit.comparisons import across_starts, mean_centred
from turntree.credit.config import CreditConfig
from turntree.credit.credit import CreditRule
from turntree.credit.scored import path_weighted
from turntree.rollout.scheduler import SchedulerConfig
from turntree.stages.train_online import TrainOnlineConfig, open_rollouts
from turntree.train.losses import LossConfig
from turntree.train.online import OnlineConfig

UNBIASED = CreditConfig(leaf_weights="path_weighted", comparison="starts", advantages="rloo")
CONSTANT = LossConfig(normalizer="constant", constant=100.0)


def config(brancher: Part | None, initial: int | None = 4, **train: Any) -> TrainOnlineConfig:
    wanted = TrainOnlineConfig(train=OnlineConfig(group_size=8, initial_rollouts=initial, **train), brancher=brancher)
    wanted.build_brancher(vocabulary=10)
    return wanted


def test_what_works_survives_its_file() -> None:
    for brancher in (Part("entropy"), Part("fixed_brancher:FixedBrancher", {"turns": [2, 3]}), Part("arpo")):
        wanted = config(brancher)
        assert from_mapping(TrainOnlineConfig, to_mapping(wanted)) == wanted
    config(Part("entropy"), credit=UNBIASED, loss=CONSTANT)
    config(Part("entropy", {"probe_tokens": 1}), loss=LossConfig(ratio="action"))
    config(Part("fixed_brancher:FixedBrancher"), loss=LossConfig(ratio="action"))
    config(None, None)


@pytest.mark.parametrize(
    ("wrong", "field", "why"),
    [
        (lambda: config(Part("entropy"), 8), "train.initial_rollouts", "none left to add"),
        (lambda: config(None, 4), "train.initial_rollouts", "without a brancher"),
        (lambda: config(Part("entropy"), loss=LossConfig(ratio="action")), "train.loss.ratio", "whole turns"),
        (
            lambda: config(Part("random"), loss=LossConfig(ratio="action")),
            "train.loss.ratio",
            "share a part of one",
        ),
        (
            lambda: config(Part("arpo"), credit=UNBIASED, loss=CONSTANT),
            "train.credit.leaf_weights",
            "path weights are biased",
        ),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_in_one_line(wrong: Any, field: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        wrong()
    assert f"field '{field}'" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("initial", [0, 9])
def test_impossible_numbers_of_rollouts_are_refused(initial: int) -> None:
    with pytest.raises(ConfigError, match="initial_rollouts"):
        SchedulerConfig(group_size=8, initial_rollouts=initial)


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (CreditRule(leaf_weights=path_weighted), "comparison"),
        (CreditRule(leaf_weights=path_weighted, comparison=across_starts), "loss.normalizer"),
        (CreditRule(advantages=mean_centred), "loss.normalizer"),
    ],
)
def test_an_estimator_by_name_is_refused_where_the_same_keys_would_be(rule: Any, field: str, monkeypatch: Any) -> None:
    monkeypatch.setattr("turntree.stages.config.parts.build", lambda *_, **__: rule)
    with pytest.raises(ConfigError) as refused:
        TrainOnlineConfig(estimator=Part("mine:rule")).build_estimator()
    assert refused.value.field == field
    constant = OnlineConfig(loss=CONSTANT)
    if field == "loss.normalizer":
        assert TrainOnlineConfig(estimator=Part("mine:rule"), train=constant).build_estimator() is not None


def test_another_trainer_gets_groups_with_a_greedy_rollout_and_none_that_a_batch_must_complete() -> None:
    assert OnlineConfig(credit=CreditConfig(advantages="remax")).played.rollouts.greedy_first
    over_a_batch = TrainOnlineConfig(train=OnlineConfig(credit=CreditConfig(advantages="reinforce_pp")))
    with pytest.raises(ConfigError) as refused, open_rollouts(over_a_batch):
        pass
    assert refused.value.field == "train.credit.advantages"
