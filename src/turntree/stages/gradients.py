"""Rollouts without a reward teach nothing, and neither do groups whose rewards are all equal. A run that has no other
ones says so early, and what to do; without any reward it is no success."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from turntree.core.errors import InputError
from turntree.core.tree import StopReason
from turntree.core.verdict import most_frequent

Row = Mapping[str, Any]  # of metrics.jsonl

CUT = "group cut by the gate"
STILL = 1e-6  # of the KL divergence from the start, in nats a token
NEARLY_ALL = 0.9  # of the rollouts
_SERVER = re.compile(r"\b(API\w*|RateLimit|InternalServer|Authentication|PermissionDenied|NotFound|BadRequest)Error\b")


def reasons(rows: Sequence[Row], figure: str = "censored_reasons") -> dict[str, int]:
    """Why rollouts of these steps have no reward, with their numbers; or what another figure of reasons adds up to."""
    return dict(sum((Counter[str](row.get(figure)) for row in rows), Counter[str]()))


def remedy(why: Mapping[str, int]) -> str:
    """What to do where no rollout has a reward, for these reasons."""
    if why and set(why) == {CUT}:
        return "loosen the gate: turntree gate calibrate shows what a threshold cuts"
    if 2 * sum(count for reason, count in why.items() if _SERVER.search(reason)) > sum(why.values()):
        return "so the server answered, or did not: look at its log, address, key and limits"
    return "mend the reward function that is named, or see turntree check model and turntree check environment"


def require_rewards(rows: Sequence[Row]) -> None:
    """Raises `InputError` where the whole run has no rollout with a reward: its policy is that of the start."""
    steps = [row for row in rows if row["step"]]
    if any(row["reward_mean"] is not None for row in steps) or not (why := _why(steps)):
        return
    problem = f"no rollout of the run has a reward, so the policy is that of the start ({most_frequent(why)})"
    raise InputError(problem, hint=remedy(why))


def _why(rows: Sequence[Row]) -> dict[str, int]:
    """As `reasons`, and the groups that the gate cut, whose rollouts are censored on purpose."""
    cut = sum(row.get("groups_cut", 0) for row in rows)
    return {**reasons(rows), **({CUT: cut} if cut else {})}


class GradientWatch:
    """What a run says of itself as it goes on; `rows` are those of an earlier part of it."""

    def __init__(self, steps: int, rows: Sequence[Row] = ()) -> None:
        self._steps = steps
        self._since: list[Row] = []  # the steps since the last gradient
        self._learned = False
        for row in rows:
            self._take(row)

    def warnings(self, row: Row) -> list[str]:
        """The warnings for the next row."""
        unrewarded = bool(self._since) and self._since[-1]["reward_mean"] is None
        if not self._take(row):
            return []
        step, found = row["step"], list[str]()
        if row["reward_mean"] is None and not unrewarded and (why := _why([row])):
            found.append(f"step {step}: no rollout has a reward, so nothing was trained ({most_frequent(why)})")
        if not self._learned and step == min(3, self._steps) and any(r["reward_mean"] is not None for r in self._since):
            found.append(f"step {step}: no group has had a gradient so far: {diagnosis(self._since)}")
        kl = math.inf if row.get("kl") is None else row["kl"]
        if self._learned and step == max(3, math.ceil(self._steps / 10)) and kl < STILL:
            found.append(
                f"step {step} of {self._steps}: the KL divergence from the start is {kl:.1g}, so the policy "
                "hardly moves; raise --learning-rate (the embedded tiny policies want 3e-4 to 5e-4)"
            )
        return [f"warning: {text}" for text in found]

    def at_the_end(self) -> str | None:
        """For a run in which no group ever had a gradient."""
        if self._learned or not self._since:
            return None
        told = "no group of the run had a gradient, so the policy is that of the start"
        return f"warning: {told}: {diagnosis(self._since)}"

    def _take(self, row: Row) -> bool:
        """Whether the row is of a step that played."""
        if not row["step"] or "reward_mean" not in row:
            return False
        taught = row.get("trained_groups", 0) > 0 and row.get("zero_variance_fraction", 0.0) < 1 - 1e-6
        self._learned |= taught
        self._since = [] if taught else [*self._since, row]
        return True


def diagnosis(rows: Sequence[Row]) -> str:
    """Why no group of these steps has a gradient, and what to do."""
    means = [row["reward_mean"] for row in rows if row["reward_mean"] is not None]
    if not means:
        why = _why(rows)
        return f"no rollout has a reward ({most_frequent(why)}); {remedy(why)}"
    ended = Counter[str]()
    for row in rows:
        ended.update(row.get("stops") or {StopReason.MAX_TOKENS: row.get("cut_turns", 0)})
    played = sum(sum(row["stops"].values()) if "stops" in row else row.get("rollouts", 0) for row in rows)
    played -= sum(sum(reasons([row]).values()) for row in rows) + ended[StopReason.GATED]
    for stop, what, hint in (
        (StopReason.MAX_TOKENS, "tokens", "allow longer turns: --max-tokens, and max_context for longer episodes"),
        (StopReason.MAX_TURNS, "turns", "allow more of them: --max-turns"),
    ):
        if ended[stop] >= NEARLY_ALL * played > 0:
            return f"{ended[stop]} of {played} rollouts ended at the limit of their {what}; {hint}"
    groups, lost = (sum(row.get(name, 0) for row in rows) for name in ("groups", "groups_censored"))
    if 2 * lost >= groups > 0 and (why := reasons(rows)):
        return f"{lost} of {groups} groups have fewer than two rewards ({most_frequent(why)}); {remedy(why)}"
    low, high = min(means), max(means)
    equal = "all rewards of a group are equal"
    what = f"every reward is {low:g}" if low == high else f"{equal} (means {low:.3g} to {high:.3g})"
    failed, solved = (sum(row.get(f"groups_{name}", 0) for row in rows) for name in ("all_fail", "all_succeed"))
    if failed and solved:
        what = f"{equal} ({failed} groups failed as a whole, {solved} succeeded as a whole)"
        return f"{what}; take tasks of medium difficulty, larger groups, or a reward that says more than success"
    if solved or (not failed and low >= 1):
        return f"{what}; the tasks are solved: take harder ones"
    begin = "begin with demonstrations (turntree sft), easier tasks or longer turns"
    return f"{what}; look at what the policy does (turntree evaluate); {begin}"
