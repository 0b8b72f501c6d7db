"""The numbers of the report: arms, paired differences, the ledger, and where two files of a run disagree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.observe.statistics import paired_bootstrap
from turntree.profiling.select import THRESHOLDS, SelectConfig, preview
from turntree.report.read import Arm, Play, Row, Run, Share, reading

COUNTS = ("turns", "decoded_tokens", "prefilled_tokens", "reused_tokens", "trained_tokens")
PLAYED = ("environment", "count", "split", "task_seed", "temperature", "max_turns", "max_tokens", "max_context")


@dataclass(frozen=True)
class ArmResult:
    """One line of the main table. Shares are in [0, 1]; None is what the run does not record."""

    name: str
    sampled: Share | None
    greedy: Share | None
    invalid_share: float | None  # of the commands of sampled episodes: refused by the environment
    retention: float | None
    retention_change: float | None
    turns: float | None
    tokens: float | None
    seconds: float | None


@dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval."""

    mean: float
    low: float
    high: float

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0 <= self.high


@dataclass(frozen=True)
class Difference:
    """Success of `first` minus success of `second`, paired over tasks; greedy only where both played greedily."""

    first: str
    second: str
    sampled: Estimate
    greedy: Estimate | None = None
    games: int | None = None


@dataclass(frozen=True)
class LedgerRow:
    """What one stage cost. `seconds` by engine, environment and training; `rho` is flat / unique trained tokens."""

    name: str
    counts: Mapping[str, int | None]
    engine: float | None = None
    environment: float | None = None
    training: float | None = None
    rho: float | None = None

    @property
    def seconds(self) -> float | None:
        parts = [part for part in (self.engine, self.environment, self.training) if part is not None]
        return sum(parts) if parts else None


def arm_results(run: Run) -> list[ArmResult]:
    """One result per arm: from the arm's own files, and from `summary.json` where that says something."""
    recorded = (run.summary or {}).get("arms", {})
    base = run.arm("base")
    with reading(run.path / "summary.json"):
        return [_result(arm, base, recorded.get(arm.name, {})) for arm in run.arms]


def _result(arm: Arm, base: Arm | None, recorded: Row) -> ArmResult:
    evaluation, cost = arm.evaluation, arm.cost or {}
    retention = _first(recorded.get("retention"), evaluation.retention if evaluation else None)
    start = base.evaluation.retention if base is not None and base.evaluation else None
    change = retention - start if retention is not None and start is not None and arm is not base else None
    return ArmResult(
        name=arm.name,
        sampled=evaluation.sampled.overall if evaluation else _recorded_share(recorded, ""),
        greedy=evaluation.greedy.overall if evaluation and evaluation.greedy else _recorded_share(recorded, "greedy_"),
        invalid_share=_first(evaluation.sampled.invalid_share if evaluation else None, recorded.get("invalid_share")),
        retention=retention,
        retention_change=_first(recorded.get("retention_change"), change),
        turns=_first(recorded.get("turns"), cost.get("turns")),
        tokens=_first(recorded.get("tokens"), cost.get("decoded_tokens")),
        seconds=_first(recorded.get("seconds"), sum(cost["timing"].values()) if "timing" in cost else None),
    )


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _recorded_share(recorded: Row, prefix: str) -> Share | None:
    """A share of `summary.json`, which does not say over how many episodes."""
    success = recorded.get(f"{prefix}success")
    if success is None:
        return None
    return Share(float(success), float(recorded[f"{prefix}low"]), float(recorded[f"{prefix}high"]), 0)


def differences(run: Run) -> list[Difference]:
    """Those that `summary.json` records, else computed from the outcomes on the tasks that both arms played."""
    recorded = (run.summary or {}).get("differences")
    if recorded:
        with reading(run.path / "summary.json"):
            names = {f"{one.name}-{other.name}": (one.name, other.name) for one in run.arms for other in run.arms}
            return [_recorded_difference(*names.get(key, (key, "")), row) for key, row in recorded.items()]
    pairs = [_computed_difference(first, second) for first, second in _comparisons(run)]
    return [pair for pair in pairs if pair is not None]


def _recorded_difference(first: str, second: str, row: Row) -> Difference:
    def estimate(prefix: str) -> Estimate:
        return Estimate(*(float(row[f"{prefix}{key}"]) for key in ("mean", "low", "high")))

    greedy = estimate("greedy_") if "greedy_mean" in row else None
    return Difference(first, second, estimate(""), greedy, row.get("games"))


def _comparisons(run: Run) -> list[tuple[Arm, Arm]]:
    """PivotRL against every other arm; without it, every arm against the base."""
    pivotrl, base = run.arm("pivotrl"), run.arm("base")
    if pivotrl is not None and pivotrl.evaluation is not None:
        return [(pivotrl, arm) for arm in run.arms if arm is not pivotrl]
    return [(arm, base) for arm in run.arms if base is not None and arm is not base]


