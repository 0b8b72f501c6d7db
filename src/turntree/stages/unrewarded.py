"""Rollouts without a reward teach nothing. A run that has no other ones is no success, and says so early."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turntree.core.errors import InputError
from turntree.core.verdict import most_frequent

Row = Mapping[str, Any]  # of metrics.jsonl

HINT = "see turntree check model and turntree check environment"


CUT = "group cut by the gate"


def reasons(rows: Sequence[Row]) -> dict[str, int]:
    """Why rollouts of these steps have no reward, with their numbers."""
    found = Counter[str]()
    for row in rows:
        found.update(row.get("censored_reasons") or {})
    return dict(found)


def none_rewarded(row: Row) -> str | None:
    """For the first step, if none of its rollouts has a reward; None for any other row."""
    if row["step"] != 1 or row["reward_mean"] is not None or not (why := _why([row])):
        return None
    return f"warning: step 1: no rollout has a reward, so nothing was trained ({most_frequent(why)})"


def require_rewards(rows: Sequence[Row]) -> None:
    """Raises `InputError` where the whole run has no rollout with a reward: its policy is that of the start."""
    steps = [row for row in rows if row["step"]]
    if any(row["reward_mean"] is not None for row in steps) or not (why := _why(steps)):
        return
    raise InputError(
        f"no rollout of the run has a reward, so the policy is that of the start ({most_frequent(why)})",
        hint=HINT if set(why) != {CUT} else "loosen the gate: turntree gate sweep shows what a threshold cuts",
    )


def _why(rows: Sequence[Row]) -> dict[str, int]:
    """As `reasons`, and the groups that the gate cut, whose rollouts are censored on purpose."""
    cut = sum(row.get("groups_cut", 0) for row in rows)
    return {**reasons(rows), **({CUT: cut} if cut else {})}
