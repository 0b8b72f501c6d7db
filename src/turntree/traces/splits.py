"""Splits by trajectory: a pure function of (seed, group), so that all turns of a group are in one split.

The group of a trace is `Trace.group`: a task or a trajectory, several traces of which may be in the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from turntree.core.errors import ConfigError, InputError
from turntree.core.seeds import derive
from turntree.traces.schema import SPLITS, Split

DEFAULT_FRACTIONS: Mapping[Split, float] = MappingProxyType({"train": 0.9, "dev": 0.05, "test": 0.05})


def assign_split(key: str, seed: int, fractions: Mapping[Split, float] = DEFAULT_FRACTIONS) -> Split:
    """The split of everything that has this key (a trace id or a group), whatever other data there are.

    `fractions` of "train", "dev" and "test" are expected shares and sum to 1; raises `ConfigError` otherwise.
    """
    if unknown := sorted(set(fractions) - set(SPLITS)):
        raise ConfigError("unknown split", field=f"fractions.{unknown[0]}", hint=f"use {', '.join(SPLITS)}")
    if any(share < 0 for share in fractions.values()) or abs(sum(fractions.values()) - 1) > 1e-9:
        raise ConfigError(f"are {dict(fractions)}", field="fractions", hint="shares of at least 0 that sum to 1")
    draw = derive(seed, "split", key) / 2**63
    passed = 0.0
    for split in SPLITS:
        passed += fractions.get(split, 0.0)
        if draw < passed:
            return split
    return next(split for split in reversed(SPLITS) if fractions.get(split, 0.0) > 0)  # the sum rounded below 1


def demonstrated_split(played: Split, task_id: str, seed: int, dev: float) -> Split:
    """The split of a demonstration: of the tasks to train on, the share `dev` is for development; held-out tasks stay
    in their split."""
    return assign_split(task_id, seed, {"train": 1 - dev, "dev": dev}) if played == "train" else played


def assign_splits(
    keys: Sequence[tuple[str, str, Split | None]], seed: int, fractions: Mapping[Split, float] = DEFAULT_FRACTIONS
) -> list[Split]:
    """The split of every trace, from its id, its group and its declared split: a declared one is kept, and shared by
    the whole group.

    Raises `InputError` when traces of one group declare different splits.
    """
    declared: dict[str, Split] = {}
    for name, group, split in keys:
        if split is not None and declared.setdefault(group, split) != split:
            problem = f"of trace {name!r} is {split!r}, but its group {group!r} is also in"
            raise InputError(f"{problem} {declared[group]!r}", field="split", hint="give a group one split")
    return [declared.get(group) or assign_split(group, seed, fractions) for _, group, _ in keys]
