"""The random arm of the gate experiment cuts as many groups as the gate did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError
from turntree.core.protocols import Gate, GateDecision, GroupProgress
from turntree.decide.gates.divergence import PrefixDivergenceGate
from turntree.experiments import gate as experiment
from turntree.experiments.config import GateExperimentConfig
from turntree.experiments.gate import _random_gate, run_gate_experiment
from turntree.stages.config import TrainOnlineConfig
from turntree.train.loss_config import LossConfig

TURN, GROUPS = 4, 2000


def group(number: int, turn: int) -> GroupProgress:
    """As of `turn`: every other group is over after two turns, and half of all play the same actions."""
    early, alike = number % 2 == 0, number // 2 % 2 == 0
    turns = min(turn, 2) if early else turn
    actions = tuple(tuple(f"a{t}" if alike else f"r{r}t{t}" for t in range(turns)) for r in range(4))
    return GroupProgress(
        task_id=f"t{number}",
        max_turns=8,
        actions=actions,
        observations=(("",) * (turns + 1),) * 4,
        finished=(early and turn >= 2,) * 4,
        progress=(None,) * 4,
        iteration=1,
        occurrence=0,
    )


def played(gate: Gate) -> list[dict[str, Any]]:
    """The rows of `gate.jsonl`, as far as they matter here."""
    rows: list[dict[str, Any]] = []
    for number in range(GROUPS):
        for turn in range(1, TURN + 1):
            decision = gate.decide(group(number, turn))
            if decision is not None and (decision.cut or decision.final):
                rows.append(row(decision, turn))
                break
    return rows


def row(decision: GateDecision, turn: int) -> dict[str, Any]:
    return {"cut": turn if decision.cut else None, "numbers": dict(decision.numbers)}


def cuts(rows: list[dict[str, Any]]) -> int:
    return sum(row["cut"] is not None for row in rows)


def test_the_control_cuts_as_many_groups_as_the_gate_although_many_are_over_before_its_turn() -> None:
    log = played(PrefixDivergenceGate(turn=TURN, threshold=0.12))
    control = parts.build("gates", _random_gate(log), seed=0)
    assert cuts(log) == GROUPS / 4
    assert abs(cuts(played(control)) - cuts(log)) < 75  # five standard deviations of the draws


def test_a_gate_that_cut_nothing_has_a_control_that_cuts_nothing() -> None:
    log = played(PrefixDivergenceGate(turn=TURN, threshold=0.0))
    for rows in (log, []):
        assert cuts(played(parts.build("gates", _random_gate(rows), seed=0))) == 0


def test_the_control_matches_the_gate_wherever_it_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: dict[str, TrainOnlineConfig] = {}

    def run(config: TrainOnlineConfig, folder: Path) -> None:
        ran[folder.name] = config
        if folder.name == "gate":
            folder.mkdir(parents=True)
            (folder / "gate.jsonl").write_text(json.dumps({"cut": TURN, "numbers": {}}) + "\n")

    monkeypatch.setattr(experiment, "run_or_reuse", run)
    monkeypatch.setattr(experiment, "summarise", lambda config, out: {"arms": config.arms})
    listed = GateExperimentConfig(seeds=(0,), arms=("random", "none", "gate"))
    assert run_gate_experiment(listed, tmp_path)["arms"] == listed.arms
    assert ran["random"].gate == Part("random", {"turn": TURN, "rate": 1.0})


def test_a_repeated_arm_is_refused() -> None:
    with pytest.raises(ConfigError, match="each once"):
        GateExperimentConfig(arms=("none", "gate", "gate"))


def write(out: Path, arm: str, name: str, *rows: dict[str, Any]) -> None:
    """A log of an arm, by hand."""
    folder = experiment.arm_folder(out, 0, arm)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_recall_is_over_the_groups_without_variance_that_the_matched_arm_played(tmp_path: Path) -> None:
    """E.12: of three groups without variance the gate cut one; its other cut is of a mixed group, a third of a task
    that the other arm did not play."""
    rewards = {"a": [0, 0], "b": [1, 1], "c": [0, 0], "d": [0, 1]}
    played = [{"iteration": 1, "task": t, "rollouts": [{"reward": r} for r in rs]} for t, rs in rewards.items()]
    write(tmp_path, "none", "rollouts.jsonl", *played)
    cut_at = {"a": 4, "b": None, "d": 4, "e": 4}
    decisions = [{"id": t, "group": t, "iteration": 1, "task": t, "cut": cut} for t, cut in cut_at.items()]
    write(tmp_path, "gate", "rollouts.jsonl", *decisions)
    write(tmp_path, "gate", experiment.GATE_LOG, *decisions)
    found = experiment.precision([0], tmp_path, "gate")
    assert (found["cut"], found["unmatched"]) == (3, 1)
    assert found["precision"] == 1 / 2
    assert found["recall"] == 1 / 3


def test_the_papers_mean_over_rollouts_is_one_setting_away() -> None:
    """Section 2.1 divides by the N trajectories of the batch: a cut then enlarges the step, which is its factor."""
    mean = LossConfig(normalizer="rollouts", ratio="action", kl_coefficient=0.0)
    changed = GateExperimentConfig(train=replace(GateExperimentConfig().train, loss=mean))
    assert changed.online.train.loss == mean
    assert GateExperimentConfig().train.loss.normalizer == "constant"


def test_a_task_that_comes_twice_in_an_iteration_is_matched_group_by_group(tmp_path: Path) -> None:
    """An epoch ends inside an iteration: the flat group of the task was cut, its mixed one was not."""

    def groups(*rewards: tuple[float, float]) -> list[dict[str, Any]]:
        rows = [[{"reward": reward} for reward in pair] for pair in rewards]
        return [{"id": f"13.{k}", "iteration": 13, "task": "t", "rollouts": row} for k, row in enumerate(rows)]

    write(tmp_path, "none", "rollouts.jsonl", *groups((0.0, 0.0), (0.0, 1.0)))
    write(tmp_path, "gate", "rollouts.jsonl", *groups((0.0, 0.0), (0.0, 1.0)))
    decision = {"iteration": 13, "task": "t", "numbers": {}}
    write(
        tmp_path,
        "gate",
        "gate.jsonl",
        {**decision, "group": "13.0", "cut": 3},
        {**decision, "group": "13.1", "cut": None},
    )
    found = experiment.precision([0], tmp_path, "gate")
    assert (found["cut"], found["precision"], found["recall"]) == (1, 1.0, 1.0)
    write(tmp_path, "none", "rollouts.jsonl", *groups((0.0, 0.0), (1.0, 1.0)))
    write(tmp_path, "gate", "gate.jsonl", *({**decision, "group": f"13.{k}", "cut": 3} for k in range(2)))
    assert experiment.precision([0], tmp_path, "gate")["recall"] == 1.0
