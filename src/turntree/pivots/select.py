"""Select pivots from a profile (PivotRL, Eq. 5), the random baseline, and anchors (mastered turns).

Why a share of each kind of action is bounded, and why anchors are: the filter keeps what is learned at the moment and
removes the kinds that the policy masters or never gets right. A policy trained on what is left turns into it: at hard
games two thirds of the pivots are searches, and a policy that does nothing but search is paid more there than the one
that it began as, while it wins no game (docs/results/hard.md). An anchor is a mastered turn that stays in the mix,
where the KL term and rare failures keep the policy from drifting on it. Neither is in the paper: `max_per_kind=1`
with `anchor_share=0` is its form.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from turntree.core import seeds
from turntree.core.config import Between, Bounded, Count
from turntree.core.errors import ConfigError
from turntree.pivots.rows import Row, Threshold, classify

T = TypeVar("T")
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)  # lambdas that are previewed


@dataclass(frozen=True, kw_only=True)
class BalanceConfig(Bounded):
    """How often each turn is drawn."""

    max_per_kind: Annotated[float, Between(above=0, most=1)] = 0.3
    """Largest share of one kind of action in the draws of pivots (1: no limit, as in the paper). Too few kinds
    for it have equal shares."""
    anchor_share: Annotated[float, Between(0, below=1)] = 0.3
    """Share of mastered turns (mean at or above lambda) among the turns and in the draws, the same for every kind of
    action that has enough (0: none, as in the paper)."""
    weight: Literal["equal", "variance"] = "equal"
    """How heavy a pivot is in the draws of training: all alike, or by its reward variance. A step draws distinct turns:
    in proportion to the weights where it draws few of them, nearly all alike where it draws most."""


@dataclass(frozen=True, kw_only=True)
class SelectConfig(BalanceConfig):
    """Which turns are trained on, and how often each is drawn."""

    rule: Literal["pivots", "random"] = "pivots"
    """Keep the pivots (variance above zero, mean below lambda), or the same number of candidates drawn at random."""
    threshold: Threshold = 0.6
    """lambda_diff: keep reward means below this."""
    per_duplicate: Count = 1
    """Most pivots of equal demonstrated actions at equal states (0: no limit). What is dropped is chosen by seed."""
    seed: int = 0
    """Seed for choosing what is dropped at a limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, none in (("weight", "equal"), ("anchor_share", 0), ("max_per_kind", 1)):
            if self.rule == "random" and getattr(self, name) not in (none, getattr(SelectConfig, name)):
                raise ConfigError("does not go with rule random, which draws blindly", field=name, hint="leave it out")


@dataclass(frozen=True)
class Selection:
    """The selected rows with their role, and counts by outcome that add up to all candidates."""

    rows: tuple[dict[str, Any], ...]
    counts: Mapping[str, int]


def settled_at(header: Row) -> float | None:
    """The one lambda that an adaptive profile serves; None of one of fixed K, which serves every lambda."""
    adaptive = header["config"]["profile"].get("adaptive")
    return None if adaptive is None else adaptive["threshold"]


def is_pivot(row: Row, threshold: float) -> bool:
    """Eq. 5 (`rows.class_of_moments`)."""
    return classify(row, threshold) == "pivot"


def select(rows: Sequence[Row], config: SelectConfig) -> Selection:
    """Choose the training states. Deterministic for a seed; every candidate is counted under one reason."""
    classes = [classify(row, config.threshold) for row in rows]
    counts = Counter(classes)
    pivots = [row for row, kind in zip(rows, classes, strict=True) if kind == "pivot"]
    if config.rule == "random":
        rng = seeds.generator(config.seed, "random pivots")
        judged = [row for row, kind in zip(rows, classes, strict=True) if kind != "unjudged"]
        drawn = rng.sample(judged, len(_distinct(pivots, config)))
        blind = {"drawn": len(drawn), "not drawn": len(judged) - len(drawn), "unjudged": len(rows) - len(judged)}
        return Selection(tuple(_marked(row, "random", 1.0) for row in drawn), blind)
    chosen = _distinct(pivots, config)
    if dropped := len(pivots) - len(chosen):
        counts["pivot"] -= dropped
        counts["pivot that is a duplicate"] = dropped
    wanted = round(len(chosen) * config.anchor_share / (1 - config.anchor_share))
    mastered = _distinct([row for row in rows if (row["reward_mean"] or 0.0) >= min(config.threshold, 1.0)], config)
    anchors = over_kinds(mastered, [row["kind"] for row in mastered], wanted, config.seed)
    of_pivots = 1 - config.anchor_share if anchors else 1.0
    shares = [of_pivots * share for share in _pivot_shares(chosen, config)]
    sizes = Counter(row["kind"] for row in anchors)  # every kind has the same share of the draws of anchors
    shares += [config.anchor_share / len(sizes) / sizes[row["kind"]] for row in anchors]
    roles = [(row, "pivot") for row in chosen] + [(row, "anchor") for row in anchors]
    weights = [share * len(shares) for share in shares]
    if all(math.isclose(weight, 1.0) for weight in weights):  # exactly: turns of equal weight are drawn in epochs
        weights = [1.0] * len(weights)
    marked = (_marked(row, role, weight) for (row, role), weight in zip(roles, weights, strict=True))
    return Selection(tuple(marked), counts)


