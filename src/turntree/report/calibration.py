"""The page of `turntree gate calibrate`: one static file that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turntree.core.outcome import GroupOutcome
from turntree.decide.gates.sweep import PAPER_SIGNAL
from turntree.decide.gates.table import GroupTable
from turntree.report import wording
from turntree.report.figures import INK, Chart, drawing, percent_ticks
from turntree.report.page import templates
from turntree.report.wording import percent
from turntree.run.files import write_text
from turntree.run.statistics import clopper_pearson_low

Row = Mapping[str, Any]
NAMES = {"prefix_edit_distance_mean": "prefix edit distance", "action_bigram_jaccard_mean": "bigram Jaccard distance"}


def build_calibration_page(result: Row, table: GroupTable, out: Path) -> Path:
    """Write the page about a calibration's result and the groups behind it to `out`, and return where it lies."""
    return write_text(out, render(result, table))


def render(result: Row, table: GroupTable) -> str:
    """The page as HTML; the same result gives the same page."""
    environment, absent = templates(), result["absent"]
    chosen = [row["choice"] for row in result["choices"] if row["scope"] == "all" and row["choice"] is not None]
    environment.filters |= {function.__name__: function for function in (signal_name, short_rule)}
    return environment.get_template("calibration.html.j2").render(
        result=result,
        headline=headline(result),
        distributions=distributions(table),
        precision_chart=precision(table, result["floor"], result["confidence"]),
        savings_chart=savings(result, table),
        heat=_heat(result),
        choices=_choices(result),
        baselines=list({one["rule"]: one for one in chosen}.values()),  # over all groups, each once
        absent={why: [name for name in absent if absent[name] == why] for why in dict.fromkeys(absent.values())},
    )


def headline(result: Row) -> tuple[str, str]:
    """The data, and the recommendation."""
    groups, zero = wording.plural(result["groups"], "group"), wording.percent(result["zero_variance_rate"])
    seen = f"{groups} of {wording.plural(result['tasks'], 'task')}, {zero} of them without variance."
    chosen = result["recommended"]
    if chosen is None:
        return seen, f"No operating point is recommended: {result['refused']['reason']}."
    live = chosen["actionable"]
    return seen, (
        f"Recommended: {chosen['rule']}. It cuts {live['cut']} groups that were still running, {live['tp']} of them "
        f"truly without variance: precision {wording.percent(live['precision'])}, at least "
        f"{wording.percent(live['precision_low'])} at {result['confidence']:.0%} confidence."
    )


def signal_name(name: str) -> str:
    return NAMES.get(name, name.replace("_", " "))


def short_rule(row: Row) -> str:
    """`prefix edit distance < 0.12`, without its turn."""
    if row["termination"] is not None:
        return f"{signal_name(row['signal'])} ≥ {row['termination']:g}"
    low, high = row["threshold"], row.get("same_up_to", row["threshold"])
    return f"{signal_name(row['signal'])} < {low:g}" + (f" to {high:g}" if high > low else "")


def _choices(result: Row) -> list[tuple[str, list[Row]]]:
    """Those of running groups, then those of all groups; turns in order, then all turns together."""
    order = {turn: index for index, turn in enumerate([*result["turns"], None])}
    rows = sorted(result["choices"], key=lambda row: order[row["turn"]])
    return [(scope, [row for row in rows if row["scope"] == scope]) for scope in ("actionable", "all")]


def _heat(result: Row) -> dict[str, Any]:
    """AUROC of every signal (rows) at every turn (columns), and of every task type; tint 1 is 0 or 1, none is 0.5."""
    rows: dict[str, dict[int, Row]] = {}
    for row in result["association"]:
        rows.setdefault(row["signal"], {})[row["turn"]] = row
    kinds = list(result["task_types"])
    return {"turns": result["turns"], "signals": rows, "kinds": kinds}


# figures: where the groups lie, how precise each threshold is, what it saves


ROWS = (
    (GroupOutcome.ALL_FAIL, "all fail", "#D55E00"),
    (GroupOutcome.MIXED, "mixed", "#56B4E9"),
    (GroupOutcome.ALL_SUCCEED, "all succeed", "#009E73"),
)
LINE, BAND = "#0072B2", "#56B4E9"
ALL_LINE = "#E69F00"
DISTANCE = "mean prefix edit distance"


