"""`turntree profile --published`: the pass rates of a published pivot data set as a profile. Nothing is sampled.

They are those of the publisher's model, sampling and verifier. So the profile names none of the user's, and training on
pivots that were selected from it needs `--allow-stale`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from turntree.core import parts
from turntree.core.config import Part, to_mapping
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState
from turntree.observe.artifacts import MOST_ROLLOUTS, POLICY, PROFILE, require_same_profile
from turntree.observe.statistics import wilson
from turntree.profiling.rows import PUBLISHED, moments
from turntree.profiling.summary import ProfileSummary
from turntree.stages.candidates import survey
from turntree.stages.config import ProfileStageConfig
from turntree.traces.candidates import candidates
from turntree.traces.schema import Trace, read_traces
from turntree.verifiers.strict import action_kind

NO_RATE = "no_pass_rate_with_its_number_of_rollouts"


def write_published(config: ProfileStageConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the profile; returns its summary. Candidates of traces without a pass rate are counted as
    `NO_RATE`. Raises `InputError` where no trace has one, and where another profile lies there, unless `overwrite`."""
    if config.verifier == parts.DEFAULT:  # the rule that the published rates were made with
        config = replace(config, verifier=Part("nemo"))
    config = parts.resolved(config)
    surveyed = survey(config.traces, config.split, config.limit)
    skipped = Counter(surveyed.skipped)
    rows = list(_rows(config, skipped))
    if not rows:
        hint = "import a published pivot data set (docs/pivots.md), or profile with a policy"
        raise InputError("record no pass rate", path=config.traces, hint=hint)
    found = ProfileSummary(max(row["rollouts"] for row in rows), None)
    for row in rows:
        found.add({"stop": "K reached", "certainty": 1.0, "faults": {}, "truncated": 0, **row})
    summary = found.summary(skipped)
    header = {
        "config": to_mapping(config),
        **dict.fromkeys(POLICY, PUBLISHED),
        "verifier": PUBLISHED,
        "traces_hash": surveyed.traces_hash,
        "summary": summary,
    }
    require_same_profile(out, header, overwrite=overwrite)
    PROFILE.write(out, header, rows)
    return {"path": str(out), **summary}


def _rows(config: ProfileStageConfig, skipped: Counter[str]) -> Iterator[dict[str, Any]]:
    taken = 0
    for trace in read_traces(config.traces):
        if config.split not in ("", trace.split):
            continue
        rewards = _rewards(trace, config.traces)
        for state in candidates(trace):
            if rewards is None:
                skipped[NO_RATE] += 1
            elif not config.limit or taken < config.limit:
                taken += 1
                yield _row(state, rewards)


def _rewards(trace: Trace, path: str) -> list[float] | None:
    """The rewards of the rollouts behind a pass rate: `pass_rate_passed` (or the rate times their number) of
    `pass_rate_total`, else the recorded `rewards`. Raises `InputError` for values that are no pass rate."""
    rate, total, rewards = (trace.meta.get(key) for key in ("pass_rate", "pass_rate_total", "rewards"))
    if total is None and rewards is None:
        return None
    if isinstance(rate, int | float) and type(total) is int and 1 <= total <= MOST_ROLLOUTS and 0 <= rate <= 1:
        passed = trace.meta.get("pass_rate_passed", round(rate * total))
        if type(passed) is int and 0 <= passed <= total:
            return [1.0] * passed + [0.0] * (total - passed)
    elif (
        isinstance(rewards, list) and rewards and all(isinstance(one, int | float) and 0 <= one <= 1 for one in rewards)
    ):
        return [float(one) for one in rewards]
    if rate is None and rewards is None:
        return None
    problem = f"of trace {trace.id!r} are not a pass rate ({rate!r} of {total!r})"
    raise InputError(problem, path=path, field="meta", hint="pass_rate in [0, 1] with pass_rate_total, or rewards")


def _row(state: TurnState, rewards: list[float]) -> dict[str, Any]:
    mean, variance = moments(rewards) or (None, None)
    low, high = wilson(sum(rewards), len(rewards))
    return {
        "trace_id": state.trace_id,
        "turn": state.turn,
        "kind": action_kind(state.demonstration),
        "rollouts": len(rewards),
        "successes": sum(reward == 1.0 for reward in rewards),
        "unjudged": 0,
        "reward_mean": mean,
        "reward_var": variance,
        "low": low,
        "high": high,
        "actions": [],
        "cost": NO_COST.counts(),
    }
