"""The verdict of a verifier. A reward of None is not zero: it means that the action was not judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from turntree.core.cost import NO_COST, Cost


@dataclass(frozen=True)
class Verdict:
    """`reward` (in [0, 1] unless the domain says otherwise), or None where judging failed: the rollout is then
    censored, never given a reward of 0. `reason` says why."""

    reward: float | None
    reason: str
    kind: str = ""  # the kind of action judged ("take", "search", a tool's name), for quotas and drift tracking
    success: bool | None = None  # of an episode: whether its task was solved, whatever the reward is
    # of an episode: what each reward function gave, by name (`rollout.rewards`), None where it failed
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"], hash=False)
    cost: Cost = NO_COST  # of judging, where a verifier plays


def succeeded(said: bool | None, reward: float | None) -> bool | None:
    """Without a word about success, a reward of at least 1 is one."""
    return said if said is not None or reward is None else reward >= 1


def tells_success(verdicts: Sequence[Verdict]) -> bool:
    """Whether the environment of these episodes says which succeed. One that rewards ends and calls none a success does
    not: what a limit ended is no failure there."""
    return any(v.success for v in verdicts) or not any(v.success is None and v.reward is not None for v in verdicts)


def censored(verdicts: Iterable[Verdict]) -> dict[str, int]:
    """How many verdicts have no reward, by the first line of their reasons, most frequent first."""
    reasons = Counter(verdict.reason.strip().split("\n")[0] for verdict in verdicts if verdict.reward is None)
    return dict(reasons.most_common())


def most_frequent(reasons: Mapping[str, int]) -> str:
    """The three most frequent reasons with their counts, for a line of text."""
    return "; ".join(f"{count} x {reason}" for reason, count in Counter(reasons).most_common(3))
