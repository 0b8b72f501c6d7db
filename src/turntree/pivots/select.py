"""Select pivots from a profile (PivotRL, Eq. 5), the random baseline, and anchors (mastered turns).

Why anchors: the low-mean filter removes the kinds of action that the policy masters, and a policy trained on the rest
forgets them (docs/results/quickstart.md). An anchor is a mastered turn that stays in the training mix, where the KL
term and rare failures keep the policy from drifting on it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from turntree.core import seeds
from turntree.core.errors import ConfigError
from turntree.pivots.importance import shrunk
from turntree.pivots.rows import class_of_moments
from turntree.run.artifacts import PIVOTS

SCHEMA = PIVOTS.schema
THRESHOLDS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.01)  # lambdas that are previewed
_LEAST = 0.05  # importance of a state, as a share of the highest
Row = Mapping[str, Any]  # a row of a profile (schema turntree.profile/2)


@dataclass(frozen=True, kw_only=True)
class SelectConfig:
    """Limits on the pivots, applied in this order: `per_duplicate`, `per_trajectory`, `per_action`, `quota`,
    `max_per_kind`. What is dropped is chosen by seed and counted."""

    rule: Literal["pivots", "random"] = "pivots"
    """Keep the pivots (variance above zero, mean below lambda), or the same number of candidates drawn at random."""
    threshold: float = 0.6
    """lambda_diff: keep reward means below this."""
    anchor_share: float = 0.0
    """Share of mastered turns (mean at or above lambda) in the training mix, spread evenly over action kinds."""
    per_duplicate: int = 1
    """Most pivots of equal demonstrated actions at equal states (0: no limit)."""
    per_trajectory: int = 0
    """Most pivots of one trace (0: no limit)."""
    per_action: int = 0
    """Most pivots that demonstrate the same action (0: no limit)."""
    quota: dict[str, int] = field(default_factory=dict[str, int])
    """Most pivots of one action kind, by kind; '*' is every kind not named."""
    max_per_kind: float = 1.0
    """Largest share of one action kind among the pivots, rounded to whole pivots."""
    weight: Literal["equal", "variance", "importance", "both"] = "equal"
    """How heavy a pivot is in the draws of training: all alike, by its reward variance, by its importance (what
    `turntree importance` measured), or by the product of both. Anchors have the mean weight of the pivots. A step draws
    distinct pivots: in proportion to the weights where it draws few of them, nearly all alike where it draws most."""
    seed: int = 0
    """Seed for choosing what is dropped at a limit."""

    def __post_init__(self) -> None:
        if not 0 < self.threshold <= 1.01:
            raise ConfigError("is outside (0, 1]", field="threshold", hint="0.6 is usual, and 1 keeps every mean")
        if not 0 <= self.anchor_share < 1:
            raise ConfigError("is outside [0, 1)", field="anchor_share", hint="0: no anchors")
        if not 0 < self.max_per_kind <= 1:
            raise ConfigError("is outside (0, 1]", field="max_per_kind", hint="1: no limit")
        if self.rule == "random" and self.weight != "equal":
            raise ConfigError("does not go with rule random, which draws blindly", field="weight", hint="use equal")
        for name in ("per_duplicate", "per_trajectory", "per_action"):
            if getattr(self, name) < 0:
                raise ConfigError("must not be negative", field=name, hint="0 means no limit")
        for kind, number in self.quota.items():
            if number < 0:
                raise ConfigError("must not be negative", field=f"quota.{kind}", hint="0 drops the kind")


@dataclass(frozen=True)
class Selection:
    """The selected rows with their role, and counts by outcome that add up to all candidates."""

    rows: tuple[dict[str, Any], ...]
    counts: Mapping[str, int]


def is_mixed(row: Row) -> bool:
    """Reward variance above zero: some rollouts succeeded, some failed."""
    return row["reward_var"] is not None and row["reward_var"] > 0


def is_pivot(row: Row, threshold: float) -> bool:
    """Eq. 5."""
    return is_mixed(row) and row["reward_mean"] < threshold


def classify(row: Row, threshold: float) -> str:
    """The selection outcome of a candidate; the outcomes partition the candidates."""
    moments = None if row["reward_mean"] is None else (row["reward_mean"], row["reward_var"])
    return class_of_moments(moments, threshold).value


def select(rows: Sequence[Row], config: SelectConfig) -> Selection:
    """Choose the training states. Deterministic for a seed; every candidate is counted under one reason."""
    classes = [classify(row, config.threshold) for row in rows]
    pivots = [row for row, kind in zip(rows, classes, strict=True) if kind == "pivot"]
    counts = Counter(classes)
    chosen = _capped(_thinned(pivots, config, counts), config, counts)
    mastered = [row for row in rows if (row["reward_mean"] or 0.0) >= min(config.threshold, 1.0)]
    wanted = round(len(chosen) * config.anchor_share / (1 - config.anchor_share))
    anchors = _spread(mastered, wanted, config.seed)
    if config.rule == "random":
        rng = seeds.generator(config.seed, "random pivots")
        judged = [row for row, kind in zip(rows, classes, strict=True) if kind != "unjudged"]
        drawn = rng.sample(judged, min(len(judged), len(chosen) + len(anchors)))
        blind = {"drawn": len(drawn), "not drawn": len(judged) - len(drawn), "unjudged": len(rows) - len(judged)}
        return Selection(tuple(_marked(row, "random") for row in drawn), blind)
    weights = _weights(chosen, config)
    selected = [_marked(row, "pivot") | weight for row, weight in zip(chosen, weights, strict=True)]
    selected += [_marked(row, "anchor") for row in anchors]
    return Selection(tuple(selected), counts)


def _thinned(pivots: list[Row], config: SelectConfig, counts: Counter[str]) -> list[Row]:
    """The pivots within the absolute limits, in order; each dropped pivot is counted under the limit that it
    exceeds."""

    def duplicate(row: Row) -> Hashable:
        return (row["state"], row["demonstrated"]) if "state" in row else id(row)

    def action(row: Row) -> Hashable:
        return row.get("demonstrated", id(row))

    quota, others = config.quota, config.quota.get("*")
    limits: list[tuple[str, Callable[[Row], Hashable], Callable[[Row], int | None]]] = [
        ("pivot that is a duplicate", duplicate, lambda _: config.per_duplicate or None),
        ("pivot over its trajectory's limit", lambda row: row["trace_id"], lambda _: config.per_trajectory or None),
        ("pivot over its action's limit", action, lambda _: config.per_action or None),
        ("pivot over its kind's quota", lambda row: row["kind"], lambda row: quota.get(row["kind"], others)),
    ]
    for reason, key, limit in limits:
        groups: dict[Hashable, list[Row]] = defaultdict(list)
        for row in pivots:
            groups[key(row)].append(row)
        rng = seeds.generator(config.seed, reason)
        kept: set[int] = set()
        for group in groups.values():
            most = limit(group[0])
            kept |= {id(row) for row in (group if most is None or len(group) <= most else rng.sample(group, most))}
        _count_dropped(counts, reason, len(pivots) - len(kept))
        pivots = [row for row in pivots if id(row) in kept]
    return pivots


def _count_dropped(counts: Counter[str], reason: str, dropped: int) -> None:
    if dropped:
        counts["pivot"] -= dropped
        counts[reason] += dropped


def _capped(pivots: list[Row], config: SelectConfig, counts: Counter[str]) -> list[Row]:
    """At most `max_per_kind` of the kept pivots may be of one kind; what is dropped is counted.

    The limit L solves sum_k min(n_k, L) = L / cap: kinds above it are cut to it, the others stay whole. Raises
    `ConfigError` when there are too few kinds for any such set.
    """
    if config.max_per_kind >= 1 or not pivots:
        return pivots
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in pivots:
        by_kind[row["kind"]].append(row)
    if len(by_kind) * config.max_per_kind < 1:
        raise ConfigError(
            f"{len(by_kind)} kinds of action cannot all stay below {config.max_per_kind:.0%}",
            field="max_per_kind",
            hint="raise it, or profile more candidates",
        )
    limit = _limit(sorted((len(group) for group in by_kind.values()), reverse=True), config.max_per_kind)
    rng = seeds.generator(config.seed, "cap")
    kept: set[int] = set()
    for kind in sorted(by_kind):
        group = by_kind[kind]
        kept |= {id(row) for row in (rng.sample(group, limit) if len(group) > limit else group)}
    _count_dropped(counts, "pivot over its kind's cap", len(pivots) - len(kept))
    return [row for row in pivots if id(row) in kept]


def _limit(sizes: Sequence[int], cap: float) -> int:
    """The most that one kind may keep; `sizes` are sorted descending. With c kinds cut to L and `rest` whole, L = cap
    (c L + rest)."""
    if sizes[0] <= cap * sum(sizes):
        return sizes[0]
    for cut in range(1, len(sizes) + 1):
        if cut * cap >= 1:
            return sizes[cut - 1]
        limit = cap * sum(sizes[cut:]) / (1 - cut * cap)
        if cut == len(sizes) or limit >= sizes[cut]:
            return max(1, round(limit))
    raise AssertionError("some kind is small enough to stay whole")


def _spread(rows: list[Row], wanted: int, seed: int) -> list[Row]:
    """`wanted` rows, taken from the action kinds in turn, so that rare kinds are included."""
    by_kind: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_kind[row["kind"]].append(row)
    for kind, group in by_kind.items():
        seeds.generator(seed, "anchors", kind).shuffle(group)
    taken: list[Row] = []
    while len(taken) < wanted and any(by_kind.values()):
        for kind in sorted(by_kind):
            if by_kind[kind] and len(taken) < wanted:
                taken.append(by_kind[kind].pop())
    return taken


def _weights(pivots: Sequence[Row], config: SelectConfig) -> list[dict[str, float]]:
    """The weight of every pivot with a mean of 1, as a field of its row; no field where all are alike. Importance
    counts as at least a twentieth of the highest, because it is never certain that nothing hangs on a state. Raises
    `ConfigError` where no importance was measured."""
    if config.weight == "equal" or not pivots:
        return [{} for _ in pivots]
    values = [float(row["reward_var"]) if config.weight != "importance" else 1.0 for row in pivots]
    if config.weight != "variance":
        measured = [row.get("importance") for row in pivots]
        if not any(one and one["difference"] is not None for one in measured):
            hint = "measure it with `turntree importance`, or use --weight variance"
            raise ConfigError("needs the importance of the pivots", field="weight", hint=hint)
        found = shrunk([row["kind"] for row in pivots], measured)
        least = _LEAST * max(found)
        values = [value * (max(least, one) if least > 0 else 1.0) for value, one in zip(values, found, strict=True)]
    mean = sum(values) / len(values)
    return [{"weight": value / mean} for value in values]


def _marked(row: Row, role: str) -> dict[str, Any]:
    keys = ("trace_id", "turn", "kind", "reward_mean", "reward_var")
    return {**{key: row[key] for key in keys}, "role": role}


def preview(rows: Sequence[Row], thresholds: Sequence[float]) -> list[dict[str, Any]]:
    """What each lambda would keep, by action kind."""
    table: list[dict[str, Any]] = []
    for threshold in thresholds:
        kept = [row for row in rows if is_pivot(row, threshold)]
        kinds = Counter(row["kind"] for row in kept)
        table.append({"threshold": threshold, "pivots": len(kept), "kinds": dict(sorted(kinds.items()))})
    return table
