"""End-to-end GRPO with groups of different sizes: the budget, the metrics, and that a killed run goes on exactly."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_online import ROLLOUTS, config, corridors, parts, weights, without_timing

from fault_drill import Hopeless
from turntree.advantages.config import CreditConfig
from turntree.branching.rules import FixedBrancher
from turntree.core.errors import ConfigError
from turntree.filters.allocation import HOPELESS, AllocationConfig
from turntree.filters.dapo import DapoFilter
from turntree.training.checkpoints import CheckpointConfig, Checkpoints
from turntree.training.online import train_online

ALLOCATED = {"iterations": 5, "groups": 4, "allocation": AllocationConfig(smallest=3, prior=0.5)}


def test_an_allocated_run_plays_as_many_rollouts_and_gives_the_hopeless_none() -> None:
    run, rows, seen = parts([Hopeless("lost", 1), *corridors(count=3)]), [], []
    train_online(
        run,
        config(**ALLOCATED),
        log=rows.append,
        keep=lambda iteration, groups, credits: seen.append([len(group.rewards.verdicts) for group in groups]),
    )
    assert [sum(sizes) for sizes in seen] == [sum(row["stops"].values()) for row in rows] == [16] * 5
    assert seen[0] == [4] * 4 != sorted(seen[-1])
    assert sum(row["prompts_skipped"].get(HOPELESS, 0) for row in rows) > 0
    for row, sizes in zip(rows, seen, strict=True):
        figures = row["allocation"]
        none = sum(row["prompts_skipped"].values())
        given = {int(size): count for size, count in figures["sizes"].items() if size != "0"}
        assert given == Counter(sizes) and figures["sizes"].get("0", 0) == none == 4 - row["groups"]
        assert 0 <= figures["zero_variance_predicted"] <= 1 and 0 <= figures["zero_variance"] <= 1


def test_an_allocated_run_that_was_killed_goes_on_to_the_same_weights_and_rows(tmp_path: Path) -> None:
    tasks = [Hopeless("lost", 1), *corridors(count=3)]
    settings = config(**ALLOCATED, dapo=DapoFilter(refill_cap=0.5))
    calm, calm_rows = parts(tasks), []
    train_online(calm, settings, log=calm_rows.append)
    assert len({str(row["allocation"]["sizes"]) for row in calm_rows}) > 1
    rows: list[dict[str, Any]] = []
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(every=1))

    def killed(row: dict[str, Any]) -> None:
        if row["step"] == 4:
            raise KeyboardInterrupt
        rows.append(row)

    with pytest.raises(KeyboardInterrupt):
        train_online(parts(tasks), settings, log=killed, checkpoints=checkpoints)
    again = parts(tasks)
    train_online(again, settings, log=rows.append, checkpoints=checkpoints)
    assert without_timing(json.loads(json.dumps(rows))) == without_timing(json.loads(json.dumps(calm_rows)))
    assert all(torch.equal(value, weights(calm)[name]) for name, value in weights(again).items())


def test_a_task_without_rollouts_is_no_place_for_a_refill() -> None:
    """The iteration wants the groups that were given rollouts: DAPO without a cap adds none."""
    run, rows = parts([Hopeless("lost", 1), *corridors(count=3)]), []
    train_online(run, config(**ALLOCATED, dapo=DapoFilter()), log=rows.append)
    assert min(row["groups"] for row in rows) < 4
    assert [sum(row["stops"].values()) for row in rows] == [16] * 5


def test_an_allocation_with_branching_is_refused() -> None:
    halves = replace(ROLLOUTS, initial_rollouts=2)
    with pytest.raises(ConfigError, match="branching"):
        config(**ALLOCATED, rollouts=halves)
    with pytest.raises(ConfigError, match="brancher"):
        train_online(parts(brancher=FixedBrancher(turns=[2])), config(**ALLOCATED), log=lambda row: None)


@pytest.mark.parametrize("advantages", ["rloo", "mean_centred"])
def test_the_run_weighs_its_groups_as_its_estimator_needs_it(advantages: Any) -> None:
    """Groups of another size than 4: their advantages are those of the rule times the factor of their size."""
    seen: list[tuple[int, float]] = []
    credit = CreditConfig(advantages=advantages)
    settings = config(**ALLOCATED, credit=credit)
    rule = settings.loss.estimator(credit)

    def keep(iteration: int, groups: Any, credits: Any) -> None:
        for group, found in zip(groups, credits, strict=True):
            plain = rule(group.tree, group.rewards)
            whole, ours = (sum(one.positive for one in each.nodes.values()) for each in (plain, found))
            if whole:
                seen.append((len(group.rewards.verdicts), ours / whole))
            assert found.rollouts == pytest.approx(4)

    train_online(parts([Hopeless("lost", 1), *corridors(count=3)]), settings, log=lambda row: None, keep=keep)
    assert len({size for size, _ in seen}) > 1
    for size, found in seen:
        wanted = 3 / (size - 1) if advantages == "mean_centred" else 4 / size
        assert found == pytest.approx(wanted)
