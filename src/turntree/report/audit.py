"""The page of an audit of logs: headline, bars, the table of remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.report.wording import count, percent, plural, templates, within
from turntree.run.files import write_text

REMEDIES = {
    "dapo": ("DAPO filter", "drops finished groups without a gradient from the update"),
    "greso": ("GRESO", "skips prompts whose history predicts no gradient; others take their place"),
    "gate": ("Gate, calibrated on this log", "stops groups whose rollouts have converged"),
    "gate_paper": ("Gate, the paper’s setting", "stops at turn 10 below a mean distance of 0.12; not calibrated here"),
    "pivots": ("PivotRL’s selection of tasks", "plays only tasks that were mixed and hard when first seen"),
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
    over_time = result["over_time"]
    page = templates().get_template("audit.html.j2")
    shown = {
        "sentences": sentences(result),
        "figures": figures(result),
        "suspicion": suspicion(result),
        "unit": units[0] if units else None,
        "unit_words": UNITS,
        "budget": budget(result),
        "over_time": outcomes_over_time(over_time) if over_time and len(over_time) > 1 else None,
        "remedies": REMEDIES,
        "outcomes": OUTCOMES,
    }
    return write_text(out, page.render(result=result, **shown))


def suspicion(result: dict[str, Any]) -> str | None:
    """What looks like failures that were trained on as the lowest reward; None where nothing does."""
    found, without = result["failures"]["suspects"], result["failures"]["without"]
    if not found["rollouts"]:
        return None
    signs = ", ".join(f"{count(row['lowest'])} {sign}" for sign, row in found["by_sign"].items())
    left = without["zero_variance_rate"]
    then = "no group would be left to compare" if left is None else f"{percent(left, 0)} of the groups had no gradient"
    return (
        f"{count(found['rollouts'])} of {plural(found['of_lowest'], 'rollout')} with the lowest reward "
        f"({found['lowest_reward']:g}) look like failures that were counted as that reward: {signs}. Log them without "
        f"a reward, so that they train nothing: then {then}."
    )


def figures(result: dict[str, Any]) -> list[dict[str, str]]:
    """The three figures of the first screen: how many groups taught nothing, what they cost, what would save most."""
    unit = next((unit for unit in UNITS if unit in result["cost"]), None)
    edges = _edges([result["low"], result["high"]])
    shown = [
        {"value": percent(result["zero_variance_rate"], 0), "what": "of the groups without a gradient", "note": edges}
    ]
    if unit is not None:
        cost = result["cost"][unit]
        spent = {"value": percent(cost["zero_variance_share"], 0), "what": f"of the {UNITS[unit]} were spent on them"}
        shown.append(spent | {"note": _edges(cost["zero_variance_interval"])})
        if (best := _best(result, unit)) is not None:
            shown.append(best)
    return shown


def _best(result: dict[str, Any], unit: str) -> dict[str, str] | None:
    """The remedy that saves most generation for what it loses, else most training."""
    for kind, words in (("rollout_saved", "would be saved by"), ("training_saved", "would not be trained on with")):
        worth = {
            name: row[f"{kind}_share"][unit] - (row["mixed_lost_share"] or 0.0)
            for name, row in result["remedies"].items()
            if row is not None and name not in ("together", "gate_paper") and row[f"{kind}_share"].get(unit)
        }
        name = max(worth, key=lambda one: worth[one], default="")
        if not name or worth[name] <= 0:
            continue
        row = result["remedies"][name]
        what = f"of the {UNITS[unit]} {words} {REMEDIES[name][0]}"
        lost = row["mixed_lost_share"]
        price = f"; price: {percent(lost, 0)} of the groups with a gradient" if lost else ""
        note = f"{_edges(row[f'{kind}_interval'][unit])}{price}".lstrip("; ")
        return {"value": percent(row[f"{kind}_share"][unit], 0), "what": what, "note": note}
    return None


def _edges(interval: list[float] | None) -> str:
    return "" if interval is None else f"95% interval {within(interval)}"


def sentences(result: dict[str, Any]) -> list[str]:
    """What a reader should know next to the headline."""
    counts, tasks, dilution = result["counts"], result["tasks"], result["dilution"]
    why = result["failures"]["why"]
    looks = f", {count(why['as_lowest'])} look like failures that were counted" if why["as_lowest"] else ""
    lines = [
        f"{count(result['zero_variance'])} of {count(result['scored'])} scored groups had equal rewards "
        f"({_edges([result['low'], result['high']])}): {count(why['all_fail'])} failed as a whole, "
        f"{count(why['all_succeed'])} succeeded as a whole{looks}. Success is a reward of at least "
        f"{result['success']:g} (--set success=NUMBER).",
    ]
    if "over_time" in result["absent"]:
        lines.append("The log tells no iteration: all rollouts of one name were compared as one group.")
    if counts["censored"] or counts["censored_rollouts"]:
        few = f"; {plural(counts['censored'], 'group')} with fewer than two scored rollouts left out of all rates"
        lines.append(
            f"{plural(counts['censored_rollouts'], 'rollout')} had no reward{few if counts['censored'] else ''}."
        )
    if tasks["tasks_with_enough_epochs"]:
        lines.append(
            f"{count(tasks['never_taught'])} of {plural(tasks['tasks_with_enough_epochs'], 'task')} that were played "
            f"at least {tasks['epochs']} times never had a gradient; chance alone would make "
            f"{tasks['expected_by_chance']:.1f} of them look so."
        )
    if dilution["amplification"] is not None and dilution["amplification"] > 1:
        how = f" ({result['log']['format']}: {setting})" if (setting := result["log"]["filter_setting"]) else ""
        lines.append(
            f"{percent(dilution['share'], 0)} of the rollouts in the loss had advantage zero: a mean over the others "
            f"would have had a gradient {dilution['amplification']:.2f} times as large. "
            f"DAPO’s filter leaves them out{how}."
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
