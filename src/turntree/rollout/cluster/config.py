"""Where rollout workers run, as plain values. Without Ray, so that configurations can be read without it."""

from __future__ import annotations

from dataclasses import dataclass, field

from turntree.core.config import FIXED, Bounded, Count
from turntree.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkersConfig(Bounded):
    """Processes on a Ray cluster that hold the engine, the environments and the verifiers. No result depends on this
    beyond rounding, so a run may go on with other numbers."""

    workers: Count = 0
    """Rollout workers on a Ray cluster (0: rollouts run in this process). Needs turntree[ray]."""
    address: str | None = None
    """The cluster: local (started on this machine, the default), HOST:PORT or auto (a running one, from one of its
    nodes), ray://HOST:PORT (a running one, through Ray Client)."""
    cpus: float = field(default=1.0, metadata=FIXED)
    """CPUs of one worker, for Ray's placement."""
    start_seconds: float = field(default=600.0, metadata=FIXED)
    """Give up where no worker has started after this time."""
    unit_seconds: float = field(default=7200.0, metadata=FIXED)
    """Time limit of one unit. A worker that takes longer is replaced."""
    attempts: int = field(default=3, metadata=FIXED)
    """How often a unit is given out before it counts as lost."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.address is not None and not self.address:
            raise ConfigError("is empty", field="address", hint="use local, HOST:PORT, auto or ray://HOST:PORT")
        if self.address is not None and self.workers == 0:
            hint = "set cluster.workers to the number of rollout workers"
            raise ConfigError("names a cluster, and nothing would run there", field="address", hint=hint)
