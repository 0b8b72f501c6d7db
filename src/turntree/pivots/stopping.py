"""When to stop sampling a candidate: more rollouts would not change how it is selected.

A fixed profile draws K rollouts of every candidate and then asks two questions (PivotRL, Eq. 5): are the rewards mixed,
and is their mean below lambda? For most candidates the first rollouts answer both. A selection treats a candidate in
one of three ways: it is a pivot, it is mastered (all succeed, or mixed but easy: a possible anchor), or all its
rollouts fail. After n of K rollouts with s successes and f failures, the outcome at K is

- *certain* where no outcome of the other K - n can change it: rewards are mixed, and the mean stays on one side of
  lambda (curtailed sampling; no error against the same K draws);
- *settled* where the rewards so far have one way, and its posterior predictive probability is at least `confidence`:

      P(way | s, f) = sum_p w(p | s, f) sum_t Binomial(t; K - n, p) [way of s + t successes in K]

  with the prior w over the success probability p estimated from the profile so far (`Prior`).

A share of the candidates (`audit`, drawn by seed) is run to K although it could have stopped. They measure the errors
of the rule, in every run (docs/results/adaptive-profiling.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from turntree.core.config import FIXED, Between, Bounded, Positive, Share
from turntree.core.errors import ConfigError
from turntree.pivots.rows import Class, Threshold, class_of

if TYPE_CHECKING:
    import numpy as np

_SUPPORT = 65  # points of the prior in [0, 1]
_PSEUDO_CANDIDATES = 8.0  # weight of the prior before any data, in candidates
_ITERATIONS = 200  # of expectation maximisation; by then changes are too small to change a decision


@dataclass(frozen=True, kw_only=True)
class AdaptiveConfig(Bounded):
    """Stop a candidate when its selection at `threshold` (lambda) is certain or probable enough.

    The defaults were chosen on 3,000 household candidates and checked on others.
    """

    threshold: Threshold = 0.6
    """lambda_diff, the threshold that adaptive profiling decides on. Setting it switches adaptive profiling on."""
    confidence: Annotated[float, Between(above=0.5, most=1)] = field(default=0.97, metadata=FIXED)
    """Stop when the candidate's selection has this predictive probability; 1: only when it is certain."""
    first: Positive = 4
    """Rollouts before the first look."""
    step: Positive = field(default=2, metadata=FIXED)
    """Rollouts between two looks."""
    audit: Share = field(default=0.03, metadata=FIXED)
    """Share of the candidates that are run to K although they could have stopped."""

    def check(self, rollouts: int) -> None:
        """Raises `ConfigError` where no candidate of that many rollouts could be stopped."""
        if self.first >= rollouts:
            problem = f"the first look is after {self.first} rollouts of {rollouts}: no candidate can stop early"
            raise ConfigError(problem, field="adaptive.first", hint="set it lower, or leave adaptive profiling out")

    def looks(self, rollouts: int) -> list[int]:
        """The numbers of rollouts after which the rule is checked; the last is `rollouts`."""
        return [*range(self.first, rollouts, self.step), rollouts]


def way_of(rewards: Sequence[float], threshold: float) -> Class:
    """The way in which a selection treats these rewards, as a class that stands for it."""
    kind = class_of(rewards, threshold)
    return Class.EASY if kind is Class.SUCCEED else kind


