"""`turntree report`: a run directory in, one static page out that needs nothing beside itself."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turntree.pivots.select import classify
from turntree.report import browser, examples, figures, results, svg
from turntree.report.columns import ACCEPTANCE, BY_STAGE, SPENT, SUCCESS, Curve
from turntree.report.figures import Chart, Mark, intervals, lines, series, style
from turntree.report.page import templates
from turntree.report.read import Arm, Row, Run, read_run, reading
from turntree.report.wording import MINUS, duration, label, percent, points
from turntree.run.files import write_text

SECTIONS = {  # a page has those that the folder has something for
    "results": "Results",
    "success": "Success for what was spent",
    "curves": "Learning curves",
    "branching": "Branching",
    "profile": "Profile",
    "task_types": "Task types",
    "skills": "Other skills",
    "tree": "A rollout tree",
    "ledger": "Ledger",
    "examples": "Examples",
    "configuration": "Configuration",
}


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run directory to `out` (default: `report.html` inside it) and return where it lies. Beside
    every run in it that kept its trees a `trees.html` is written (`turntree.report.browser`), to which the page leads.

    The same files give the same bytes. Raises `InputError` where the folder holds nothing that can be shown, or a
    file of it cannot be read.
    """
    out = out or run_dir / "report.html"
    run = read_run(run_dir)
    trees: dict[str, tuple[Path, browser.Groups]] = {}  # that of PivotRL first
    for arm in sorted(run.arms, key=lambda arm: arm.name != "pivotrl"):
        groups = None if arm.folder is None else browser.read_groups(arm.folder)
        if arm.folder is not None and groups is not None:
            trees[arm.name] = arm.folder / browser.PAGE, groups
    with reading(run.path):
        shown = view(run) | {"tree": _trees(trees, out)}
    sections = {name: title for name, title in SECTIONS.items() if shown[name]}
    page = templates().get_template("report.html.j2").render(run=run, sections=sections, **shown)
    for path, groups in trees.values():
        write_text(path, browser.render(groups))
    return write_text(out, page)


def view(run: Run) -> dict[str, Any]:
    """Everything that the template shows, by section; a section without data is empty."""
    compared, arms = results.differences(run), results.arm_rows(run)
    evaluated = {arm.name: arm.evaluation for arm in run.arms if arm.evaluation is not None}
    skills = {name: one["retention"]["by_skill"] for name, one in evaluated.items() if one["retention"].get("by_skill")}
    task_types = {name: one["sampled"]["by_task_type"] for name, one in evaluated.items()}
    return {
        "headline": [line for line in results.headline(run, compared) if line],
        "compared": [f"{difference.sentence()}." for difference in compared],
        "disagreements": results.disagreements(run),
        "results": evaluated and {
            "arms": arms,
            "differences": compared,
            "success": _success(arms),
            "paired": _paired(compared) if compared else None,
            "remarks": _remarks(run.summary or {}),
        },
        "success": _success_for_cost(run.arms),
        "curves": _curves(run.arms),
        "branching": _branching(run.arms),
        "profile": _profile(run),
        "task_types": _by_row("task-types", task_types, "success (%)", 19 * (len(evaluated) + 1)),
        "skills": _by_row("skills", skills, "exact-match accuracy (%)", 42),
        "ledger": results.ledger(run),
        "examples": examples.examples(run),
        "configuration": _configurations(run),
    }  # fmt: skip


def _remarks(summary: Mapping[str, Any]) -> str:
    """A sentence about the whole run from its summary, or an empty text."""
    told = [f"seed {summary['seed']}"] if "seed" in summary else []
    told += [str(summary["machine"])] if "machine" in summary else []
    told += [f"{duration(summary['wall_seconds'])} in all"] if "wall_seconds" in summary else []
    return f"The run: {', '.join(told)}." if told else ""


# results


def _success(arms: Sequence[Row]) -> Chart | None:
    names = [arm["name"] for arm in arms]
    marks = [
        Mark(
            label(arm["name"]),
            *(share["success"], share["low"], share["high"]),
            tint=style(arm["name"], names)[0],
            shape=style(arm["name"], names)[1],
            hollow=greedy,
            shift=0.17 if greedy else -0.13,
            text="" if greedy else percent(share["success"]),
        )
        for arm in arms
        for share, greedy in ((arm["sampled"], False), (arm["greedy"], True))
        if share is not None and share["success"] is not None
    ]
    if not marks:
        return None
    below = " Open markers below: greedy decoding." if any(mark.hollow for mark in marks) else ""
    size = (540.0, 90.0 + 55 * len({mark.row for mark in marks}))
    alt, caption = "Success by policy with 95% intervals.", f"Success, with 95% Wilson intervals.{below}"
    return intervals("success", size, marks, alt=alt, xlabel="success (%)", caption=caption)


