"""What a verifier says. `None` is not zero: a verdict without a reward means that the action was not judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Verdict:
    """`reward` (in [0, 1] where a domain does not say otherwise), or None where judging failed (the rollout is
    censored, never punished); why; of what kind."""

    reward: float | None
    reason: str
    kind: str = ""  # the kind of action judged ("take", "search", a tool's name), for quotas and drift tracking
    success: bool | None = None  # of an episode: whether its task was solved, whatever the reward is
    # of an episode: what each reward function gave, by name (`rollouts.rewards`), None where it failed
    parts: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"], hash=False)
