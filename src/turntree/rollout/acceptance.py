"""How much an episode's reward hangs on each kind of action, learned from the run itself.

What hangs on a kind is the slope of an episode's reward (minus the mean of its group, which takes the task's difficulty
out) on whether its action at a state of the kind was accepted. It costs no rollouts, and it is an observation: a policy
that is accepted more often where it is about to win for another reason has a slope, too. Slopes are shrunk towards that
of all kinds together (a ridge).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Any

_RIDGE = 7.0  # noise of a centred success (about .2) over the variance of slopes between kinds (about .03)


@dataclass
class _Kind:
    """Sums over the judged turns of one kind, of acceptance x and reward y."""

    count: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    @property
    def spread(self) -> float:
        return self.xx - self.x * self.x / self.count if self.count else 0.0

    @property
    def together(self) -> float:
        return self.xy - self.x * self.y / self.count if self.count else 0.0


class Acceptance:
    """What was seen of each kind so far."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = defaultdict(_Kind)

    def episode(self, kind: str, accepted: float, reward: float) -> None:
        """The verdict on an episode's own action at a state of a kind, and the episode's reward minus that of its
        group."""
        sums = self._kinds[kind]
        sums.count += 1
        sums.x, sums.y = sums.x + accepted, sums.y + reward
        sums.xx, sums.xy = sums.xx + accepted * accepted, sums.xy + accepted * reward

    def slopes(self, kinds: Iterable[str] = ()) -> dict[str, float]:
        """What hangs on each kind seen and on each of `kinds`: without evidence, what hangs on all together."""
        together = math.fsum(sums.together for sums in self._kinds.values())
        spread = math.fsum(sums.spread for sums in self._kinds.values())
        overall = together / spread if spread else 0.0
        every = {**dict.fromkeys(kinds, _Kind()), **self._kinds}
        return {
            kind: (sums.together + _RIDGE * overall) / (sums.spread + _RIDGE) for kind, sums in sorted(every.items())
        }

    def state(self) -> dict[str, Any]:
        """As JSON, for `restore`."""
        return {kind: list(astuple(sums)) for kind, sums in sorted(self._kinds.items())}

    def restore(self, state: dict[str, Any]) -> None:
        self._kinds = defaultdict(_Kind, {kind: _Kind(*sums) for kind, sums in state.items()})
