"""The summary of a profile, accumulated row by row in constant memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from turntree.pivots.rows import Row, Stop, classify
from turntree.pivots.stopping import AdaptiveConfig, way_of

UNJUDGED = "not judged by the verifier"
_REASONS = 20  # the most distinct faults that are counted; a server may send unlimited different messages


class ProfileSummary:
    """Counts over the rows of a profile. The classes are those at lambda = `threshold` (0.6 where K is fixed)."""

    def __init__(self, rollouts: int, adaptive: AdaptiveConfig | None) -> None:
        self.threshold = (adaptive or AdaptiveConfig()).threshold
        self._rollouts, self._adaptive = rollouts, adaptive
        self._classes: Counter[str] = Counter()
        self._stops: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._cost: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._doubt = self._accepted = self._missed = 0.0

    def add(self, row: Row) -> None:
        self._classes[classify(row, self.threshold)] += 1
        self._stops[row["stop"]] += 1
        self._sums.update({key: row[key] for key in ("rollouts", "truncated", "unjudged")})
        for reason, count in row["faults"].items():
            known = reason in self._faults or len(self._faults) < _REASONS
            self._faults[reason if known else "other"] += count
        self._sums.update(candidates=1, gold_refused=row.get("gold") == 0.0)
        self._sums.update(gold_unjudged="gold" in row and row["gold"] is None)
        self._doubt += 1 - row["certainty"]
        for action in row["actions"]:
            if action["reward"] == 1.0 and action["strict"] is not None:
                share = action["count"] / row["rollouts"]  # adaptive profiling samples some candidates more often
                self._accepted += share
                self._missed += share * (action["strict"] == 0.0)
        if self._adaptive is not None and row["stop"] == Stop.AUDITED:
            rewards = [a["reward"] for a in row["actions"] if a["reward"] is not None for _ in range(a["count"])]
            agreed = way_of(rewards, self._adaptive.threshold) == row["audit"]["forecast"]
            self._sums.update(audited=1, audit_disagreed=not agreed)
        self._cost.update(row["cost"])

    @property
    def candidates(self) -> int:
        return self._sums["candidates"]

    @property
    def scored(self) -> int:
        """Rollouts with a reward."""
        return self._sums["rollouts"] - self._sums["unjudged"]

    @property
    def unscored(self) -> dict[str, int]:
        """Why rollouts have no reward: faults of the engine by reason, and what the verifier could not judge."""
        unjudged = self._sums["unjudged"] - self._faults.total()
        return {**dict(self._faults.most_common()), **({UNJUDGED: unjudged} if unjudged else {})}

    def summary(self, skipped: Mapping[str, int]) -> dict[str, Any]:
        """`miss_rate` is Pr[strict = 0 | functional = 1] with every candidate weighing the same (PivotRL, section 2);
        None when nothing was acceptable."""
        sums = self._sums
        summary: dict[str, Any] = {
            "candidates": sums["candidates"],
            "skipped_turns": dict(sorted(skipped.items())),
            "threshold": self.threshold,
            "classes": dict(sorted(self._classes.items())),
            "rollouts": sums["rollouts"],
            "stops": dict(sorted(self._stops.items())),
            "miss_rate": self._missed / self._accepted if self._accepted else None,
            **{key: sums[key] for key in ("truncated", "unjudged", "gold_refused", "gold_unjudged")},
            "faults": dict(self._faults),
            "cost": dict(self._cost),
        }
        if self._adaptive is not None:
            summary["adaptive"] = {
                "saved": 1 - sums["rollouts"] / (sums["candidates"] * self._rollouts),
                "expected_disagreement": self._doubt / sums["candidates"],
                "audited": sums["audited"],
                "audit_disagreed": sums["audit_disagreed"],
            }
        return summary
