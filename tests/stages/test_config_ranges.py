"""Numbers that no run can have are refused where they are given, under their own names."""

from __future__ import annotations

from typing import Any

import pytest

from turntree.core.config import from_mapping
from turntree.core.errors import ConfigError
from turntree.core.keys import keys
from turntree.stages.config import (
    EvaluateConfig,
    ProfileStageConfig,
    SFTStageConfig,
    TrainOnlineConfig,
    TrainPivotConfig,
)
from turntree.stages.gold import Gold
from turntree.train.launch import open_ranks
from turntree_worlds.qa.demonstrator import QaDemonstrator


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (TrainPivotConfig, {"pivots": "p", "check": {"tasks": -3}}, "check.tasks"),
        (TrainPivotConfig, {"pivots": "p", "check": {"states": -1}}, "check.states"),
        (TrainPivotConfig, {"pivots": "p", "check": {"max_turns": 0}}, "check.max_turns"),
        (SFTStageConfig, {"traces": "t", "check": {"max_tokens": 0}}, "check.max_tokens"),
        (TrainPivotConfig, {"states": "own", "own": {"candidates": 0}}, "own.candidates"),
        (
            TrainOnlineConfig,
            {"train": {"max_turns": 0}},
            "train.max_turns",
        ),
        (TrainOnlineConfig, {"train": {"rollout_seconds": 0.0}}, "train.rollout_seconds"),
        (EvaluateConfig, {"max_turns": 0}, "max_turns"),
        (EvaluateConfig, {"count": 0}, "count"),
        (Gold, {"count": -1}, "count"),
        (QaDemonstrator, {"count": 0}, "count"),
        (EvaluateConfig, {"temperature": 0.0}, "temperature"),
        (EvaluateConfig, {"max_live_rollouts": 0}, "max_live_rollouts"),
        (TrainPivotConfig, {"pivots": "p", "train": {"check_every": -1}}, "train.check_every"),
        (TrainOnlineConfig, {"train": {"check_every": -1}}, "train.check_every"),
        (SFTStageConfig, {"traces": "t", "sft": {"max_tokens": 0}}, "sft.max_tokens"),
        (TrainOnlineConfig, {"train": {"loss": {"clip_high": -0.1}}}, "train.loss.clip_high"),
    ],
)
def test_a_number_out_of_range_is_refused_by_its_name(kind: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"'{field}': is -?[\\d.]+; it is (at least|above)"):
        from_mapping(kind, given)


def test_workers_that_a_stage_would_not_start_are_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        from_mapping(SFTStageConfig, {"traces": "t", "cluster": {"workers": 2}})
    assert refused.value.field == "cluster.workers"


def test_what_is_no_key_any_more_may_stand_in_an_old_file_with_its_value_and_no_other() -> None:
    for name, value, other in (("eps", 1e-8, 1e-6), ("betas", [0.9, 0.95], [0.9, 0.999])):
        old = {"pivots": "p", "train": {"optimizer": {name: value}}}
        assert from_mapping(TrainPivotConfig, old) == TrainPivotConfig(pivots="p")
        with pytest.raises(ConfigError, match="is no key; it is") as refused:
            from_mapping(TrainPivotConfig, {"pivots": "p", "train": {"optimizer": {name: other}}})
        assert refused.value.field == f"train.optimizer.{name}"
        assert f"train.optimizer.{name}" not in {key.name for key in keys(TrainPivotConfig)}


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        (ProfileStageConfig, {"traces": "t", "profile": {"rollouts": 4, "adaptive": {}}}, "profile.adaptive.first"),
    ],
)
def test_adaptive_profiling_that_could_stop_nothing_is_refused(kind: Any, given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"'{field}': the first look is after 4 rollouts of 4"):
        from_mapping(kind, given)


@pytest.mark.parametrize("kind, steps", [(TrainPivotConfig, {"steps": 40}), (TrainOnlineConfig, {"iterations": 40})])
def test_a_learning_rate_that_could_never_fall_is_refused_before_there_is_a_run(kind: Any, steps: Any) -> None:
    optimizer = {"schedule": "cosine", "warmup_steps": 40}
    given = {"pivots": "p"} if kind is TrainPivotConfig else {}
    with pytest.raises(ConfigError, match=r"'train\.optimizer\.schedule': .*\(40\), and there are 40"):
        from_mapping(kind, {**given, "train": {**steps, "optimizer": optimizer}})


def test_credit_that_does_not_go_with_the_loss_names_the_key_of_the_loss() -> None:
    with pytest.raises(ConfigError, match=r"field 'train\.loss\.normalizer': 'tokens' brings back"):
        from_mapping(TrainOnlineConfig, {"train": {"credit": {"advantages": "dr_grpo"}}})


def test_sampling_that_no_loss_takes_is_named_where_it_is() -> None:
    with pytest.raises(ConfigError, match=r"field 'train\.sampling': training needs"):
        from_mapping(TrainOnlineConfig, {"train": {"sampling": {"temperature": 0.0}}})


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"gate": {"name": "divergence", "audit": 2.0}}, "gate.audit"),
        ({"gate": {"name": "divergence", "turn": 0}}, "gate.turn"),
        ({"gate": {"name": "random", "rate": 3.0}}, "gate.rate"),
        ({"brancher": {"name": "random", "rate": 3.0}}, "brancher.rate"),
        ({"filters": ["greso", {"name": "dapo", "refill_cap": -1.0}]}, "filters.1.refill_cap"),
    ],
)
def test_an_option_that_a_part_refuses_is_named_by_its_whole_key(given: dict[str, Any], field: str) -> None:
    """Of a gate it was said to be a defect of turntree, and of the others 'rate' and 'refill_cap' alone."""
    config = from_mapping(TrainOnlineConfig, given)
    with pytest.raises(ConfigError, match=f"field '{field}': "):
        config.build_gate(), config.build_brancher(100), config.build_filters()


LAUNCHER = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize("name, value", [*((name, "") for name in LAUNCHER if name != "WORLD_SIZE"), ("RANK", "one"),
    ("WORLD_SIZE", "two"), ("MASTER_PORT", "any")])  # fmt: skip
def test_half_of_a_launcher_is_refused_in_one_line(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, said in LAUNCHER.items():
        monkeypatch.setenv(key, said)
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"the environment says .*{name}='{value}'"), open_ranks():
        pass


def test_an_empty_world_size_is_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "")
    with open_ranks() as group:
        assert group is not None
