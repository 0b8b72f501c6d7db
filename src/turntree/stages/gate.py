"""`turntree gate`: finished groups in, the effect of a gate on them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from turntree.core.config import Between, Part
from turntree.core.errors import ConfigError
from turntree.decide.gates.calibrate import SHOWN_THRESHOLDS, CalibrationConfig, calibrate
from turntree.decide.gates.features import PAPER_HORIZON, read_features
from turntree.decide.gates.sweep import PAPER_SIGNAL, sweep
from turntree.decide.gates.table import GroupTable, table_from_groups
from turntree.logs.read import AUTO, open_log


def read_groups(
    paths: Sequence[Path],
    *,
    turns: Sequence[int] | None = None,
    max_turns: int | None = None,
    log_format: Part = AUTO,
) -> tuple[GroupTable, dict[str, Any] | None]:
    """A feature table (one CSV file) or a rollout log (anything that `open_log` reads), and the counts of what was
    read."""
    if len(paths) == 1 and paths[0].suffix == ".csv":
        features = read_features(paths[0], max_turns=max_turns or PAPER_HORIZON)
        return features if turns is None else features.at(turns), None
    log = open_log(paths, log_format)
    table = table_from_groups(list(log), source=str(paths[0]), max_turns=max_turns, turns=turns)
    return table, log.report.to_json()


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """`turntree gate sweep`."""

    turn: Annotated[int, Between(1)] = 10
    """K, the turn at which the gate looks."""
    thresholds: tuple[float, ...] = SHOWN_THRESHOLDS
    """Cut below these; from these on for termination_fraction."""
    signal: str = PAPER_SIGNAL
    """One of the seven signals."""
    rule: Literal["single", "or"] = "single"
    """Cut by the signal alone, or also by the share of rollouts that have ended."""
    termination: Annotated[float, Between(0, 1)] | None = None
    """With rule "or": cut from this termination fraction on."""
    max_turns: Annotated[int, Between(1)] | None = None
    """The horizon; default: the longest rollout, CSV: 30."""
    log_format: Part = AUTO
    """Of a log, where its fields do not tell it: a registered format, or module:object of your own."""

    def __post_init__(self) -> None:
        if (self.rule == "or") != (self.termination is not None):
            hint = "give both --rule or and --termination, or neither"
            raise ConfigError("the OR rule and the termination fraction belong together", field="--rule", hint=hint)


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """`turntree gate calibrate`."""

    turns: tuple[Annotated[int, Between(1)], ...] | None = None
    """Turns to evaluate, e.g. 5,10,15; default: 1/6, 1/3, 1/2, 2/3 of the horizon."""
    max_turns: Annotated[int, Between(1)] | None = None
    """The horizon; default: the longest rollout, CSV: 30."""
    log_format: Part = AUTO
    """Of a log, where its fields do not tell it: a registered format, or module:object of your own."""
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)


def run_sweep(
    paths: Sequence[Path],
    config: SweepConfig,
) -> dict[str, Any]:
    """`rows`: the columns of the paper's Table 1 for every threshold, and the actual savings on this data."""
    table, read = read_groups(paths, turns=[config.turn], max_turns=config.max_turns, log_format=config.log_format)
    return {
        "source": table.source,
        "groups": len(table.tasks),
        "zero_variance": int(table.zero_variance_N.sum()),
        "turn": config.turn,
        "max_turns": table.max_turns,
        "rule": config.rule,
        "signal": config.signal,
        "termination": config.termination,
        "rows": sweep(table, config.thresholds, turn=config.turn, signal=config.signal, termination=config.termination),
        "absent": table.absent,
        "dropped": table.dropped,
        "read": read,
    }


def run_calibration(
    paths: Sequence[Path],
    config: CalibrateConfig,
) -> tuple[dict[str, Any], GroupTable]:
    """The result of `calibrate`, and the groups that it used (for the page)."""
    table, read = read_groups(paths, turns=config.turns, max_turns=config.max_turns, log_format=config.log_format)
    return {**calibrate(table, config.calibration), "read": read}, table
