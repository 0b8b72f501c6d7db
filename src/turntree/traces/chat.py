"""Import what people have: chat rows, Responses rollouts, tau-bench runs, into traces and a report that adds up.

Policy. A malformed row (a damaged line, an unknown key, arguments that are not JSON, no assistant turn) stops the
import with its file, line and field. With `on_error="drop"` it is dropped and counted; a malformed *message* then
ends its trace early, because later turns would have a history that never was. Turns that are well-formed but no
candidates (`candidates.SkipReason`) never stop anything; they are counted, and stay in the history of later turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.observe.jsonl import located
from turntree.traces.assemble import Assembled, assemble
from turntree.traces.candidates import skipped_turns
from turntree.traces.formats.chat import UnknownKeys, read_chat_row
from turntree.traces.formats.row import ChatRow, RowRefused, fingerprint
from turntree.traces.schema import Trace
from turntree.traces.sources import SourceRow, source_rows

Reader = Callable[[dict[str, Any]], ChatRow | Mapping[str, Any] | None]
AUTO = "auto"  # the format of every row is told by its keys
OnError = Literal["stop", "drop"]
Known = dict[str, tuple[str, Any]]  # id -> fingerprint and source of the trace that has it
TRACE_DROPPED = "in_dropped_trace"


@dataclass
class ImportReport:
    """What an import read, kept and left behind. Laws (tests/traces/test_chat.py):

    traces_read = traces_kept + sum(dropped_traces); turns_read = turns_kept + sum(dropped_turns), where turns_kept
    are exactly the candidates of the kept traces. A row that could not be read has no turns to count.
    """

    traces_read: int = 0
    traces_kept: int = 0
    turns_read: int = 0
    turns_kept: int = 0
    dropped_traces: Counter[str] = field(default_factory=Counter[str])
    dropped_turns: Counter[str] = field(default_factory=Counter[str])
    merged_messages: int = 0  # assistant messages that were joined to the one before
    ignored: Counter[str] = field(default_factory=Counter[str])  # fields that a trace has no place for
    formats: Counter[str] = field(default_factory=Counter[str])

    @property
    def adds_up(self) -> bool:
        traces = self.traces_kept + self.dropped_traces.total()
        return traces == self.traces_read and self.turns_kept + self.dropped_turns.total() == self.turns_read

    def to_json(self) -> dict[str, Any]:
        return {key: dict(sorted(v.items())) if isinstance(v, Counter) else v for key, v in vars(self).items()}

    def summary(self) -> str:
        """Two lines for people."""
        return "\n".join(
            f"{name}: {kept} of {read} kept" + "".join(f", {n} {reason}" for reason, n in sorted(dropped.items()))
            for name, kept, read, dropped in (
                ("traces", self.traces_kept, self.traces_read, self.dropped_traces),
                ("turns", self.turns_kept, self.turns_read, self.dropped_turns),
            )
        )


def import_chat(
    paths: Iterable[str | Path],
    *,
    format: str | Part = AUTO,
    on_error: OnError = "stop",
    success_only: bool = False,
    unknown_keys: UnknownKeys = "stop",
    domain: str = "",
) -> tuple[list[Trace], ImportReport]:
    """`stream_chat` into a list."""
    traces: list[Trace] = []
    report = stream_chat(
        paths,
        traces.append,
        format=format,
        on_error=on_error,
        success_only=success_only,
        unknown_keys=unknown_keys,
        domain=domain,
    )
    return traces, report


def stream_chat(
    paths: Iterable[str | Path],
    keep: Callable[[Trace], None],
    *,
    format: str | Part = AUTO,
    on_error: OnError = "stop",
    success_only: bool = False,
    unknown_keys: UnknownKeys = "stop",
    domain: str = "",
) -> ImportReport:
    """Read source files and hand every trace to `keep`; only ids and fingerprints are remembered. Raises `InputError`
    naming file, line and field (see the policy above).

    `format` is a part (`traces.formats`); "auto" decides for every row by its keys (`detect_format`). `success_only`
    drops traces that failed or whose outcome is unknown, counted apart. `unknown_keys="keep"` carries unknown row keys
    in `meta["extra"]` and
    counts unknown message keys in `ignored`. `domain` is given to rows that name none. Rows equal in id and content
    are kept once and counted; one id with two contents is malformed.
    """
    for name, value, kind in (("on_error", on_error, OnError), ("unknown_keys", unknown_keys, UnknownKeys)):
        if value not in get_args(kind):
            raise ConfigError(f"is {value!r}", field=name, hint=f"use one of {', '.join(get_args(kind))}")
    options = _Options(_Readers(format, unknown_keys), on_error == "drop", success_only, domain)
    report = ImportReport()
    known: Known = {}
    for path in map(Path, paths):
        for row in source_rows(path):
            report.traces_read += 1
            try:
                _import_row(row, path, keep, known, report, options)
            except InputError as error:
                if on_error == "stop":
                    raise _with_place(error, path, row) from error
                report.dropped_traces[error.reason if isinstance(error, RowRefused) else "malformed_field"] += 1
    return report


def detect_format(row: dict[str, Any]) -> str:
    """By keys: `responses_create_params` is Responses; `traj`, or `messages` beside `reward_info`, is tau; else
    `messages` is chat. Raises `RowRefused`."""
    if "responses_create_params" in row:
        return "responses"
    if "traj" in row or ("messages" in row and "reward_info" in row):
        return "tau2"
    if "messages" in row:
        return "chat"
    raise RowRefused(
        "unknown_format",
        f"has none of the keys that tell its format (keys: {', '.join(sorted(row)[:8])})",
        hint="chat rows have 'messages', Responses rows 'responses_create_params', tau runs 'traj' or 'simulations'",
    )


class _Readers:
    """The readers of rows by the names of their formats. Raises `InputError` and `ConfigError` for a format that does
    not exist or has not these options."""

    def __init__(self, format: str | Part, unknown_keys: UnknownKeys) -> None:
        self._format = Part.from_value(format, "format")
        self._unknown_keys: UnknownKeys = unknown_keys
        self._found: dict[str, Reader] = {}
        if self._format.name != AUTO:
            self._load(self._format)
        elif self._format.options:
            raise ConfigError("has no options", field="format", hint="name the format of the rows with --format")

    def read(self, row: SourceRow, formats: Counter[str]) -> ChatRow | None:
        """The row in chat shape; None for one that its format leaves out. Counts the format."""
        value = row.value
        if isinstance(value, InputError):
            raise RowRefused("not_a_json_object", value.problem, hint=value.hint)
        document = row.environment_info
        name = self._format.name
        if name == AUTO:
            name = "tau2" if document is not None else detect_format(value)
        formats[name] += 1
        reader = self._found.get(name) or self._load(Part(name))
        try:
            read = reader(value if document is None else {**value, "environment_info": document})
        except InputError:
            raise
        except Exception as error:  # the boundary to foreign code
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise RowRefused("format_failed", f"cannot be read: format {name!r} raised {said}") from error
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


@dataclass(frozen=True)
class _Options:
    readers: _Readers
    keep_going: bool
    success_only: bool
    domain: str


def _import_row(
    row: SourceRow,
    path: Path,
    keep: Callable[[Trace], None],
    known: Known,
    report: ImportReport,
    options: _Options,
) -> None:
    chat = options.readers.read(row, report.formats)
    if chat is None:
        report.dropped_traces["left_out_by_format"] += 1
        return
    source = {"file": path.name} | ({"line": row.line} if row.line else {"index": row.index} if row.index else {})
    built = assemble(chat, keep_going=options.keep_going, domain=options.domain, source=source)
    reason, content = _why_not(built, known, options.success_only)
    skipped = Counter(skipped_turns(built.trace).values()) if built.trace is not None else Counter[str]()
    candidates = built.turns - built.lost.total() - skipped.total()
    if reason is None and candidates == 0:
        reason = "no_candidate_turn"
    report.turns_read += built.turns
    report.merged_messages += built.merged_messages
    report.ignored += chat.ignored
    report.dropped_turns += built.lost + skipped
    if reason is not None:
        report.dropped_traces[reason] += 1
        report.dropped_turns += Counter({TRACE_DROPPED: candidates})
    elif built.trace is not None:
        known[built.trace.id] = content, source
        keep(built.trace)
        report.traces_kept += 1
        report.turns_kept += candidates


def _why_not(built: Assembled, known: Known, success_only: bool) -> tuple[str | None, str]:
    """Why a well-formed trace is left out (None: it is kept), and the fingerprint of what it holds."""
    trace = built.trace
    if trace is None:
        return "no_candidate_turn", ""
    content = fingerprint([[message.to_chat() for message in trace.messages], trace.tools])
    if success_only and trace.success is not True:
        return ("success_unknown" if trace.success is None else "not_successful"), content
    if trace.id in known:
        before, first = known[trace.id]
        if before == content:
            return "duplicate", content
        problem = f"{trace.id!r} names another trace already ({first})"
        raise RowRefused("duplicate_id", problem, field="id", hint="give every trace an id of its own")
    return None, content


def _with_place(error: InputError, path: Path, row: SourceRow) -> InputError:
    error = located(error, path=path, line=row.line, inside=row.index)
    advice = "or drop and count such rows with on_error='drop' (--on-error drop)"
    hint = f"{error.hint}, {advice}" if error.hint else advice.removeprefix("or ")
    return InputError(error.problem, path=error.path, line=error.line, field=error.field, hint=hint)
