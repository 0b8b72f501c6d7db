"""The example game keeps the laws, and its splits never meet."""

from __future__ import annotations

from pathlib import Path

import pytest

from turntree.core.config import Part
from turntree.env.check import check_environment
from turntree.env.tasks import open_tasks


def test_the_example_game_keeps_the_laws_and_its_splits_never_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    with open_tasks(Part("examples.hide_and_seek:tasks"), {"train": 400, "dev": 100, "test": 100}) as opened:
        assert check_environment(opened.of("train")[0]) == []
        assert len({task.task_id for split in ("train", "dev", "test") for task in opened.of(split)}) == 600
