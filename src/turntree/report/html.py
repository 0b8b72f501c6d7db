"""`turntree report`: a run directory in, one static page out that needs nothing beside itself."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from turntree.core.errors import InputError
from turntree.core.progress import notice
from turntree.pivots.rows import classify, message_text
from turntree.pivots.select import is_pivot
from turntree.report import browser, figures, results
from turntree.report.figures import ACCEPTANCE, BY_STAGE, SPENT, SUCCESS, Chart, Curve, lines, series, style
from turntree.report.read import Arm, Row, Run, Table, read_run, reading
from turntree.report.wording import duration, templates
from turntree.run.files import file_hash, write_text
from turntree.traces.schema import Trace, read_traces

EXAMPLES = 4
ACTIONS = 8  # distinct sampled actions shown of one pivot
CHARACTERS = 1200  # of one message
SECTIONS = {  # a page has those that the folder has something for
    "results": "Results",
    "success": "Success for what was spent",
    "curves": "Learning curves",
    "branching": "Branching",
    "profile": "Profile",
    "task_types": "Task types",
    "skills": "Other skills",
    "tree": "Rollout trees",
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
    if not figures.can_draw():
        notice("the page has no curves without matplotlib: pip install 'turntree[train]' draws them")
    run = read_run(run_dir)
    trees: dict[str, tuple[Path, dict[str, Any]]] = {}  # that of PivotRL first
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
            "remarks": _remarks(run.summary or {}),
        },
        "success": _success_for_cost(run.arms),
        "curves": _curves(run.arms),
        "branching": _branching(run.arms),
        "profile": _profile(run),
        "task_types": _by_row(task_types),
        "skills": _by_row(skills),
        "ledger": results.ledger(run),
        "examples": _examples(run),
        "configuration": _configurations(run),
    }  # fmt: skip


def _remarks(summary: Mapping[str, Any]) -> str:
    """A sentence about the whole run from its summary, or an empty text."""
    told = [f"seed {summary['seed']}"] if "seed" in summary else []
    told += [str(summary["machine"])] if "machine" in summary else []
    told += [f"{duration(summary['wall_seconds'])} in all"] if "wall_seconds" in summary else []
    return f"The run: {', '.join(told)}." if told else ""


def _by_row(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By row (task type or skill) what every arm has there, or None."""
    names = sorted({row for by_row in measured.values() for row in by_row})
    return {row: {arm: by_row.get(row) for arm, by_row in measured.items()} for row in names}


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
        charts += [_curve(what, named, f"{stage} {what.key}".replace(" ", "-")) for what in curves]
        if len(named) > 1:
            legend |= {name: figures.themed(style(name, list(named))[0]) for name in named}
    pivot = {arm.name: arm for arm in arms if arm.stage == "train pivot"}
    kinds = {kind for arm in pivot.values() for row in arm.metrics for kind in row.get(ACCEPTANCE, {})}
    small = [
        _curve(Curve(f"{ACCEPTANCE}.{kind}", kind, "accepted (%)", "share", size=(2.7, 1.9)), pivot, f"kind-{number}")
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
    for unit in ("calls", "tokens"):
        made, one_by_one = totals[f"{unit}_fresh"], totals[f"{unit}_chain"]
        totals[f"{unit}_saving"] = 1 - made / one_by_one if one_by_one else None
    return {**totals, "groups": sum(row["groups"] for row in iterations)}


# the profile


def _each(counts: Sequence[int]) -> str:
    fewest, most = min(counts), max(counts)
    return f"{most} rollouts each" if fewest == most else f"{fewest} to {most} rollouts each ({sum(counts):,} in all)"


def _profile(run: Run) -> dict[str, Any]:
    if run.profile is None or not run.profile.rows:
        return {}
    threshold, rows, header = results.threshold(run), run.profile.rows, run.profile.header
    states: dict[str, Counter[str]] = {}  # by role, how many of each kind
    for row in sorted(run.pivots.rows if run.pivots else (), key=lambda row: row["role"], reverse=True):
        states.setdefault(row["role"], Counter())[row["kind"]] += 1
    preview = results.lambda_preview(run)
    return {
        "threshold": threshold,
        "chart": figures.reward_means(rows, threshold),
        "kinds": figures.kinds_by_mean(rows, threshold),
        "classes": dict(sorted(Counter(classify(row, threshold) for row in rows).items())),
        "rollouts": _each([row["rollouts"] for row in rows]),
        "candidates": len(rows),
        "policy": header["policy_hash"],
        "verifier": header["verifier"],
        "miss_rate": header["summary"].get("miss_rate"),
        "skipped": header["summary"].get("skipped_turns", {}),
        "states": states,
        "state_kinds": sorted({kind for kinds in states.values() for kind in kinds}),
        "preview": preview,
        "preview_kinds": sorted({kind for row in preview for kind in row["kinds"]}),
    }


# a few example pivots: the state as the policy saw it, the demonstrated action, and the sampled actions


def _examples(run: Run) -> dict[str, Any]:
    """The most evenly mixed pivot of each of the most frequent action kinds, or why their states cannot be shown;
    empty without a pivot."""
    chosen = choose(run.profile.rows, results.threshold(run)) if run.profile is not None else []
    if run.profile is None or not chosen:
        return {}
    path = _traces_path(run.path, run.profile)
    if path is None:
        absent = "The traces that were profiled were not found, so the states of pivots cannot be shown."
        return {"shown": [], "absent": absent}
    wanted = {row["trace_id"] for row in chosen}
    traces = {trace.id: trace for trace in read_traces(path) if trace.id in wanted}
    source = run.path / "profile.jsonl"
    return {"shown": [_example(row, traces.get(row["trace_id"]), source) for row in chosen]}


def choose(rows: Sequence[Row], below: float) -> list[Row]:
    """One row a kind, frequent kinds first; within a kind the highest variance, then the most distinct actions."""
    pivots = [row for row in rows if is_pivot(row, below) and row["actions"]]
    frequent = Counter(row["kind"] for row in pivots)
    kinds = sorted(frequent, key=lambda kind: (-frequent[kind], kind))[:EXAMPLES]

    def rank(row: Row) -> tuple[float, int, str, int]:
        return -row["reward_var"], -len(row["actions"]), str(row["trace_id"]), row["turn"]

    return [min((row for row in pivots if row["kind"] == kind), key=rank) for kind in kinds]


def _traces_path(folder: Path, profile: Table) -> Path | None:
    """The traces of the run directory, else the file that the profile names: by its content only, because another
    file of a relative name may lie in the current folder."""
    named = Path(str(profile.header["config"]["traces"]))
    places = (folder / "traces.jsonl", folder / named.name, named)
    wanted = profile.header["traces_hash"]
    return next((place for place in places if place.is_file() and file_hash(place) == wanted), None)


def _example(row: Row, trace: Trace | None, path: Path) -> dict[str, Any]:
    """`task` is the first message of the trace, where it is not the last observation itself; `previous` the
    demonstrated action before this turn."""
    if trace is None or not 0 <= row["turn"] < len(trace.turn_positions):
        raise InputError(f"names turn {row['turn']} of trace {row['trace_id']!r}, which the traces lack", path=path)
    at = trace.turn_positions[row["turn"]]
    history = trace.messages[:at]
    before = next((message for message in reversed(history[:-1]) if message.role == "assistant"), None)
    actions = row["actions"]
    return {
        "kind": row["kind"],
        "turn": row["turn"],
        "trace": row["trace_id"],
        "task": _clipped(message_text(history[0])) if len(history) > 1 else "",
        "previous": "" if before is None else _clipped(message_text(before)),
        "observation": _clipped(message_text(history[-1])) if history else "",
        "demonstration": _clipped(message_text(trace.labels.get(row["turn"]) or trace.messages[at])),
        "samples": sum(action["count"] for action in actions),
        "successes": sum(action["count"] for action in actions if action["reward"] == 1.0),
        "actions": actions[:ACTIONS],
        "more_actions": len(actions[ACTIONS:]),
        "more_samples": sum(action["count"] for action in actions[ACTIONS:]),
    }


def _clipped(text: str) -> str:
    cut = len(text) - CHARACTERS
    return text if cut <= 0 else f"{text[:CHARACTERS]} … ({cut:,} more characters)"


# the trees, and what everything was made with


def _trees(trees: Mapping[str, tuple[Path, dict[str, Any]]], page: Path) -> dict[str, Any]:
    """Where each run that kept any has its browser, seen from where the page will lie (a folder may be called
    `lr=1e-3#2`), and how many lines of them could not be read."""
    links = {arm: quote(os.path.relpath(path, page.parent)) for arm, (path, _) in trees.items()}
    return {"links": links, "unread": sum(held["unread"] for _, held in trees.values())} if links else {}


def _configurations(run: Run) -> dict[str, str]:
    """By file, the configuration of everything that records how it was made."""
    tables = {"profile.jsonl": run.profile, "pivots.jsonl": run.pivots}
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
