"""Figures of one online run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from turntree.report.figures import SMOOTHING, Curve, moving_mean, scale
from turntree.report.svg import INK, MUTED, Chart, drawing, literal, percent_ticks, plain_ticks
from turntree.report.wording import count, number, percent

BLUE = "#0072B2"
TINTS = ("#0072B2", "#D55E00", "#5d6570", "#009E73", "#CC79A7", "#E69F00")
DASHES = ("-", "--", ":", "-.", (0, (5, 1)), (0, (1, 1)))


def progress(name: str, what: Curve, points: Sequence[tuple[float, float]], spent: str) -> Chart:
    """One logged figure over what was spent; long curves get a moving mean, their values faint behind it."""
    at, values = [x for x, _ in points], [y for _, y in points]
    with drawing(name, *what.size) as (figure, made):
        axes = figure.add_subplot()
        if len(values) >= 4 * SMOOTHING:
            axes.plot(at, values, color=BLUE, linewidth=0.9, alpha=0.3)
            axes.plot(at, moving_mean(values), color=BLUE, linewidth=2)
        else:
            axes.plot(at, values, color=BLUE, linewidth=1.8, marker="o", ms=5, clip_on=False)
        axes.set(title=literal(f"{what.title} over {spent}" if spent != "iteration" else what.title), xlabel=spent)
        axes.set(ylabel=what.unit)
        scale(axes, what, values)
        plain_ticks(axes, "x", whole=True)
        axes.set_xlim(left=0)
        if what.kind != "reward" and max(values) > 0:
            room = 1.12 * max(values)
            axes.set_ylim(top=min(1.02, room) if what.kind == "share" else room)
    said = f"from {number(values[0])} to {number(values[-1])}"
    return Chart(made[0], f"{what.title} over {spent}, {said} ({count(at[-1])} {spent} at the end).")


def shares(name: str, title: str, kinds: Mapping[str, Sequence[tuple[float, float]]]) -> Chart:
    """The shares of several kinds over iterations, a line each."""
    with drawing(name, 3.9, 2.5) as (figure, made):
        axes = figure.add_subplot()
        for index, (kind, points) in enumerate(kinds.items()):
            steps, values = [x for x, _ in points], [y for _, y in points]
            axes.plot(steps, values, color=TINTS[index % 6], linestyle=DASHES[index % 6], label=literal(kind))
        axes.set(title=title, xlabel="iteration", ylabel="rollouts (%)")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        plain_ticks(axes, "x", whole=True)
        plain_ticks(axes, "y", steps=(1, 2, 5, 10))
        percent_ticks(axes, "y")
        figure.legend(loc="outside lower left", ncols=2, fontsize=9)
    said = "; ".join(f"{kind} from {percent(p[0][1], 0)} to {percent(p[-1][1], 0)}" for kind, p in kinds.items())
    return Chart(made[0], f"{title}, by iteration. {said}.")


def by_turn(name: str, counts: Mapping[int, int]) -> Chart:
    """How many forks lie at each turn, over the whole run."""
    turns = range(min(counts), max(counts) + 1)
    values = [counts.get(turn, 0) for turn in turns]
    with drawing(name, 3.9, 2.5) as (figure, made):
        axes = figure.add_subplot()
        axes.bar(list(turns), values, color=BLUE, width=0.72)
        for turn, value in zip(turns, values, strict=True):
            axes.annotate(count(value), (turn, value), (0, 2), textcoords="offset points", ha="center", color=INK)
        axes.set(title="Forks by turn", xlabel="turn of the fork", ylabel="forks", xticks=list(turns))
        axes.set_ylim(top=1.12 * max(values))
        axes.grid(visible=False, axis="x")
    said = ", ".join(f"turn {turn}: {count(value)}" for turn, value in zip(turns, values, strict=True))
    return Chart(made[0], f"Forks by turn. {said}.")


def cumulative(name: str, samples: Mapping[str, Sequence[float]], unit: str) -> Chart:
    """The share of moments below a value, a line for each of what became of them."""
    everything = sorted(value for values in samples.values() for value in values)
    low, high = (everything[int(share * (len(everything) - 1))] for share in (0.005, 0.95))
    with drawing(name, 5.0, 2.9) as (figure, made):
        axes = figure.add_subplot()
        for index, (what, values) in enumerate(samples.items()):
            axes.ecdf(
                list(values),
                color=TINTS[index % 6],
                linestyle=DASHES[index % 6],
                linewidth=2,
                label=literal(f"{what} ({count(len(values))})"),
            )
        axes.set(title="What the rule measured", xlabel=literal(unit), ylabel="moments below (%)", ylim=(0, 1.02))
        if low < high:
            axes.set_xlim(low, high)
        plain_ticks(axes, "x")
        percent_ticks(axes, "y")
        axes.tick_params(axis="x", labelcolor=MUTED)
        axes.legend(loc="lower right")
    medians = "; ".join(
        f"{what}: median {sorted(values)[len(values) // 2]:.4g} of {count(len(values))}"
        for what, values in samples.items()
        if values
    )
    outside = percent(sum(value > high for value in everything) / len(everything), 0)
    return Chart(made[0], f"{unit} at forks and passes. {medians}.", f"{outside} of the moments lie further right.")
