"""A policy that attends to a window is not trained on longer packed trees, whichever engine samples: a server keeps to
the window, and a packed pass would not. It has a row per rollout then, or is refused where it is to share prefixes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from scripted_engine import ScriptedEngine
from tiny_models import VOCAB_SIZE, save_tiny_checkpoint
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.stages.config import Device, TrainOnlineConfig, TrainPivotConfig
from turntree.stages.train_online import run_train_online
from turntree.stages.train_pivot import run_train_pivot
from turntree.train.config import OnlineConfig, PivotConfig

WINDOW, CONTEXT = 64, 4096


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = save_tiny_checkpoint(tmp_path / "policy")
    config = folder / "config.json"
    kinds = {
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "layer_types": ["full_attention", "sliding_attention"],
    }
    config.write_text(json.dumps(json.loads(config.read_text()) | kinds))
    return str(folder)


def engine(policy: object) -> ScriptedEngine:
    """Like a server, it knows the window, and samples with it."""
    return ScriptedEngine(lambda prompt, seed: (7,), [7], vocab_size=VOCAB_SIZE, max_context=CONTEXT)


ELSEWHERE = Device(engine=Part("test_windows:engine"), prefixes="shared")


def online(model: str, tokens: int) -> TrainOnlineConfig:
    train = OnlineConfig(max_context=tokens)
    return TrainOnlineConfig(model=model, device=ELSEWHERE, train=train)


def pivot(model: str, tokens: int) -> TrainPivotConfig:
    household, train = Part("household"), PivotConfig(max_tokens=tokens)
    own = {"states": "own", "teacher": household, "verifier": household, "environment": household}
    return TrainPivotConfig(**own, model=model, device=ELSEWHERE, train=train)


STAGES = [
    (run_train_online, online, "train.max_context"),
    (run_train_pivot, pivot, "train.max_tokens"),
]


class Reached(Exception):
    """The check that a test waits for was called."""


def reached(model: object) -> None:
    raise Reached


@pytest.mark.parametrize(("run", "config", "field"), STAGES, ids=["online", "pivot"])
def test_paths_longer_than_the_window_are_refused_before_anything_is_sampled(
    run: Callable, config: Callable, field: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as refused:
        run(config(model, WINDOW + 1), tmp_path / "run")
    said = f"field {field!r}: Qwen3ForCausalLM attends to the last {WINDOW} tokens only; use at most {WINDOW}"
    assert str(refused.value) == said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("run", "config", "field"), STAGES, ids=["online", "pivot"])
def test_paths_within_the_window_are_not(
    run: Callable, config: Callable, field: str, model: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("turntree.train.isolation.check_path_isolation", reached)
    with pytest.raises(Reached):
        run(config(model, WINDOW), tmp_path / "run")


@pytest.mark.parametrize(("run", "config", "field"), STAGES, ids=["online", "pivot"])
@pytest.mark.parametrize("carried", [True, False])
def test_longer_paths_go_chain_by_chain_or_else_row_by_row_where_the_choice_is_ours(
    run: Callable, config: Callable, field: str, carried: bool, model: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    asked = config(model, WINDOW + 1)
    device = replace(asked.device, prefixes="auto", gradient_checkpointing=not carried)
    monkeypatch.setattr("turntree.train.isolation.check_rows", reached)
    if carried:
        monkeypatch.setattr("turntree.train.isolation.notice", lambda said: reached(notice(said)))
    with pytest.raises(Reached):
        run(replace(asked, device=device), tmp_path / "run")
    how = "trees go through the model chain by chain"
    said = how if carried else "a row per rollout, which computes shared prefixes again"
    told = capsys.readouterr().err
    assert f"{said}: Qwen3ForCausalLM attends to the last {WINDOW} tokens only ({field}: use at most {WINDOW})" in told
    assert ("gradient_checkpointing" in told) is not carried
