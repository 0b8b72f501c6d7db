"""The numbers of a page: arms, paired differences, the ledger, and where two files of a run disagree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.pivots.select import THRESHOLDS, SelectConfig, preview, settled_at
from turntree.report.read import Arm, Row, Run, reading
from turntree.report.wording import count, label, percent, plural, points, span
from turntree.run.folder import HELD_OUT, RunDirectory
from turntree.run.statistics import paired_bootstrap

COUNTS = ("turns", "decoded_tokens", "prefilled_tokens", "reused_tokens", "trained_tokens")
PLAYED = ("environment", "count", "split", "task_seed", "temperature", "max_turns", "max_tokens", "max_context")
BILLED = ("turns", "tokens", "prefilled_tokens", "trained_tokens", "seconds")  # what making a policy cost
COMPARED = (
    *(("own", other) for other in ("base", "grpo", "sft", "pivotrl")),
    *(("pivotrl", other) for other in ("base", "sft")),
)


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

    def __str__(self) -> str:
        return f"{points(self.mean)} points [{points(self.low)}, {points(self.high)}] ({self.reading})"


@dataclass(frozen=True)
class Difference:
    """Success of `first` minus success of `second`, paired over tasks; greedy only where both played greedily."""

    first: str
    second: str
    sampled: Estimate
    greedy: Estimate | None = None

    def sentence(self, name: Callable[[str], str] = label) -> str:
        """What came out, sampled and greedy alike: a policy can gain at one and lose at the other."""
        greedy = f", {self.greedy} greedy" if self.greedy else ""
        of = f"{name(self.first)} minus {name(self.second)}, success on {self.sampled.tasks} held-out tasks, paired"
        return f"{of}: {self.sampled} sampled{greedy}"


def arm_rows(run: Run) -> list[dict[str, Any]]:
    """The lines of the main table; None is what the run does not record. `skills` is accuracy on skills outside the
    training domain, `skills_change` that minus the base policy's, `bill` what making the policy cost."""
    skills = {arm.name: (arm.evaluation or {}).get("retention", {}).get("accuracy") for arm in run.arms}
    rows: list[dict[str, Any]] = []
    for arm in run.arms:
        evaluation = arm.evaluation or {"sampled": None, "greedy": None}
        known = arm.name != "base" and None not in (skills[arm.name], skills.get("base"))
        rows.append(
            {
                "name": arm.name,
                "sampled": evaluation["sampled"],
                "greedy": evaluation["greedy"],
                "invalid_share": evaluation["sampled"] and evaluation["sampled"]["invalid_share"],
                "skills": skills[arm.name],
                "skills_change": skills[arm.name] - skills["base"] if known else None,
                "bill": _bill(run, arm),
            }
        )
    return rows


def _bill(run: Run, arm: Arm) -> dict[str, Any] | None:
    """By `BILLED`; "tokens" are those decoded. PivotRL's has its profile in it."""
    if arm.cost is None:
        return None
    profile = run.profile.header if arm.name == "pivotrl" and run.profile is not None else {}
    costs, timing = [arm.cost, profile.get("summary", {}).get("cost", {})], profile.get("timing", {})
    counted = ("turns", "decoded_tokens", "prefilled_tokens", "trained_tokens")
    counts = [sum(cost.get(key, 0) for cost in costs) for key in counted]
    seconds = round(sum(arm.cost.get("timing", {}).values()) + sum(timing.values()), 1)
    return dict(zip(BILLED, (*counts, seconds), strict=True))


def differences(run: Run) -> list[Difference]:
    """Of the pairs that the quickstart compares those that are here; without any, every policy against the base."""
    pairs = [(run.arm(first), run.arm(second)) for first, second in COMPARED]
    found = [_difference(first, second, run.seed) for first, second in pairs]
    if not any(found):
        found = [_difference(arm, run.arm("base"), run.seed) for arm in run.arms if arm.name != "base"]
    return [difference for difference in found if difference is not None]


def _difference(first: Arm | None, second: Arm | None, seed: int) -> Difference | None:
    if first is None or second is None or first.evaluation is None or second.evaluation is None:
        return None
    sampled, greedy = (paired(first.evaluation[key], second.evaluation[key], seed) for key in ("sampled", "greedy"))
    return None if sampled is None else Difference(first.name, second.name, sampled, greedy)


