"""How well each signal at each turn tells groups with mixed rewards from those without variance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.gates.table import GroupTable
from turntree.observe.statistics import auroc, percentile_interval, resampled, spearman

Row = dict[str, Any]


def associations(table: GroupTable, *, resamples: int, seed: int) -> list[Row]:
    """AUROC and Spearman's rho of every signal at every turn, overall and by task type (paper, tables 7 and 8).

    AUROC: chance that a mixed group has the higher raw signal than one without variance, ties a half; below 0.5 for
    signals that fall with variance. Spearman: against the population variance of the rewards. None where a class is
    empty or a side is constant. The interval is a percentile bootstrap over tasks, of the overall AUROC.
    """
    mixed_N = ~table.zero_variance_N
    samples = list(resampled(table.tasks, resamples=resamples, seed=seed))
    types = _types(table)
    rows: list[Row] = []
    for name, values_NK in table.signals_NK.items():
        for column, turn in enumerate(table.turns):
            values = values_NK[:, column]
            drawn = [auroc(values[sample], mixed_N[sample]) for sample in samples]
            rows.append(
                {
                    "signal": name,
                    "turn": turn,
                    **_pair(values, mixed_N, table.reward_var_N),
                    "auroc_interval": percentile_interval([value for value in drawn if value is not None]),
                    "task_types": {
                        kind: _pair(values[mask], mixed_N[mask], table.reward_var_N[mask])
                        for kind, mask in types.items()
                    },
                }
            )
    return rows


def task_type_sizes(table: GroupTable) -> dict[str, dict[str, int]]:
    """Groups of each type, and how many of them have no variance."""
    zero = table.zero_variance_N
    return {
        kind: {"groups": int(mask.sum()), "zero_variance": int((mask & zero).sum())}
        for kind, mask in _types(table).items()
    }


def by_task_type(table: GroupTable, cut_N: NDArray[np.bool_]) -> dict[str, dict[str, int]]:
    """Of each type: groups cut, and how many of them had no variance (tp) or mixed rewards (fp)."""
    zero, found = table.zero_variance_N, dict[str, dict[str, int]]()
    for kind, mask in _types(table).items():
        cut = cut_N & mask
        found[kind] = {"cut": int(cut.sum()), "tp": int((cut & zero).sum()), "fp": int((cut & ~zero).sum())}
    return found


def _types(table: GroupTable) -> dict[str, NDArray[np.bool_]]:
    """Where each task type stands, the most frequent first."""
    known = [kind for kind in table.task_types if kind is not None]
    order: Sequence[str] = sorted(set(known), key=lambda kind: (-known.count(kind), kind))
    return {kind: np.array([each == kind for each in table.task_types]) for kind in order}


def _pair(values: NDArray[np.float64], mixed: NDArray[np.bool_], variance: NDArray[np.float64]) -> Row:
    return {"auroc": auroc(values, mixed), "spearman": spearman(values, variance)}
