"""Profile pivot candidates: K local rollouts of a frozen policy at every state (PivotRL, Eq. 4)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from turntree.core.completion import Sampling
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.protocols import Engine, Renderer, TurnState, TurnVerifier
from turntree.core.tree import RolloutTree, StopReason
from turntree.rollouts.local import render, sample_local, score_local

SCHEMA = "turntree.profile/1"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """`rollouts` is the paper's K. `wave` states are sampled together (their number changes no result's meaning)."""

    rollouts: int = 16
    sampling: Sampling = field(default_factory=lambda: Sampling(temperature=1.0, max_tokens=256))
    seed: int = 0
    wave: int = 32

    def __post_init__(self) -> None:
        if self.rollouts < 2 or self.wave < 1:
            raise InputError("a profile needs at least 2 rollouts a state", field="rollouts", hint="the paper uses 16")


@dataclass(frozen=True)
class CandidateProfile:
    """What K rollouts said about one candidate. A reward is None where the verifier could not judge."""

    trace_id: str
    turn: int
    kind: str  # of the demonstrated action
    rewards: tuple[float | None, ...]
    strict: tuple[float | None, ...]
    actions: tuple[str, ...]
    truncated: int  # completions that were cut at max_tokens
    gold: float | None  # the verdict on the demonstration itself: anything but 1 is a fault of the verifier
    cost: Cost

    @property
    def id(self) -> str:
        return f"{self.trace_id}#{self.turn}"

    @property
    def scored(self) -> tuple[float, ...]:
        return tuple(reward for reward in self.rewards if reward is not None)

    @property
    def reward_mean(self) -> float | None:
        """Eq. 4, over the rollouts that were judged; None when none was."""
        return sum(self.scored) / len(self.scored) if self.scored else None

    @property
    def reward_var(self) -> float | None:
        """Eq. 4: the population variance."""
        mean = self.reward_mean
        return None if mean is None else sum((r - mean) ** 2 for r in self.scored) / len(self.scored)

    def to_json(self) -> dict[str, Any]:
        counted = Counter(zip(self.actions, self.rewards, self.strict, strict=True))
        return {
            "trace_id": self.trace_id,
            "turn": self.turn,
            "kind": self.kind,
            "rollouts": len(self.rewards),
            "successes": sum(reward == 1.0 for reward in self.rewards),
            "unjudged": sum(reward is None for reward in self.rewards),
            "truncated": self.truncated,
            "gold": self.gold,
            "reward_mean": self.reward_mean,
            "reward_var": self.reward_var,
            "actions": [
                {"text": text, "reward": reward, "strict": strict, "count": count}
                for (text, reward, strict), count in sorted(counted.items(), key=lambda item: (-item[1], item[0][0]))
            ],
            "cost": self.cost.counts(),
        }


def profile(
    states: Sequence[TurnState],
    engine: Engine,
    renderer: Renderer,
    verifier: TurnVerifier,
    strict: TurnVerifier,
    config: ProfileConfig,
) -> Iterator[CandidateProfile]:
    """Yield the profile of every candidate, in order. `strict` is the exact-match rule beside which the miss rate
    is measured. The rollouts of a candidate depend on its id and `config.seed`, not on the wave it lies in."""
    for start in range(0, len(states), config.wave):
        prompted = [render(state, renderer) for state in states[start : start + config.wave]]
        trees = sample_local(prompted, engine, renderer, config.sampling, config.rollouts, config.seed)
        for item, tree in zip(prompted, trees, strict=True):
            yield _candidate(item.state, tree, verifier, strict)


def _candidate(state: TurnState, tree: RolloutTree, verifier: TurnVerifier, strict: TurnVerifier) -> CandidateProfile:
    functional, exact = score_local(tree, state, verifier), score_local(tree, state, strict)
    leaves = tree.leaves()
    gold = verifier.judge(state, state.demonstration)
    return CandidateProfile(
        trace_id=state.trace_id,
        turn=state.turn,
        kind=gold.kind,
        rewards=tuple(functional.of(leaf) for leaf in leaves),
        strict=tuple(exact.of(leaf) for leaf in leaves),
        actions=tuple(_text(tree[leaf].message) for leaf in leaves),
        truncated=sum(tree.stop_reason(leaf) is StopReason.MAX_TOKENS for leaf in leaves),
        gold=gold.reward,
        cost=tree.cost,
    )


def _text(message: Any) -> str:
    calls = " ".join(f"{call.name}({call.arguments})" for call in message.tool_calls)
    return " ".join(part for part in (message.content, calls) if part)


def miss_rate(profiles: Sequence[CandidateProfile]) -> float | None:
    """Pr[strict = 0 | functional = 1] over all rollouts (PivotRL, section 2); None when nothing was acceptable."""
    pairs = [(r, s) for row in profiles for r, s in zip(row.rewards, row.strict, strict=True) if r == 1.0]
    judged = [s for _, s in pairs if s is not None]
    return sum(s == 0.0 for s in judged) / len(judged) if judged else None
