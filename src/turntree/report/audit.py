"""The page of an audit of logs: headline, bars, the table of remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.report.page import templates
from turntree.report.wording import count, percent, plural
from turntree.run.files import write_text

REMEDIES = {
    "dapo": ("DAPO filter", "drops finished groups without a gradient from the update"),
    "greso": ("GRESO", "skips prompts whose history predicts no gradient; others take their place"),
    "gate": ("Gate, calibrated on this log", "stops groups whose rollouts have converged"),
    "gate_paper": ("Gate, the paper’s setting", "stops at turn 10 below a mean distance of 0.12; not calibrated here"),
    "pivots": ("Pivot selection of tasks", "plays only tasks that were mixed and hard when first seen"),
    "together": ("GRESO, gate and DAPO", "those that the log supports, on one budget, nothing counted twice"),
}
UNITS = {"tokens": "generated tokens", "turns": "turns", "characters": "generated characters"}
ON_DARK, ON_LIGHT = "#fdfdfd", "#1b1d21"  # text on a bar, whose colour is the same on a light and on a dark page
OUTCOMES = {  # colour on the page, ink on it, words
    "mixed": ("#0072B2", ON_DARK, "mixed rewards: a gradient"),
    "all_fail": ("#b9572b", ON_DARK, "all fail"),
    "all_succeed": ("#e3a46b", ON_LIGHT, "all succeed"),
    "censored": ("#c9ced5", ON_LIGHT, "censored"),
}
MOST_BARS = 40


def build_audit_page(result: dict[str, Any], out: Path) -> Path:
    """Write the page of `audit.audit` to `out`. The same result gives the same bytes."""
    units = [unit for unit in UNITS if unit in result["cost"]]
    rows = [_remedy(result, name, units[0] if units else None) for name in REMEDIES]
    over_time = result["over_time"]
    page = templates().get_template("audit.html.j2")
    shown = {
        "sentences": sentences(result),
        "unit": units[0] if units else None,
        "unit_words": UNITS,
        "budget": budget(result),
        "over_time": outcomes_over_time(over_time) if over_time and len(over_time) > 1 else None,
        "remedies": rows,
        "outcomes": OUTCOMES,
    }
    return write_text(out, page.render(result=result, **shown))


def _remedy(result: dict[str, Any], name: str, unit: str | None) -> dict[str, Any]:
    label, what = REMEDIES[name]
    measured = result["remedies"][name]
    row: dict[str, Any] = {"name": name, "label": label, "what": what, "measured": measured}
    if measured is None:
        return row | {"why": result["absent"][name]}
    return row | {
        "generation": measured["rollout_saved_share"].get(unit),
        "training": measured["training_saved_share"].get(unit),
        "lost": measured["mixed_lost_share"],
    }


def sentences(result: dict[str, Any]) -> list[str]:
    """What a reader should know next to the headline."""
    counts, tasks, dilution = result["counts"], result["tasks"], result["dilution"]
    lines = [
        f"{count(result['zero_variance'])} of {count(result['scored'])} scored groups had equal rewards (95% interval "
        f"{100 * result['low']:.0f}–{100 * result['high']:.0f}%): {count(counts['all_fail'])} failed as a whole, "
        f"{count(counts['all_succeed'])} succeeded as a whole."
    ]
    if counts["censored"] or counts["censored_rollouts"]:
        lines.append(
            f"{plural(counts['censored_rollouts'], 'rollout')} had no reward; {plural(counts['censored'], 'group')} "
            "with fewer than two scored rollouts are in no rate."
        )
    if tasks["tasks_with_enough_epochs"]:
        lines.append(
            f"{count(tasks['never_taught'])} of {plural(tasks['tasks_with_enough_epochs'], 'task')} that were played "
            f"at least {tasks['epochs']} times never had a gradient; chance alone would make "
            f"{tasks['expected_by_chance']:.1f} of them look so."
        )
    if dilution["amplification"] is not None and dilution["amplification"] > 1:
        lines.append(
            f"A loss that averages over all rollouts was {percent(dilution['share'], 0)} zeros: without them its "
            f"gradient would have been {dilution['amplification']:.2f} times as large."
        )
    return lines


# stacked bars, which the page draws itself


def shares(row: Mapping[str, int]) -> dict[str, float]:
    """Of a row of counts by outcome."""
    total = sum(row[name] for name in OUTCOMES)
    return {name: row[name] / total if total else 0.0 for name in OUTCOMES}


def budget(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Shares of the groups, and of every unit that the log knows, by the outcome of the group."""
    rows = {f"groups ({count(result['counts']['groups'])})": shares(result["counts"])}
    return rows | {f"{UNITS[unit]} ({count(spent['total'])})": shares(spent) for unit, spent in result["cost"].items()}


def outcomes_over_time(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of the groups of each iteration, several iterations a bar where there are many."""
    width = math.ceil(len(rows) / MOST_BARS)
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    return {
        f"iteration {part[0]['iteration']}": shares({name: sum(row[name] for row in part) for name in OUTCOMES})
        for part in bins
    }
