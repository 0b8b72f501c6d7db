"""`turntree audit`: the figures of an audit as one static page; headline, pictures, then the table of remedies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.observe.files import atomic_write
from turntree.report import audit_figures as figures
from turntree.report.page import templates
from turntree.report.wording import count, percent, plural

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
    """Write the page of `stages.audit` to `out`. The same result gives the same bytes."""
    page = templates().get_template("audit.html.j2").render(view(result))
    with atomic_write(out) as handle:
        handle.write(page)
    return out


def view(result: dict[str, Any]) -> dict[str, Any]:
    """Everything that the template shows."""
    unit = next((unit for unit in PREFERRED if unit in result["cost"]), None)
    saved_in = _unit_of_savings(result)
    table = [_row(result, name, label, what, saved_in) for name, label, what in REMEDIES]
    shown = [row for row in table if row["found"]]
    rows = result["over_time"]
    return {
        "result": result,
        "sentences": sentences(result),
        "unit": unit,
        "unit_word": None if saved_in is None else figures.UNIT_WORDS[saved_in],
        "saved_in": saved_in,
        "budget": figures.budget(result),
        "over_time": figures.over_time(rows) if rows and len(rows) > 1 else None,
        "remedies": table,
        "remedies_chart": figures.remedies(shown, saved_in) if shown and saved_in else None,
        "task_map": figures.task_map(result["histories"]["rows"]) if result["histories"]["rows"] else None,
        "group_size": figures.group_size(result["group_size"]) if len(result["group_size"]) > 1 else None,
        "gate": result["gate"],
    }


def _unit_of_savings(result: dict[str, Any]) -> str | None:
    """The unit of savings: tokens where the log has them, else turns, else characters of text."""
    return next((unit for unit in ("tokens", "turns", "characters") if unit in result["cost"]), None)


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
