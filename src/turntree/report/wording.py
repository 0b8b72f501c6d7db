"""Numbers as people read them, and the sentences at the top of the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from turntree.report.read import Arm, Run, Share
from turntree.report.results import ArmResult, Difference, Estimate

ABSENT = "–"
MINUS = "\N{MINUS SIGN}"
LABELS = {"base": "Base", "sft": "SFT", "random": "Random pivots", "pivotrl": "PivotRL", "own": "Own-path PivotRL"}
IN_SENTENCES = {
    "base": "the base policy",
    "sft": "SFT on the same traces",
    "random": "the same training on random turns",
}


def label(arm: str) -> str:
    return LABELS.get(arm, arm)


def percent(share: float | None, digits: int = 1) -> str:
    return ABSENT if share is None else f"{100 * share:.{digits}f}%"


def interval(share: Share) -> str:
    """`38.3–51.9`, in percent."""
    return f"{100 * share.low:.1f}–{100 * share.high:.1f}"


def points(difference: float | None) -> str:
    """A difference of shares in percentage points, with its sign: `+14.0`."""
    if difference is None:
        return ABSENT
    return f"{100 * difference:+.1f}".replace("-", MINUS).replace(f"{MINUS}0.0", "0.0").replace("+0.0", "0.0")


def count(number: float | None) -> str:
    return ABSENT if number is None else f"{number:,.0f}"


def plural(size: int, noun: str) -> str:
    return f"{size:,} {noun}" if size == 1 else f"{size:,} {noun}s"


def number(value: float | None) -> str:
    """Three significant digits."""
    return ABSENT if value is None else f"{value:.3g}".replace("-", MINUS)


def seconds(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.1f}"


def duration(seconds: float | None) -> str:
    """`4.2 s`, `12 min 34 s`, `1 h 02 min`."""
    if seconds is None:
        return ABSENT
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


@dataclass(frozen=True)
class Headline:
    """`done`: what was trained on what. `found`: the result. `verdict`: the conclusion from the interval."""

    done: str
    found: str
    verdict: str = ""
    others: tuple[str, ...] = ()


def headline(run: Run, results: Sequence[ArmResult], differences: Sequence[Difference]) -> Headline:
    """What was trained, on what, and the result with its interval; missing parts are named."""
    main = _main(differences)
    if main is not None:
        others = tuple(_other(difference) for difference in differences if difference is not main)
        verdict = " ".join([_verdict(main), *_greedy_losses(differences)])
        return Headline(_done(run, run.arm(main.first)), _found(run, results, main), verdict, others)
    evaluated = [arm for arm in run.arms if arm.evaluation is not None]
    trained = [arm for arm in run.arms if arm.stage is not None]
    if evaluated:
        arm = evaluated[-1]
        share = arm.evaluation.sampled.overall if arm.evaluation else Share(None, 0, 1, 0)
        found = (
            f"{_subject(arm.name)} succeeds in {percent(share.success)} (95% interval {interval(share)}) {_where(arm)}."
        )
        return Headline(_done(run, arm), found, "There is no second policy to compare it with.")
    if trained:
        found = "No policy of this run was evaluated, so this page says nothing about success."
        return Headline(_done(run, trained[-1]), found)
    return Headline(_done(run, None), "No policy was trained or evaluated in this run.")


def _main(differences: Sequence[Difference]) -> Difference | None:
    against_base = [difference for difference in differences if difference.second == "base"]
    return next(iter([*against_base, *differences]), None)


def _done(run: Run, arm: Arm | None) -> str:
    steps = arm.metrics[-1]["step"] if arm is not None and arm.metrics else None
    trained = f" for {plural(steps, 'step')}" if steps is not None else ""
    model = f"policy “{arm.config.get('model', '')}”" if arm is not None and arm.config else "a policy"
    if arm is not None and arm.stage == "train pivot":
        return f"{_trainer(arm)} trained {model}{trained}{_on_pivots(run, arm)}."
    if arm is not None and arm.stage is not None:
        return f"{_trainer(arm)} trained {model}{trained}."
    return f"This run profiled {_candidates(run)}." if run.profile is not None else ""


def _trainer(arm: Arm) -> str:
    return LABELS.get(arm.name) or f"Run “{arm.name}” ({arm.stage})"


def _on_pivots(run: Run, arm: Arm) -> str:
    if (arm.config or {}).get("states") == "own":
        return " at states of its own play"
    table = run.random if arm.name == "random" else run.pivots
    if table is None:
        return ""
    how = "drawn at random from" if arm.name == "random" else "selected from"
    roles = Counter(str(row.get("role", "pivot")) for row in table.rows)
    told = f" ({', '.join(f'{count(n)} {role}s' for role, n in sorted(roles.items(), reverse=True))})"
    return f" on {count(len(table.rows))} turns{told if len(roles) > 1 else ''} {how} {_candidates(run)}"


def _candidates(run: Run) -> str:
    if run.profile is None:
        return "a profile that is not in this folder"
    traces = len({row["trace_id"] for row in run.profile.rows})
    return f"{count(len(run.profile.rows))} candidate turns of {count(traces)} expert traces"


def _found(run: Run, results: Sequence[ArmResult], main: Difference) -> str:
    shares = {result.name: result.sampled for result in results}
    first, second = shares.get(main.first), shares.get(main.second)
    arm = run.arm(main.first)
    where = _where(arm) if arm is not None and arm.evaluation is not None else "on the evaluation tasks"
    there = f" {where[0].upper()}{where[1:]}, " if where else " "
    if first is None or second is None:
        return f"{there}{_name(main.first)} minus {_name(main.second)} is {_with_intervals(main)}.".strip()
    return (
        f"{there}{_name(main.first)} succeeds in {percent(first.success)} (95% interval {interval(first)}) and "
        f"{_name(main.second)} in {percent(second.success)} ({interval(second)}): "
        f"a paired difference of {_with_intervals(main)}."
    ).strip()


def _where(arm: Arm) -> str:
    """`on 200 tasks of split “test” of environment “household”`."""
    assert arm.evaluation is not None
    config = arm.evaluation.config
    which = f" of split “{config['split']}”" if "split" in config else ""
    which += f" of environment “{config['environment']['name']}”" if config.get("environment") else ""
    return f"on {plural(len(arm.evaluation.sampled.outcomes), 'task')}{which}"


def _verdict(difference: Difference) -> str:
    """Of sampled play, and of greedy play where it says something else."""
    told = _judged(difference, difference.sampled)
    if difference.greedy is None or _side(difference.greedy) == _side(difference.sampled):
        return told
    return f"Sampled: {told} Greedy: {_judged(difference, difference.greedy)}"


def _judged(difference: Difference, found: Estimate) -> str:
    if found.contains_zero:
        return "The interval contains zero: these tasks do not tell the two policies apart."
    if found.low > 0:
        return "The whole interval lies above zero."
    return f"The whole interval lies below zero: {_name(difference.first)} is worse than {_name(difference.second)}."


def _side(found: Estimate) -> str:
    return "contains zero" if found.contains_zero else "lies above zero" if found.low > 0 else "lies below zero"


def _greedy_losses(differences: Sequence[Difference]) -> list[str]:
    """The further policies that win when both play greedily; the first is in the verdict."""
    lost = [one for one in differences if one is not _main(differences) and one.greedy is not None]
    return [
        f"Greedy, {_name(one.first)} is worse than {_name(one.second)} ({points(one.greedy.mean)} percentage points)."
        for one in lost
        if one.greedy is not None and _side(one.greedy) == "lies below zero"
    ]


def _other(difference: Difference) -> str:
    what = f"{_subject(difference.first)} minus {_name(difference.second)}: {_with_intervals(difference)}"
    told = _side(difference.sampled)
    if difference.greedy is None:
        return f"{what}. The interval {told}."
    if _side(difference.greedy) == told:
        return f"{what}. Both intervals {told.replace('s', '', 1)}."
    return f"{what}. Sampled, the interval {told}; greedy, it {_side(difference.greedy)}."


def _with_intervals(difference: Difference) -> str:
    greedy = "" if difference.greedy is None else f" sampled, {_with_interval(difference.greedy, '')} greedy"
    return _with_interval(difference.sampled, " percentage points") + greedy


def _with_interval(found: Estimate, unit: str) -> str:
    return f"{points(found.mean)}{unit} (95% interval {points(found.low)} to {points(found.high)})"


def _name(arm: str) -> str:
    return IN_SENTENCES.get(arm) or LABELS.get(arm) or f"“{arm}”"


def _subject(arm: str) -> str:
    name = _name(arm)
    return name[:1].upper() + name[1:]
