"""The configuration of `turntree audit`, apart from what reads logs: options are made from it before anything else."""

from __future__ import annotations

from dataclasses import dataclass

from turntree.core.config import Bounded, Part, Positive
from turntree.core.outcome import SUCCESS_REWARD

AUTO = Part("auto")  # the format that the log itself tells


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Bounded):
    """`turntree audit`."""

    log_format: Part = AUTO
    """Of the logs, where their fields do not tell it: turntree, trees, verl, trl, nemo-gym, prime-rl, skyrl,
    slime, rllm, areal, agent-lightning, generic, or module:object of your own."""
    epochs: Positive = 3
    """Scored groups that a task needs before it can be listed as never teaching."""
    success: float = SUCCESS_REWARD
    """A reward from this on is a success."""
