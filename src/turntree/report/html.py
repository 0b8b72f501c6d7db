"""`turntree report`: a run directory in, one static page out that needs nothing beside itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turntree.pivots.select import classify
from turntree.report import columns, figures, online, results, rollout_tree, wording
from turntree.report.browser import build_browser
from turntree.report.columns import ACCEPTANCE, Curve
from turntree.report.examples import examples
from turntree.report.figures import Chart, Mark, intervals, lines, series, style
from turntree.report.page import templates
from turntree.report.read import ARMS, Arm, Run, Share, read_run, reading
from turntree.report.wording import label, percent
from turntree.run.files import write_text

PIVOT_STAGE, SFT_STAGE = "train pivot", "sft"


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run directory to `out` (default: `report.html` inside it) and return where it lies. Beside
    every run in it that kept its trees a `trees.html` is written (`browser.build_browser`), to which the page leads.

    The same files give the same bytes. Raises `InputError` where the folder holds nothing that can be shown, or a
    file of it cannot be read.
    """
    out = out or run_dir / "report.html"
    run = read_run(run_dir)
    if online.is_online(run):  # such a run has a page of its own
        page = templates().get_template("online.html.j2").render(online.view(run, out))
    else:
        page = templates().get_template("report.html.j2").render(view(run, out))
    for folder in rollout_tree.with_trees(run).values():
        build_browser(folder)
    return write_text(out, page)


def view(run: Run, page: Path) -> dict[str, Any]:
    """Everything that the template shows, by section; `page` is where it will lie."""
    with reading(run.path):
        differences = results.differences(run)
        evaluated = {arm.name: arm.evaluation for arm in run.arms if arm.evaluation is not None}
        return {
            "run": run,
            "headline": results.headline(run, differences),
            "missing": missing(run),
            "disagreements": results.disagreements(run),
            "arms": results.arm_results(run),
            "differences": differences,
            "success_chart": _success(results.arm_results(run)),
            "paired_chart": _paired(differences) if differences else None,
            "remarks": _remarks(run.summary or {}),
            **_curves(run.arms),
            **_profile(run),
            "types": (types := _by_row({arm: one.sampled.by_task_type for arm, one in evaluated.items()})),
            "types_chart": _by_task_type(types) if types else None,
            "skills": (skills := _by_row({arm: one.skills for arm, one in evaluated.items() if one.skills})),
            "skills_chart": _skills(skills) if skills else None,
            **rollout_tree.of_arms(run, page),
            "ledger": results.ledger(run),
            "examples": examples(run),
            "configurations": _configurations(run),
        }


def missing(run: Run) -> list[str]:
    """The parts of a quickstart that this folder lacks; none of a training run of its own."""
    if any(arm.folder == run.path for arm in run.arms):
        return []
    files = {
        "profile.jsonl": run.profile,
        "pivots.jsonl": run.pivots,
        "random.jsonl": run.random,
        "summary.json": run.summary,
    }
    arms = {name: run.arm(name) for name in ARMS if name != "own" or run.arm(name)}  # older quickstarts have no own
    return [
        *(name for name, found in files.items() if found is None),
        *(f"{name}/" for name, arm in arms.items() if name != "base" and (arm is None or arm.stage is None)),
        *(f"evaluation/{name}.json" for name, arm in arms.items() if arm is None or arm.evaluation is None),
    ]


def _remarks(summary: Mapping[str, Any]) -> str:
    """A sentence about the whole run from its summary, or an empty text."""
    told = [f"seed {summary['seed']}"] if "seed" in summary else []
    told += [str(summary["machine"])] if "machine" in summary else []
    told += [f"{wording.duration(summary['wall_seconds'])} in all"] if "wall_seconds" in summary else []
    return f"The run: {', '.join(told)}." if told else ""


# figures


def _success(arms: Sequence[results.ArmResult]) -> Chart | None:
    names = [arm.name for arm in arms]
    marks = [
        Mark(label(arm.name), share.success, share.low, share.high, *_looks(arm.name, names), greedy, shift, text)
        for arm in arms
        for share, greedy, shift in ((arm.sampled, False, -0.13), (arm.greedy, True, 0.17))
        if share is not None and share.success is not None
        for text in ["" if greedy else percent(share.success)]
    ]
    if not marks:
        return None
    below = " Open markers below: greedy decoding." if any(mark.hollow for mark in marks) else ""
    size = (5.4, 0.9 + 0.55 * len({mark.row for mark in marks}))
    alt, caption = "Success by policy with 95% intervals.", f"Success, with 95% Wilson intervals.{below}"
    return intervals("success", size, marks, alt=alt, xlabel="success (%)", caption=caption)


def _looks(arm: str, names: Sequence[str], of: str = "") -> tuple[str, str, str]:
    return of, *style(arm, names)


def _paired(differences: Sequence[results.Difference]) -> Chart:
    arms = [one.first for one in differences]
    marks = [
        Mark(
            f"{label(one.first)} {wording.MINUS} {label(one.second)}",
            *(one.sampled.mean, one.sampled.low, one.sampled.high),
            *_looks(one.first, arms),
            hollow=one.sampled.contains_zero,
            text=wording.points(one.sampled.mean),
        )
        for one in differences
    ]
    caption = "Paired differences over tasks, with 95% bootstrap intervals; hollow: the interval contains zero."
    return intervals(
        "paired",
        (5.4, 0.9 + 0.5 * len(differences)),
        marks,
        alt="Paired differences in percentage points.",
        xlabel="difference in success (percentage points)",
        caption=caption,
        told=wording.points,
        line=0,
    )


