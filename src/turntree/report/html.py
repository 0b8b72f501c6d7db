"""`turntree report`: a run directory in, one static page out that needs nothing beside itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.observe.files import write_text
from turntree.profiling.select import classify
from turntree.report import figures, online, results, rollout_tree, wording
from turntree.report.browser import build_browser
from turntree.report.examples import examples
from turntree.report.figures import Curve
from turntree.report.page import templates
from turntree.report.read import ARMS, Arm, Row, Run, read_run
from turntree.report.svg import colour, themed

CURVES = (
    Curve("reward_mean", "Reward on training states", "mean reward", "reward"),
    Curve("mixed_groups", "Groups with mixed rewards", "share of groups (%)", "share"),
    Curve("kl", "KL to the reference", "nats per token"),
    Curve("grad_norm", "Gradient norm before clipping", "L2 norm"),
    Curve("held_out_success", "Success on development tasks", "success (%)", "share"),
    Curve("held_out_invalid_share", "Impossible commands (dev tasks)", "share of commands (%)", "share"),
)
SFT_CURVE = Curve("loss", "SFT loss", "nats per token")
PIVOT_STAGE, SFT_STAGE = "train pivot", "sft"


def build_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of a run directory to `out` (default: `report.html` inside it) and return where it lies. Beside
    every run in it that kept its trees a `trees.html` is written (`browser.build_browser`), to which the page leads.

    The same files give the same bytes. Raises `InputError` where the folder holds nothing that can be shown, or a
    file of it cannot be read.
    """
    out = out or run_dir / "report.html"
    run = read_run(run_dir)
    page = render(run, out)
    for folder in rollout_tree.with_trees(run).values():
        build_browser(folder)
    return write_text(out, page)


def render(run: Run, page: Path) -> str:
    """The page that will lie at `page` as HTML; a single online run has one of its own."""
    if online.is_online(run):
        return _filled("online.html.j2", online.view(run, page))
    return _filled("report.html.j2", view(run, page))


def _filled(template: str, shown: dict[str, Any]) -> str:
    environment = templates()
    environment.filters |= {"pretty": pretty}
    return environment.get_template(template).render(shown)


def view(run: Run, page: Path) -> dict[str, Any]:
    """Everything that the template shows, by section; `page` is where it will lie."""
    arms = results.arm_results(run)
    differences = results.differences(run)
    return {
        "run": run,
        "headline": wording.headline(run, arms, differences),
        "missing": missing(run),
        "disagreements": results.disagreements(run),
        **_results(run, arms, differences),
        **_curves(run.arms),
        **_profile(run),
        **_by_task_type(run.arms),
        **_retention(run.arms),
        **rollout_tree.of_arms(run, page),
        "ledger": (ledger := results.ledger(run)),
        "ledger_total": results.total(ledger),
        "examples": examples(run),
        "configurations": _configurations(run),
    }


def missing(run: Run) -> list[str]:
    """The parts of a quickstart that this folder lacks; none of a training run of its own."""
    if any(arm.folder == run.path for arm in run.arms):
        return []
    wanted = {
        "profile.jsonl": run.profile,
        "pivots.jsonl": run.pivots,
        "random.jsonl": run.random,
        "summary.json": run.summary,
    }
    absent = [name for name, found in wanted.items() if found is None]
    known = {arm.name: arm for arm in run.arms}
    arms = [name for name in ARMS if name != "own" or name in known]  # quickstarts of before had none
    for name in arms[1:]:
        if name not in known or known[name].stage is None:
            absent.append(f"{name}/")
    for name in arms:
        if name not in known or known[name].evaluation is None:
            absent.append(f"evaluation/{name}.json")
    return absent


def _results(run: Run, arms: Sequence[results.ArmResult], differences: Sequence[results.Difference]) -> dict[str, Any]:
    sampled = {arm.name: arm.sampled for arm in arms if arm.sampled is not None and arm.sampled.success is not None}
    greedy = {arm.name: arm.greedy for arm in arms if arm.greedy is not None and arm.greedy.success is not None}
    return {
        "arms": arms,
        "differences": differences,
        "success_chart": figures.success(sampled, greedy) if sampled else None,
        "paired_chart": figures.paired(differences) if differences else None,
        "from_summary": bool((run.summary or {}).get("arms")),
        "remarks": _remarks(run.summary or {}),
    }


def _remarks(summary: Row) -> str:
    """A sentence about the whole run from its summary, or an empty text."""
    told = [f"seed {summary['seed']}"] if "seed" in summary else []
    told += [str(summary["machine"])] if "machine" in summary else []
    told += [f"{wording.duration(summary['wall_seconds'])} in all"] if "wall_seconds" in summary else []
    return f"The run: {', '.join(told)}." if told else ""


