"""The page of an online run: success over cost, how its trees forked, and one tree drawn."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.tree import Decision, StopReason
from turntree.report import results, rollout_tree, wording
from turntree.report.columns import BRANCHING, ONLINE, SPENT, STOPS, SUCCESS, Curve
from turntree.report.figures import (
    BLUE,
    DASHES,
    INK,
    MUTED,
    OTHERS,
    Chart,
    drawing,
    lines,
    literal,
    percent_ticks,
    plain_ticks,
    series,
)
from turntree.report.read import ONLINE_STAGE, Arm, Row, Run, reading
from turntree.report.rollout_tree import KeptTrees
from turntree.report.wording import count, percent
from turntree.run import jsonl
from turntree.run.statistics import paired_bootstrap

HELD_OUT = "held_out.jsonl"  # a name given by the stage, which lies beside this floor
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


def view(run: Run, page: Path) -> dict[str, Any]:
    """Everything that the template of an online run shows; `page` is where it will lie."""
    arm, kept = run.arms[0], rollout_tree.look(run.path)
    with reading(run.path / "metrics.jsonl"):
        rows = [row for row in arm.metrics if row["step"]]
        stops: Counter[str] = sum((Counter(row.get("stops", {})) for row in rows), Counter())
        return {
            "run": run,
            "lead": lead(arm, rows),
            "result": result(run.path, arm.metrics),
            "spent": rows[-1].get("spent", {}) if rows else {},
            "success_charts": list(_success(arm.metrics)),
            "calls_made": any(calls for _, calls in series(arm.metrics, "trees.calls_fresh")),
            "curves": [*_curves(ONLINE, arm.metrics), *_drawn(lines(STOPS, _broken(rows), x="iteration", legend=True))],
            "stops": stops.most_common(),
            **_branching(arm, rows, kept),
            "tree": rollout_tree.view(kept, run.path, page),
            "ledger": results.ledger(run),
            "configurations": {"config.json": json.dumps(arm.config, indent=2, ensure_ascii=False)},
        }


def lead(arm: Arm, rows: Sequence[Row]) -> str:
    """What was trained, for how many iterations, and how the trees grew."""
    config = arm.config or {}
    groups = sum(row.get("groups", 0) for row in rows)
    told = (
        f"Online training of policy “{config.get('model', '')}”: {wording.plural(len(rows), 'iteration')}, "
        f"{wording.plural(groups, 'group')} of rollouts"
    )
    brancher = config.get("brancher")
    if brancher is None:
        return f"{told}, all of them independent."
    rollouts = config.get("train", {}).get("rollouts", {})
    initial, size = rollouts.get("initial_rollouts"), rollouts.get("group_size")
    begun = f"; {initial} of {size} rollouts begin independently" if initial else ""
    return f"{told}, forked by the brancher “{brancher['name']}”{begun}."


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
    if not tasks:
        return f"{told}. No task has an outcome in both checks, so there is no paired gain."
    mean, low, high = paired_bootstrap([after[task] for task in tasks], [before[task] for task in tasks])
    verdict = "contains zero" if low <= 0 <= high else "lies above zero" if low > 0 else "lies below zero"
    return (
        f"{told} on {wording.plural(len(tasks), 'task')}: a paired gain of {wording.points(mean)} points "
        f"(95% interval {wording.points(low)} to {wording.points(high)}, which {verdict})."
    )


def _outcomes(path: Path) -> dict[int, dict[str, float]]:
    """Mean reward by iteration and task, of tasks with an outcome."""
    found: dict[int, dict[str, float]] = {}
    for line, row in _rows(path):
        with reading(path, line):
            if row["rewards"]:
                found.setdefault(row["iteration"], {})[row["task"]] = sum(row["rewards"]) / len(row["rewards"])
    return found


def _rows(path: Path) -> Iterator[tuple[int, Any]]:
    if path.exists():
        for number, line in jsonl.read_lines(path):
            yield number, jsonl.parse_json(line, path, number)


def _success(metrics: Sequence[Row]) -> Iterator[Chart]:
    for key, spent in SPENT.items():
        points = over(metrics, key, SUCCESS.key)
        if points and points[-1][0]:  # an environment without tools spends no calls
            yield from _drawn(lines(SUCCESS, {"": points}, x=spent))


def over(metrics: Sequence[Row], spent: str, key: str) -> list[tuple[float, float]]:
    """(spent so far, value) at every step that logged the value; before the first iteration nothing was spent."""
    costs = {0.0: 0.0, **dict(series(metrics, spent))}
    return [(costs[step], value) for step, value in series(metrics, key) if step in costs] if len(costs) > 1 else []


def _curves(curves: Sequence[Curve], metrics: Sequence[Row]) -> list[Chart]:
    drawn = (lines(what, {"": series(metrics, what.key)}, x="iteration") for what in curves)
    return [chart for chart in drawn if chart is not None]


def _drawn(chart: Chart | None) -> list[Chart]:
    return [] if chart is None else [chart]


def _broken(rows: Sequence[Row]) -> dict[str, list[tuple[float, float]]]:
    """The share of every ending but completion, by iteration."""
    kinds = sorted({kind for row in rows for kind in row.get("stops", {})} - {StopReason.COMPLETED.value})
    counted = [(row["step"], row["stops"]) for row in rows if row.get("stops")]
    return {kind: [(step, stops.get(kind, 0) / sum(stops.values())) for step, stops in counted] for kind in kinds}


def _branching(arm: Arm, rows: Sequence[Row], kept: KeptTrees | None) -> dict[str, Any]:
    """The panel of the forks; `totals` is None where no iteration logged any."""
    logged = [row["branching"] for row in rows if row.get("branching")]
    if not logged:
        return {"totals": None}
    forks: Counter[int] = Counter()
    for row in logged:
        forks.update({int(turn): count for turn, count in row.get("forks_by_turn", {}).items()})
    decided = None if kept is None else decisions(kept.decisions)
    return {
        "totals": _totals(logged, sum(row["groups"] for row in rows if row.get("branching"))),
        "branching_curves": [*_curves(BRANCHING, arm.metrics), *([by_turn(forks)] if forks else [])],
        "decisions": decided,
        "decisions_over": 0 if kept is None else len(kept.iterations),
        "measured_chart": cumulative(decided.measured, decided.unit) if decided and decided.measured else None,
    }


def _totals(logged: Sequence[Row], groups: int) -> dict[str, Any]:
    names = ("leaves", "starts", "refills", "forks", "calls_fresh", "calls_chain", "tokens_fresh", "tokens_chain")
    totals: dict[str, Any] = {name: sum(row[name] for row in logged) for name in names}
    for unit in ("calls", "tokens"):
        made, one_by_one = totals[f"{unit}_fresh"], totals[f"{unit}_chain"]
        totals[f"{unit}_saving"] = 1 - made / one_by_one if one_by_one else None
    return {**totals, "groups": groups}


def decisions(made: Iterable[Decision]) -> Decisions | None:
    """What the brancher decided, forks and passes; None where it was never asked."""
    reasons: Counter[str] = Counter()
    actions: Counter[str] = Counter()
    numbers: dict[str, list[dict[str, float]]] = {}
    for decision in made:
        actions[decision.action] += 1
        reasons[decision.reason] += 1
        numbers.setdefault(_outcome(decision), []).append(decision.numbers)
    if not actions:
        return None
    key = next((key for key in MEASURED if any(key in row for rows in numbers.values() for row in rows)), "")
    measured = {
        what: values for what, rows in sorted(numbers.items()) if (values := [row[key] for row in rows if key in row])
    }
    return Decisions(actions["fork"], actions["pass"], dict(reasons.most_common()), MEASURED.get(key, ""), measured)


def _outcome(decision: Decision) -> str:
    if decision.action == "fork":
        return "forked"
    return "no leaf left" if "no leaf is left" in decision.reason else "passed"


# figures


def by_turn(counts: Mapping[int, int]) -> Chart:
    """How many forks lie at each turn, over the whole run."""
    turns = range(min(counts), max(counts) + 1)
    values = [counts.get(turn, 0) for turn in turns]
    with drawing("forks-by-turn", 3.9, 2.5) as (figure, made):
        axes = figure.add_subplot()
        axes.bar(list(turns), values, color=BLUE, width=0.72)
        for turn, value in zip(turns, values, strict=True):
            axes.annotate(count(value), (turn, value), (0, 2), textcoords="offset points", ha="center", color=INK)
        axes.set(title="Forks by turn", xlabel="turn of the fork", ylabel="forks", xticks=list(turns))
        axes.set_ylim(top=1.12 * max(values))
        axes.grid(visible=False, axis="x")
    said = ", ".join(f"turn {turn}: {count(value)}" for turn, value in zip(turns, values, strict=True))
    return Chart(made[0], f"Forks by turn. {said}.")


def cumulative(samples: Mapping[str, Sequence[float]], unit: str) -> Chart:
    """The share of moments below a value, a line for each of what became of them."""
    everything = sorted(value for values in samples.values() for value in values)
    low, high = (everything[int(share * (len(everything) - 1))] for share in (0.005, 0.95))
    with drawing("measured", 5.0, 2.9) as (figure, made):
        axes = figure.add_subplot()
        for index, (what, values) in enumerate(samples.items()):
            axes.ecdf(
                list(values),
                color=(BLUE, *(tint for tint, _ in OTHERS))[index % 4],
                linestyle=DASHES[index % 4],
                linewidth=2,
                label=literal(f"{what} ({count(len(values))})"),
            )
        axes.set(title="What the rule measured", xlabel=literal(unit), ylabel="moments below (%)", ylim=(0, 1.02))
        if low < high:
            axes.set_xlim(low, high)
        plain_ticks(axes, "x")
        percent_ticks(axes, "y")
        axes.tick_params(axis="x", labelcolor=MUTED)
        axes.legend(loc="lower right")
    medians = "; ".join(
        f"{what}: median {sorted(values)[len(values) // 2]:.4g} of {count(len(values))}"
        for what, values in samples.items()
        if values
    )
    outside = percent(sum(value > high for value in everything) / len(everything), 0)
    return Chart(made[0], f"{unit} at forks and passes. {medians}.", f"{outside} of the moments lie further right.")
