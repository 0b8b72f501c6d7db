"""What can be known of a moment's variance before it is forked, for `experiments.ladder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.experiments.premise import ForkSeen, against_variance


def predictors(moments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What can be known of a moment's variance: rank correlation within turns, and the variance in the upper over the
    lower half (intervals over questions). Of entropy; of the question's own history, the mean variance of its moments
    under the other seeds; and of a Bayesian linear regression that never saw the question, on `features` alone
    (`learned`) and with the history."""
    names = sorted(moments[0]["features"])
    inputs = np.array([[row["features"][name] for name in names] for row in moments])
    turns = np.array([row["turn"] for row in moments])
    inputs = np.column_stack([inputs, turns, turns == 2, turns == 3])
    past = _history(moments)
    scores = {
        "entropy": np.array([row["features"]["probe_entropy"] for row in moments]),
        "learned": _held_out(moments, inputs),
        "history": past,
        "learned_with_history": _held_out(moments, np.column_stack([inputs, past])),
    }
    return {"features": names} | {name: _against(moments, score) for name, score in scores.items()}


def _history(moments: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Of each moment's question under the other seeds; the mean of all where there is nothing."""
    seen: dict[str, dict[int, list[float]]] = {}
    for row in moments:
        seen.setdefault(row["task"], {}).setdefault(row.get("seed", 0), []).append(row["variance"])
    overall = float(np.mean([row["variance"] for row in moments]))

    def elsewhere(row: Mapping[str, Any]) -> float:
        others = [one for seed, found in seen[row["task"]].items() if seed != row.get("seed", 0) for one in found]
        return float(np.mean(others)) if others else overall

    return np.array([elsewhere(row) for row in moments])


def _held_out(moments: Sequence[Mapping[str, Any]], inputs: NDArray[np.float64], folds: int = 5) -> NDArray[np.float64]:
    """Predictions for each fifth of the questions from the others."""
    spread = inputs.std(axis=0)
    inputs = np.column_stack([(inputs - inputs.mean(axis=0)) / np.where(spread > 0, spread, 1.0), np.ones(len(inputs))])
    variances = np.array([row["variance"] for row in moments])
    tasks = sorted({row["task"] for row in moments})
    fold = np.array([tasks.index(row["task"]) % folds for row in moments])
    found = np.zeros(len(moments))
    for number in range(folds):
        held = fold == number
        if held.any() and not held.all():
            found[held] = inputs[held] @ posterior(inputs[~held], variances[~held])
    return found


def posterior(inputs: NDArray[np.float64], targets: NDArray[np.float64], prior: float = 1.0) -> NDArray[np.float64]:
    """Mean weights of a Bayesian linear regression with normal prior and noise (Bishop 2006, 3.53); the noise has the
    variance of the targets."""
    noise = float(targets.var()) or 1.0
    precision = np.eye(inputs.shape[1]) / prior + inputs.T @ inputs / noise
    return np.asarray(np.linalg.solve(precision, inputs.T @ targets / noise), dtype=float)


def _against(moments: Sequence[Mapping[str, Any]], score: NDArray[np.float64]) -> dict[str, Any] | None:
    seen = [
        ForkSeen(row["task"], row["turn"], float(value), 0.0, tuple(row["rewards"]))
        for row, value in zip(moments, score, strict=True)
    ]
    found = against_variance(seen, resamples=500).get("entropy")
    return found if found and found["spearman"] is not None else None
