"""One JSON document read row by row: only one row is held in memory.

The document is cut at the brackets of its rows, and every row is parsed by `parse_json` as everything else is: the same
strictness, the same errors. (ijson would be a second JSON parser, which accepts NaN, unlimited nesting and lone
surrogates.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.observe.jsonl import LONGEST, parse_json, read_chunks, too_long

ROWS = "simulations"  # the member of a tau2 document that holds its rows
_RUN = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)  # up to the next bracket outside of text
_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s,\[\]{}":]++', re.DOTALL)
_AGAIN = "it is damaged or cut off: write the file again"
Row = tuple[str | None, Any]  # where it stands in the document (None: it is the document), and its value or an error


def document_rows(path: Path) -> Iterator[tuple[Row, Any]]:
    """The rows of a document, each with the `info` of its document: the items of a list, the `simulations` of a tau2
    document, the values of an object whose keys are all numbers, or the document itself.

    A row that is not JSON comes as an `InputError`; so does what follows it, where the document goes on in no
    readable way.
    """
    scanner = _Scanner(path)
    last: str | None = None
    try:
        first = scanner.peek()
        if first == b"[":
            for i, value in enumerate(scanner.items()):
                yield (last := f"[{i}]", value), None
        elif first == b"{":
            for (last, value), info in _object(scanner, path):
                yield (last, value), info
        else:
            raise InputError("is neither an object nor a list", hint="write JSON lines, one trace a line")
        if scanner.peek():
            raise InputError("goes on after the end of its JSON document", hint="write one value a line")
    except InputError as error:
        yield (last and f"after {last}", error), None


def document_info(path: Path) -> Any:
    """The `info` of a document, wherever it stands; None where there is none."""
    scanner = _Scanner(path)
    if scanner.peek() != b"{":
        return None
    for key in scanner.members():
        raw = scanner.raw()
        if key == "info":
            return parse_json(raw)
    return None


def _object(scanner: _Scanner, path: Path) -> Iterator[tuple[Row, Any]]:
    kept: dict[str, bytes] = {}
    numbered, rows = True, 0
    for key in scanner.members():
        if key == ROWS and scanner.peek() == b"[":
            info = parse_json(kept["info"]) if "info" in kept else document_info(path)
            kept.clear()
            for i, value in enumerate(scanner.items()):
                yield (f"{ROWS}[{i}]", value), info
            for _ in scanner.members(going_on=True):
                scanner.raw()
            return
        numbered = numbered and key.isdecimal() and scanner.peek() == b"{"
        if numbered:
            rows += 1
            yield (f"[{key}]", _value(scanner.raw())), None
        else:
            kept[key] = scanner.raw()
    if kept or not rows:
        yield (None, {key: parse_json(raw) for key, raw in kept.items()}), None


def _value(raw: bytes) -> Any:
    try:
        return parse_json(raw)
    except InputError as error:
        return error


class _Scanner:
    """Reads a file forward and cuts values out of it. Raises `InputError` where it is cut off or is not JSON."""

    def __init__(self, path: Path) -> None:
        self._chunks = read_chunks(path)
        self._buffer = bytearray()
        self._at = 0
        self._more()
        if self._buffer.startswith(b"\xef\xbb\xbf"):
            self._at = 3

    def peek(self) -> bytes:
        """The next byte that is not white space; empty at the end."""
        while True:
            found = _SPACE.match(self._buffer, self._at)
            self._at = found.end() if found else self._at
            del found
            if self._at < len(self._buffer):
                return bytes(self._buffer[self._at : self._at + 1])
            if not self._more():
                return b""

    def items(self) -> Iterator[Any]:
        """The items of a list, parsed one at a time; one that is not JSON is an `InputError`."""
        self._expect(b"[")
        if self.peek() == b"]":
            self._at += 1
            return
        while True:
            yield _value(self.raw())
            if not self._goes_on(b"]"):
                return

    def members(self, *, going_on: bool = False) -> Iterator[str]:
        """The keys of an object; the value of each must be read (`raw`, `items`) before the next is asked for."""
        if going_on:
            if not self._goes_on(b"}"):
                return
        else:
            self._expect(b"{")
            if self.peek() == b"}":
                self._at += 1
                return
        while True:
            key = parse_json(self.raw())
            if not isinstance(key, str):
                raise InputError("has a key that is not text", hint=_AGAIN)
            self._expect(b":")
            yield key
            if not self._goes_on(b"}"):
                return

    def raw(self) -> bytes:
        """The bytes of the next value, whatever it is."""
        first = self.peek()
        if first in (b"{", b"["):
            return self._take(self._closing())
        while True:
            found = _SCALAR.match(self._buffer, self._at)
            end = found.end() if found else 0
            del found
            if end and end < len(self._buffer):
                return self._take(end)
            if not self._more():
                break
        if not end:
            raise self._cut_off()
        return self._take(end)

    def _closing(self) -> int:
        """Where the value that begins here ends."""
        depth, at = 0, self._at
        while True:
            run = _RUN.match(self._buffer, at)
            at = run.end() if run else at
            del run
            byte = self._buffer[at : at + 1]
            if byte and byte in b"{[":
                depth += 1
            elif byte and byte in b"}]":
                depth -= 1
                if not depth:
                    return at + 1
            else:  # the end of what was read, or of a text that goes on behind it
                before = self._at
                if not self._more():
                    raise self._cut_off()
                at -= before - self._at
                continue
            at += 1

    def _expect(self, byte: bytes) -> None:
        found = self.peek()
        if found != byte:
            raise (
                self._cut_off()
                if not found
                else InputError(
                    f"is not complete JSON ({byte.decode()!r} was expected, not {found.decode(errors='replace')!r})",
                    hint=_AGAIN,
                )
            )
        self._at += 1

    def _goes_on(self, closing: bytes) -> bool:
        if self.peek() == closing:
            self._at += 1
            return False
        self._expect(b",")
        return True

    def _take(self, end: int) -> bytes:
        value = bytes(self._buffer[self._at : end])
        self._at = end
        return value

    def _more(self) -> bool:
        """Drop what was consumed, and read as much as is left, or more. Moves `_at`."""
        del self._buffer[: self._at]
        before, self._at = len(self._buffer), 0
        if before > LONGEST:
            raise too_long()
        while len(self._buffer) <= 2 * before and (chunk := next(self._chunks, b"")):  # else long texts take for ever
            self._buffer += chunk
        return len(self._buffer) > before

    def _cut_off(self) -> InputError:
        return InputError("is not complete JSON (it ends inside a value)", hint=_AGAIN)