def paired(one: Row | None, other: Row | None, seed: int = 0) -> Estimate | None:
    """The difference of the `outcomes` of two plays, over the tasks that both have."""
    tasks = [task for task in one["outcomes"] if task in other["outcomes"]] if one and other else []
    if one is None or other is None or not tasks:
        return None
    values = ([play["outcomes"][task] for task in tasks] for play in (one, other))
    return Estimate(*paired_bootstrap(*values, seed=seed), len(tasks))


# the top of the page


def headline(run: Run, compared: Sequence[Difference]) -> list[str]:
    """What was trained, on what, and the result with its interval; the first sentences of the page."""
    trained = [arm for arm in run.arms if arm.stage is not None]
    evaluated = [arm for arm in run.arms if arm.evaluation is not None]
    if compared:
        pair = [arm for arm in run.arms if arm.name in (compared[0].first, compared[0].second)]
        first = run.arm(compared[0].first)
        return [_made(run, first), " ".join(_success(arm) for arm in sorted(pair, key=lambda arm: arm is not first))]
    if evaluated:
        return [_made(run, evaluated[-1]), f"{_success(evaluated[-1])} There is no second policy to compare it with."]
    if len(trained) == 1:
        return [_made(run, trained[0]), _held_out(trained[0])]
    if trained:
        return [_made(run, trained[-1]), "No policy of this run was evaluated: this page says nothing about success."]
    return [_made(run, None), "No policy was trained or evaluated in this run."]


def _success(arm: Arm) -> str:
    """`PivotRL succeeds in 45.0% (95% interval 38.3–51.9) on 200 tasks of split “test” of environment “household”.`"""
    assert arm.evaluation is not None
    config, share = arm.evaluation["config"], arm.evaluation["sampled"]
    which = f" of split “{config['split']}”" if "split" in config else ""
    which += f" of environment “{config['environment']['name']}”" if config.get("environment") else ""
    success = f"{percent(share['success'])} (95% interval {span((share['low'], share['high']))})"
    return f"{label(arm.name)} succeeds in {success} on {plural(len(share['outcomes']), 'task')}{which}."


def _made(run: Run, arm: Arm | None) -> str:
    if arm is None or arm.stage is None:
        return f"This run profiled {_candidates(run)}." if run.profile is not None else ""
    if arm.stage == "train online":
        return _played(arm)
    steps = f" for {plural(arm.metrics[-1]['step'], 'step')}" if arm.metrics else ""
    who = label(arm.name) if label(arm.name) != arm.name else f"Run “{arm.name}” ({arm.stage})"
    states = ""
    if arm.stage == "train pivot" and (arm.config or {}).get("states") == "own":
        states = " at states of its own play"
    elif arm.stage == "train pivot" and run.pivots is not None:
        states = f" on {count(len(run.pivots.rows))} turns selected from {_candidates(run)}"
    return f"{who} trained policy “{(arm.config or {}).get('model', '')}”{steps}{states}."


def _candidates(run: Run) -> str:
    if run.profile is None:
        return "a profile that is not in this folder"
    traces = len({row["trace_id"] for row in run.profile.rows})
    return f"{count(len(run.profile.rows))} candidate turns of {count(traces)} expert traces"


def _played(arm: Arm) -> str:
    """What was trained on whole episodes, and how the trees grew."""
    config, rows = arm.config or {}, [row for row in arm.metrics if row["step"]]
    groups = sum(row.get("groups", 0) for row in rows)
    made = f"Online training of policy “{config.get('model', '')}”: {plural(len(rows), 'iteration')}, "
    made += f"{plural(groups, 'group')} of rollouts, "
    brancher, train = config.get("brancher"), config.get("train", {})
    made += "all of them independent" if brancher is None else f"forked by the brancher “{brancher['name']}”"
    if brancher is not None and train.get("initial_rollouts"):
        made += f"; {train['initial_rollouts']} of {train['group_size']} rollouts begin independently"
    return f"{made}."


