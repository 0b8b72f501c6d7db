"""The gates that are registered (`turntree.gates`), each with its options."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.core.errors import ConfigError
from turntree.core.protocols import Gate
from turntree.decide.gates.composed import AnyOf, AuditedGate, RandomGate
from turntree.decide.gates.divergence import PrefixDivergenceGate, edit_distance_bounds


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """One look at the group."""

    turn: int = 10
    """Look at the group at this turn."""
    threshold: float = 0.12
    """Stop the group when the divergence of its rollouts is below this."""
    termination: float | None = None
    """The OR rule: stop also from this share of ended rollouts on."""

    def __post_init__(self) -> None:
        PrefixDivergenceGate(turn=self.turn, threshold=self.threshold, termination=self.termination)  # checks them


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The default is the paper's gate: one look, on d_10 < 0.12. It is calibrated for one model, group size and
    environment; `turntree gate calibrate` says whether your own rollouts support a point.
    """

    checkpoints: tuple[CheckpointConfig, ...] = (CheckpointConfig(),)
    """The looks; any of them may stop the group."""
    early: bool = False
    """Decide before a look's turn where bounds on the divergence already settle it."""
    audit: float = 0.0
    """Share of would-be cuts that are not cut, to measure precision."""

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise ConfigError("are none", field="checkpoints", hint="a gate needs at least one")
        if not 0 <= self.audit <= 1:
            raise ConfigError(f"must be in [0, 1], not {self.audit}", field="audit")


def build_gate(config: GateConfig, seed: int) -> Gate:
    """The gate that `config` describes; `seed` draws the audits."""
    bounds = edit_distance_bounds if config.early else None
    looks = tuple(
        PrefixDivergenceGate(turn=look.turn, threshold=look.threshold, termination=look.termination, bounds=bounds)
        for look in config.checkpoints
    )
    gate = looks[0] if len(looks) == 1 else AnyOf(looks)
    return AuditedGate(gate=gate, share=config.audit, seed=seed) if config.audit else gate


def random(*, seed: int, turn: int = 10, rate: float = 0.2) -> Gate:
    """The control of an experiment: cuts groups whatever they do.

    Args:
        turn: The turn at which groups are cut.
        rate: The share of the groups that reach it.
    """
    return RandomGate(turn=turn, rate=rate, seed=seed)
