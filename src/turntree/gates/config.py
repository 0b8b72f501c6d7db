"""The gates that are registered (`turntree.gates`), each with its options, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.core.protocols import Gate
from turntree.gates.bounds import edit_distance_bounds
from turntree.gates.compose import AnyOf, AuditedGate, RandomGate
from turntree.gates.divergence import PrefixDivergenceGate


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """One look at the group; `termination` adds the OR rule's clause."""

    turn: int = 10
    threshold: float = 0.12
    termination: float | None = None

    def __post_init__(self) -> None:
        PrefixDivergenceGate(turn=self.turn, threshold=self.threshold, termination=self.termination)  # checks them


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """The default is the paper's gate: one look, on d_10 < 0.12. It is calibrated for one model, group size and
    environment; `turntree gate calibrate` says whether your own rollouts support a point.

    `early`: decide before a checkpoint's turn where bounds on d_K already settle it. `audit`: the share of would-be
    cuts that runs on to measure precision; 0 turns it off.
    """

    checkpoints: tuple[CheckpointConfig, ...] = (CheckpointConfig(),)
    early: bool = False
    audit: float = 0.0

    def __post_init__(self) -> None:
        if not self.checkpoints:
            raise ValueError("a gate needs at least one checkpoint")
        if not 0 <= self.audit <= 1:
            raise ValueError(f"audit must be in [0, 1], not {self.audit}")


def build_gate(config: GateConfig, seed: int) -> Gate:
    """The gate that `config` describes; `seed` draws the audits."""
    bounds = edit_distance_bounds if config.early else None
    looks = tuple(
        PrefixDivergenceGate(turn=look.turn, threshold=look.threshold, termination=look.termination, bounds=bounds)
        for look in config.checkpoints
    )
    gate = looks[0] if len(looks) == 1 else AnyOf(looks)
    return AuditedGate(gate=gate, share=config.audit, seed=seed) if config.audit else gate


# what the entry points name: the keyword parameters are the options


def divergence(
    *,
    seed: int,
    checkpoints: tuple[CheckpointConfig, ...] = (CheckpointConfig(),),
    early: bool = False,
    audit: float = 0.0,
) -> Gate:
    return build_gate(GateConfig(checkpoints=checkpoints, early=early, audit=audit), seed)


def random(*, seed: int, turn: int = 10, rate: float = 0.2) -> Gate:
    """The control of an experiment: cuts a share `rate` of the groups that reach `turn`, whatever they do."""
    return RandomGate(turn=turn, rate=rate, seed=seed)
