"""Import source files (`traces.formats`) into traces, with a report whose counts add up.

Policy. A malformed row (a damaged line, an unknown key, arguments that are not JSON, no assistant turn) stops the
import with its file, line and field. With `on_error="drop"` it is dropped and counted; a malformed *message* then ends
its trace early, because the history of later turns would be wrong. Well-formed turns that are not candidates
(`candidates.SkipReason`) never stop the import; they are counted, and stay in the history of later turns.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.observe.jsonl import located
from turntree.traces.assemble import Assembled, assemble, count_turns
from turntree.traces.candidates import skipped_turns
from turntree.traces.formats.chat import UnknownKeys
from turntree.traces.formats.row import ChatRow, RowRefused, Rule, fingerprint
from turntree.traces.readers import AUTO, Readers
from turntree.traces.schema import Trace
from turntree.traces.sources import SourceFile, SourceRow, source_files

CandidateRule = Literal["auto", "turns", "tool_calls", "bash", "search"]
OnError = Literal["stop", "drop"]
Known = dict[str, tuple[str, Any]]  # id -> fingerprint and source of the trace that has it
TRACE_DROPPED = "in_dropped_trace"


@dataclass
class ImportReport:
    """What an import read, kept and dropped. Laws (tests/traces/test_chat.py):

    traces_read = traces_kept + sum(dropped_traces); turns_read = turns_kept + sum(dropped_turns), where turns_kept
    are exactly the candidates of the kept traces. A row whose messages could not be read has no turns to count.
    """

    traces_read: int = 0
    traces_kept: int = 0
    turns_read: int = 0
    turns_kept: int = 0
    dropped_traces: Counter[str] = field(default_factory=Counter[str])
    dropped_turns: Counter[str] = field(default_factory=Counter[str])
    cut_traces: Counter[str] = field(default_factory=Counter[str])  # they end before a malformed message, of this kind
    merged_messages: int = 0  # assistant messages that were joined to the one before
    ignored: Counter[str] = field(default_factory=Counter[str])  # fields that a trace has no place for
    formats: Counter[str] = field(default_factory=Counter[str])

    @property
    def adds_up(self) -> bool:
        traces = self.traces_kept + self.dropped_traces.total()
        return traces == self.traces_read and self.turns_kept + self.dropped_turns.total() == self.turns_read

    def to_json(self) -> dict[str, Any]:
        return {key: dict(sorted(v.items())) if isinstance(v, Counter) else v for key, v in vars(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImportReport:
        """Inverse of `to_json`."""
        fields: dict[str, Any] = {key: Counter(v) if isinstance(v, dict) else v for key, v in value.items()}
        return cls(**fields)

    def summary(self) -> str:
        """A summary in two lines."""
        return "\n".join(
            f"{name}: {kept} of {read} kept" + "".join(f", {n} {reason}" for reason, n in sorted(dropped.items()))
            for name, kept, read, dropped in (
                ("traces", self.traces_kept, self.traces_read, self.dropped_traces),
                ("turns", self.turns_kept, self.turns_read, self.dropped_turns),
            )
        )


def stream_chat(
    paths: Iterable[str | Path],
    keep: Callable[[Trace], None],
    *,
    format: str | Part = AUTO,
    on_error: OnError = "stop",
    success_only: bool = False,
    unknown_keys: UnknownKeys = "stop",
    domain: str = "",
    candidates: CandidateRule = "auto",
    tools: Sequence[dict[str, Any]] = (),
    done: Done | None = None,
    after_row: Callable[[int, ImportReport], None] | None = None,
) -> ImportReport:
    """Read source files, folders and archives, and hand every trace to `keep`; only ids and fingerprints are
    remembered. Raises `InputError` naming file, line and field (see the policy above).

    `format` is a part (`traces.formats`); "auto" asks every registered format whether it knows the row. `success_only`
    drops traces that failed or whose outcome is unknown, counted apart. `unknown_keys="keep"` carries unknown keys of
    chat rows in `meta["extra"]`; what other formats do not know is counted in `ignored`. `domain` is given to rows that
    name none, and `tools` (declarations in chat form) to rows that declare none. `candidates` is the rule by which
    turns become candidates ("auto": that of the format). Rows equal in id and content are kept once and counted; one id
    with two contents is malformed. `after_row` is called with the number of rows read; an interrupted import resumes
    from what it had kept (`done`).
    """
    kinds = (("on_error", on_error, OnError), ("unknown_keys", unknown_keys, UnknownKeys))
    for name, value, kind in (*kinds, ("candidates", candidates, CandidateRule)):
        if value not in get_args(kind):
            raise ConfigError(f"is {value!r}", field=name, hint=f"use one of {', '.join(get_args(kind))}")
    rule = None if candidates == "auto" else candidates
    done = done or Done(0, ImportReport(), {})
    readers, keep_going = Readers(format, unknown_keys), on_error == "drop"
    options = _Options(readers, keep_going, success_only, domain, rule, list(tools), done.groups)
    report, rows = done.report, 0
    for path in paths:
        passed: Counter[str] = Counter()  # over since the file before
        for file in source_files(path, passed):
            _count(passed, report, known=rows < done.rows)
            with _shown(file):
                for row in options.readers.rows(file):
                    rows += 1
                    if rows > done.rows:
                        _import_row(row, file, keep, done.known, report, options)
                        if after_row is not None:
                            after_row(rows, report)
        _count(passed, report, known=rows < done.rows)
    return report


def _count(passed: Counter[str], report: ImportReport, *, known: bool) -> None:
    """Move what was passed over into the report, which holds it already where it is `known` from before."""
    if not known:
        report.ignored += passed
    passed.clear()


@dataclass(frozen=True)
class Done:
    """The state of an interrupted import: the number of rows read, its report, the traces kept, and the groups by
    their names (`ChatRow.thread`)."""

    rows: int
    report: ImportReport
    known: Known
    groups: dict[str, str] = field(default_factory=dict[str, str])


def fingerprint_of(trace: Trace) -> str:
    """Equal for traces that demonstrate the same with the same outcome."""
    known = [trace.success, trace.meta.get("reward"), trace.split, trace.environment, trace.domain]
    return fingerprint([[message.to_chat() for message in trace.messages], trace.tools, known])


@dataclass(frozen=True)
class _Options:
    readers: Readers
    keep_going: bool
    success_only: bool
    domain: str
    rule: Rule | None
    tools: list[dict[str, Any]]
    groups: dict[str, str]


@contextlib.contextmanager
def _shown(file: SourceFile) -> Iterator[None]:
    """Errors name the file as the user named it; inside an archive the actual path differs."""
    try:
        yield
    except InputError as error:
        place = {"line": error.line, "field": error.field, "hint": error.hint}
        raise InputError(error.problem, path=file.shown, **place) from error


def _import_row(
    row: SourceRow,
    file: SourceFile,
    keep: Callable[[Trace], None],
    known: Known,
    report: ImportReport,
    options: _Options,
) -> None:
    for number, chat in enumerate(options.readers.read(row, report.formats), start=1):
        report.traces_read += 1
        if chat is None:
            report.dropped_traces["left_out_by_format"] += 1
            continue
        source = _source(file, row) | ({"part": number} if number > 1 else {})
        try:
            if isinstance(chat, InputError):
                raise chat
            _join_group(chat, options.groups)
            _import_chat(chat, source, keep, known, report, options)
        except InputError as error:
            if not options.keep_going:
                raise _with_place(error, file.shown, row) from error
            _drop(error, chat, report)


def _join_group(chat: ChatRow, groups: dict[str, str]) -> None:
    """Give the row the group of an earlier one that shares a name with it."""
    if chat.group is not None:
        names = [name for name in (chat.thread, chat.group) if name is not None]
        group = next((groups[name] for name in names if name in groups), chat.group)
        if chat.thread is not None:
            groups.update(dict.fromkeys(names, group))
        chat.group = group


def _source(file: SourceFile, row: SourceRow) -> dict[str, Any]:
    place = {"line": row.line} if row.line else {"index": row.index} if row.index else {}
    return {"file": file.shown.name, **place}


def _drop(error: InputError, chat: ChatRow | InputError, report: ImportReport) -> None:
    """Count what cannot be used, its turns too where its messages were read."""
    reason = error.reason if isinstance(error, RowRefused) else "malformed_field"
    turns = 0 if isinstance(chat, InputError) else count_turns(chat)
    report.dropped_traces[reason] += 1
    report.turns_read += turns
    report.dropped_turns += Counter({reason: turns})


def _import_chat(
    chat: ChatRow,
    source: dict[str, Any],
    keep: Callable[[Trace], None],
    known: Known,
    report: ImportReport,
    options: _Options,
) -> None:
    if not chat.tools:
        chat.tools = options.tools
    built = assemble(chat, keep_going=options.keep_going, domain=options.domain, source=source, rule=options.rule)
    reason, content = _why_not(built, known, options.success_only)
    skipped = Counter(skipped_turns(built.trace).values()) if built.trace is not None else Counter[str]()
    candidates = built.turns - built.lost.total() - skipped.total()
    if reason is None and candidates == 0:
        reason = "no_candidate_turn"
    report.turns_read += built.turns
    report.merged_messages += built.merged_messages
    report.cut_traces += Counter({built.cut: 1} if built.cut else {})
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
    content = fingerprint_of(trace)
    if success_only and trace.success is not True:
        return ("success_unknown" if trace.success is None else "not_successful"), content
    if trace.id in known:
        before, first = known[trace.id]
        if before == content:
            return "duplicate", content
        problem = f"{trace.id!r} names another trace already ({first})"
        raise RowRefused("duplicate_id", problem, field="id", hint="give every trace its own id")
    return None, content


def _with_place(error: InputError, path: Path, row: SourceRow) -> InputError:
    error = located(error, path=path, line=error.line or row.line, inside=row.index)
    advice = "or drop and count such rows with on_error='drop' (--on-error drop)"
    hint = f"{error.hint}, {advice}" if error.hint else advice.removeprefix("or ")
    return InputError(error.problem, path=error.path, line=error.line, field=error.field, hint=hint)
