"""`turntree profile`: traces and a frozen policy in, a profile of every candidate out."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST
from turntree.core.errors import ConfigError, InputError
from turntree.core.protocols import TurnState
from turntree.observe.files import file_hash, write_table
from turntree.observe.run import progress
from turntree.profiling.profile import SCHEMA, CandidateProfile, ProfileConfig, miss_rate, profile
from turntree.profiling.select import classify
from turntree.stages.policy import Device, Policy, load_policy
from turntree.stages.verifier import resolve_verifier
from turntree.traces.candidates import candidates, count_skipped
from turntree.traces.schema import read_traces
from turntree.verifiers.strict import StrictMatch


@dataclass(frozen=True, kw_only=True)
class ProfileStageConfig:
    """`limit` profiles the first so many candidates only (0: all). `split` chooses the traces ("": all)."""

    traces: str
    model: str = "default"
    verifier: str = "household"
    split: str = "train"
    limit: int = 0
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    device: Device = field(default_factory=Device)

    def __post_init__(self) -> None:
        if self.limit < 0:
            raise ConfigError("must not be negative", field="limit")


def read_candidates(traces: str, split: str, limit: int = 0) -> tuple[list[TurnState], Counter[str]]:
    """The candidates of a split and, by reason, the turns that are none. Raises `InputError` when nothing is left."""
    found = [trace for trace in read_traces(traces) if split in ("", trace.split)]
    states = [state for trace in found for state in candidates(trace)]
    if not states:
        raise InputError(
            f"holds no candidate in split {split!r}", path=traces, hint="choose another split, or --split '' for all"
        )
    return (states[:limit] if limit else states), count_skipped(found)


def _that_fit(
    states: list[TurnState], policy: Policy, config: ProfileStageConfig, skipped: Counter[str]
) -> list[TurnState]:
    """The states whose demonstration could have been sampled; the others are counted in `skipped`. Raises
    `InputError` when none is left."""
    longest = config.profile.sampling.max_tokens
    kept: list[TurnState] = []
    for state in states:
        if len(policy.renderer.completion(state.demonstration)) > longest:
            skipped["demonstration_above_max_tokens"] += 1
        elif len(policy.renderer.prompt(state.history, state.tools)) + longest > policy.engine.max_context:
            skipped["prompt_above_context"] += 1
        else:
            kept.append(state)
    if not kept:
        reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        raise InputError(f"holds no state that fits ({reasons})", path=config.traces, hint="raise --max-tokens")
    return kept


def run_profile(config: ProfileStageConfig, out: Path) -> dict[str, Any]:
    """Write the profile table to `out`; returns its summary."""
    states, skipped = read_candidates(config.traces, config.split, config.limit)
    policy = load_policy(config.model, config.device)
    verifier = resolve_verifier(config.verifier)
    states = _that_fit(states, policy, config, skipped)
    rows: list[CandidateProfile] = list(
        progress(
            profile(states, policy.engine, policy.renderer, verifier, StrictMatch(), config.profile),
            "profile",
            total=len(states),
        )
    )
    cost = sum((row.cost for row in rows), NO_COST)
    table = [row.to_json() for row in rows]
    summary = {
        "candidates": len(rows),
        "skipped_turns": dict(skipped),
        "classes": dict(Counter(classify(row, 0.6) for row in table)),
        "miss_rate": miss_rate(rows),
        "truncated": sum(row.truncated for row in rows),
        "gold_refused": sum(row.gold == 0.0 for row in rows),
        "gold_unjudged": sum(row.gold is None for row in rows),
        "cost": cost.counts(),
    }
    header = {
        "schema": SCHEMA,
        "config": to_mapping(config),
        "policy_hash": policy.hash,
        "verifier": verifier.name,
        "traces_hash": file_hash(Path(config.traces)),
        "summary": summary,
        "timing": cost.timing(),
    }
    write_table(out, header, table)
    return {"path": str(out), **summary}
