"""The number of CPU threads: by the model's size and the machine, unless the configuration sets it."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from turntree.observe.run import notice

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Number of parameters from which threads help. In small matrix products threads wait for each other longer than they
# compute (measured: up to a hundred times longer on a shared machine).
MANY = 30_000_000
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # of a container: microseconds of processor in a period, or "max"


def set_threads(model: PreTrainedModel, asked: int | None) -> int:
    """Set the threads of this process and print their number: the same number gives the same bits."""
    import torch

    parameters = sum(parameter.numel() for parameter in model.parameters())
    count = asked or (1 if parameters < MANY else available())
    torch.set_num_threads(count)
    _say(f"{count} thread{'s' if count > 1 else ''} for {parameters / 1e6:.1f} M parameters (key device.threads)")
    return count


def available() -> int:
    """The CPUs that this process may use: by its affinity, its container's share, and at most the user's
    OMP_NUM_THREADS (which the command keeps as TURNTREE_THREADS, 0 if unset, before it sets its own)."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    said = os.environ.get("TURNTREE_THREADS") or os.environ.get("OMP_NUM_THREADS", "")
    return max(1, min(own, _quota() or own, int(said) if said.isdecimal() and int(said) else own))


def _quota() -> int | None:
    """Whole processors of the container's share, one at least; None where it has no limit."""
    try:
        allowed, period = _QUOTA.read_text().split()
        return max(1, int(allowed) // int(period))
    except (OSError, ValueError):
        return None


@functools.cache
def _say(text: str) -> None:
    """Once in a process: a comparison loads many policies."""
    notice(text)
