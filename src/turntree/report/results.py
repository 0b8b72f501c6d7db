"""The numbers of a page: arms, paired differences, the ledger, and where two files of a run disagree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turntree.pivots.select import THRESHOLDS, SelectConfig, preview
from turntree.report.read import Arm, Play, Row, Run, Share
from turntree.report.wording import count, label, percent, plural, points, span
from turntree.run.statistics import paired_bootstrap

COUNTS = ("turns", "decoded_tokens", "prefilled_tokens", "reused_tokens", "trained_tokens")
PLAYED = ("environment", "count", "split", "task_seed", "temperature", "max_turns", "max_tokens", "max_context")
COMPARED = (
    *(("own", other) for other in ("base", "sft", "pivotrl")),
    *(("pivotrl", other) for other in ("base", "sft", "random")),
)


@dataclass(frozen=True)
class Bill:
    """What making a policy cost. PivotRL's has its profile in it; random turns need none."""

    turns: int
    tokens: int
    trained_tokens: int
    seconds: float


@dataclass(frozen=True)
class ArmResult:
    """One line of the main table. Shares are in [0, 1]; None is what the run does not record. `skills` is accuracy on
    skills outside the training domain, `skills_change` that minus the base policy's."""

    name: str
    sampled: Share | None
    greedy: Share | None
    invalid_share: float | None  # of the commands of sampled episodes: refused by the environment
    skills: float | None
    skills_change: float | None
    bill: Bill | None


@dataclass(frozen=True)
class Estimate:
    """A mean over `tasks` with its 95% interval."""

    mean: float
    low: float
    high: float
    tasks: int

    @property
    def contains_zero(self) -> bool:
        return self.low <= 0 <= self.high

    @property
    def reading(self) -> str:
        return "not told apart" if self.contains_zero else "better" if self.low > 0 else "worse"


@dataclass(frozen=True)
class Difference:
    """Success of `first` minus success of `second`, paired over tasks; greedy only where both played greedily."""

    first: str
    second: str
    sampled: Estimate
    greedy: Estimate | None = None

    def sentence(self, name: Callable[[str], str] = label) -> str:
        """What came out, sampled and greedy alike: a policy can gain at one and lose at the other."""
        found = [f"{_told(self.sampled)} sampled", *([f"{_told(self.greedy)} greedy"] if self.greedy else [])]
        of = f"{name(self.first)} minus {name(self.second)}, success on {self.sampled.tasks} held-out tasks, paired"
        return f"{of}: {', '.join(found)}"


def _told(found: Estimate) -> str:
    return f"{points(found.mean)} points [{points(found.low)}, {points(found.high)}] ({found.reading})"


def arm_results(run: Run) -> list[ArmResult]:
    base = run.arm("base")
    start = base.evaluation.skills_accuracy if base is not None and base.evaluation else None
    return [_result(run, arm, None if arm is base else start) for arm in run.arms]


def _result(run: Run, arm: Arm, start: float | None) -> ArmResult:
    evaluation = arm.evaluation
    skills = evaluation.skills_accuracy if evaluation else None
    return ArmResult(
        name=arm.name,
        sampled=evaluation.sampled.overall if evaluation else None,
        greedy=evaluation.greedy.overall if evaluation and evaluation.greedy else None,
        invalid_share=evaluation.sampled.invalid_share if evaluation else None,
        skills=skills,
        skills_change=skills - start if skills is not None and start is not None else None,
        bill=_bill(run, arm),
    )


def _bill(run: Run, arm: Arm) -> Bill | None:
    if arm.cost is None:
        return None
    profile = run.profile.header if arm.name == "pivotrl" and run.profile is not None else {}
    costs, timing = [arm.cost, profile.get("summary", {}).get("cost", {})], profile.get("timing", {})
    turns, tokens = (sum(cost.get(key, 0) for cost in costs) for key in ("turns", "decoded_tokens"))
    seconds = sum(arm.cost.get("timing", {}).values()) + sum(timing.values())
    return Bill(turns, tokens, arm.cost.get("trained_tokens", 0), round(seconds, 1))


def differences(run: Run) -> list[Difference]:
    """Of the pairs that the quickstart compares those that are here; without any, every policy against the base."""
    pairs = [(run.arm(first), run.arm(second)) for first, second in COMPARED]
    found = [_difference(first, second, run.seed) for first, second in pairs]
    if not any(found):
        found = [_difference(arm, run.arm("base"), run.seed) for arm in run.arms if arm.name != "base"]
    return [difference for difference in found if difference is not None]


def _difference(first: Arm | None, second: Arm | None, seed: int) -> Difference | None:
    one, other = (None if arm is None else arm.evaluation for arm in (first, second))
    sampled = _paired(one.sampled, other.sampled, seed) if one and other else None
    if first is None or second is None or one is None or other is None or sampled is None:
        return None
    return Difference(first.name, second.name, sampled, _paired(one.greedy, other.greedy, seed))


def _paired(one: Play | None, other: Play | None, seed: int) -> Estimate | None:
    tasks = [task for task in one.outcomes if task in other.outcomes] if one and other else []
    if one is None or other is None or not tasks:
        return None
    found = paired_bootstrap([one.outcomes[t] for t in tasks], [other.outcomes[t] for t in tasks], seed=seed)
    return Estimate(*found, len(tasks))


# the top of the page


@dataclass(frozen=True)
class Headline:
    """`done`: what was trained on what. `found`: how it did. `differences`: against what, with the conclusion."""

    done: str
    found: str
    differences: tuple[str, ...] = ()