def _computed_difference(first: Arm, second: Arm) -> Difference | None:
    one, other = first.evaluation, second.evaluation
    sampled = _paired(one.sampled, other.sampled) if one and other else None
    if one is None or other is None or sampled is None:
        return None
    games = len(one.sampled.outcomes.keys() & other.sampled.outcomes.keys())
    return Difference(first.name, second.name, sampled, _paired(one.greedy, other.greedy), games)


def _paired(one: Play | None, other: Play | None) -> Estimate | None:
    tasks = sorted(one.outcomes.keys() & other.outcomes.keys()) if one and other else []
    if one is None or other is None or not tasks:
        return None
    return Estimate(*paired_bootstrap([one.outcomes[t] for t in tasks], [other.outcomes[t] for t in tasks]))


def ledger(run: Run) -> list[LedgerRow]:
    """Every stage that wrote down what it cost, in the order in which a run takes them."""
    rows: list[LedgerRow] = []
    if run.profile is not None and "cost" in run.profile.header.get("summary", {}):
        header = run.profile.header
        rows.append(_ledger_row("profile", header["summary"]["cost"], header.get("timing", {})))
    for arm in run.arms:
        if arm.cost is not None:
            rows.append(_ledger_row(f"train {arm.name}", arm.cost, arm.cost.get("timing", {}), mean_rho(arm.metrics)))
    for arm in run.arms:
        if arm.evaluation is not None and arm.evaluation.cost:
            cost = arm.evaluation.cost
            rows.append(_ledger_row(f"evaluate {arm.name}", cost, cost.get("timing", {})))
    return rows


def _ledger_row(name: str, cost: Row, timing: Row, rho: float | None = None) -> LedgerRow:
    engine, environment, training = (timing.get(f"{part}_seconds") for part in ("engine", "environment", "training"))
    return LedgerRow(name, {key: cost.get(key) for key in COUNTS}, engine, environment, training, rho)


def total(rows: Sequence[LedgerRow]) -> LedgerRow:
    """The sum of the ledger."""

    def added(values: Iterable[Any]) -> Any:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return LedgerRow(
        "total",
        {key: added(row.counts[key] for row in rows) for key in COUNTS},
        engine=added(row.engine for row in rows),
        environment=added(row.environment for row in rows),
        training=added(row.training for row in rows),
    )


def mean_rho(metrics: Sequence[Row]) -> float | None:
    """Flat over unique tokens of all training batches together: each batch's rho weighted by its unique tokens."""
    logged = [(row["rho"], row["trained_tokens"]) for row in metrics if "rho" in row and row.get("trained_tokens")]
    unique = sum(tokens for _, tokens in logged)
    return sum(rho * tokens for rho, tokens in logged) / unique if unique else None


def threshold(run: Run) -> float:
    """The lambda of the run's selection; without one the default of `turntree select`."""
    config = run.pivots.header.get("config", {}) if run.pivots else {}
    return float(config.get("threshold", SelectConfig().threshold))


def lambda_preview(run: Run) -> list[Row]:
    """What each lambda keeps, as the selection recorded it, else computed from the profile."""
    if run.pivots is not None and run.pivots.header.get("summary", {}).get("preview"):
        return list(run.pivots.header["summary"]["preview"])
    return list(preview(run.profile.rows, THRESHOLDS)) if run.profile is not None else []


def disagreements(run: Run) -> list[str]:
    """Contradictions between two files of the run, of which one then belongs to another run."""
    found: list[str] = []
    recorded = (run.summary or {}).get("arms", {})
    for arm in run.arms:
        said = recorded.get(arm.name, {}).get("success")
        measured = arm.evaluation.sampled.overall.success if arm.evaluation else None
        if said is not None and measured is not None and abs(said - measured) > 1e-9:
            found.append(
                f"summary.json says that {arm.name} succeeds in {said:.1%}, evaluation/{arm.name}.json {measured:.1%}"
            )
    for name, table in (("pivots.jsonl", run.pivots), ("random.jsonl", run.random)):
        if table is None or run.profile is None:
            continue
        if table.header.get("policy_hash") != run.profile.header.get("policy_hash"):
            found.append(f"{name} was selected from a profile of another policy than the one in profile.jsonl")
    played = [[arm.evaluation.config.get(key) for key in PLAYED] for arm in run.arms if arm.evaluation]
    if any(one != played[0] for one in played):
        told = "the arms were not evaluated on the same tasks at the same settings"
        found.append(f"{told}, so their success rates cannot be compared")
    return found
