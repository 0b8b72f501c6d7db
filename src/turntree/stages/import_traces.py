"""`turntree traces import`: a user's logs to the documented schema, with every dropped turn counted."""

from __future__ import annotations

import io
import json
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from turntree import __version__
from turntree.core import parts
from turntree.core.config import Between, Part, to_value
from turntree.core.errors import InputError
from turntree.core.progress import notice, progress
from turntree.observe.files import parse_line, read_json, write_json
from turntree.observe.jsonl import located, parse_json, read_text
from turntree.traces.chat import Done, ImportReport, fingerprint_of, stream_chat
from turntree.traces.formats.row import chat_tools, fingerprint
from turntree.traces.readers import AUTO
from turntree.traces.schema import Split, Trace, check_schemas, check_tools, write_traces
from turntree.traces.splits import assign_splits

Key = tuple[str, str, Split | None]
_BY_KEYS = Part(AUTO)
SAVE_EVERY = 5.0  # seconds between two progress messages


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
    dev: Annotated[float, Between(0, 1)] = 0.1
    """Share of traces held out for development."""
    seed: int = 0
    """Of the splits."""


def import_traces(files: list[Path], out: Path, config: ImportConfig) -> dict[str, Any]:
    """Import, split by trajectory, write `out` and its report `OUT.report.json`. Raises `InputError` with the counts by
    reason, and writes nothing, where no trace is kept, or none in a split that has a share. Give the same command again
    to resume an interrupted import."""
    if out.exists() and any(out.resolve().is_relative_to(file.resolve()) for file in files):
        raise InputError("would replace one of the files that are read", path=out, hint="choose another --out")
    tools = _tools(config.tools)
    with _Spool(out, files, config) as spool, progress((), "traces imported", initial=len(spool.keys)) as bar:

        def keep(trace: Trace) -> None:
            bar.update()
            spool.keep(trace)

        report = stream_chat(
            *(files, keep),
            format=config.format,
            on_error=config.on_error,
            unknown_keys=config.unknown_keys,
            success_only=config.success_only,
            candidates=config.candidates,
            tools=tools,
            done=spool.done,
            after_row=spool.after_row,
        )
        counts, splits = _split(files, spool.keys, report, config.dev, config.seed)
        traces = (replace(trace, split=one) for trace, one in zip(spool.traces(), splits, strict=True))
        header = {"made_by": "import", "sources": [str(file) for file in files], "report": counts}
        write_traces(out, traces, {**header, "traces": len(splits)})
    write_json(out.with_name(out.name + ".report.json"), counts)
    return {"path": str(out), **counts}


class _Spool:
    """The traces kept so far, in a folder beside `out` (they may exceed the memory, and the header counts them), and
    how far the sources were read. It stays only where the import is interrupted."""

    def __init__(self, out: Path, files: list[Path], config: ImportConfig) -> None:
        self._folder = out.with_name(f".{out.name}.import")
        self._rows, self._state = self._folder / "traces.jsonl", self._folder / "state.json"
        self._identity = _identity(files, config)
        self._saved = time.monotonic()
        self.keys: list[Key] = []
        self.done = Done(0, ImportReport(), {})

    def __enter__(self) -> _Spool:
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._read_state()
        self._file = self._rows.open("r+b" if state else "w+b")
        if state:
            self._file.truncate(state["bytes"])
            for trace in self.traces():
                self.keys.append((trace.id, trace.group, trace.split))
                self.done.known[trace.id] = fingerprint_of(trace), trace.meta.get("source")
            self._file.seek(0, io.SEEK_END)
            self.done = Done(
                state["rows"], ImportReport.from_json(state["report"]), self.done.known, state.get("groups", {})
            )
            notice(f"resuming the import of {self._folder.name[1:-7]} after {state['rows']} rows")
        return self

    def keep(self, trace: Trace) -> None:
        self.keys.append((trace.id, trace.group, trace.split))
        self._file.write(json.dumps(trace.to_json()).encode() + b"\n")

    def after_row(self, rows: int, report: ImportReport) -> None:
        if time.monotonic() - self._saved < SAVE_EVERY:
            return
        self._file.flush()
        state = {"rows": rows, "bytes": self._file.tell(), "report": report.to_json(), "groups": self.done.groups}
        write_json(self._state, {**state, "check": fingerprint([self._identity, state])})
        self._saved = time.monotonic()

    def traces(self) -> Iterator[Trace]:
        self._file.seek(0)
        for number, line in enumerate(self._file, start=1):
            try:
                yield Trace.from_json(parse_line(line, self._rows, number))
            except InputError as error:
                hint = f"delete {self._folder}, and the import begins anew"
                raise InputError(error.problem, path=self._rows, line=number, field=error.field, hint=hint) from error

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._file.close()
        if kind is None or issubclass(kind, Exception):  # not an interrupt
            shutil.rmtree(self._folder, ignore_errors=True)

    def _read_state(self) -> dict[str, Any] | None:
        """The state of an earlier import of the same files with the same settings; None without one."""
        if not self._state.exists() or not self._rows.exists():
            return None
        try:
            state = read_json(self._state)
        except InputError:  # damaged: the files are read anew
            return None
        whole = isinstance(state, dict) and state.pop("check", None) == fingerprint([self._identity, state])
        return state if whole and self._rows.stat().st_size >= state["bytes"] else None