def headline(run: Run, differences: Sequence[Difference]) -> Headline:
    """What was trained, on what, and the result with its interval; missing parts are named."""
    trained = [arm for arm in run.arms if arm.stage is not None]
    evaluated = [arm for arm in run.arms if arm.evaluation is not None]
    if differences:
        pair = [arm for name in (differences[0].first, differences[0].second) if (arm := run.arm(name)) is not None]
        return Headline(
            _done(run, pair[0] if pair else None),
            " ".join(map(_success, pair)),
            tuple(f"{difference.sentence()}." for difference in differences),
        )
    if evaluated:
        found = f"{_success(evaluated[-1])} There is no second policy to compare it with."
    elif trained:
        found = "No policy of this run was evaluated, so this page says nothing about success."
    else:
        found = "No policy was trained or evaluated in this run."
    return Headline(_done(run, (evaluated or trained or [None])[-1]), found)


def _success(arm: Arm) -> str:
    """`PivotRL succeeds in 45.0% (95% interval 38.3–51.9) on 200 tasks of split “test” of environment “household”.`"""
    if arm.evaluation is None:
        return ""
    config, share = arm.evaluation.config, arm.evaluation.sampled.overall
    which = f" of split “{config['split']}”" if "split" in config else ""
    which += f" of environment “{config['environment']['name']}”" if config.get("environment") else ""
    tasks = plural(len(arm.evaluation.sampled.outcomes), "task")
    success = f"{percent(share.success)} (95% interval {span((share.low, share.high))})"
    return f"{label(arm.name)} succeeds in {success} on {tasks}{which}."


def _done(run: Run, arm: Arm | None) -> str:
    if arm is None or arm.stage is None:
        return f"This run profiled {_candidates(run)}." if run.profile is not None else ""
    steps = f" for {plural(arm.metrics[-1]['step'], 'step')}" if arm.metrics else ""
    who = label(arm.name) if label(arm.name) != arm.name else f"Run “{arm.name}” ({arm.stage})"
    states = _on_states(run, arm) if arm.stage == "train pivot" else ""
    return f"{who} trained policy “{(arm.config or {}).get('model', '')}”{steps}{states}."


def _on_states(run: Run, arm: Arm) -> str:
    if (arm.config or {}).get("states") == "own":
        return " at states of its own play"
    table = run.random if arm.name == "random" else run.pivots
    if table is None:
        return ""
    how = "drawn at random from" if arm.name == "random" else "selected from"
    roles = Counter(str(row.get("role", "pivot")) for row in table.rows)
    told = f" ({', '.join(f'{count(n)} {role}s' for role, n in sorted(roles.items(), reverse=True))})"
    return f" on {count(len(table.rows))} turns{told if len(roles) > 1 else ''} {how} {_candidates(run)}"


def _candidates(run: Run) -> str:
    if run.profile is None:
        return "a profile that is not in this folder"
    traces = len({row["trace_id"] for row in run.profile.rows})
    return f"{count(len(run.profile.rows))} candidate turns of {count(traces)} expert traces"


# the ledger


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
        return _sum([self.engine, self.environment, self.training])


def ledger(run: Run) -> list[LedgerRow]:
    """Every stage that wrote down what it cost, in the order in which a run takes them, and their sum at the end."""
    rows: list[LedgerRow] = []
    if run.profile is not None and "cost" in run.profile.header.get("summary", {}):
        header = run.profile.header
        rows.append(_ledger_row("profile", header["summary"]["cost"], header.get("timing", {})))
    for arm in run.arms:
        if arm.cost is not None:
            rows.append(_ledger_row(f"train {arm.name}", arm.cost, rho=mean_rho(arm.metrics)))
            if arm.cost.get("checks"):
                rows.append(_ledger_row("held-out checks", arm.cost["checks"]))
    for arm in run.arms:
        if arm.evaluation is not None and arm.evaluation.cost:
            rows.append(_ledger_row(f"evaluate {arm.name}", arm.evaluation.cost))
    return [*rows, _total(rows)] if rows else []


def _ledger_row(name: str, cost: Row, timing: Row | None = None, rho: float | None = None) -> LedgerRow:
    spent: Row = cost.get("timing", {}) if timing is None else timing
    seconds = [spent.get(f"{part}_seconds") for part in ("engine", "environment", "training")]
    return LedgerRow(name, {key: cost.get(key) for key in COUNTS}, *seconds, rho=rho)


def _total(rows: Sequence[LedgerRow]) -> LedgerRow:
    parts = ([getattr(row, part) for row in rows] for part in ("engine", "environment", "training"))
    return LedgerRow("total", {key: _sum(row.counts[key] for row in rows) for key in COUNTS}, *map(_sum, parts))


def _sum(values: Iterable[Any]) -> Any:
    """Of what is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def mean_rho(metrics: Sequence[Row]) -> float | None:
    """Flat over unique tokens of all training batches together: each batch's rho weighted by its unique tokens."""
    logged = [(row["rho"], row["trained_tokens"]) for row in metrics if "rho" in row and row.get("trained_tokens")]
    unique = sum(tokens for _, tokens in logged)
    return sum(rho * tokens for rho, tokens in logged) / unique if unique else None


# what was selected


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
    for name, table in (("pivots.jsonl", run.pivots), ("random.jsonl", run.random)):
        if table is None or run.profile is None:
            continue
        if table.header.get("policy_hash") != run.profile.header.get("policy_hash"):
            found.append(f"{name} was selected from a profile of another policy than the one in profile.jsonl")
    played = [[arm.evaluation.config.get(key) for key in PLAYED] for arm in run.arms if arm.evaluation]
    if any(settings != played[0] for settings in played):
        problem = "the arms were not evaluated on the same tasks at the same settings"
        found.append(f"{problem}, so their success rates cannot be compared")
    return found
