"""`turntree gate calibrate`: finished groups in, the effect of a gate on them out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from turntree.core.config import Between, Part
from turntree.core.errors import ConfigError
from turntree.decide.gates.calibrate import PAPER_SIGNAL, TABLE_1, calibrate
from turntree.decide.gates.features import PAPER_HORIZON, read_features
from turntree.decide.gates.table import table_from_groups
from turntree.logs.read import AUTO, open_log


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig:
    """`turntree gate calibrate`."""

    turns: tuple[Annotated[int, Between(1)], ...] | None = None
    """Turns to evaluate, e.g. 5,10,15; default: 1/6, 1/3, 1/2, 2/3 of the horizon."""
    thresholds: tuple[float, ...] = TABLE_1
    """Of the table: cut below these; from these on for termination_fraction."""
    signal: str = PAPER_SIGNAL
    """Of the table: one of the seven signals, or NAME_printed where the paper's text defines it otherwise."""
    termination: Annotated[float, Between(0, 1)] | None = None
    """Of the table: cut also from this share of ended rollouts on (the OR rule)."""
    unended: Annotated[float, Between(0, 1)] | None = None
    """Of the table: cut also up to this share of ended rollouts (paper, E.9; with `termination` both clauses)."""
    floor: float = 0.8
    """Precision that a gate must have (paper, C.5)."""
    confidence: float = 0.95
    """Of the lower bound of precision."""
    max_turns: Annotated[int, Between(1)] | None = None
    """The horizon; default: the longest rollout, CSV: 30."""
    log_format: Part = AUTO
    """Of a log, where its fields do not tell it: a registered format, or module:object of your own."""

    def __post_init__(self) -> None:
        for name in ("floor", "confidence"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError("must be between 0 and 1", field=name)


def run_calibration(paths: Sequence[Path], config: CalibrateConfig) -> dict[str, Any]:
    """The result of `calibrate` on a feature table (one CSV file) or a rollout log (anything that `open_log` reads);
    `read` are the counts of the log."""
    if len(paths) == 1 and paths[0].suffix == ".csv":
        table = read_features(paths[0], max_turns=config.max_turns or PAPER_HORIZON, turns=config.turns)
        read = None
    else:
        log = open_log(paths, config.log_format)
        table = table_from_groups(list(log), source=str(paths[0]), max_turns=config.max_turns, turns=config.turns)
        read = log.report.to_json()
    result = calibrate(
        table,
        thresholds=config.thresholds,
        signal=config.signal,
        termination=config.termination,
        unended=config.unended,
        floor=config.floor,
        confidence=config.confidence,
    )
    return {**result, "read": read}
