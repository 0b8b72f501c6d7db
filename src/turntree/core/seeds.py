"""Seeds as values: every random draw is keyed by its purpose, not by its order.

`derive(run, "rollout", task_id, sample, turn)` gives the same stream whatever ran before it. So a wave can be
replayed, and two interleavings of the same work agree.
"""

from __future__ import annotations

import hashlib
import random

Key = int | str


def derive(seed: int, *keys: Key) -> int:
    """A 63-bit seed for the given keys (stable across processes, platforms and Python versions)."""
    text = "\x1f".join([str(int(seed)), *(f"{type(key).__name__}:{key}" for key in keys)])
    named = text.encode("utf-8", "surrogatepass")  # a key may come from a model, which can write half a character
    return int.from_bytes(hashlib.blake2b(named, digest_size=8).digest(), "big") >> 1


def generator(seed: int, *keys: Key) -> random.Random:
    """A new standard-library generator for the given keys."""
    return random.Random(derive(seed, *keys))
