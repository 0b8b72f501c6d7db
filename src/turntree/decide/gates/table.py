"""The input of calibration: one row per finished group, one column per turn at which a gate might have decided."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turntree.core.errors import InputError
from turntree.core.outcome import GroupOutcome, group_outcome
from turntree.core.protocols import GroupProgress
from turntree.decide.gates.signals import PRINTED, SIGNALS
from turntree.logs.groups import LoggedGroup, LoggedRollout

FEW = "groups of fewer than two rollouts that can be compared"


@dataclass(frozen=True, kw_only=True)
class Savings:
    """What a cut at each turn would have saved, in a unit that the data really have: turns or generated tokens."""

    unit: str
    total: float  # spent by all groups together
    after_NK: NDArray[np.float64]  # spent by a group after each turn


@dataclass(frozen=True, kw_only=True)
class GroupTable:
    """N finished groups at K turns. Arrays end in their axes; a signal that is not known for every group is absent.

    `actionable_NK`: something was left to save, because a rollout continued after that turn. `sizes_N` are scored
    rollouts (1 where the source does not have them, so that all groups weigh the same). `outcomes` are final.
    `absent` names what the source lacks, with the reason; `dropped` counts what was left out.
    """

    source: str
    max_turns: int
    turns: tuple[int, ...]
    tasks: tuple[str, ...]
    outcomes: tuple[GroupOutcome, ...]
    sizes_N: NDArray[np.float64]
    signals_NK: dict[str, NDArray[np.float64]]
    actionable_NK: NDArray[np.bool_]
    savings: tuple[Savings, ...] = ()
    absent: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InputError("holds no group that can be judged", path=self.source, hint=_told(self.dropped))

    @property
    def zero_variance_N(self) -> NDArray[np.bool_]:
        return np.array([outcome.zero_variance for outcome in self.outcomes])


def default_turns(max_turns: int) -> tuple[int, ...]:
    """A sixth, a third, a half and two thirds of the horizon: the paper's 5, 10, 15 and 20 of 30."""
    return tuple(sorted({max(1, round(max_turns * part)) for part in (1 / 6, 1 / 3, 1 / 2, 2 / 3)}))


def table_from_groups(
    groups: Sequence[LoggedGroup], *, source: str, max_turns: int | None = None, turns: Sequence[int] | None = None
) -> GroupTable:
    """Signals and savings of logged groups. `max_turns` defaults to the longest rollout.

    Left out and counted: rollouts without a reward (a signal counts those that failed after its turn, as a gate does),
    those that no gate would have seen since they share their first turns with another (forked) or began when others had
    ended (refills), and those whose turns the log does not tell apart; then groups of fewer than two others. Logs of a
    gated run have no outcomes of the groups that were cut, so they cannot support thresholds above that of their gate.
    """
    dropped = Counter[str]()
    kept: list[tuple[LoggedGroup, list[LoggedRollout]]] = []
    for group in groups:
        unfit = [(rollout, _unfit(rollout)) for rollout in group.rollouts]
        dropped.update(reason for _, reason in unfit if reason is not None)
        fit = [rollout for rollout, reason in unfit if reason is None]
        if len(fit) >= 2:
            kept.append((group, fit))
        else:
            dropped[FEW] += 1
    horizon = max_turns or max((len(r.actions) for _, rollouts in kept for r in rollouts), default=1)
    turns = tuple(sorted(set(turns or default_turns(horizon))))
    signals, absent = _signals(kept, turns, horizon)
    savings = [_savings(kept, turns, "turns", lambda rollout: (1,) * len(rollout.actions))]
    if all(r.turn_tokens is not None for _, rollouts in kept for r in rollouts):
        savings.append(_savings(kept, turns, "tokens", lambda rollout: rollout.turn_tokens or ()))
    else:
        absent["tokens"] = "not every rollout says how many tokens its turns generated"
    longest = np.array([[max(len(r.actions) for r in shown_at(group, 0))] for group, _ in kept])
    return GroupTable(
        source=source,
        max_turns=horizon,
        turns=turns,
        tasks=tuple(group.task for group, _ in kept),
        outcomes=tuple(group_outcome([r.reward for r in rollouts]) for _, rollouts in kept),
        sizes_N=np.array([len(rollouts) for _, rollouts in kept], dtype=float),
        signals_NK=signals,
        actionable_NK=longest > np.array(turns) if kept else np.zeros((0, len(turns)), dtype=bool),
        savings=tuple(savings),
        absent=absent,
        dropped=dict(sorted(dropped.items())),
    )


def _unfit(rollout: LoggedRollout) -> str | None:
    if rollout.reward is None:
        return "rollouts without a reward"
    if rollout.forked:
        return "rollouts that share their first turns with another"
    if rollout.refill:
        return "rollouts that began after others had ended"
    return None if rollout.actions else "rollouts whose turns are not told apart"


Kept = Sequence[tuple[LoggedGroup, Sequence[LoggedRollout]]]


def _signals(kept: Kept, turns: Sequence[int], horizon: int) -> tuple[dict[str, NDArray[np.float64]], dict[str, str]]:
    wanted, absent = {**SIGNALS, **PRINTED}, dict[str, str]()
    if any(r.observations is None for group, _ in kept for r in shown_at(group, 0)):
        del wanted["obs_unique_ratio"], wanted["obs_unique_ratio_printed"]
        absent["obs_unique_ratio"] = "not every rollout has its observations"
    columns: dict[str, list[list[float]]] = {name: [] for name in wanted}
    now = [progress_at(group, shown_at(group, 0), None, horizon) for group, _ in kept]
    for turn in turns:
        for i, (group, _) in enumerate(kept):
            shown = shown_at(group, turn)
            if len(shown) < len(now[i].actions):  # else nobody was lost since
                now[i] = progress_at(group, shown, None, horizon)
        for name, signal in wanted.items():
            columns[name].append([signal(group, turn) for group in now])
    return {name: np.array(values, dtype=float).reshape(len(turns), -1).T for name, values in columns.items()}, absent


def shown_at(group: LoggedGroup, turn: int) -> list[LoggedRollout]:
    """The rollouts that a gate sees after `turn` turns: those that began independently, without those that a fault had
    ended by then."""
    began = (one for one in group.rollouts if one.actions and not (one.forked or one.refill))
    return [one for one in began if one.reward is not None or len(one.actions) > turn]


def progress_at(group: LoggedGroup, rollouts: Sequence[LoggedRollout], turn: int | None, horizon: int) -> GroupProgress:
    """What a gate would have seen of the group when its unfinished rollouts had completed `turn` turns; None: at its
    end."""
    return GroupProgress(
        task_id=group.task,
        max_turns=horizon,
        actions=tuple(rollout.actions[:turn] for rollout in rollouts),
        observations=tuple((rollout.observations or ())[:turn] for rollout in rollouts),
        finished=tuple(turn is None or len(rollout.actions) <= turn for rollout in rollouts),
        progress=(None,) * len(rollouts),
    )


def _savings(kept: Kept, turns: Sequence[int], unit: str, spent: Callable[[LoggedRollout], Sequence[int]]) -> Savings:
    after = [[sum(sum(spent(r)[turn:]) for r in rollouts) for turn in turns] for _, rollouts in kept]
    total = sum(sum(spent(r)) for _, rollouts in kept for r in rollouts)
    return Savings(unit=unit, total=math.fsum([total]), after_NK=np.array(after, dtype=float))


def _told(dropped: dict[str, int]) -> str:
    told = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return f"left out: {told}" if told else "the file is empty"
