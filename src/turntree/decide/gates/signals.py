"""How much the rollouts of a group disagree after their first `turn` turns (Selective Rollout, appendix B).

A signal is a plain function `(group, turn) -> float`; low values mean convergence. A rollout that took fewer than
`turn` turns is padded with END, a symbol that equals itself and no action; padding deflates the distance of early
finishers: two rollouts of two turns without a common action are 2/5 apart at turn 5. In a group of one every
divergence is 0. Names and corner cases are those of the authors' code, so that their table can be read. Where the
paper's text says something else, `PRINTED` has that, under the same name with `_printed`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import combinations, pairwise

from turntree.core.protocols import GroupProgress

Signal = Callable[[GroupProgress, int], float]
Prefix = tuple[str | None, ...]  # None is END


def prefixes(group: GroupProgress, turn: int) -> list[Prefix]:
    """The first `turn` actions of every rollout, padded with END (None) to exactly that length."""
    return [actions[:turn] + (None,) * (turn - len(actions)) for actions in group.actions]


def prefix_edit_distance_mean(group: GroupProgress, turn: int) -> float:
    """d_K, the signal of the paper (section 3.2): Levenshtein distance in whole actions over `turn`, mean over the
    pairs.

    The longer of the two lengths, by which the paper divides, is always `turn` after padding. In [0, 1].
    """
    return _distance(prefixes(group, turn), "distance", turn)


def action_bigram_jaccard_mean(group: GroupProgress, turn: int) -> float:
    """1 - |A & B| / |A | B| over the sets of consecutive action pairs, mean over the pairs of rollouts. In [0, 1].

    Pairs with END count, (END, END) too; a pair of actions that occurs twice counts once; 0 at turn 1, where there is
    no bigram.
    """
    return _jaccard(prefixes(group, turn))


def unique_prefix_ratio(group: GroupProgress, turn: int) -> float:
    """Distinct prefixes over the group size: in [1/G, 1]."""
    return _distinct(prefixes(group, turn))


def unique_action_ratio(group: GroupProgress, turn: int) -> float:
    """Distinct actions of turn `turn` over the group size, END being one of them: in [1/G, 1]."""
    return _distinct([prefix[-1] for prefix in prefixes(group, turn)])


def action_entropy(group: GroupProgress, turn: int) -> float:
    """Shannon entropy of the actions of turn `turn`, END being one of them, over log G (the paper does not mention
    that division). In [0, 1]."""
    size = len(group.actions)
    if size < 2:
        return 0.0
    counts = Counter(prefix[-1] for prefix in prefixes(group, turn)).values()
    return sum(count / size * math.log(size / count) for count in counts) / math.log(size)


def obs_unique_ratio(group: GroupProgress, turn: int) -> float:
    """Distinct observations over the group size, of what was seen *before* action `turn` (the paper's o_K reads like
    the one after it); END where a rollout had ended before. In [1/G, 1]."""
    return _distinct([seen[turn - 1] if len(seen) >= turn else None for seen in group.observations])


def termination_fraction(group: GroupProgress, turn: int) -> float:
    """tau_K: the share of rollouts that ended after fewer than `turn` turns (ending exactly there does not count).

    No divergence: it is high in groups that were solved fast and low in those that fail, so a gate cuts *above* it.
    """
    ended = [done and len(actions) < turn for actions, done in zip(group.actions, group.finished, strict=True)]
    return _mean(ended)


SIGNALS: dict[str, Signal] = {
    signal.__name__: signal
    for signal in (
        prefix_edit_distance_mean,
        action_bigram_jaccard_mean,
        unique_prefix_ratio,
        unique_action_ratio,
        action_entropy,
        obs_unique_ratio,
        termination_fraction,
    )
}
"""The seven in-group signals of appendix B, by the names that the authors' tables use."""


def prefix_edit_distance_mean_printed(group: GroupProgress, turn: int) -> float:
    """Without END: each pair's distance over the longer of its two lengths."""
    return _distance([actions[:turn] for actions in group.actions], "normalized_distance", 1)


def _distance(taken: Sequence[Prefix], scorer: str, longest: int) -> float:
    """The mean over all pairs, over `longest`; 0 where there is no pair. NumPy and RapidFuzz are loaded for it alone:
    every command knows gates."""
    import numpy as np
    from rapidfuzz.distance import Levenshtein
    from rapidfuzz.process import cdist

    size, codes = len(taken), dict[str | None, str]()
    if size < 2:
        return 0.0
    texts = ["".join(codes.setdefault(action, chr(len(codes))) for action in one) for one in taken]
    kind = np.int64 if scorer == "distance" else np.float64
    summed = float(cdist(texts, texts, scorer=getattr(Levenshtein, scorer), dtype=kind).sum())
    return summed / (size * (size - 1) * longest)


def action_bigram_jaccard_mean_printed(group: GroupProgress, turn: int) -> float:
    """Without END: over pairs of actions that were taken."""
    return _jaccard([actions[:turn] for actions in group.actions])


def action_entropy_printed(group: GroupProgress, turn: int) -> float:
    """In nats, without the division by log G: in [0, log G]."""
    return action_entropy(group, turn) * math.log(max(2, len(group.actions)))


def obs_unique_ratio_printed(group: GroupProgress, turn: int) -> float:
    """Over what was seen after action `turn` (o_K); END where a rollout ended before."""
    return obs_unique_ratio(group, turn + 1)


def termination_fraction_printed(group: GroupProgress, turn: int) -> float:
    """The share of rollouts that ended *by* turn `turn`, so that ending exactly there counts."""
    return termination_fraction(group, turn + 1)


PRINTED: dict[str, Signal] = {
    signal.__name__: signal
    for signal in (
        prefix_edit_distance_mean_printed,
        action_bigram_jaccard_mean_printed,
        action_entropy_printed,
        obs_unique_ratio_printed,
        termination_fraction_printed,
    )
}
"""The five that the text of appendix B defines otherwise than the authors' code."""


def _jaccard(taken: Sequence[Prefix]) -> float:
    sets = [frozenset(pairwise(actions)) for actions in taken]
    return _mean([1 - len(a & b) / len(a | b) if a | b else 0.0 for a, b in combinations(sets, 2)])


def _distinct(values: Sequence[Hashable]) -> float:
    return len(set(values)) / len(values)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
