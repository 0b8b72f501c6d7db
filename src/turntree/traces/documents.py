"""One JSON document read row by row: only one row is held in memory.

Python's decoder finds where a row ends, and the row is parsed by `parse_json` as everything else is: the same
strictness, the same errors. (ijson would be a second JSON parser, which accepts NaN, unlimited nesting and lone
surrogates.)
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.run.jsonl import LONGEST, parse_json, read_chunks, too_long

ROWS = "simulations"  # the member of a tau2 document that holds its rows
CHUNK = 1 << 18  # bytes
_DECODER = json.JSONDecoder(parse_float=str, parse_int=str, strict=False)  # what is no number `parse_json` says
_SPACE = re.compile(r"[ \t\r\n]*+")
_NEAR = 16  # characters from the end of what was read, within which a value may be cut in two
_AGAIN = "it is damaged or cut off: write the file again"
Row = tuple[str | None, Any]  # where it stands in the document (None: it is the document), and its value or an error


def document_rows(path: Path) -> Iterator[tuple[Row, Any]]:
    """The rows of a document, each with the `info` of its document: the items of a list, the `simulations` of a tau2
    document, the values of an object whose keys are all numbers, or the document itself.

    A row that is not JSON as `parse_json` reads it (NaN, a key twice, not UTF-8) comes as an `InputError`; so does what
    follows a place where the document is damaged.
    """
    scanner = _Scanner(path)
    last: str | None = None
    try:
        first = scanner.peek()
        if first == "[":
            for i, value in enumerate(scanner.items()):
                yield (last := f"[{i}]", value), None
        elif first == "{":
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
    if scanner.peek() != "{":
        return None
    for key in scanner.members():
        raw = scanner.raw()
        if key == "info":
            return parse_json(raw)
    return None


def _object(scanner: _Scanner, path: Path) -> Iterator[tuple[Row, Any]]:
    kept: dict[str, bytes] = {}
    numbered, rows, result = True, 0, False
    for key in scanner.members():
        if key == ROWS and scanner.peek() == "[":
            result, info = True, parse_json(kept["info"]) if "info" in kept else document_info(path)
            kept.clear()
            for i, value in enumerate(scanner.items()):
                yield (f"{ROWS}[{i}]", value), info
            continue
        raw = scanner.raw()
        numbered = numbered and key.isdecimal() and raw.startswith(b"{")
        if numbered:
            rows += 1
            yield (f"[{key}]", parsed(raw)), None
        elif not result:
            kept[key] = raw
    if not result and (kept or not rows):
        yield (None, {key: parse_json(raw) for key, raw in kept.items()}), None


def parsed(text: bytes) -> Any:
    """A JSON value, or the `InputError` that says why the text is none."""
    try:
        return parse_json(text)
    except InputError as error:
        return error


class _Scanner:
    """Reads a file forward and cuts values out of it. Raises `InputError` where it is cut off or is not JSON."""

    def __init__(self, path: Path) -> None:
        self._chunks = codecs.iterdecode(read_chunks(path, CHUNK), "utf-8-sig", errors="surrogateescape")
        self._text, self._at = "", 0

    def peek(self) -> str:
        """The next character that is not white space; empty at the end."""
        while True:
            if space := _SPACE.match(self._text, self._at):
                self._at = space.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def items(self) -> Iterator[Any]:
        """The items of a list, parsed one at a time; one that is not JSON is an `InputError`."""
        for _ in self._between("[", "]"):
            yield parsed(self.raw())

    def members(self) -> Iterator[str]:
        """The keys of an object; the value of each must be read (`raw`, `items`) before the next is asked for."""
        for _ in self._between("{", "}"):
            key = parse_json(self.raw())
            if not isinstance(key, str):
                raise InputError("has a key that is not text", hint=_AGAIN)
            self._take(":")
            yield key

    def raw(self) -> bytes:
        """The bytes of the next value, whatever it is."""
        self.peek()
        while True:
            try:
                _, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                end = len(self._text)
                if error.pos < end - _NEAR and not error.msg.startswith("Unterminated"):
                    raise InputError(f"is not complete JSON ({error.msg})", hint=_AGAIN) from error
                if not self._more():
                    raise self._cut_off() from error
                continue
            except RecursionError as error:
                raise InputError("is nested too deeply to read", hint=_AGAIN) from error
            if end < len(self._text) - _NEAR or not self._more():  # a number may go on behind what was read
                value, self._at = self._text[self._at : end], end
                return value.encode("utf-8", "surrogateescape")

    def _between(self, opening: str, closing: str) -> Iterator[None]:
        """Once for each value of a list or object, in front of it."""
        self._take(opening)
        if self.peek() == closing:
            self._take(closing)
            return
        yield
        while self._take(f",{closing}") == ",":
            yield

    def _take(self, wanted: str) -> str:
        found = self.peek()
        if not found:
            raise self._cut_off()
        if found not in wanted:
            raise InputError(f"is not complete JSON ({wanted[0]!r} was expected, not {found!r})", hint=_AGAIN)
        self._at += 1
        return found

    def _more(self) -> bool:
        """Drop what was consumed, and read as much as is left, or more (else long texts take for ever)."""
        if not (chunk := next(self._chunks, "")):
            return False
        left = len(self._text) - self._at
        if left > LONGEST:
            raise too_long()
        read = [self._text[self._at :], chunk]
        while left > 0 and (chunk := next(self._chunks, "")):
            read.append(chunk)
            left -= len(chunk)
        self._text, self._at = "".join(read), 0
        return True

    def _cut_off(self) -> InputError:
        return InputError("is not complete JSON (it ends inside a value)", hint=_AGAIN)
