"""Which format a file or a row of traces has, and its reader: a named one, or ("auto") the one that recognises it.
Rollout logs are read by `logs.read`."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.foreign import reason_of
from turntree.traces.formats.chat import UnknownKeys, read_chat_row
from turntree.traces.formats.row import LINE, ChatRow, RowRefused, Told, told
from turntree.traces.sources import SourceFile, SourceRow, is_text, source_rows, text_lines

Reader = Callable[[dict[str, Any]], Any]
AUTO = "auto"
EVENTS = "events"  # of the one row that a session format gets: all rows of its file


class Readers:
    """The readers of rows by the names of their formats. Raises `InputError` and `ConfigError` for a format that does
    not exist or has not these options."""

    def __init__(self, format: str | Part, unknown_keys: UnknownKeys) -> None:
        self._format = Part.from_value(format, "format")
        self._unknown_keys: UnknownKeys = unknown_keys
        self._found: dict[str, Reader] = {}
        self._told: dict[str, Told]
        if self._format.name == AUTO:
            if self._format.options:
                raise ConfigError("has no options", field="format", hint="name the format of the rows with --format")
            self._told = _registered()
        else:
            self._load(self._format)
            how = told(parts.load("trace_formats", self._format.name).target)
            self._told = {} if how is None else {self._format.name: how}

    def rows(self, file: SourceFile) -> Iterator[SourceRow]:
        """The rows of a file. A session comes as one row, `{"events": its rows}`; the events of a text are lines."""
        if is_text(file.path):
            text = text_lines(file.path)
            name = self._session({"text": next(text, (0, ""))[1]})
            if name is not None:
                yield SourceRow({EVENTS: (line for _, line in text_lines(file.path))}, format=name)
                return
        rows = source_rows(file.path, file.info)
        first = next(rows, None)
        if first is None:
            return
        name = self._session(first.value) if isinstance(first.value, dict) else None
        if name is not None:
            yield SourceRow({EVENTS: [_event(row) for row in itertools.chain([first], rows)]}, format=name)
            return
        yield first
        yield from rows

    def read(self, row: SourceRow, formats: Counter[str]) -> Iterator[ChatRow | InputError | None]:
        """The row in chat shape, several if it holds several traces; None for a row that its format leaves out, an
        error for one that it cannot read. Counts the format."""
        value = row.value
        if isinstance(value, InputError):
            yield RowRefused("not_a_json_object", value.problem, hint=value.hint)
            return
        name, found = row.format or self._format.name, list[Any]()
        try:
            if name == AUTO:
                name = self.detect(value)
            formats[name] += 1
            read = (self._found.get(name) or self._load(Part(name)))(value)
            for one in cast("Iterator[Any]", read) if isinstance(read, Iterator) else (read,):
                found.append(self._chat(one, name))
        except InputError as error:
            found.append(error)
        except BaseException as error:  # the boundary to foreign code
            found.append(RowRefused("format_failed", f"cannot be read: format {name!r} raised {reason_of(error)}"))
        yield from found

    def detect(self, row: dict[str, Any]) -> str:
        """The format that recognises a row. Raises `RowRefused` where none does, saying why each does not, or where
        several do."""
        against = {name: how.row(row) for name, how in self._told.items() if how.row is not None}
        fitting = [name for name, problem in against.items() if not problem]
        chosen = [name for name in fitting if not self._told[name].general] or fitting
        if len(chosen) == 1:
            return chosen[0]
        if chosen:
            hint = f"name one of them with --format ({', '.join(chosen)})"
            raise RowRefused("unknown_format", f"looks like {' and like '.join(chosen)}", hint=hint)
        keys = ", ".join(sorted(row)[:8])
        near = {name: problem for name, problem in sorted(against.items()) if any(f"'{key}'" in problem for key in row)}
        tried = ", ".join(f"{name} ({near[name]})" if name in near else name for name in sorted(self._told))
        hint = "name its format with --format, or bring your own (module:function)"
        if str(row.get("schema")).startswith("turntree.traces/"):
            hint = "it is a file of traces already: the next commands take it as it is"
        raise RowRefused("unknown_format", f"is of no known format (keys: {keys}). Tried {tried}", hint=hint)

    def _session(self, first: dict[str, Any]) -> str | None:
        """The session format that a file with this first row has."""
        for name, how in self._told.items():
            if how.session is None:
                continue
            only = self._format.name != AUTO and how.row is None and "text" not in first
            if only or not how.session(first):
                return name
        return None

    def _chat(self, read: Any, name: str) -> ChatRow | None:
        if read is None or isinstance(read, ChatRow):
            return read
        if not isinstance(read, Mapping):
            hint = "a format returns a chat row, {messages: [...], ...}, or None"
            raise RowRefused("format_failed", f"is {type(read).__name__} as {name!r} reads it", hint=hint)
        return read_chat_row(dict(read), unknown_keys=self._unknown_keys)

    def _load(self, format: Part) -> Reader:
        loaded = parts.load("trace_formats", format.name)
        options = dict(format.options)
        if "unknown_keys" in loaded.options():
            options.setdefault("unknown_keys", self._unknown_keys)
        loaded.resolved(options, "format")
        return self._found.setdefault(format.name, loaded.build(options, {}))


@functools.cache
def _registered() -> dict[str, Told]:
    """How each registered format is recognised; looked up once per process."""
    found = {name: told(parts.load("trace_formats", name).target) for name in parts.names("trace_formats")}
    return {name: how for name, how in found.items() if how is not None}


def _event(row: SourceRow) -> Any:
    """A line of a session, which knows its number; a damaged one stands in its place as an error."""
    if isinstance(row.value, InputError):
        return InputError(row.value.problem, line=row.line, field=row.index, hint=row.value.hint)
    return row.value | {LINE: row.line} if isinstance(row.value, dict) and row.line else row.value