def _paired(compared: Sequence[results.Difference]) -> Chart:
    arms = [difference.first for difference in compared]
    marks = [
        Mark(
            f"{label(difference.first)} {MINUS} {label(difference.second)}",
            *(difference.sampled.mean, difference.sampled.low, difference.sampled.high),
            tint=style(difference.first, arms)[0],
            shape=style(difference.first, arms)[1],
            hollow=difference.sampled.contains_zero,
            text=points(difference.sampled.mean),
        )
        for difference in compared
    ]
    return intervals(
        "paired",
        (540.0, 90.0 + 50 * len(compared)),
        marks,
        alt="Paired differences in percentage points.",
        xlabel="difference in success (percentage points)",
        caption="Paired differences over tasks, with 95% bootstrap intervals; hollow: the interval contains zero.",
        line=0,
    )


def _by_row(name: str, measured: Mapping[str, Mapping[str, Any]], xlabel: str, height: float) -> dict[str, Any]:
    """By row (task type or skill) what every arm has there, or None; and the arms as dodged intervals in a band a row,
    where a bar across the band marks a chance level."""
    names, arms = sorted({row for by_row in measured.values() for row in by_row}), list(measured)
    rows = {row: {arm: by_row.get(row) for arm, by_row in measured.items()} for row in names}
    marks: list[Mark] = []
    for row, by_arm in rows.items():
        known = [value for value in by_arm.values() if value]
        if "chance" in known[0]:
            chance = known[0]["chance"]
            marks.append(Mark(row, chance, chance, chance, "chance", svg.INK, "|"))
        for place, (arm, value) in enumerate(by_arm.items()):
            share = value and value.get("success", value.get("accuracy"))
            if value and share is not None:
                low, high = value.get("low", share), value.get("high", share)
                shift = (place - (len(arms) - 1) / 2) * 0.8 / len(arms)
                marks.append(Mark(row, share, low, high, arm, *style(arm, arms), shift=shift))
    if not marks:
        return {}
    alt = f"{name.replace('-', ' ').capitalize()} by policy."
    return {"rows": rows, "chart": intervals(name, (700.0, 100.0 + height * len(rows)), marks, alt=alt, xlabel=xlabel)}


# training


def _success_for_cost(arms: Sequence[Arm]) -> list[Chart]:
    """Held-out success of online runs over what they had spent."""
    online = _named([arm for arm in arms if arm.stage == "train online"])
    charts: list[Chart | None] = []
    for key, spent in SPENT.items():
        drawn = {name: over(arm.metrics, key, SUCCESS.key) for name, arm in online.items()}
        drawn = {name: curve for name, curve in drawn.items() if curve and curve[-1][0]}  # no tools, no calls
        charts.append(lines(SUCCESS, drawn, x=spent))
    return [chart for chart in charts if chart is not None]


def _named(arms: Sequence[Arm]) -> dict[str, Arm]:
    """By name; one that is alone needs none in its figures."""
    return {arm.name if len(arms) > 1 else "": arm for arm in arms}


def over(metrics: Sequence[Row], spent: str, key: str) -> list[tuple[float, float]]:
    """(spent so far, value) at every step that logged the value; before the first iteration nothing was spent."""
    costs = {0.0: 0.0, **dict(series(metrics, spent))}
    return [(costs[step], value) for step, value in series(metrics, key) if step in costs] if len(costs) > 1 else []


def _curves(arms: Sequence[Arm]) -> dict[str, Any]:
    """What each stage logs, and acceptance on held-out states: one small figure for every kind of action."""
    charts: list[Chart | None] = []
    legend: dict[str, str] = {}
    for stage, curves in BY_STAGE.items():
        trained = [arm for arm in arms if arm.stage == stage]
        named = _named(trained) if stage == "train online" else {arm.name: arm for arm in trained}
        charts += [_curve(what, named) for what in curves]
        if len(named) > 1:
            legend |= {name: svg.themed(style(name, list(named))[0]) for name in named}
    pivot = {arm.name: arm for arm in arms if arm.stage == "train pivot"}
    kinds = {kind for arm in pivot.values() for row in arm.metrics for kind in row.get(ACCEPTANCE, {})}
    small = [
        _curve(Curve(f"{ACCEPTANCE}.{kind}", kind, "accepted (%)", "share", size=(270, 190)), pivot, f"kind-{number}")
        for number, kind in enumerate(sorted(kinds, key=lambda kind: (kind != "all", kind)))
    ]
    drawn = [chart for chart in charts if chart is not None]
    stops = sum((Counter(row.get("stops", {})) for arm in arms for row in arm.metrics), Counter[str]())
    by_kind = [chart for chart in small if chart is not None]
    return {"charts": drawn, "by_kind": by_kind, "legend": legend, "stops": stops.most_common()} if drawn else {}