def _identity(files: list[Path], config: ImportConfig) -> str:
    """The identity of files, settings and turntree: an interrupted import is resumed only if all are unchanged."""
    read = [*files, *([Path(config.tools)] if config.tools else [])]
    found = [one for file in read for one in (sorted(file.rglob("*")) if file.is_dir() else [file]) if one.is_file()]
    seen = [(str(one.resolve()), one.stat().st_size, one.stat().st_mtime_ns) for one in found]
    return fingerprint(
        [__version__, seen, to_value(config), parts.identity("trace_formats", config.format) if _named(config) else ""]
    )


def _named(config: ImportConfig) -> bool:
    return config.format.name != AUTO


_REMEDIES = {
    "unknown_format": "name the format with --format",
    "not_a_json_object": "check that the files are JSON, JSON lines or a text of a known format",
    "unknown_key": "keep such keys with --unknown-keys keep",
    "not_successful": "import failures too: leave --success-only away",
    "success_unknown": "the source does not say what succeeded: leave --success-only away",
    "no_candidate_turn": "see dropped_turns for why; --set candidates=turns takes every turn",
    "no_assistant_turn": "the files hold tasks, not episodes: record some with `turntree traces record`",
}


def _tools(file: str) -> list[dict[str, Any]]:
    if not file:
        return []
    tools: Any = parse_json(read_text(file), file)
    tools = tools.get("tools", tools) if isinstance(tools, dict) else tools
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InputError(
            "is not a list of tool declarations", path=file, field="tools", hint="write [{type, function}, ...]"
        )
    try:
        declared = chat_tools(tools, Counter())
        check_tools(declared)
        check_schemas(declared)
    except InputError as error:
        raise located(error, path=file) from error
    return declared


def _split(
    files: list[Path], keys: list[Key], report: ImportReport, dev: float, seed: int
) -> tuple[dict[str, Any], list[Split]]:
    if not keys:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped_traces.most_common())
        turns = ", ".join(f"{count} {reason}" for reason, count in report.dropped_turns.most_common())
        problem = f"keeps none of {report.traces_read} traces ({reasons or 'the files are empty'})"
        problem += f" and none of {report.turns_read} turns ({turns})" if turns else ""
        first = next((reason for reason, _ in report.dropped_traces.most_common() if reason in _REMEDIES), "")
        remedy = _REMEDIES.get(first, "see what is dropped with --on-error stop")
        raise InputError(problem, path=files[0], hint=f"{remedy}; nothing was written")
    splits = assign_splits(keys, seed, {"train": 1 - dev, "dev": dev})
    sizes = Counter(splits)
    if not sizes["train"] and dev < 1:
        problem = f"leaves nothing to train on ({', '.join(f'{count} in {name}' for name, count in sizes.items())})"
        raise InputError(problem, path=files[0], hint="import more traces, or lower --dev; nothing was written")
    counts = {**report.to_json(), "splits": dict(sorted(sizes.items()))}
    return counts, splits
