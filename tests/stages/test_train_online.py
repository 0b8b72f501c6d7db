"""A killed online run leaves the same logs as one that was not killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from turntree.branching.config import BranchConfig
from turntree.core.completion import Sampling
from turntree.gates.config import CheckpointConfig as Look
from turntree.gates.config import GateConfig
from turntree.logs.rollouts import FILE_NAME
from turntree.rollouts.live import EpisodeConfig
from turntree.rollouts.scheduler import SchedulerConfig
from turntree.stages.train_online import BRANCH_LOG, GATE_LOG, HELD_OUT, TrainOnlineConfig, run_train_online
from turntree.training.checkpoints import CheckpointConfig, Checkpoints
from turntree.training.online import OnlineConfig

LOGS = (FILE_NAME, GATE_LOG, BRANCH_LOG, HELD_OUT)
ROLLOUTS = SchedulerConfig(
    episodes=EpisodeConfig(max_turns=3, sampling=Sampling(max_tokens=12)), group_size=3, initial_rollouts=2
)
CONFIG = TrainOnlineConfig(
    count=3,
    held_out_count=1,
    train=OnlineConfig(iterations=3, groups=2, check_every=1, rollouts=ROLLOUTS),
    branching=BranchConfig(rule="entropy", probe_tokens=2),  # paced: it remembers earlier iterations
    gate=GateConfig(checkpoints=(Look(turn=2, threshold=0.5),), audit=0.5),
    checkpoints=CheckpointConfig(every=1),
)


def without_timing(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: without_timing(inner) for key, inner in value.items() if key != "timing"}


def rows(path: Path) -> list[Any]:
    return [without_timing(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_a_killed_run_had_logged_after_its_checkpoint_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_train_online(CONFIG, tmp_path / "calm")
    save = Checkpoints.save

    def killed(self: Checkpoints, step: int, *state: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt
        save(self, step, *state)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", killed)
        run_train_online(CONFIG, tmp_path / "killed")
    for name in LOGS:
        with (tmp_path / "killed" / name).open("a", encoding="utf-8") as log:
            log.write('{"iteration": 2, "half of a r')
    run_train_online(CONFIG, tmp_path / "killed")
    for name in (*LOGS, "metrics.jsonl"):
        logged = rows(tmp_path / "calm" / name)
        assert {row["iteration"] for row in logged if "iteration" in row} >= {2, 3} or name == "metrics.jsonl"
        assert rows(tmp_path / "killed" / name) == logged
    bills = [json.loads((tmp_path / run / "cost.json").read_text(encoding="utf-8")) for run in ("calm", "killed")]
    assert without_timing(bills[0]) == without_timing(bills[1])
