"""How much hangs on a turn: success of the episode after an accepted action minus success after a refused one.

Variance of a turn-level reward says that a turn can be learned, not that success hangs on it. At a mixed state, one
accepted and one refused action of its profile are played, and the policy goes on from both to the end, a few times.
The differences are noisy, so each is shrunk towards the mean of its kind of action (normal empirical Bayes). The means
are unweighted, and the spread between states of a kind is the moment estimator of Hedges (1983), pooled over kinds:
weights by each state's own variance would favour extreme outcomes, which look certain. One action is drawn for each
side, so the spread holds that draw, too. No paper of turntree's three has this measure.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

from turntree.core import seeds
from turntree.core.cost import NO_COST, Cost
from turntree.core.protocols import TurnState
from turntree.pivots.rows import Row, samples_of
from turntree.rollout.continuations import Continuation, PlayOn
from turntree.run.artifacts import Importance

_SIDES = ("accepted", "refused")
_LEAST_VARIANCE = 1e-3  # of a difference between two outcomes that are exact


def choose(state: TurnState, row: Row, seed: int) -> list[Continuation]:
    """How episodes shall go on from a sample above and from one below the mean reward of a profiled state, drawn by
    `seed` as often as they were sampled; nothing where the state is not mixed."""
    mean = row["reward_mean"]
    actions = samples_of({**row, "samples": range(len(row["actions"])), "faults": {}})
    sides: list[Continuation] = []
    for name in _SIDES:
        weights = [each["count"] * _on_side(name, each["reward"], mean) for each in row["actions"]]
        if not sum(weights):
            return []
        (sample,) = seeds.generator(seed, "importance", state.id, name).choices(actions, weights)
        assert sample.action is not None  # `actions` of a row hold no fault
        sides.append(Continuation(state, sample.action, name))
    return sides


def _on_side(name: str, reward: float | None, mean: float | None) -> bool:
    if reward is None or mean is None:
        return False
    return reward > mean if name == "accepted" else reward < mean


def weigh(
    states: Sequence[TurnState], rows: Sequence[Row | None], play_on: PlayOn, *, seed: int
) -> tuple[list[Importance | None], Cost]:
    """The importance of every state, given its row of a profile: continuations to the end from an accepted and from a
    refused action of each, played together. None where the state has no row or is not mixed: there are no two actions
    to compare. A state that cannot be rebuilt, and one whose continuations all failed, has no importance, with the
    reason. Raises `InputError` for traces that do not say how to build their environment."""
    pairs = zip(states, rows, strict=True)
    chosen = [[] if row is None else choose(state, row, seed) for state, row in pairs]
    sides = [side for both in chosen for side in both]
    play_on(sides, seeds.derive(seed, "importance"))
    cost = sum((side.cost for side in sides), NO_COST)
    return [_difference(*both) if both else None for both in chosen], cost


def shrunk(kinds: Sequence[str], measured: Sequence[Row | None]) -> list[float]:
    """The importance of every state, given the field `importance` of its row: the difference shrunk towards the mean of
    its kind. A state that was not measured has the mean of its kind, and one of a kind without any measurement that of
    all states. Raises `ValueError` where nothing was measured."""
    pairs = [_pair(one) for one in measured]
    by_kind: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kind, pair in zip(kinds, pairs, strict=True):
        if pair is not None:
            by_kind[kind].append(pair)
    everything = [pair for pairs in by_kind.values() for pair in pairs]
    if not everything:
        raise ValueError("no importance was measured")
    between = _between(by_kind)
    means = {kind: _mean(pairs) for kind, pairs in by_kind.items()}
    overall = _mean(everything)
    values: list[float] = []
    for kind, pair in zip(kinds, pairs, strict=True):
        mean = means.get(kind, overall)
        trust = 0.0 if pair is None else between / (between + pair[1])
        values.append(mean + trust * ((pair[0] if pair else mean) - mean))
    return values


def _pair(one: Row | None) -> tuple[float, float] | None:
    """A difference and its variance."""
    if not one or one["difference"] is None:
        return None
    return one["difference"], max(_LEAST_VARIANCE, one["error"] ** 2)


def _between(by_kind: Mapping[str, Sequence[tuple[float, float]]]) -> float:
    """The variance of importance between states of one kind, pooled over kinds; not below 0."""
    excess, freedom = 0.0, 0
    for pairs in by_kind.values():
        mean = _mean(pairs)
        noise = sum(variance for _, variance in pairs) / len(pairs)
        excess += sum((value - mean) ** 2 for value, _ in pairs) - (len(pairs) - 1) * noise
        freedom += len(pairs) - 1
    return max(0.0, excess / freedom) if freedom else 0.0


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(value for value, _ in pairs) / len(pairs)


def _difference(accepted: Continuation, refused: Continuation) -> Importance:
    for side in (accepted, refused):
        if not side.outcomes:
            unknown = dict.fromkeys(("accepted", "refused", "difference", "error"))
            return Importance(**unknown, reason=f"{side.name}: {side.reason}")
    (high, spread), (low, other) = _moments(accepted), _moments(refused)
    return Importance(accepted=high, refused=low, difference=high - low, error=math.sqrt(spread + other))


def _moments(side: Continuation) -> tuple[float, float]:
    """The mean outcome and the variance of its error. Half a success and half a failure are added for the variance,
    because a few equal outcomes do not make a certain mean; where the action ended the episode, there is no error."""
    mean, count = sum(side.outcomes) / len(side.outcomes), len(side.outcomes)
    if side.exact:
        return mean, 0.0
    padded = (sum(side.outcomes) + 0.5) / (count + 1)
    return mean, padded * (1 - padded) / count
