"""What turns of each kind of action are worth sampling again, learned from the run itself.

What hangs on a kind is the slope of an episode's reward (minus the mean of its group, which takes the task's difficulty
out) on whether its action at a state of the kind was accepted. Unlike `profiling.importance` it costs no rollouts, and
it is an observation: a policy that is accepted more often where it is about to win for another reason has a slope,
too. Slopes are shrunk towards that of all kinds together (a ridge). What can be learned at a kind is the variance of
verdicts at one state. States are drawn in proportion to slope times deviation and not weighed by the inverse: that
tilts the update towards kinds on which success hangs, on purpose, as weights of pivots do (`profiling.select`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

_RIDGE = 7.0  # noise of a centred success (about .2) over the variance of slopes between kinds (about .03)
_VARIANCE, _STATES = 0.2, 4.0  # of the verdicts at a state before any was sampled, and how many states that is worth
_LEAST = 0.05  # of the highest slope: it is never certain that nothing hangs on a kind


@dataclass
class _Kind:
    """Sums over the states of one kind: of acceptance x and reward y, and of the variance of verdicts at a state."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    variance: float = 0.0
    states: float = 0.0
    gain: float = 0.0
    gradients: float = 0.0

    @property
    def spread(self) -> float:
        return self.xx - self.x * self.x / self.count if self.count else 0.0

    @property
    def together(self) -> float:
        return self.xy - self.x * self.y / self.count if self.count else 0.0


class Acceptance:
    """What was seen of each kind so far. It depends on earlier iterations only if it is asked before it is told."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = defaultdict(_Kind)

    def episode(self, kind: str, accepted: float, reward: float) -> None:
        """The verdict on an episode's own action at a state of a kind, and the episode's reward minus that of its
        group."""
        one = self._kinds[kind]
        one.count += 1
        one.x, one.y = one.x + accepted, one.y + reward
        one.xx, one.xy = one.xx + accepted * accepted, one.xy + accepted * reward

    def group(self, kind: str, rewards: Sequence[float]) -> None:
        """The verdicts on the local rollouts at one state."""
        if len(rewards) > 1:
            mean = math.fsum(rewards) / len(rewards)
            self._kinds[kind].variance += math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)
            self._kinds[kind].states += 1

    def aligned(self, kind: str, gain: float, states: int) -> None:
        """What a step along the gradient of the kind's local rollouts at `states` states gains in the objective of the
        episodes: the inner product of the two gradients, of one iteration."""
        one = self._kinds[kind]
        one.gain, one.gradients = one.gain + gain, one.gradients + states

    def gains(self) -> dict[str, float]:
        """The gain of a state of each kind whose gradient was measured, on average."""
        return {kind: one.gain / one.gradients for kind, one in sorted(self._kinds.items()) if one.gradients}

    def trains(self, kind: str) -> bool:
        """Whether local rollouts of a kind have pointed along the episodes' objective so far."""
        return self.gains().get(kind, 0.0) > 0

    def slopes(self, kinds: Iterable[str] = ()) -> dict[str, float]:
        """What hangs on each kind seen and on each of `kinds`: without evidence, what hangs on all together."""
        together = math.fsum(one.together for one in self._kinds.values())
        spread = math.fsum(one.spread for one in self._kinds.values())
        overall = together / spread if spread else 0.0
        known = {**dict.fromkeys(kinds, _Kind()), **self._kinds}
        return {kind: (one.together + _RIDGE * overall) / (one.spread + _RIDGE) for kind, one in sorted(known.items())}

    def weights(self, kinds: Sequence[str], *, by_gain: bool = False) -> list[float]:
        """How often to draw a state of each of these kinds, relative to the others: its slope (or its gain) times the
        deviation of its verdicts. All alike until anything is known to hang on a kind."""
        slopes = self.gains() if by_gain else self.slopes()
        highest = max(slopes.values(), default=0.0)
        if highest <= 0:
            return [1.0] * len(kinds)
        known = list(slopes.values())
        mean = math.fsum(known) / len(known)
        return [max(slopes.get(kind, mean), _LEAST * highest) * self._deviation(kind) for kind in kinds]

    def _deviation(self, kind: str) -> float:
        one = self._kinds.get(kind, _Kind())
        return math.sqrt((one.variance + _VARIANCE * _STATES) / (one.states + _STATES))

    def state(self) -> dict[str, Any]:
        """As JSON, for `restore`."""
        return {kind: list(astuple(one)) for kind, one in sorted(self._kinds.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._kinds = defaultdict(_Kind, {kind: _Kind(*sums) for kind, sums in state.items()})
