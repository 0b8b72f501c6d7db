"""Seeds as values: every random draw is keyed by its purpose, not by its order.

`derive(run, "rollout", task_id, sample, turn)` gives the same stream whatever ran before it. So a wave can be
replayed, and two interleavings of the same work agree.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable
from typing import TypeVar

Key = int | str
T = TypeVar("T")


def derive(seed: int, *keys: Key) -> int:
    """A 63-bit seed for the given keys (stable across processes, platforms and Python versions)."""
    text = "\x1f".join([str(int(seed)), *(f"{type(key).__name__}:{key}" for key in keys)])
    named = text.encode("utf-8", "surrogatepass")  # a key may come from a model, which can write half a character
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big") >> 1


def of_turn(seed: int, task_id: str, rollout: tuple[int, ...], turn: int) -> int:
    """The seed of one turn of a rollout: the same whether the environment is stepped or an agent asks for the turn."""
    return derive(seed, "episode", task_id, *rollout, turn)


def again(seed: int, iteration: int, occurrence: int) -> int:
    """The seed of a task that is played in a later iteration, or once more in the same one."""
    return derive(seed, "again", iteration, occurrence) if iteration or occurrence else seed


def shuffled(seed: int, items: Iterable[T], key: Callable[[T], Key]) -> list[T]:
    """`items` in an order drawn by `seed`: the first n are a random choice of n. Files are often sorted by kind of
    task, so their own first rows are not. The order depends on the key of each item alone."""
    return sorted(items, key=lambda item: derive(seed, "shuffled", key(item)))


def generator(seed: int, *keys: Key) -> random.Random:
    """A new standard-library generator for the given keys."""
    return random.Random(derive(seed, *keys))
