"""Damaged copies of a good file, drawn by seed: what disks, editors, other programs and ill will make of it."""

from __future__ import annotations

import gzip
import json
import lzma
import random
from collections.abc import Callable, Iterator
from typing import Any

_DEEP, _HUGE = "@deep@", "@huge@"  # stand in the JSON for what Python could not write
_RAW = {f'"{_DEEP}"': "[" * 5000 + "]" * 5000, f'"{_HUGE}"': "9" * 5000}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 1.5, -0.5, 10**18, 10**400, 1e308, float("nan"), float("inf"), "", "x", "0", "\ud800",
    "a\x00b", "\x1b[31m", "x" * 3000, [], [None], [[]], ["x"], [1, "x"], {}, {"x": None}, {"": []}, _DEEP, _HUGE,
)  # fmt: skip

Damage = Callable[[bytes, random.Random], bytes]


def mutations(good: bytes, count: int, seed: int, *, structured: bool = True, packed: str = "") -> Iterator[bytes]:
    """`count` damaged copies of `good`. `structured`: it is JSON or JSON lines, so values are exchanged too; `packed`
    ("gz", "xz"): it is compressed afterwards, and half of the damage is done to the archive."""
    rng = random.Random(seed)
    for _ in range(count):
        damage = rng.choice(_VALUES) if structured and rng.random() < 0.6 else rng.choice(_BYTES)
        if not packed:
            yield damage(good, rng)
        elif rng.random() < 0.5:
            yield rng.choice(_BYTES)(pack(good, packed), rng)
        else:
            yield pack(damage(good, rng), packed)


def pack(data: bytes, packed: str) -> bytes:
    return gzip.compress(data, mtime=0) if packed == "gz" else lzma.compress(data) if packed else data


# damage to bytes


def _flip(data: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 8))):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def _lose_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    start = rng.randrange(len(lines))
    return b"".join(lines[:start] + lines[start + rng.randrange(1, 3) :])


def _repeat_line(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    line = rng.choice(lines)
    return b"".join([*lines[: rng.randrange(len(lines) + 1)], line, *lines])


def _insert(data: bytes, rng: random.Random) -> bytes:
    junk = rng.choice((b"\xff", b"\x00", b"\xed\xa0\x80", b"\xc3", b"\n", b"\r", b"{", b"]", b'"', b"\\u", b"\\ud800"))
    place = rng.randrange(len(data) + 1)
    return data[:place] + junk + data[place:]


def _encode_otherwise(data: bytes, rng: random.Random) -> bytes:
    text = data.decode("utf-8", "replace")
    coded = rng.choice(("utf-16", "utf-32-le", "latin-1", "utf-8-sig", "utf-7", "cp037"))
    return text.replace("a", "\u00e9", 3).encode(coded, "replace")


def _replace_all(data: bytes, rng: random.Random) -> bytes:
    return rng.choice((b"", b"\n", b"null", b"[]", b"{}", b"0", b"[" * 5000, rng.randbytes(300), b'{"a":' * 3000))


def _pretty(data: bytes, rng: random.Random) -> bytes:
    try:
        return json.dumps(json.loads(data.splitlines()[0]), indent=2).encode()
    except ValueError:
        return data[:1]


_BYTES: tuple[Damage, ...] = (
    _flip, _flip, _cut, _cut, _lose_lines, _repeat_line, _insert, _insert, _encode_otherwise, _replace_all, _pretty
)  # fmt: skip


# damage to values


def _places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        found.append((value, key))
        _places(item, found)
    return found


def _in_json(change: Callable[[Any, Any, random.Random], None]) -> Damage:
    """The damage of changing one place of one line (or of the document)."""

    def damage(data: bytes, rng: random.Random) -> bytes:
        lines = [data] if _is_document(data) else data.splitlines()
        number = rng.randrange(len(lines))
        if rng.random() < 0.25:
            number = 0  # headers are short, and say most
        value = json.loads(lines[number])
        places = _places(value, [])
        shallow = [place for place in places if place[0] is value]
        container, key = rng.choice(shallow if rng.random() < 0.4 else places)
        change(container, key, rng)
        text = json.dumps(value)
        for name, raw in _RAW.items():
            text = text.replace(name, raw)
        return b"\n".join([*lines[:number], text.encode(), *lines[number + 1 :], b""])

    return damage


def _is_document(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _exchange(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice(VALUES)


def _remove(container: Any, key: Any, rng: random.Random) -> None:
    del container[key]


def _add(container: Any, key: Any, rng: random.Random) -> None:
    if isinstance(container, dict):
        container[rng.choice(("", "x", "schema ", "\ud800", "x" * 3000))] = rng.choice(VALUES)
    else:
        container.append(rng.choice(VALUES))


def _wrap(container: Any, key: Any, rng: random.Random) -> None:
    container[key] = rng.choice(([container[key]], {"x": container[key]}, str(container[key])))


def _grow(container: Any, key: Any, rng: random.Random) -> None:
    value = container[key]
    if isinstance(value, bool) or not isinstance(value, int | float):
        container[key] = [value] * 3
    else:
        container[key] = rng.choice((value + 1, value * 10**9, -value - 1, float(value) + 0.25, 10**30))


_VALUES: tuple[Damage, ...] = tuple(map(_in_json, (_exchange, _exchange, _exchange, _remove, _add, _wrap, _grow)))
