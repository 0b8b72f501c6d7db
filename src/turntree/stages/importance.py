"""`turntree importance`: a profile and its environment in, the profile with the importance of its mixed states out."""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree import __version__
from turntree.core import parts, seeds
from turntree.core.config import to_mapping
from turntree.core.cost import NO_COST
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState
from turntree.engine.limits import connection_free
from turntree.pivots.importance import weigh
from turntree.pivots.rows import StoredProfile
from turntree.pivots.select import is_mixed
from turntree.rollout.continuations import PlayOn
from turntree.rollout.rebuild import Rebuilder
from turntree.run.artifacts import POLICY, PROFILE, policy_of, require_same_profile
from turntree.run.files import file_hash
from turntree.run.wave_log import WaveLog, open_log
from turntree.stages.candidates import stream_candidates
from turntree.stages.config import ImportanceConfig
from turntree.stages.policy import load_policy
from turntree.stages.profile import Wave, work

Place = tuple[str, int]  # trace and turn


def run_importance(config: ImportanceConfig, out: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Measure and write `out`; returns the mean difference by kind. A killed measurement resumes with its unfinished
    wave. Raises `InputError` where no state is mixed or none could be measured."""
    config = parts.resolved(config)
    stored = StoredProfile(Path(config.profile))
    made = stored.header["config"]
    traces = config.traces or made["traces"]
    if file_hash(Path(traces)) != stored.header["traces_hash"]:
        raise InputError("is not the file that was profiled", path=traces, hint="name it with --traces")
    chosen = _mixed(stored, config)
    policy = load_policy(config.model or made["model"], config.device)
    if config.model is None and (other := policy_of(stored.header)) != policy.identity:
        differing = ", ".join(POLICY[key] for key in other if other[key] != policy.identity[key])
        hint = "name the policy that shall play on with --model"
        raise InputError(f"is of a policy that is no longer there (other {differing})", path=stored.path, hint=hint)
    described = {
        "config": connection_free(to_mapping(config)),
        "version": __version__,
        "profile": file_hash(stored.path),
        "code": parts.identities(config),
        **policy.identity,
    }
    header = {**stored.header, "importance": {"config": to_mapping(config)}}
    require_same_profile(out, header, overwrite=overwrite)
    play_on = PlayOn(Rebuilder(config.environment), policy.engine, policy.renderer, config.episodes, config.forks)
    states = (s for s in stream_candidates(traces, made["split"]) if (s.trace_id, s.turn) in chosen)

    def measured(members: Sequence[TurnState]) -> Wave:
        policy.engine.clear_cache()  # a resumed run has not computed earlier waves
        found, cost = weigh(members, [stored.row(state) for state in members], play_on, seed=config.seed)
        pairs = zip(members, found, strict=True)
        told = [[state.trace_id, state.turn, one.to_json()] for state, one in pairs if one is not None]
        return {"importance": told, "cost": cost.counts(), "timing": cost.timing()}

    with (
        contextlib.closing(play_on.rebuilder),
        open_log(out.with_name(f"{out.name}.waves"), described, overwrite=overwrite) as log,
    ):
        work(log, states, len(chosen), config.wave, measured, what="importance", noun="states")
        return _write(log, stored, len(chosen), config, policy.identity, out)


def _mixed(stored: StoredProfile, config: ImportanceConfig) -> set[Place]:
    """The mixed states, or `config.limit` of them."""
    _, rows = PROFILE.stream(stored.path)
    mixed = [(row["trace_id"], row["turn"]) for row in rows if is_mixed(row)]
    if not mixed:
        raise InputError("holds no mixed state", path=stored.path, hint="profile more candidates")
    if config.limit:
        mixed = seeds.generator(config.seed, "importance").sample(mixed, min(config.limit, len(mixed)))
    return set(mixed)


def _write(
    log: WaveLog, stored: StoredProfile, mixed: int, config: ImportanceConfig, policy: dict[str, str], out: Path
) -> dict[str, Any]:
    found: dict[Place, dict[str, Any]] = {}
    cost, seconds = Counter[str](), Counter[str]()
    for wave in log:
        found |= {(trace, turn): importance for trace, turn, importance in wave["importance"]}
        cost.update(wave["cost"])
        seconds.update(wave["timing"])
    reasons = Counter(one["reason"] for one in found.values() if one["difference"] is None)
    if sum(reasons.values()) == len(found):
        log.remove()
        why = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "all are of other traces"
        raise InputError(f"no state could be measured ({why})", path=stored.path)
    header, rows = PROFILE.stream(stored.path)
    by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def weighed() -> Any:
        for row in rows:
            one = found.get((row["trace_id"], row["turn"]))
            if one is not None and one["difference"] is not None:
                by_kind[row["kind"]].append(one)
            yield row if one is None else {**row, "importance": one}

    header = {key: value for key, value in header.items() if key != "schema"}
    bill = {"cost": {**NO_COST.counts(), **cost}, "timing": dict(seconds)}
    PROFILE.write(out, {**header, "importance": {"config": to_mapping(config), "policy": policy, **bill}}, weighed())
    log.remove()
    return {
        "path": str(out),
        "mixed": mixed,
        "measured": len(found) - sum(reasons.values()),
        "not_measured": dict(reasons),
        "by_kind": {kind: _summary(ones) for kind, ones in sorted(by_kind.items())},
        **bill,
    }


def _summary(ones: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The mean difference of a kind and its standard error, from the spread between states (None for one state)."""
    values = [one["difference"] for one in ones]
    mean, count = sum(values) / len(values), len(values)
    spread = sum((value - mean) ** 2 for value in values) / (count - 1) / count if count > 1 else ones[0]["error"] ** 2
    return {"states": count, "difference": mean, "error": spread**0.5}
