"""Groups in flight for the tests of gates: short actions from a small alphabet, some rollouts ended."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from turntree.core.protocols import GroupProgress

HORIZON = 8


def progress(
    *actions: str | Sequence[str],
    finished: Sequence[int] = (),
    observations: Sequence[Sequence[str]] | None = None,
    reported: Sequence[float | None] | None = None,
    task_id: str = "task",
    iteration: int = 0,
) -> GroupProgress:
    """A group in flight; a string is one action a letter, `finished` names rollouts by index."""
    size = len(actions)
    return GroupProgress(
        task_id=task_id,
        max_turns=HORIZON,
        actions=tuple(tuple(rollout) for rollout in actions),
        observations=tuple(map(tuple, observations)) if observations else tuple(("o",) * len(a) for a in actions),
        finished=tuple(index in finished for index in range(size)),
        progress=tuple(reported) if reported else (None,) * size,
        iteration=iteration,
    )


@st.composite
def played_out(draw: st.DrawFn, min_size: int = 1) -> tuple[str, ...]:
    """The whole rollouts of a group: 1 to 8 actions each."""
    rollout = st.text("abc", min_size=1, max_size=HORIZON)
    return tuple(draw(st.lists(rollout, min_size=min_size, max_size=5)))


def stopped_at(rollouts: Sequence[str], turn: int) -> GroupProgress:
    """Those rollouts when each has played at most `turn` turns; the shorter ones and those at the horizon ended."""
    finished = [i for i, rollout in enumerate(rollouts) if len(rollout) < turn or len(rollout[:turn]) == HORIZON]
    finished += [i for i, rollout in enumerate(rollouts) if len(rollout) == turn and turn < HORIZON]
    return progress(*(rollout[:turn] for rollout in rollouts), finished=finished)