def _distinct(pivots: list[Row], config: SelectConfig) -> list[Row]:
    """The pivots, in order, with at most `per_duplicate` of equal actions at equal states."""
    if not config.per_duplicate:
        return pivots
    groups: dict[Hashable, list[Row]] = defaultdict(list)
    for row in pivots:
        groups[(row["state"], row["demonstrated"]) if "state" in row else id(row)].append(row)
    rng = seeds.generator(config.seed, "pivot that is a duplicate")
    most = config.per_duplicate
    kept = {id(row) for group in groups.values() for row in (rng.sample(group, most) if len(group) > most else group)}
    return [row for row in pivots if id(row) in kept]


def _pivot_shares(pivots: Sequence[Row], config: SelectConfig) -> list[float]:
    """The share of each pivot in the draws of pivots: by its value, with no kind above `max_per_kind`."""
    values = [float(row["reward_var"]) if config.weight == "variance" else 1.0 for row in pivots]
    by_kind: dict[str, float] = defaultdict(float)
    for row, value in zip(pivots, values, strict=True):
        by_kind[row["kind"]] += value
    shares = capped_shares(by_kind, config.max_per_kind)
    return [value * shares[row["kind"]] / by_kind[row["kind"]] for row, value in zip(pivots, values, strict=True)]


def over_kinds(items: Sequence[T], kinds: Sequence[str], wanted: int, seed: int) -> list[T]:
    """`wanted` items, in order, taken from the kinds of action in turn, so that rare kinds are among them."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    for place, kind in enumerate(kinds):
        by_kind[kind].append(place)
    for kind, group in by_kind.items():
        seeds.generator(seed, "anchors", kind).shuffle(group)
    taken: set[int] = set()
    while len(taken) < min(wanted, len(items)):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(taken) < wanted:
                taken.add(by_kind[kind].pop())
    return [items[place] for place in sorted(taken)]


def capped_shares(sizes: Mapping[str, float], cap: float) -> dict[str, float]:
    """Shares that add up to 1, in proportion to `sizes` but none above `cap` (or 1 over their number, where the cap is
    lower): what the kinds above it lose goes to the others in proportion.

    >>> capped_shares({"go": 8, "open": 1, "take": 1}, 0.5)
    {'go': 0.5, 'open': 0.25, 'take': 0.25}
    """
    cap = max(cap, 1 / max(1, len(sizes)))
    full: set[str] = set()
    while True:
        rest = sum(size for kind, size in sizes.items() if kind not in full)
        left = 1 - cap * len(full)
        shares = {kind: cap if kind in full else left * size / rest for kind, size in sizes.items()}
        above = {kind for kind, share in shares.items() if share > cap * (1 + 1e-9)} - full
        if not above:
            return shares
        full |= above


def _marked(row: Row, role: str, weight: float) -> dict[str, Any]:
    keys = ("trace_id", "turn", "kind", "reward_mean", "reward_var")
    return {**{key: row[key] for key in keys}, "role": role, "weight": weight}


def preview(rows: Sequence[Row], thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """What each lambda would keep, by action kind."""
    table: list[dict[str, Any]] = []
    for threshold in thresholds:
        kept = [row for row in rows if is_pivot(row, threshold)]
        kinds = Counter(row["kind"] for row in kept)
        table.append({"threshold": threshold, "pivots": len(kept), "kinds": dict(sorted(kinds.items()))})
    return table
