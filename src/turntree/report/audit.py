"""The page of an audit of logs: headline, pictures, the table of remedies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.report.figures import INK, MUTED, ON_DARK, ON_LIGHT, PALE, Chart, drawing, percent_ticks
from turntree.report.page import templates
from turntree.report.wording import count, percent, plural
from turntree.run.files import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes


REMEDIES = (
    ("dapo", "DAPO filter", "drops finished groups without a gradient from the update"),
    ("greso", "GRESO", "skips prompts whose history predicts no gradient; others take their place"),
    ("gate", "Gate, calibrated on this log", "stops groups whose rollouts have converged"),
    ("gate_paper", "Gate, the paper’s setting", "stops at turn 10 below a mean distance of 0.12; not calibrated here"),
    ("pivots", "Pivot selection of tasks", "plays only tasks that were mixed and hard when first seen"),
    ("together", "", "on one budget, nothing counted twice"),
    ("together_with_pivots", "", "on one budget, nothing counted twice"),
)
PREFERRED = ("tokens", "characters", "turns")


def build_audit_page(result: dict[str, Any], out: Path) -> Path:
    """Write the page of `audit.audit` to `out`. The same result gives the same bytes."""
    return write_text(out, templates().get_template("audit.html.j2").render(view(result)))


def view(result: dict[str, Any]) -> dict[str, Any]:
    """Everything that the template shows."""
    unit = next((unit for unit in PREFERRED if unit in result["cost"]), None)
    saved_in = next((unit for unit in ("tokens", "turns", "characters") if unit in result["cost"]), None)
    table = [_row(result, name, label, what, saved_in) for name, label, what in REMEDIES]
    shown = [row for row in table if row["found"]]
    rows = result["over_time"]
    return {
        "result": result,
        "sentences": sentences(result),
        "unit": unit,
        "unit_word": None if saved_in is None else UNIT_WORDS[saved_in],
        "saved_in": saved_in,
        "budget": budget(result),
        "over_time": over_time(rows) if rows and len(rows) > 1 else None,
        "remedies": table,
        "remedies_chart": remedies(shown, saved_in) if shown and saved_in else None,
        "task_map": task_map(result["histories"]["rows"]) if result["histories"]["rows"] else None,
        "group_size": group_size(result["group_size"]) if len(result["group_size"]) > 1 else None,
        "gate": result["gate"],
    }


def _row(result: dict[str, Any], name: str, label: str, what: str, unit: str | None) -> dict[str, Any]:
    found = result["remedies"][name]
    row: dict[str, Any] = {"name": name, "label": label or _together(result, name), "what": what, "found": found}
    if found is None:
        absent = result["absent"]
        return {**row, "why": absent.get(name) or absent.get("pivots") or "unknown"}
    return {
        **row,
        "generation": found["rollout_saved_share"].get(unit),
        "training": found["training_saved_share"].get(unit),
        "lost": found["mixed_lost_share"],
    }


def _together(result: dict[str, Any], name: str) -> str:
    """Which remedies the log supports together: `GRESO, gate and DAPO`."""
    order = {"pivots": "pivots", "greso": "GRESO", "gate": "gate", "dapo": "DAPO"}
    if name == "together":
        del order["pivots"]
    # a row that cannot be judged names what it would have been
    words = [word for key, word in order.items() if result["remedies"][key] or not result["remedies"][name]]
    told = f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else f"{words[0]} alone"
    return told[0].upper() + told[1:]


def sentences(result: dict[str, Any]) -> list[str]:
    """What a reader should know next to the headline."""
    counts, told = result["counts"], []
    told.append(
        f"{count(result['zero_variance'])} of {count(result['scored'])} scored groups had equal rewards (95% interval "
        f"{100 * result['low']:.0f}–{100 * result['high']:.0f}%): {count(counts['all_fail'])} failed as a whole, "
        f"{count(counts['all_succeed'])} succeeded as a whole."
    )
    if counts["censored"] or counts["censored_rollouts"]:
        told.append(
            f"{plural(counts['censored_rollouts'], 'rollout')} had no reward; {plural(counts['censored'], 'group')} "
            "with fewer than two scored rollouts are in no rate."
        )
    tasks = result["tasks"]
    if tasks["tasks_with_enough_epochs"]:
        told.append(
            f"{count(tasks['never_taught'])} of {plural(tasks['tasks_with_enough_epochs'], 'task')} that were played "
            f"at least {tasks['epochs']} times never had a gradient; chance alone would make "
            f"{tasks['expected_by_chance']:.1f} of them look so."
        )
    dilution = result["dilution"]
    factor = dilution["amplification"]["by_rollout"]
    if factor is not None and factor > 1:
        told.append(
            f"A loss that averages over all rollouts was {percent(dilution['by_rollout'], 0)} zeros: without them its "
            f"gradient would have been {factor:.2f} times as large."
        )
    return told


# figures: where the budget went, when, on which tasks, and what would have saved it


OUTCOMES = (
    ("mixed", "#0072B2", "mixed rewards: a gradient"),
    ("all_fail", "#b9572b", "all fail"),
    ("all_succeed", "#e3a46b", "all succeed"),
    ("censored", PALE, "censored"),
)
TINTS = {name: tint for name, tint, _ in OUTCOMES}
LETTERS = {"m": "mixed", "f": "all_fail", "s": "all_succeed", "c": "censored"}
UNIT_WORDS = {"tokens": "generated tokens", "turns": "turns", "characters": "generated characters"}
GENERATION, TRAINING, LOST = "#0072B2", "#9fcbe8", "#b9572b"
MOST_BARS = 50


def budget(result: dict[str, Any]) -> Chart:
    """Stacked shares of groups, and of every unit that the log knows, by the outcome of the group."""
    rows = [("groups", result["counts"], result["counts"]["groups"])]
    rows += [(UNIT_WORDS[unit], spent, spent["total"]) for unit, spent in result["cost"].items()]
    with drawing("budget", 7.6, 0.85 + 0.5 * len(rows)) as (figure, made):
        axes = figure.subplots()
        for y, (_, parts, total) in enumerate(rows):
            left = 0.0
            for name, tint, _ in OUTCOMES:
                share = parts[name] / total if total else 0.0
                axes.barh(y, share, 0.66, left=left, color=tint)
                if share >= 0.06:
                    ink = {"all_succeed": ON_LIGHT, "censored": INK}.get(name, ON_DARK)
                    axes.text(left + share / 2, y, f"{share:.0%}", color=ink, ha="center", va="center")
                left += share
        axes.set_yticks(range(len(rows)), [f"{name} ({total:,})" for name, _, total in rows])
        axes.invert_yaxis()
        _bare(axes)
        _outcome_legend(figure, [name for name, _, _ in OUTCOMES if result["counts"][name]])
    said = "; ".join(f"{name}: {parts['mixed'] / total:.0%} mixed" for name, parts, total in rows if total)
    return Chart(made[0], f"Shares of the budget by outcome of the group. {said}.")


def over_time(rows: Sequence[dict[str, Any]]) -> Chart:
    """Outcomes of the groups by iteration as stacked bars, several iterations a bar where there are many."""
    width = math.ceil(len(rows) / MOST_BARS)
    bins = [rows[i : i + width] for i in range(0, len(rows), width)]
    with drawing("over-time", 7.6, 3.0) as (figure, made):
        axes = figure.subplots()
        bottom = [0.0] * len(bins)
        for name, tint, _ in reversed(OUTCOMES):
            heights = [_share(sum(row[name] for row in one), sum(_groups(row) for row in one)) for one in bins]
            axes.bar(range(len(bins)), heights, 0.92, bottom=bottom, color=tint)
            bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
        shown = range(0, len(bins), max(1, len(bins) // 8))
        axes.set_xticks(list(shown), [str(bins[i][0]["iteration"]) for i in shown])
        axes.set(xlabel="iteration", ylabel="share of groups (%)", ylim=(0, 1), xlim=(-0.6, len(bins) - 0.4))
        percent_ticks(axes, "y")
        axes.grid(visible=False)
        _outcome_legend(figure, [name for name, _, _ in OUTCOMES if any(row[name] for row in rows)])
    ends = [_share(sum(r["zero_variance"] for r in one), sum(r["scored"] for r in one)) for one in (bins[0], bins[-1])]
    said = f"Zero variance goes from {ends[0]:.0%} of the scored groups in the first bar to {ends[1]:.0%} in the last."
    return Chart(made[0], said, f"{width} iterations a bar." if width > 1 else "")


def remedies(rows: Sequence[dict[str, Any]], unit: str) -> Chart:
    """Left what each remedy saves, in generation and in training; right the teaching groups that it loses."""
    with drawing("remedies", 7.6, 1.1 + 0.52 * len(rows)) as (figure, made):
        saved, lost = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1.5))
        for y, row in enumerate(rows):
            for offset, value, tint in ((-0.19, row["generation"], GENERATION), (0.19, row["training"], TRAINING)):
                _bar(saved, y + offset, value, tint)
            _bar(lost, y, row["lost"], LOST, 0.5)
        saved.set_yticks(range(len(rows)), [row["label"] for row in rows])
        saved.invert_yaxis()
        saved.set_xlabel(f"saved: share of all {UNIT_WORDS[unit]} (%)")
        lost.set_xlabel("lost: share of groups\nwith a gradient (%)")
        for axes in (saved, lost):
            axes.set_xlim(0, max(0.1, axes.get_xlim()[1]) * 1.12)
            percent_ticks(axes)
            axes.tick_params(left=False)
            axes.grid(visible=False, axis="y")
        figure.legend(
            handles=[_patch(GENERATION, "never generated"), _patch(TRAINING, "never trained on")],
            loc="outside upper left", ncols=2, fontsize=9.5,
        )  # fmt: skip
    said = "; ".join(f"{row['label']} {_percent(row['generation'])} of generation" for row in rows)
    return Chart(made[0], f"What each remedy saves: {said}.")


def task_map(histories: dict[str, str]) -> Chart:
    """One row a task, one cell a group in log order; tasks that teach most at the top."""
    rows = sorted(histories.values(), key=lambda row: (-row.count("m") / len(row), row.count("f"), -len(row)))
    longest = max(map(len, rows))
    with drawing("task-map", 7.6, min(5.2, 0.9 + 0.07 * len(rows))) as (figure, made):
        axes = figure.subplots()
        for letter, name in LETTERS.items():
            cells = [(x, y) for y, row in enumerate(rows) for x, found in enumerate(row) if found == letter]
            if cells:
                xs, ys = zip(*cells, strict=True)
                axes.barh(ys, [0.94] * len(xs), 0.9, left=[x - 0.47 for x in xs], color=TINTS[name], linewidth=0)
        axes.set(
            xlim=(-0.6, longest - 0.4), ylim=(len(rows) - 0.4, -0.6), xlabel="n-th group of the task", ylabel="tasks"
        )
        axes.set_xticks(list(range(0, longest, max(1, longest // 10))))
        axes.set_xticklabels([str(x + 1) for x in range(0, longest, max(1, longest // 10))])
        axes.set_yticks([])
        axes.grid(visible=False)
        present = {LETTERS[letter] for row in rows for letter in row}
        _outcome_legend(figure, [name for name, _, _ in OUTCOMES if name in present])
    never = sum("m" not in row for row in rows)
    return Chart(
        made[0], f"Outcomes of {len(rows)} tasks that were played again; {never} of them never had a mixed group."
    )


def group_size(rows: Sequence[dict[str, Any]]) -> Chart:
    """Zero-variance rate and mixed groups per 1000 rollouts, for every size up to the log's own."""
    sizes = [row["size"] for row in rows]
    with drawing("group-size", 7.6, 2.7) as (figure, made):
        left, right = figure.subplots(1, 2)
        left.plot(sizes, [row["zero_variance_rate"] for row in rows], color=LOST, marker="o", markersize=4)
        right.plot(
            sizes, [row["mixed_groups_per_1000_rollouts"] for row in rows], color=GENERATION, marker="o", markersize=4
        )
        left.set(title="groups without a gradient (%)", ylim=(0, 1))
        percent_ticks(left, "y")
        right.set(title="groups with a gradient per 1,000 rollouts")
        right.set_ylim(0, 1.12 * max(row["mixed_groups_per_1000_rollouts"] for row in rows) or 1)
        for axes in (left, right):
            axes.set_xlabel("rollouts a group")
            axes.set_xticks(sizes[:: max(1, len(sizes) // 8)])
    last = rows[-1]
    return Chart(made[0], f"At {last['size']} rollouts a group {last['zero_variance_rate']:.0%} have no gradient.")


def _bar(axes: Axes, y: float, value: float | None, tint: str, height: float = 0.36) -> None:
    if value is None:
        axes.text(0, y, " not in the log", color=MUTED, va="center", fontsize=9)
        return
    axes.barh(y, value, height, color=tint)
    axes.text(value, y, f" {100 * value:.1f}", va="center", fontsize=9)


def _bare(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.tick_params(left=False)
    axes.grid(visible=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _outcome_legend(figure: Any, present: Sequence[str]) -> None:
    handles = [_patch(tint, text) for name, tint, text in OUTCOMES if name in present]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=9.5)


def _patch(tint: str, text: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=tint, label=text)


def _groups(row: dict[str, Any]) -> int:
    return sum(row[name] for name, _, _ in OUTCOMES)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.0%}"
