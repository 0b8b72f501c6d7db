"""The page of `turntree gate calibrate`: one static file that needs nothing beside itself."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turntree.gates.table import GroupTable
from turntree.observe.files import atomic_write
from turntree.report import calibration_figures as figures
from turntree.report import wording
from turntree.report.page import templates

Row = Mapping[str, Any]
NAMES = {"prefix_edit_distance_mean": "prefix edit distance", "action_bigram_jaccard_mean": "bigram Jaccard distance"}


def build_calibration_page(result: Row, table: GroupTable, out: Path) -> Path:
    """Write the page about a calibration's result and the groups behind it to `out`, and return where it lies."""
    page = render(result, table)
    with atomic_write(out) as handle:
        handle.write(page)
    return out


def render(result: Row, table: GroupTable) -> str:
    """The page as HTML; the same result gives the same page."""
    environment = templates()
    environment.filters |= {function.__name__: function for function in (signal_name, short_rule, span)}
    return environment.get_template("calibration.html.j2").render(
        result=result,
        headline=headline(result),
        distributions=figures.distributions(table),
        precision_chart=figures.precision(table, result["floor"], result["confidence"]),
        savings_chart=figures.savings(result, table),
        heat=_heat(result),
        choices=_choices(result),
        baselines=_baselines(result),
        absent=_by_reason(result["absent"]),
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


def span(interval: tuple[float, float] | None) -> str:
    """`6.7–16.0`, in percent."""
    return wording.ABSENT if interval is None else f"{100 * interval[0]:.1f}–{100 * interval[1]:.1f}"


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


def _baselines(result: Row) -> list[Row]:
    """The chosen points over all groups, each once."""
    chosen = [row["choice"] for row in result["choices"] if row["scope"] == "all" and row["choice"] is not None]
    return list({one["rule"]: one for one in chosen}.values())


def _by_reason(absent: Mapping[str, str]) -> dict[str, list[str]]:
    return {why: [name for name, other in absent.items() if other == why] for why in dict.fromkeys(absent.values())}


def _heat(result: Row) -> dict[str, Any]:
    """AUROC of every signal (rows) at every turn (columns), and of every task type; tint 1 is 0 or 1, none is 0.5."""
    rows: dict[str, dict[int, Row]] = {}
    for row in result["association"]:
        rows.setdefault(row["signal"], {})[row["turn"]] = row
    kinds = list(result["task_types"])
    return {"turns": result["turns"], "signals": rows, "kinds": kinds}
