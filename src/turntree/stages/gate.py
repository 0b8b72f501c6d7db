"""`turntree gate`: finished groups in, what a gate would have done to them out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from turntree.core.errors import InputError
from turntree.gates.calibrate import CalibrationConfig, calibrate
from turntree.gates.features import PAPER_HORIZON, read_features
from turntree.gates.sweep import PAPER_SIGNAL, sweep
from turntree.gates.table import GroupTable, table_from_groups
from turntree.logs.read import LogFormat, open_log
from turntree.logs.rows import ReadConfig

RuleName = Literal["single", "or"]


def read_groups(
    paths: Sequence[Path],
    *,
    turns: Sequence[int] | None = None,
    max_turns: int | None = None,
    form: LogFormat | None = None,
    config: ReadConfig | None = None,
) -> tuple[GroupTable, dict[str, Any] | None]:
    """A feature table (one CSV file) or a rollout log (anything that `open_log` reads), and what reading counted."""
    if len(paths) == 1 and paths[0].suffix == ".csv":
        features = read_features(paths[0], max_turns=max_turns or PAPER_HORIZON)
        return features if turns is None else features.at(turns), None
    log = open_log(paths, form, config)
    table = table_from_groups(list(log), source=str(paths[0]), max_turns=max_turns, turns=turns)
    return table, log.report.to_json()


def run_sweep(
    paths: Sequence[Path],
    *,
    turn: int,
    thresholds: Sequence[float],
    rule: RuleName = "single",
    termination: float | None = None,
    signal: str = PAPER_SIGNAL,
    max_turns: int | None = None,
    form: LogFormat | None = None,
    config: ReadConfig | None = None,
) -> dict[str, Any]:
    """`rows`: the columns of the paper's Table 1 for every threshold, and the savings that the data really have."""
    if (rule == "or") != (termination is not None):
        hint = "give both --rule or and --termination, or neither"
        raise InputError("the OR rule and the termination fraction belong together", field="--rule", hint=hint)
    table, read = read_groups(paths, turns=[turn], max_turns=max_turns, form=form, config=config)
    return {
        "source": table.source,
        "groups": len(table.tasks),
        "zero_variance": int(table.zero_variance_N.sum()),
        "turn": turn,
        "max_turns": table.max_turns,
        "rule": rule,
        "signal": signal,
        "termination": termination,
        "rows": sweep(table, thresholds, turn=turn, signal=signal, termination=termination),
        "absent": table.absent,
        "dropped": table.dropped,
        "read": read,
    }


def run_calibration(
    paths: Sequence[Path],
    calibration: CalibrationConfig,
    *,
    turns: Sequence[int] | None = None,
    max_turns: int | None = None,
    form: LogFormat | None = None,
    config: ReadConfig | None = None,
) -> tuple[dict[str, Any], GroupTable]:
    """What `calibrate` says, and the groups that it looked at (for the page)."""
    table, read = read_groups(paths, turns=turns, max_turns=max_turns, form=form, config=config)
    return {**calibrate(table, calibration), "read": read}, table