def _curve(what: Curve, arms: Mapping[str, Arm], name: str = "") -> Chart | None:
    return lines(what, {arm: series(run.metrics, what.key) for arm, run in arms.items()}, name=name)


def _branching(arms: Sequence[Arm]) -> dict[str, Any]:
    """Totals over the iterations of an online run that forked."""
    iterations = [row for arm in arms for row in arm.metrics if row.get("branching")] if len(arms) == 1 else []
    if not iterations:
        return {}
    logged = [row["branching"] for row in iterations]
    names = ("leaves", "starts", "refills", "forks", "calls_fresh", "calls_chain", "tokens_fresh", "tokens_chain")
    totals: dict[str, Any] = {name: sum(row[name] for row in logged) for name in names}
    for name in ("correlation_within_starts", "effective_leaves"):
        known = [row[name] for row in logged if row.get(name) is not None]
        totals[name] = sum(known) / len(known) if known else None
    for unit in ("calls", "tokens"):
        made, one_by_one = totals[f"{unit}_fresh"], totals[f"{unit}_chain"]
        totals[f"{unit}_saving"] = 1 - made / one_by_one if one_by_one else None
    return {**totals, "groups": sum(row["groups"] for row in iterations)}


# the profile


def _profile(run: Run) -> dict[str, Any]:
    if run.profile is None or not run.profile.rows:
        return {}
    threshold, rows, header = results.threshold(run), run.profile.rows, run.profile.header
    states: dict[tuple[str, str], Counter[str]] = {}  # by file and role, how many of each kind
    for name, table in (("pivots.jsonl", run.pivots), ("random.jsonl", run.random)):
        for row in sorted(table.rows if table else (), key=lambda row: row.get("role", "pivot"), reverse=True):
            states.setdefault((name, row.get("role", "pivot")), Counter())[row["kind"]] += 1
    preview = results.lambda_preview(run)
    return {
        "threshold": threshold,
        "chart": figures.reward_means(rows, threshold),
        "kinds": figures.kinds_by_mean(rows, threshold),
        "classes": dict(sorted(Counter(classify(row, threshold) for row in rows).items())),
        "rollouts": max(row.get("rollouts", 0) for row in rows),
        "candidates": len(rows),
        "policy": header.get("policy_hash", "unknown"),
        "verifier": header.get("verifier", "unknown"),
        "miss_rate": header.get("summary", {}).get("miss_rate"),
        "skipped": header.get("summary", {}).get("skipped_turns", {}),
        "states": states,
        "state_kinds": sorted({kind for kinds in states.values() for kind in kinds}),
        "preview": preview,
        "preview_kinds": sorted({kind for row in preview for kind in row["kinds"]}),
    }


# the trees, and what everything was made with


def _trees(trees: Mapping[str, tuple[Path, browser.Groups]], page: Path) -> dict[str, Any]:
    """A group of the first run that kept any, and where each has its browser, seen from where the page will lie (a
    folder may be called `lr=1e-3#2`)."""
    if not trees:
        return {}
    name, (_, groups) = next(iter(trees.items()))
    links = {arm: quote(os.path.relpath(path, page.parent)) for arm, (path, _) in trees.items()}
    total = len(groups.groups) + groups.left_out
    return {"arm": name, "picture": browser.picture(groups), "total": total, "unread": groups.unread, "links": links}


def _configurations(run: Run) -> dict[str, str]:
    """By file, the configuration of everything that records how it was made."""
    tables = {"profile.jsonl": run.profile, "pivots.jsonl": run.pivots, "random.jsonl": run.random}
    found: dict[str, Any] = {} if run.config is None else {"config.json": run.config}
    for name, table in tables.items():
        if table is not None:
            found[name] = {key: value for key, value in table.header.items() if key not in ("summary", "timing")}
    for arm in run.arms:
        if arm.config is not None and arm.folder != run.path:
            found[f"{arm.name}/config.json"] = arm.config
        if arm.evaluation is not None:
            found[f"evaluation/{arm.name}.json"] = arm.evaluation["config"]
    return {name: json.dumps(value, indent=2, ensure_ascii=False) for name, value in found.items()}
