"""An alarm when a kind of action is accepted less often than at the start.

Overall reward can rise while the policy forgets one kind of action, so acceptance is monitored per kind, in two places:

    live       rewards of training rollouts. A pivot comes back once per epoch, so blocks of `window` groups are
               compared: each later block of a kind against its first one, by Welch's unequal variances (degrees of
               freedom: the smaller block's). Pivots that have retired since are left out of the first block too,
               because later blocks cannot contain them. held_out   the caller's checks. They use the same states each
               time, so the differences are paired by state.

Groups and states are the units, never single rollouts: samples at one state are not independent.

The null hypothesis is that acceptance fell by no more than `tolerance`. `false_alarms` bounds the chance of any alarm
in a whole run where it holds for every kind: half of it goes to each place, an equal part to each kind, and look
number j of a kind spends 1 / (j (j + 1)) of that, which sums to one however long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import Any, Literal

from scipy.special import stdtr

from turntree.training.config import FEWEST_STATES, DriftConfig

Place = Literal["live", "held_out"]


@dataclass
class _Watch:
    """One kind in one place. `first` and `block` map the number of a group or state to its mean reward."""

    first: list[tuple[int, float]] = field(default_factory=list)
    block: list[tuple[int, float]] = field(default_factory=list)
    looks: int = 0
    alarmed: bool = False


class DriftMonitor:
    """Watches the kinds of one run; a kind raises at most one alarm in each place."""

    def __init__(self, config: DriftConfig, live_kinds: Collection[str]) -> None:
        self.config = config
        self._live = {kind: _Watch() for kind in sorted(live_kinds)}
        self._held_out: dict[str, _Watch] = {}

    def live(self, kind: str, pivot: int, acceptance: float, retired: Collection[int] = ()) -> list[dict[str, Any]]:
        """One trained group: the mean reward at `pivot`. Returns the alarm that its block raises, if it fills one."""
        watch = self._live[kind]
        if len(watch.first) < self.config.window:
            watch.first.append((pivot, acceptance))
            return []
        watch.block.append((pivot, acceptance))
        if len(watch.block) < self.config.window:
            return []
        start = [value for index, value in watch.first if index not in retired]
        now = [value for _, value in watch.block]
        watch.block = []
        if len(start) < FEWEST_STATES:
            return []
        spread = variance(start) / len(start) + variance(now) / len(now)
        drop = fmean(start) - fmean(now)
        freedom = min(len(start), len(now)) - 1
        return self._look("live", kind, watch, fmean(start), drop, spread, freedom)

    def held_out(self, acceptance: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
        """One check: by kind the mean reward at each state (None: censored), the same states in the same order each
        time. The first call is the start. Returns the alarms."""
        alarms: list[dict[str, Any]] = []
        for kind, values in sorted(acceptance.items()):
            now = {index: value for index, value in enumerate(values) if value is not None}
            if kind not in self._held_out:
                self._held_out[kind] = _Watch(first=list(now.items()))
                continue
            watch = self._held_out[kind]
            pairs = [(before, now[index]) for index, before in watch.first if index in now]
            if len(pairs) >= FEWEST_STATES:
                drops = [before - after for before, after in pairs]
                start, spread = fmean(before for before, _ in pairs), variance(drops) / len(drops)
                alarms += self._look("held_out", kind, watch, start, fmean(drops), spread, len(drops) - 1)
        return alarms

    def state(self) -> dict[str, Any]:
        """Everything above as plain JSON, for a checkpoint."""
        places = {"live": self._live, "held_out": self._held_out}
        return {place: {kind: vars(watch) for kind, watch in watches.items()} for place, watches in places.items()}

    def restore(self, state: dict[str, Any]) -> None:
        for place, watches in (("live", self._live), ("held_out", self._held_out)):
            for kind, values in state[place].items():
                pairs = {key: [(int(i), float(x)) for i, x in values[key]] for key in ("first", "block")}
                watches[kind] = _Watch(**{**values, **pairs})

    def _look(
        self, place: Place, kind: str, watch: _Watch, start: float, drop: float, spread: float, freedom: int
    ) -> list[dict[str, Any]]:
        """One look at one kind; `spread` is the variance of `drop`."""
        watch.looks += 1
        kinds = len(self._live if place == "live" else self._held_out)
        level = self.config.false_alarms / 2 / kinds / (watch.looks * (watch.looks + 1))
        p_value = _p_value(drop - self.config.tolerance, spread, freedom)
        if watch.alarmed or p_value > level:
            return []
        watch.alarmed = True
        return [{"where": place, "kind": kind, "start": start, "now": start - drop, "p_value": p_value}]


def _p_value(excess: float, spread: float, freedom: int) -> float:
    """Chance under Student's t of an excess at least as large when there is none."""
    if spread == 0:
        return 0.0 if excess > 0 else 1.0
    return float(stdtr(freedom, -excess / math.sqrt(spread)))