def distributions(table: GroupTable) -> Chart | None:
    """d_K of every group by its outcome, one panel a turn; hollow: every rollout had ended by then."""
    if PAPER_SIGNAL not in table.signals_NK:
        return None
    outcomes = np.array([outcome.value for outcome in table.outcomes])
    with drawing("distance", 3.4 * len(table.turns), 2.5) as (figure, made):
        panels = figure.subplots(1, len(table.turns), sharey=True, sharex=True, squeeze=False)[0]
        for column, (axes, turn) in enumerate(zip(panels, table.turns, strict=True)):
            values, live = table.signals_NK[PAPER_SIGNAL][:, column], table.actionable_NK[:, column]
            for row, (outcome, _, tint) in enumerate(ROWS):
                member = outcomes == outcome.value
                heights = row + _spread(values[member])
                for mask, face in ((live[member], tint), (~live[member], "none")):
                    axes.scatter(
                        values[member][mask], heights[mask], s=16, facecolors=face, edgecolors=tint, linewidths=0.9
                    )
            axes.set(title=f"turn {turn}", xlabel=DISTANCE, xlim=(-0.03, 1.03), ylim=(2.5, -0.5))
            axes.set_yticks(range(len(ROWS)), [name for _, name, _ in ROWS])
            axes.grid(axis="y", visible=False)
    counted = ", ".join(f"{int((outcomes == outcome.value).sum())} {name}" for outcome, name, _ in ROWS)
    return Chart(
        made[0],
        f"Mean prefix edit distance of every group by its final outcome, at each turn: {counted}.",
        "A dot is a group; hollow: all its rollouts had ended, so that cutting it would have saved nothing.",
    )


def precision(table: GroupTable, floor: float, confidence: float) -> Chart | None:
    """Precision of every threshold of d_K among running groups, with its exact lower bound, and among all."""
    if PAPER_SIGNAL not in table.signals_NK:
        return None
    with drawing("precision", 3.4 * len(table.turns), 2.7) as (figure, made):
        panels = figure.subplots(1, len(table.turns), sharey=True, sharex=True, squeeze=False)[0]
        for column, (axes, turn) in enumerate(zip(panels, table.turns, strict=True)):
            live = table.actionable_NK[:, column]
            x, true, cut = _curve(table, column, np.ones_like(live))
            axes.step(x, true / cut, where="post", color=ALL_LINE, linewidth=1.2, label="all groups")
            x, true, cut = _curve(table, column, live)
            low = [clopper_pearson_low(int(t), int(c), confidence) for t, c in zip(true, cut, strict=True)]
            axes.fill_between(x, low, true / cut, step="post", color=BAND, alpha=0.35, linewidth=0)
            axes.step(x, true / cut, where="post", color=LINE, linewidth=1.8, label="running groups")
            axes.axhline(floor, color=INK, linewidth=1, linestyle=(0, (4, 3)))
            axes.set(title=f"turn {turn}", xlabel=f"threshold on {DISTANCE}", xlim=(0, 0.6), ylim=(0, 1.02))
            percent_ticks(axes, "y")
        panels[0].set_ylabel("precision (%)")
        panels[-1].legend(loc="lower right")
    return Chart(
        made[0],
        f"Precision of the cut for every threshold at each turn, with its lower bound, against the floor of "
        f"{percent(floor, 0)}.",
        f"Precision of cutting below a threshold. Blue: groups still running, down to the {confidence:.0%} lower bound "
        f"(shaded); orange: all groups, as the paper counts. Dashed: the floor. A point is supported where the lower "
        f"edge of the shade reaches it.",
    )


def savings(result: Mapping[str, Any], table: GroupTable) -> Chart | None:
    """Turns saved by the true cuts among running groups for every threshold of d_K, a line a turn, and the oracle."""
    if PAPER_SIGNAL not in table.signals_NK:
        return None
    with drawing("savings", 5.6, 2.9) as (figure, made):
        axes = figure.add_subplot()
        tints = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
        for column, turn in enumerate(table.turns):
            x, true, _ = _curve(table, column, table.actionable_NK[:, column])
            oracle = result["oracle"][str(turn)]["actionable"]
            share = oracle["safe"] / oracle["tp"] if oracle["tp"] else 0.0
            tint = tints[column % len(tints)]
            axes.step(x, true * share, where="post", color=tint, label=f"turn {turn}")
            axes.axhline(oracle["safe"], color=tint, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set(xlabel=f"threshold on {DISTANCE}", ylabel="turns saved (%)", xlim=(0, 0.6))
        axes.set_ylim(bottom=0)
        percent_ticks(axes, "y")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return Chart(
        made[0],
        "Turns that true cuts of running groups save, by threshold, one line for each turn.",
        "Share of all turns (every rollout as long as the horizon) that true cuts of running groups save. Dotted: an "
        "oracle that cuts every group without variance at that turn.",
    )


def _curve(
    table: GroupTable, column: int, mask: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Thresholds just above each value of d_K, and the true and all cuts among `mask` there."""
    values, zero = table.signals_NK[PAPER_SIGNAL][mask, column], table.zero_variance_N[mask]
    order = np.argsort(values, kind="stable")
    last = np.flatnonzero(np.diff(values[order], append=np.inf))
    return values[order][last], np.cumsum(zero[order], dtype=np.int64)[last], last + 1


def _spread(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Heights that keep dots of nearly equal value apart: the same for the same values."""
    heights = np.zeros(len(values))
    taken: dict[int, int] = {}
    for index in np.argsort(values, kind="stable"):
        near = round(float(values[index]) * 40)
        place = taken[near] = taken.get(near, -1) + 1
        heights[index] = (-1) ** place * ((place + 1) // 2) * 0.09
    return np.clip(heights, -0.42, 0.42)
