"""The branchers that are registered (`turntree.branchers`), each with its options, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from turntree.branching.published import PosthocBrancher, ReleasedArpoBrancher
from turntree.branching.rules import EntropyBrancher, FixedBrancher, RandomBrancher
from turntree.core.config import at_least
from turntree.core.errors import ConfigError
from turntree.core.parts import described_by
from turntree.core.protocols import Brancher


@dataclass(frozen=True, kw_only=True)
class BranchConfig:
    """Where rollouts fork. How many leaves are grown, and from where, is set in `rollouts` (`group_size` M,
    `initial_rollouts` N, `max_branched`)."""

    rule: Literal["entropy", "random", "fixed", "arpo_released", "posthoc"] = "entropy"
    """Fork episodes after tool results by this rule."""
    branches: int = 2
    """Z, rollouts that go on from a fork, the rollout itself among them."""
    probe_tokens: int = 20
    """k, the number of first entropies to look at; only longer turns can fork."""
    alpha: float = 0.5
    """Of entropy: the base probability; of arpo_released: its probability."""
    beta: float = 0.2
    """Weight of the change of entropy."""
    tau: float = 0.5
    """Of entropy, unpaced: the threshold."""
    paced: bool = True
    """Of entropy: adapt the threshold to the budget, from the second iteration on."""
    rate: float | None = None
    """Of random: the chance of a fork (default: the pace of entropy)."""
    turns: tuple[int, ...] = (2,)
    """Of fixed: the turns that fork."""
    expansions: int = 2
    """Of posthoc: forks of each rollout."""
    rounds: int = 1
    """Of posthoc: rounds of expansion."""

    def __post_init__(self) -> None:
        if self.branches < 2:
            raise ConfigError("must be at least 2: the rollout itself is one of them", field="branches")
        at_least(self, probe_tokens=1, expansions=1, rounds=1)
        if self.rate is not None and not 0 <= self.rate <= 1:
            raise ConfigError("must be in [0, 1]", field="rate")
        if self.beta < 0 or (self.beta == 0 and self.rule == "entropy"):
            raise ConfigError("must be above 0: forks are for where entropy rises", field="beta")
        if any(turn < 2 for turn in self.turns):
            raise ConfigError("a fork follows a tool result: turns count from 2 here", field="turns")


def build_brancher(config: BranchConfig, vocabulary: int) -> Brancher:
    """The brancher that `config` describes, for a policy over `vocabulary` tokens."""
    match config.rule:
        case "entropy":
            return EntropyBrancher(
                vocabulary=vocabulary,
                probe_tokens=config.probe_tokens,
                alpha=config.alpha,
                beta=config.beta,
                tau=config.tau,
                branches=config.branches,
                paced=config.paced,
            )
        case "random":
            return RandomBrancher(
                rate=config.rate,
                branches=config.branches,
                shared=config.probe_tokens - 1,
                first_rate=config.alpha,
            )
        case "fixed":
            return FixedBrancher(turns=config.turns, branches=config.branches)
        case "arpo_released":
            return ReleasedArpoBrancher(
                vocabulary=vocabulary, probability=config.alpha, weight=config.beta, branches=config.branches
            )
        case "posthoc":
            return PosthocBrancher(expansions=config.expansions, rounds=config.rounds)


# what the entry points name: the keyword parameters are the options


@described_by(BranchConfig)
def entropy(
    *,
    vocabulary: int,
    branches: int = 2,
    probe_tokens: int = 20,
    alpha: float = 0.5,
    beta: float = 0.2,
    tau: float = 0.5,
    paced: bool = True,
) -> Brancher:
    config = BranchConfig(branches=branches, probe_tokens=probe_tokens, alpha=alpha, beta=beta, tau=tau, paced=paced)
    return build_brancher(config, vocabulary)


@described_by(BranchConfig)
def random(*, branches: int = 2, probe_tokens: int = 20, rate: float | None = None, alpha: float = 0.5) -> Brancher:
    return build_brancher(
        BranchConfig(rule="random", branches=branches, probe_tokens=probe_tokens, rate=rate, alpha=alpha), 0
    )


@described_by(BranchConfig)
def fixed(*, branches: int = 2, turns: tuple[int, ...] = (2,)) -> Brancher:
    return build_brancher(BranchConfig(rule="fixed", branches=branches, turns=turns), 0)


@described_by(BranchConfig)
def arpo_released(*, vocabulary: int, branches: int = 2, alpha: float = 0.5, beta: float = 0.2) -> Brancher:
    return build_brancher(BranchConfig(rule="arpo_released", branches=branches, alpha=alpha, beta=beta), vocabulary)


@described_by(BranchConfig)
def posthoc(*, expansions: int = 2, rounds: int = 1) -> Brancher:
    return build_brancher(BranchConfig(rule="posthoc", expansions=expansions, rounds=rounds), 0)
