"""The page of an audit of logs: headline, pictures, the table of remedies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.report.figures import INK, MUTED, ON_DARK, ON_LIGHT, PALE, Chart, drawing, percent_ticks
from turntree.report.page import templates
from turntree.report.wording import count, percent, plural
from turntree.run.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

REMEDIES = {
    "dapo": ("DAPO filter", "drops finished groups without a gradient from the update"),
    "greso": ("GRESO", "skips prompts whose history predicts no gradient; others take their place"),
    "gate": ("Gate, calibrated on this log", "stops groups whose rollouts have converged"),
    "gate_paper": ("Gate, the paper’s setting", "stops at turn 10 below a mean distance of 0.12; not calibrated here"),
    "pivots": ("Pivot selection of tasks", "plays only tasks that were mixed and hard when first seen"),
    "together": ("GRESO, gate and DAPO", "those that the log supports, on one budget, nothing counted twice"),
}
UNITS = {"tokens": "generated tokens", "turns": "turns", "characters": "generated characters"}
OUTCOMES = {  # colour on the page, ink on it, words
    "mixed": ("#0072B2", ON_DARK, "mixed rewards: a gradient"),
    "all_fail": ("#b9572b", ON_DARK, "all fail"),
    "all_succeed": ("#e3a46b", ON_LIGHT, "all succeed"),
    "censored": (PALE, INK, "censored"),
}
GENERATION, TRAINING, LOST = "#0072B2", "#9fcbe8", "#b9572b"
MOST_BARS = 50


def build_audit_page(result: dict[str, Any], out: Path) -> Path:
    """Write the page of `audit.audit` to `out`. The same result gives the same bytes."""
    units = [unit for unit in UNITS if unit in result["cost"]]
    rows = [_remedy(result, name, units[0] if units else None) for name in REMEDIES]
    known = [row for row in rows if row["measured"]]
    over_time = result["over_time"]
    page = templates().get_template("audit.html.j2")
    shown = {
        "sentences": sentences(result),
        "unit": units[0] if units else None,
        "unit_words": UNITS,
        "budget": budget(result),
        "over_time": outcomes_over_time(over_time) if over_time and len(over_time) > 1 else None,
        "remedies": rows,
        "remedies_chart": remedies(known, units[0]) if units else None,
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


# figures: where the budget went, when, and what would have saved it


def budget(result: dict[str, Any]) -> Chart:
    """Stacked shares of groups, and of every unit that the log knows, by the outcome of the group."""
    counts = result["counts"]
    rows = {f"groups ({count(counts['groups'])})": _shares(counts, counts["groups"])}
    for unit, spent in result["cost"].items():
        rows[f"{UNITS[unit]} ({count(spent['total'])})"] = _shares(spent, spent["total"])
    with drawing("budget", 7.6, 0.85 + 0.5 * len(rows)) as (figure, made):
        axes = figure.subplots()
        for y, shares in enumerate(rows.values()):
            left = 0.0
            for name, (tint, ink, _) in OUTCOMES.items():
                axes.barh(y, shares[name], 0.66, left=left, color=tint)
                if shares[name] >= 0.06:
                    middle = left + shares[name] / 2
                    axes.text(middle, y, f"{shares[name]:.0%}", color=ink, ha="center", va="center")
                left += shares[name]
        axes.set_yticks(range(len(rows)), list(rows))
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        axes.tick_params(left=False)
        axes.grid(visible=False)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        _legend(figure, {text: tint for name, (tint, _, text) in OUTCOMES.items() if counts[name]})
    mixed = "; ".join(f"{name}: {shares['mixed']:.0%} mixed" for name, shares in rows.items())
    return Chart(made[0], f"Shares of the budget by outcome of the group. {mixed}.")


def _shares(row: Mapping[str, int], total: int) -> dict[str, float]:
    return {name: row[name] / total if total else 0.0 for name in OUTCOMES}


def outcomes_over_time(rows: Sequence[dict[str, Any]]) -> Chart:
    """Outcomes of the groups by iteration as stacked bars, several iterations a bar where there are many."""
    width = math.ceil(len(rows) / MOST_BARS)
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    summed = [{name: sum(row[name] for row in part) for name in OUTCOMES} for part in bins]
    shares = [_shares(row, sum(row.values())) for row in summed]
    with drawing("over-time", 7.6, 3.0) as (figure, made):
        axes = figure.subplots()
        bottom = [0.0] * len(bins)
        for name, (tint, _, _) in reversed(OUTCOMES.items()):
            axes.bar(range(len(bins)), [row[name] for row in shares], 0.92, bottom=bottom, color=tint)
            bottom = [low + row[name] for low, row in zip(bottom, shares, strict=True)]
        shown = range(0, len(bins), max(1, len(bins) // 8))
        axes.set_xticks(list(shown), [str(bins[i][0]["iteration"]) for i in shown])
        axes.set(xlabel="iteration", ylabel="share of groups (%)", ylim=(0, 1), xlim=(-0.6, len(bins) - 0.4))
        percent_ticks(axes, "y")
        axes.grid(visible=False)
        present = {text: tint for name, (tint, _, text) in OUTCOMES.items() if any(row[name] for row in summed)}
        _legend(figure, present)
    ends = " to ".join(f"{shares[at]['mixed']:.0%}" for at in (0, -1))
    caption = f"{width} iterations a bar." if width > 1 else ""
    return Chart(made[0], f"Mixed groups from the first bar to the last: {ends}.", caption)


def remedies(rows: Sequence[dict[str, Any]], unit: str) -> Chart:
    """Left what each remedy saves, in generation and in training; right the teaching groups that it loses."""
    with drawing("remedies", 7.6, 1.1 + 0.52 * len(rows)) as (figure, made):
        saved, lost = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1.5))
        for y, row in enumerate(rows):
            _bar(saved, y - 0.19, row["generation"], GENERATION)
            _bar(saved, y + 0.19, row["training"], TRAINING)
            _bar(lost, y, row["lost"], LOST, 0.5)
        saved.set_yticks(range(len(rows)), [row["label"] for row in rows])
        saved.invert_yaxis()
        saved.set_xlabel(f"saved: share of all {UNITS[unit]} (%)")
        lost.set_xlabel("lost: share of groups\nwith a gradient (%)")
        for axes in (saved, lost):
            axes.set_xlim(0, max(0.1, axes.get_xlim()[1]) * 1.12)
            percent_ticks(axes)
            axes.tick_params(left=False)
            axes.grid(visible=False, axis="y")
        _legend(figure, {"never generated": GENERATION, "never trained on": TRAINING})
    return Chart(made[0], "What each remedy saves and loses; the table has the figures.")


def _bar(axes: Axes, y: float, value: float | None, tint: str, height: float = 0.36) -> None:
    if value is None:
        axes.text(0, y, " not in the log", color=MUTED, va="center", fontsize=9)
        return
    axes.barh(y, value, height, color=tint)
    axes.text(value, y, f" {100 * value:.1f}", va="center", fontsize=9)


def _legend(figure: Figure, tints: Mapping[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=tint, label=text) for text, tint in tints.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9.5)