class Prior:
    """The distribution of success probabilities over the candidates profiled so far, on a fixed grid.

    It maximises the likelihood (binomial in s and f, since the stopping rule depends on the counts only) times a
    Dirichlet with the weight of `_PSEUDO_CANDIDATES` candidates of Jeffreys' prior. Expectation maximisation starts
    from the same point every time, so the result is a function of the counts and a resumed profile decides as an
    uninterrupted one.
    """

    def __init__(self, rollouts: int) -> None:
        import numpy as np

        self._counts = np.zeros((rollouts + 1, rollouts + 1))  # candidates by (successes, failures)

    def learn(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count profiled candidates (rows of a profile); those with rewards other than 0 and 1 are left out."""
        for row in rows:
            successes = row["successes"]
            failures = sum(action["count"] for action in row["actions"] if action["reward"] == 0.0)
            if successes + failures == row["rollouts"] - row["unjudged"]:
                self._counts[successes, failures] += 1

    def weights(self) -> np.ndarray:
        """Probabilities of the points of the grid."""
        import numpy as np

        uniform_G = np.full(_SUPPORT, 1 / _SUPPORT)
        successes, failures = np.nonzero(self._counts)
        if not len(successes):
            return uniform_G
        counts_N = self._counts[successes, failures]
        likelihood_NG = _likelihood(successes[:, None], failures[:, None])
        weights_G = uniform_G
        for _ in range(_ITERATIONS):
            joint_NG = likelihood_NG * weights_G
            posterior_NG = joint_NG / joint_NG.sum(axis=1, keepdims=True)
            expected_G = (counts_N[:, None] * posterior_NG).sum(axis=0) + _PSEUDO_CANDIDATES * uniform_G
            weights_G = expected_G / (counts_N.sum() + _PSEUDO_CANDIDATES)
        return weights_G


@dataclass(frozen=True)
class Forecast:
    """The likeliest outcome of all K rollouts (a class that stands for its way), and its predictive probability."""

    kind: Class
    probability: float


class StoppingRule:
    """The rule for one wave, with a fixed prior."""

    def __init__(self, config: AdaptiveConfig, rollouts: int, prior: Prior) -> None:
        self._config, self._rollouts = config, rollouts
        self._weights_G = prior.weights()
        self._forecast = lru_cache(maxsize=None)(self._compute)

    def settled(self, rewards: Sequence[float | None]) -> Forecast | None:
        """The outcome of K rollouts where the first few (None: not judged) settle it; None where they do not.

        Rewards other than 0 and 1 can be certain but are not forecast.
        """
        scored = [reward for reward in rewards if reward is not None]
        left = self._rollouts - len(rewards)
        if left == 0 or self._certain(scored, left):
            return Forecast(way_of(scored, self._config.threshold), 1.0)
        if not scored or any(reward not in (0.0, 1.0) for reward in scored):
            return None
        successes = int(sum(scored))
        forecast = self._forecast(successes, len(scored) - successes, left)
        seen = way_of(
            scored, self._config.threshold
        )  # what the row says: a pivot that is only forecast is not selected
        return forecast if forecast.kind is seen and forecast.probability >= self._config.confidence else None

    def _certain(self, scored: Sequence[float], left: int) -> bool:
        """Whether the outcome is certain: mixed rewards stay mixed, and the final mean lies between all others failing
        and all others succeeding."""
        if class_of(scored, self._config.threshold) not in (Class.PIVOT, Class.EASY):
            return False
        low, high = sum(scored) / (len(scored) + left), (sum(scored) + left) / (len(scored) + left)
        return (low < self._config.threshold) == (high < self._config.threshold)

    def _compute(self, successes: int, failures: int, left: int) -> Forecast:
        joint_G = self._weights_G * _likelihood(successes, failures)
        chances_T = _binomials(left) @ (joint_G / joint_G.sum())
        total = successes + failures + left
        by_way: dict[Class, float] = {}
        for more, chance in enumerate(chances_T.tolist(), start=successes):
            way = way_of([1.0] * more + [0.0] * (total - more), self._config.threshold)
            by_way[way] = by_way.get(way, 0.0) + chance
        way = max(by_way, key=lambda one: by_way[one])
        return Forecast(way, min(1.0, by_way[way]))


@lru_cache(maxsize=1)
def _grid() -> np.ndarray:
    """Grid points in [0, 1], both ends included, at which Jeffreys' prior is uniform: dense near 0 and 1, where classes
    are decided."""
    import numpy as np

    points_G = np.sin(np.pi * np.arange(_SUPPORT) / (2 * (_SUPPORT - 1))) ** 2
    points_G[[0, -1]] = 0.0, 1.0
    return points_G


def _likelihood(successes: int | np.ndarray, failures: int | np.ndarray) -> np.ndarray:
    """Of these counts (in any order) at every point of the grid (last axis). Plain powers of hundreds of rollouts would
    be 0 at all points."""
    import numpy as np

    from turntree.run.distributions import binomial

    return binomial(successes, np.add(successes, failures), _grid())


@lru_cache(maxsize=64)
def _binomials(left: int) -> np.ndarray:
    """Chances of 0..left successes (rows) at every point of the grid (columns)."""
    import numpy as np

    more = np.arange(left + 1)[:, None]
    return _likelihood(more, left - more)
