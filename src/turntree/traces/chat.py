"""Import source files (`traces.formats`) into traces, with a report whose counts add up.

Policy. A malformed row (a damaged line, an unknown key, arguments that are not JSON, no assistant turn) stops the
import with its file, line and field. With `on_error="drop"` it is dropped and counted; a malformed *message* then ends
its trace early, because the history of later turns would be wrong. Well-formed turns that are not candidates
(`candidates.SkipReason`) never stop the import; they are counted, and stay in the history of later turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from turntree.core.config import Part, Share
from turntree.core.errors import InputError
from turntree.run.identity import fingerprint
from turntree.run.jsonl import located, placed
from turntree.traces.assemble import Assembled, assemble, count_turns
from turntree.traces.formats.row import ChatRow, RowRefused
from turntree.traces.readers import AUTO, Readers
from turntree.traces.schema import Trace
from turntree.traces.sources import SourceFile, SourceRow, source_files

TRACE_DROPPED = "in_dropped_trace"
_BY_KEYS = Part(AUTO)


@dataclass(frozen=True, kw_only=True)
class ImportConfig:
    """`turntree traces import`."""

    format: Part = _BY_KEYS
    """auto, a registered format (docs/traces.md), or module:function of your own; its options are format.KEY."""
    on_error: Literal["stop", "drop"] = "stop"
    """What happens on a row that cannot be read."""
    unknown_keys: Literal["stop", "keep"] = "stop"
    """Keys of a row that the format does not know: an error, or kept in the trace's meta."""
    success_only: bool = False
    """Keep only the traces that their source calls a success."""
    candidates: Literal["auto", "turns", "tool_calls", "bash", "search"] = "auto"
    """Which turns become candidates: all, calls without error, bash actions, search steps; auto: the format's rule."""
    tools: str = ""
    """A JSON file of tool declarations, for traces that record none."""
    dev: Share = 0.1
    """Share of traces held out for development."""
    seed: int = 0
    """Of the splits."""


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

    def to_json(self) -> dict[str, Any]:
        return {key: dict(sorted(v.items())) if isinstance(v, Counter) else v for key, v in vars(self).items()}


def stream_chat(
    paths: Iterable[str | Path],
    keep: Callable[[Trace], None],
    config: ImportConfig | None = None,
    tools: Sequence[dict[str, Any]] = (),
) -> ImportReport:
    """Read source files, folders and archives, and hand every trace to `keep`; only ids and fingerprints are
    remembered. Raises `InputError` naming file, line and field (see the policy above).

    `success_only` drops traces that failed or whose outcome is unknown, counted apart. What other formats than chat do
    not know of a row is counted in `ignored`. `tools` (declarations in chat form) are given to rows that declare none.
    Rows equal in id and content are kept once and counted; one id with two contents is malformed.
    """
    config = config or ImportConfig()
    read = _Import(keep, config, Readers(config.format, config.unknown_keys), list(tools))
    for path in paths:
        for file in source_files(path, read.report.ignored):
            read.file(file)
    return read.report


@dataclass
class _Import:
    keep: Callable[[Trace], None]
    config: ImportConfig
    readers: Readers
    tools: list[dict[str, Any]]
    report: ImportReport = field(default_factory=ImportReport)
    known: dict[str, tuple[str, Any]] = field(default_factory=dict[str, tuple[str, Any]])
    """The fingerprint and the source of every trace that was kept, by its id."""
    groups: dict[str, str] = field(default_factory=dict[str, str])
    """Groups by their names (`ChatRow.thread`)."""

    def file(self, file: SourceFile) -> None:
        with placed(path=file.shown):  # as the user named the file: inside an archive the actual path differs
            for row in self.readers.rows(file):
                self._row(row, file)

    def _row(self, row: SourceRow, file: SourceFile) -> None:
        place = {"line": row.line} if row.line else {"index": row.index} if row.index else {}
        for number, chat in enumerate(self.readers.read(row, self.report.formats), start=1):
            self.report.traces_read += 1
            if chat is None:
                self.report.dropped_traces["left_out_by_format"] += 1
                continue
            source = {"file": file.shown.name, **place, **({"part": number} if number > 1 else {})}
            try:
                if isinstance(chat, InputError):
                    raise chat
                self._join_group(chat)
                self._chat(chat, source)
            except InputError as error:
                if self.config.on_error == "stop":
                    raise _advised(error, row) from error
                self._drop(error, chat)

    def _join_group(self, chat: ChatRow) -> None:
        """Give the row the group of an earlier one that shares a name with it."""
        if chat.group is not None:
            names = [name for name in (chat.thread, chat.group) if name is not None]
            group = next((self.groups[name] for name in names if name in self.groups), chat.group)
            if chat.thread is not None:
                self.groups.update(dict.fromkeys(names, group))
            chat.group = group

    def _drop(self, error: InputError, chat: ChatRow | InputError) -> None:
        """Count what cannot be used, its turns too where its messages were read."""
        reason = error.reason if isinstance(error, RowRefused) else "malformed_field"
        turns = 0 if isinstance(chat, InputError) else count_turns(chat)
        self.report.dropped_traces[reason] += 1
        self.report.turns_read += turns
        self.report.dropped_turns += Counter({reason: turns})

    def _chat(self, chat: ChatRow, source: dict[str, Any]) -> None:
        chat.tools = chat.tools or self.tools
        rule = None if self.config.candidates == "auto" else self.config.candidates
        built = assemble(chat, keep_going=self.config.on_error == "drop", source=source, rule=rule)
        content = ""
        if (trace := built.trace) is not None:  # equal where the same is demonstrated with the same outcome
            outcome = [trace.success, trace.meta.get("reward"), trace.split, trace.environment, trace.domain]
            content = fingerprint([[message.to_chat() for message in trace.messages], trace.tools, outcome])
        reason = self._why_not(built, content)
        report = self.report
        report.turns_read += built.turns
        report.merged_messages += built.merged_messages
        report.cut_traces += Counter({built.cut: 1} if built.cut else {})
        report.ignored += chat.ignored
        report.dropped_turns += built.dropped
        if reason is not None or built.trace is None:
            report.dropped_traces[reason or "no_candidate_turn"] += 1
            report.dropped_turns += Counter({TRACE_DROPPED: built.candidates})
            return
        self.known[built.trace.id] = content, source
        self.keep(built.trace)
        report.traces_kept += 1
        report.turns_kept += built.candidates

    def _why_not(self, built: Assembled, content: str) -> str | None:
        """Why a well-formed trace is left out; None: it is kept."""
        trace = built.trace
        if trace is None:
            return "no_candidate_turn"
        if self.config.success_only and trace.success is not True:
            return "success_unknown" if trace.success is None else "not_successful"
        if trace.id in self.known:
            before, first = self.known[trace.id]
            if before == content:
                return "duplicate"
            problem = f"{trace.id!r} names another trace already ({first})"
            raise RowRefused("duplicate_id", problem, field="id", hint="give every trace its own id")
        return None if built.candidates else "no_candidate_turn"


def _advised(error: InputError, row: SourceRow) -> InputError:
    error = located(error, line=error.line or row.line, inside=row.index)
    advice = "or drop and count such rows with on_error='drop' (--on-error drop)"
    hint = f"{error.hint}, {advice}" if error.hint else advice.removeprefix("or ")
    return InputError(error.problem, path=error.path, line=error.line, field=error.field, hint=hint)