def _by_row(measured: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By row (task type or skill) what every arm has there, or None."""
    rows = sorted({row for by_row in measured.values() for row in by_row})
    return {row: {arm: by_row.get(row) for arm, by_row in measured.items()} for row in rows}


def _by_task_type(types: Mapping[str, Mapping[str, Share | None]]) -> Chart:
    """One band a task type, the arms as dodged intervals inside it."""
    arms = list(next(iter(types.values())))
    marks = [
        Mark(kind, share.success, share.low, share.high, *_looks(arm, arms, arm), shift=_shift(place, len(arms)))
        for kind, by_arm in types.items()
        for place, (arm, share) in enumerate(by_arm.items())
        if share is not None and share.success is not None
    ]
    size = (7.0, 0.9 + 0.19 * len(types) * (len(arms) + 1))
    return intervals("task-types", size, marks, alt="Success by task type and policy.", xlabel="success (%)")


def _skills(skills: Mapping[str, Mapping[str, Any]]) -> Chart:
    """Accuracy by skill and policy; a bar across each band marks the chance level."""
    arms = list(next(iter(skills.values())))
    marks: list[Mark] = []
    for name, by_arm in skills.items():
        chance = next(skill.chance for skill in by_arm.values() if skill)
        marks.append(Mark(name, chance, chance, chance, "chance", figures.INK, "|"))
        marks += [
            Mark(
                name,
                skill.accuracy,
                skill.accuracy,
                skill.accuracy,
                *_looks(arm, arms, arm),
                shift=_shift(place, len(arms)),
            )
            for place, (arm, skill) in enumerate(by_arm.items())
            if skill is not None
        ]
    alt = "Accuracy on skills outside the training domain."
    return intervals("skills", (7.0, 1.1 + 0.42 * len(skills)), marks, alt=alt, xlabel="exact-match accuracy (%)")


def _shift(place: int, of: int) -> float:
    return (place - (of - 1) / 2) * 0.8 / max(1, of)


def _curves(arms: Sequence[Arm]) -> dict[str, Any]:
    """The curves of training, and acceptance on held-out states: one small figure for every kind of action."""
    trained = [arm for arm in arms if arm.stage == PIVOT_STAGE]
    kinds = {kind for arm in trained for row in arm.metrics for kind in row.get(ACCEPTANCE, {})}
    small = [
        Curve(f"{ACCEPTANCE}.{kind}", kind, "accepted (%)", "share", size=(2.7, 1.9))
        for kind in sorted(kinds, key=lambda kind: (kind != "all", kind))
    ]
    drawn = [_curve(what, trained) for what in columns.PIVOT]
    drawn.append(_curve(columns.SFT, [arm for arm in arms if arm.stage == SFT_STAGE]))
    names = [arm.name for arm in trained]
    return {
        "curves": [chart for chart in drawn if chart is not None],
        "kind_curves": [chart for what in small if (chart := _curve(what, trained, f"kind-{small.index(what)}"))],
        "legend": [(name, figures.themed(style(name, names)[0])) for name in names],
    }


def _curve(what: Curve, arms: Sequence[Arm], name: str = "") -> Chart | None:
    return lines(what, {arm.name: series(arm.metrics, what.key) for arm in arms}, name=name)


# the profile


def _profile(run: Run) -> dict[str, Any]:
    threshold, preview = results.threshold(run), results.lambda_preview(run)
    shown: dict[str, Any] = {
        "threshold": threshold,
        "preview": preview,
        "preview_kinds": sorted({kind for row in preview for kind in row["kinds"]}),
        "states": (states := _training_states(run)),
        "state_kinds": sorted({kind for kinds in states.values() for kind in kinds}),
        "profile_chart": None,
    }
    if run.profile is not None and run.profile.rows:
        rows = run.profile.rows
        classes = Counter(classify(row, threshold) for row in rows)
        shown["profile_chart"] = figures.reward_means(rows, threshold)
        shown["kinds_table"] = figures.kinds_by_mean(rows, threshold)
        shown["classes"] = dict(sorted(classes.items()))
        shown["rollouts"] = max(row.get("rollouts", 0) for row in rows)
    return shown


def _training_states(run: Run) -> dict[tuple[str, str], Counter[str]]:
    """How many states of each kind the two selections hold, by file and role."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for name, table in (("pivots.jsonl", run.pivots), ("random.jsonl", run.random)):
        for row in sorted(table.rows if table else (), key=lambda row: row.get("role", "pivot"), reverse=True):
            found.setdefault((name, row.get("role", "pivot")), Counter())[row["kind"]] += 1
    return found


def _configurations(run: Run) -> dict[str, Any]:
    """By file, the configuration of everything that records how it was made."""
    tables = (("profile.jsonl", run.profile), ("pivots.jsonl", run.pivots), ("random.jsonl", run.random))
    found: dict[str, Any] = {} if run.config is None else {"config.json": run.config}
    for name, table in tables:
        if table is not None:
            found[name] = {key: value for key, value in table.header.items() if key not in ("summary", "timing")}
    for arm in run.arms:
        if arm.config is not None and arm.folder != run.path:
            found[f"{arm.name}/config.json"] = arm.config
        if arm.evaluation is not None:
            found[f"evaluation/{arm.name}.json"] = arm.evaluation.config
    return {name: json.dumps(value, indent=2, ensure_ascii=False) for name, value in found.items()}