def _curves(arms: Sequence[Arm]) -> dict[str, Any]:
    """The curves of training, and acceptance on held-out states: one small figure for every kind of action."""
    trained = [arm for arm in arms if arm.stage == PIVOT_STAGE]
    kinds = {kind for arm in trained for row in arm.metrics for kind in row.get("held_out_acceptance", {})}
    small = [
        Curve(f"held_out_acceptance.{kind}", kind, "accepted (%)", "share", size=(2.7, 1.9))
        for kind in sorted(kinds, key=lambda kind: (kind != "all", kind))
    ]
    drawn = [figures.curve(f"curve-{what.key}", what, trained) for what in CURVES]
    drawn.append(figures.curve("curve-sft", SFT_CURVE, [arm for arm in arms if arm.stage == SFT_STAGE]))
    by_kind = [figures.curve(f"kind-{index}", what, trained) for index, what in enumerate(small)]
    names = [arm.name for arm in trained]
    return {
        "curves": [chart for chart in drawn if chart is not None],
        "kind_curves": [chart for chart in by_kind if chart is not None],
        "legend": [(name, themed(colour(name, names))) for name in names],
    }


def _profile(run: Run) -> dict[str, Any]:
    threshold = results.threshold(run)
    preview = results.lambda_preview(run)
    view: dict[str, Any] = {
        "threshold": threshold,
        "preview": preview,
        "preview_kinds": sorted({kind for row in preview for kind in row["kinds"]}),
        **_training_states(run),
        "profile_chart": None,
    }
    if run.profile is not None and run.profile.rows:
        rows = run.profile.rows
        classes = [classify(row, threshold) for row in rows]
        view["profile_chart"] = figures.mean_and_variance(rows, threshold)
        view["grid"] = figures.kinds_by_mean(rows, threshold)
        view["classes"] = {name: classes.count(name) for name in sorted(set(classes))}
        view["rollouts"] = max(row.get("rollouts", 0) for row in rows)
    return view


def _training_states(run: Run) -> dict[str, Any]:
    """How many states of each role and kind the two selections hold."""
    rows: list[tuple[str, str, Counter[str]]] = []
    for name, table in (("pivots.jsonl", run.pivots), ("random.jsonl", run.random)):
        if table is not None:
            roles = sorted({row.get("role", "pivot") for row in table.rows}, reverse=True)
            rows += [
                (name, role, Counter(r["kind"] for r in table.rows if r.get("role", "pivot") == role)) for role in roles
            ]
    return {"state_rows": rows, "state_kinds": sorted({kind for _, _, kinds in rows for kind in kinds})}


def _by_task_type(arms: Sequence[Arm]) -> dict[str, Any]:
    played = {arm.name: arm.evaluation.sampled.by_task_type for arm in arms if arm.evaluation is not None}
    types = sorted({kind for by_type in played.values() for kind in by_type})
    rows = [(kind, [by_type.get(kind) for by_type in played.values()]) for kind in types]
    return {
        "types_arms": list(played),
        "types_chart": figures.by_group("task-types", played, types) if types else None,
        "types_rows": [(kind, shares, max(share.episodes for share in shares if share)) for kind, shares in rows],
    }


def _retention(arms: Sequence[Arm]) -> dict[str, Any]:
    asked = {arm.name: arm.evaluation.skills for arm in arms if arm.evaluation is not None and arm.evaluation.skills}
    names = list(dict.fromkeys(name for by_skill in asked.values() for name in by_skill))
    rows = [(name, [by_skill.get(name) for by_skill in asked.values()]) for name in names]
    return {
        "skill_arms": list(asked),
        "retention_chart": figures.retention(asked, names) if names else None,
        "skill_rows": [(name, skills, next(skill for skill in skills if skill)) for name, skills in rows],
    }


def _configurations(run: Run) -> list[tuple[str, Any]]:
    """(file, configuration) of every file that records how it was made."""
    tables = (("profile.jsonl", run.profile), ("pivots.jsonl", run.pivots), ("random.jsonl", run.random))
    found: list[tuple[str, Any]] = [] if run.config is None else [("config.json", run.config)]
    found += [
        (name, {key: value for key, value in table.header.items() if key not in ("summary", "timing")})
        for name, table in tables
        if table is not None
    ]
    found += [
        (f"{arm.name}/config.json", arm.config)
        for arm in run.arms
        if arm.config is not None and arm.config != (run.config or {}).get("config")
    ]
    found += [(f"evaluation/{arm.name}.json", arm.evaluation.config) for arm in run.arms if arm.evaluation is not None]
    return found


def pretty(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)