def _held_out(arm: Arm) -> str:
    """Held-out success before and after, paired where outcomes were kept."""
    checks = [row["held_out_success"] for row in arm.metrics if row.get("held_out_success") is not None]
    if len(checks) < 2:
        told = f"Held-out success is {percent(checks[0])}; it was looked at once." if checks else ""
        return told or "No check on held-out tasks was logged, so this page says nothing about success."
    success = f"Held-out success went from {percent(checks[0])} to {percent(checks[-1])}"
    folder = RunDirectory(arm.folder or Path())
    with reading(folder.path / HELD_OUT):
        outcomes = {iteration: tasks for iteration, tasks in folder.outcomes().items() if tasks}
    before, after = (outcomes.get(at(outcomes, default=0), {}) for at in (min, max))
    gain = paired({"outcomes": dict(sorted(after.items()))}, {"outcomes": before}) if len(outcomes) > 1 else None
    if gain is None:
        return f"{success}."
    verdict = "contains zero" if gain.contains_zero else "lies above zero" if gain.low > 0 else "lies below zero"
    success += f" on {plural(gain.tasks, 'task')}: a paired gain of {points(gain.mean)} points (95% interval "
    return f"{success}{points(gain.low)} to {points(gain.high)}, which {verdict})."


# the ledger


def ledger(run: Run) -> list[dict[str, Any]]:
    """What every stage cost that wrote it down, in the order in which a run takes them, and their sum at the end.
    `rho` is flat / unique trained tokens."""
    rows: list[dict[str, Any]] = []
    if run.profile is not None and "cost" in run.profile.header["summary"]:
        header = run.profile.header
        rows.append(_ledger_row("profile", {**header["summary"]["cost"], "timing": header.get("timing", {})}))
    for arm in run.arms:
        if arm.cost is not None:
            rows.append(_ledger_row(f"train {arm.name}", arm.cost) | {"rho": mean_rho(arm.metrics)})
            if arm.cost.get("checks"):
                rows.append(_ledger_row("held-out checks", arm.cost["checks"]))
    for arm in run.arms:
        if arm.evaluation is not None and arm.evaluation["cost"]:
            rows.append(_ledger_row(f"evaluate {arm.name}", arm.evaluation["cost"]))
    keys = (*COUNTS, "engine", "environment", "training", "seconds")
    total = {key: _sum(row[key] for row in rows) for key in keys}
    return [*rows, {"name": "total", **total, "rho": None}] if rows else []


def _ledger_row(name: str, cost: Row) -> dict[str, Any]:
    timing = cost.get("timing", {})
    seconds = {part: timing.get(f"{part}_seconds") for part in ("engine", "environment", "training")}
    counts = {key: cost.get(key) for key in COUNTS}
    return {"name": name, **counts, **seconds, "seconds": _sum(seconds.values()), "rho": None}


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
    """The lambda of the run's selection; without one that of its profile, or the default of `turntree select`."""
    settled = settled_at(run.profile.header) if run.profile else None
    return float(run.pivots.header["config"]["threshold"] if run.pivots else settled or SelectConfig.threshold)


def lambda_preview(run: Run) -> list[Row]:
    """What each lambda keeps, as the selection recorded it, else computed from the profile."""
    if run.pivots is not None and run.pivots.header["summary"].get("preview"):
        return list(run.pivots.header["summary"]["preview"])
    settled = settled_at(run.profile.header) if run.profile else None
    thresholds = THRESHOLDS if settled is None else (settled,)
    return list(preview(run.profile.rows, thresholds)) if run.profile is not None else []


def disagreements(run: Run) -> list[str]:
    """Contradictions between two files of the run, of which one then belongs to another run."""
    found: list[str] = []
    if run.pivots and run.profile and run.pivots.header["policy_hash"] != run.profile.header["policy_hash"]:
        found.append("pivots.jsonl was selected from a profile of another policy than the one in profile.jsonl")
    played = [[arm.evaluation["config"].get(key) for key in PLAYED] for arm in run.arms if arm.evaluation]
    if any(settings != played[0] for settings in played):
        problem = "the arms were not evaluated on the same tasks at the same settings"
        found.append(f"{problem}, so their success rates cannot be compared")
    return found
