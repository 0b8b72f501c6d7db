"""What an online run shows: success over what was spent, how its trees forked, and one of them drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from turntree.core.tree import StopReason
from turntree.logs.report import ReadReport
from turntree.logs.rollouts import FILE_NAME, read_groups
from turntree.logs.rows import ReadConfig
from turntree.observe import jsonl
from turntree.observe.statistics import paired_bootstrap
from turntree.report import online_figures, results, rollout_tree, wording
from turntree.report.figures import Curve, series
from turntree.report.read import ONLINE_STAGE, Arm, Row, Run, reading
from turntree.report.svg import Chart
from turntree.report.tree_figures import rollout_tree as draw_tree

HELD_OUT, BRANCH_LOG = "held_out.jsonl", "branches.jsonl"  # names given by the stage, which lies beside this floor
SUCCESS = Curve("held_out_success", "Held-out success", "success (%)", "share", size=(5.0, 2.9))
SPENT = (("trees.calls_fresh", "fresh tool calls"), ("spent.turns", "turns sampled in training"))
CURVES = (
    Curve("reward_mean", "Training reward", "mean reward", "reward"),
    Curve("success_share", "Training success", "rollouts (%)", "share"),
    Curve("zero_variance_share", "Groups without a gradient", "groups (%)", "share"),
    Curve("held_out_turns_per_episode", "Held-out turns (drift)", "turns per episode"),
    Curve("kl", "KL to the reference", "nats per token"),
    Curve("grad_norm", "Gradient norm before clipping", "L2 norm"),
)
BRANCHING_CURVES = (
    Curve("branching.structural_saving", "Structural saving s", "calls shared (%)", "share"),
    Curve("branching.correlation_within_starts", "Correlation within starts c", "of rewards"),
    Curve("branching.effective_leaves", "Effective leaves per group", "leaves"),
)
MEASURED = {"value": "value P of the rule", "u": "U of the rule", "entropy": "entropy (nats per token)"}


@dataclass(frozen=True)
class Decisions:
    """What the brancher decided. `measured` are its values by what became of them; empty where it measures nothing."""

    forks: int
    passes: int
    reasons: Mapping[str, int]
    unit: str
    measured: Mapping[str, Sequence[float]]


def is_online(run: Run) -> bool:
    """Whether the folder is one run of `turntree train online`, and nothing else."""
    alone = len(run.arms) == 1 and run.profile is None and run.pivots is None and run.random is None
    return alone and run.arms[0].stage == ONLINE_STAGE and run.arms[0].evaluation is None


def view(run: Run) -> dict[str, Any]:
    """Everything that the template of an online run shows."""
    arm = run.arms[0]
    with reading(run.path / "metrics.jsonl"):
        rows = [row for row in arm.metrics if row["step"]]
        stops: Counter[str] = sum((Counter(row.get("stops", {})) for row in rows), Counter())
        broken = _broken(rows)
        ledger = _ledger(run)
        return {
            "run": run,
            "arm": arm,
            "lead": lead(arm, rows),
            "result": result(run.path, arm.metrics),
            "spent": rows[-1].get("spent", {}) if rows else {},
            "success_charts": list(_success(arm.metrics)),
            "curves": _curves(CURVES, arm.metrics),
            "stops": stops.most_common(),
            "stops_chart": online_figures.shares("stops", "Rollouts that did not complete", broken) if broken else None,
            **_branching(run.path, arm, rows),
            **_tree(run.path),
            "ledger": ledger,
            "ledger_total": results.total(ledger),
        }


def lead(arm: Arm, rows: Sequence[Row]) -> str:
    """What was trained, for how long, and how the trees grew."""
    config = arm.config or {}
    groups = sum(row.get("groups", 0) for row in rows)
    told = (
        f"Online training of policy “{config.get('model', '')}”: {wording.plural(len(rows), 'iteration')}, "
        f"{wording.plural(groups, 'group')} of rollouts"
    )
    branching = config.get("branching")
    if branching is None:
        return f"{told}, all of them independent."
    rollouts = config.get("train", {}).get("rollouts", {})
    initial, size = rollouts.get("initial_rollouts"), rollouts.get("group_size")
    begun = f"; {initial} of {size} rollouts begin independently" if initial else ""
    return f"{told}, forked by the rule “{branching['rule']}”{begun}."


def result(folder: Path, metrics: Sequence[Row]) -> str:
    """Held-out success before and after, with the paired interval where outcomes by task were kept."""
    checks = series(metrics, SUCCESS.key)
    if not checks:
        return "No check on held-out tasks was logged, so this page says nothing about success on other tasks."
    first, last = checks[0][1], checks[-1][1]
    if len(checks) == 1:
        return f"Held-out success is {wording.percent(first)}; it was looked at only once."
    told = f"Held-out success went from {wording.percent(first)} to {wording.percent(last)}"
    outcomes = _outcomes(folder / HELD_OUT)
    if len(outcomes) < 2:
        return f"{told}."
    before, after = outcomes[min(outcomes)], outcomes[max(outcomes)]
    tasks = sorted(before.keys() & after.keys())
    mean, low, high = paired_bootstrap([after[task] for task in tasks], [before[task] for task in tasks])
    verdict = "contains zero" if low <= 0 <= high else "lies above zero" if low > 0 else "lies below zero"
    return (
        f"{told} on {wording.plural(len(tasks), 'task')}: a paired gain of {wording.points(mean)} points "
        f"(95% interval {wording.points(low)} to {wording.points(high)}, which {verdict})."
    )


def _outcomes(path: Path) -> dict[int, dict[str, float]]:
    """Mean reward by iteration and task, of tasks with an outcome."""
    found: dict[int, dict[str, float]] = {}
    for number, row in _rows(path):
        with reading(path, number):
            if row["rewards"]:
                found.setdefault(row["iteration"], {})[row["task"]] = sum(row["rewards"]) / len(row["rewards"])
    return found


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.exists():
        for number, line in jsonl.read_lines(path):
            yield number, jsonl.parse_json(line, path, number)


def _success(metrics: Sequence[Row]) -> Iterator[Chart]:
    for key, label in SPENT:
        points = over(metrics, key, SUCCESS.key)
        if points:
            yield online_figures.progress(f"success-{key}", SUCCESS, points, label)


def over(metrics: Sequence[Row], spent: str, key: str) -> list[tuple[float, float]]:
    """(spent so far, value) at every step that logged the value; before the first iteration nothing was spent."""
    costs = {0.0: 0.0, **dict(series(metrics, spent))}
    return [(costs[step], value) for step, value in series(metrics, key) if step in costs] if len(costs) > 1 else []


def _curves(curves: Sequence[Curve], metrics: Sequence[Row]) -> list[Chart]:
    drawn = ((what, series(metrics, what.key)) for what in curves)
    return [online_figures.progress(f"curve-{what.key}", what, points, "iteration") for what, points in drawn if points]


def _broken(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """The share of every ending but completion, by iteration."""
    kinds = sorted({kind for row in rows for kind in row.get("stops", {})} - {StopReason.COMPLETED.value})
    counted = [(row["step"], row["stops"]) for row in rows if row.get("stops")]
    return {kind: [(step, stops.get(kind, 0) / sum(stops.values())) for step, stops in counted] for kind in kinds}


def _branching(folder: Path, arm: Arm, rows: Sequence[Row]) -> dict[str, Any]:
    """The panel of the forks; `totals` is None where no iteration logged any."""
    logged = [row["branching"] for row in rows if row.get("branching")]
    if not logged:
        return {"totals": None}
    forks: Counter[int] = Counter()
    for row in logged:
        forks.update({int(turn): count for turn, count in row.get("forks_by_turn", {}).items()})
    decided = decisions(folder / BRANCH_LOG)
    return {
        "totals": _totals(logged, sum(row["groups"] for row in rows if row.get("branching"))),
        "branching_curves": _curves(BRANCHING_CURVES, arm.metrics),
        "forks_chart": online_figures.by_turn("forks-by-turn", forks) if forks else None,
        "decisions": decided,
        "measured_chart": (
            online_figures.cumulative("measured", decided.measured, decided.unit)
            if decided and decided.measured
            else None
        ),
    }


def _totals(logged: Sequence[Row], groups: int) -> dict[str, Any]:
    names = ("leaves", "starts", "refills", "forks", "calls_fresh", "calls_chain", "tokens_fresh", "tokens_chain")
    totals: dict[str, Any] = {name: sum(row[name] for row in logged) for name in names}
    for name in ("correlation_within_starts", "effective_leaves"):
        known = [row[name] for row in logged if row.get(name) is not None]
        totals[name] = sum(known) / len(known) if known else None
    return {**totals, "groups": groups, "saving": 1 - totals["calls_fresh"] / max(1, totals["calls_chain"])}


def decisions(path: Path) -> Decisions | None:
    """What the brancher wrote down; None where it wrote nothing."""
    reasons: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    numbers: dict[str, list[Row]] = {}
    for number, row in _rows(path):
        with reading(path, number):
            actions[row["action"]] += 1
            reasons[row["reason"]] += 1
            numbers.setdefault(_outcome(row), []).append(row["numbers"])
    if not actions:
        return None
    key = next((key for key in MEASURED if any(key in row for rows in numbers.values() for row in rows)), "")
    measured = {what: [row[key] for row in rows if key in row] for what, rows in sorted(numbers.items())} if key else {}
    return Decisions(actions["fork"], actions["pass"], dict(reasons.most_common()), MEASURED.get(key, ""), measured)


def _outcome(row: Row) -> str:
    if row["action"] == "fork":
        return "forked"
    return "no leaf left" if "no leaf is left" in row["reason"] else "passed"


def _tree(folder: Path) -> dict[str, Any]:
    """The drawn group, or the sentence why there is none."""
    if not (folder / FILE_NAME).exists():
        return {"group": None, "no_tree": f"There is no {FILE_NAME} in this folder."}
    report = ReadReport(format="turntree")
    groups = list(read_groups([folder / FILE_NAME], ReadConfig(), report))
    unread = f" {wording.plural(report.dropped.total(), 'line')} of {FILE_NAME} could not be read."
    note = unread.strip() if report.dropped else ""
    chosen = rollout_tree.choose(groups)
    if chosen is None:
        return {"group": None, "no_tree": f"No group has two different rewards. {note}".strip()}
    tree = rollout_tree.tree_of(chosen)
    return {
        "group": chosen,
        "tree_chart": draw_tree(chosen),
        "tree_leaves": tree.leaves,
        "tree_left_out": tree.left_out,
        "tree_forks": sum(rollout.forked for rollout in chosen.rollouts),
        "tree_deciding": rollout_tree.deciding_forks(chosen.rollouts),
        "tree_mixed": sum(len(set(group.scored)) > 1 for group in groups),
        "tree_groups": len(groups),
        "tree_note": note,
    }


def _ledger(run: Run) -> list[results.LedgerRow]:
    """Training, and the checks on held-out tasks where they were counted."""
    rows = results.ledger(run)
    checks = (run.arms[0].cost or {}).get("checks")
    if checks is None:
        return rows
    checked = replace(run, arms=(replace(run.arms[0], name="held-out checks", cost=checks, metrics=()),))
    return [*rows, *(replace(row, name="held-out checks") for row in results.ledger(checked))]
