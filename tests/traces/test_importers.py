"""Every format: its fixture is recognised and counted, and no damage to it is met with a traceback or with silence."""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trace_fixtures import FIXTURES, Fixture

from turntree.core import parts
from turntree.core.errors import InputError
from turntree.traces.candidates import candidates
from turntree.traces.chat import ImportReport, import_chat
from turntree.traces.formats.row import told
from turntree.traces.schema import Trace

every_format = pytest.mark.parametrize("name", FIXTURES)


def imported(fixture: Fixture, text: str | None = None, **options: Any) -> tuple[list[Trace], ImportReport]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / fixture.name
        path.write_text(fixture.text if text is None else text)
        return import_chat([path], **fixture.options, **options)


def test_every_registered_format_has_a_fixture_and_tells_its_rows() -> None:
    names = set(parts.names("trace_formats"))
    assert names == {name.split()[0] for name in FIXTURES}
    assert all(told(parts.load("trace_formats", name).target) is not None for name in names)


@every_format
def test_a_fixture_is_recognised_and_all_its_turns_are_accounted_for(name: str) -> None:
    fixture = FIXTURES[name]
    traces, report = imported(fixture)
    assert set(report.formats) == {name.split()[0]}
    assert (report.turns_read, report.turns_kept, report.dropped_turns) == (
        fixture.turns,
        fixture.kept,
        fixture.dropped,
    )
    assert report.adds_up and len(traces) == fixture.traces
    assert tuple(trace.success for trace in traces) == fixture.success
    assert not fixture.unknown or report.ignored[fixture.unknown] >= 1, report.ignored
    assert all(trace.messages[0].role in ("system", "user", "assistant") for trace in traces)


@every_format
def test_a_format_that_is_named_reads_what_auto_reads(name: str) -> None:
    assert imported(FIXTURES[name], format=name.split()[0]) == imported(FIXTURES[name])


# damage


WELL_FORMED = {"duplicate", "no_candidate_turn", "left_out_by_format"}


@functools.cache
def whole(name: str) -> ImportReport:
    return imported(FIXTURES[name], on_error="drop")[1]


def account(report: ImportReport) -> tuple[Any, ...]:
    return report.dropped_traces, report.dropped_turns, report.cut_traces, report.ignored


def check(fixture: Fixture, text: str) -> ImportReport:
    """What stops an import (in one line) is counted by one that goes on; what does not stop it loses nothing more."""
    try:
        stopping = imported(fixture, text)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000
        stopping = None
    going_on = traces, report = imported(fixture, text, on_error="drop")
    assert report.adds_up
    assert report.turns_kept == sum(len(candidates(trace)) for trace in traces)
    assert "format_failed" not in report.dropped_traces
    malformed = set(report.dropped_traces) - WELL_FORMED or report.cut_traces
    assert not malformed if stopping == going_on else malformed and stopping is None
    return report


@every_format
@settings(max_examples=8, deadline=None)
@given(share=st.floats(0.02, 0.98))
def test_a_file_that_is_cut_off_is_an_error_or_loses_only_what_is_counted(name: str, share: float) -> None:
    fixture = FIXTURES[name]
    if name != "react":  # a text has no end that could be missed
        check(fixture, fixture.text[: int(len(fixture.text) * share)])


def documents(fixture: Fixture) -> list[Any]:
    if fixture.name.endswith(".jsonl"):
        return [json.loads(line) for line in fixture.text.splitlines()]
    return [json.loads(fixture.text)]


def written(fixture: Fixture, values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [*([at] if at else []), *(place for key, one in inside for place in places(one, (*at, key)))]


def changed(values: list[Any], at: tuple[Any, ...], new: Any) -> list[Any]:
    values = copy.deepcopy(values)
    holder: Any = values
    for key in at[:-1]:
        holder = holder[key]
    if new is DELETE:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    return values


DELETE = object()
WRONG = st.sampled_from([None, 3, 0.5, True, "", "text", [], {}, [3], {"a": 1}, [[]], "{oops", DELETE])
structured = pytest.mark.parametrize("name", [name for name in FIXTURES if name != "react"])


@structured
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_value_of_a_wrong_type_is_an_error_or_counted(name: str, data: st.DataObject) -> None:
    fixture = FIXTURES[name]
    values = documents(fixture)
    at = data.draw(st.sampled_from([place for place in places(values) if len(place) > 1]))
    old, new = functools.reduce(lambda value, key: value[key], at, values), data.draw(WRONG)
    report = check(fixture, written(fixture, changed(values, at, new)))
    fewer = report.turns_kept < whole(name).turns_kept
    if fewer and not isinstance(old, dict | list) and new is not None and new is not DELETE:
        assert account(report) != account(whole(name)), "turns are gone, and the report says nothing"


IDS = frozenset({"id", "call_id", "tool_call_id", "tool_call_ids", "callID", "tool_use_id", "source_call_id", "uuid"})
IDS |= {"parentUuid", "sessionId", "session_id", "trajectory_id", "instance_id", "task_id", "example_id", "index"}


@structured
def test_ids_that_are_missing_everywhere_leave_no_turn_uncounted(name: str) -> None:
    fixture = FIXTURES[name]

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key not in IDS}
        return [without(one) for one in value] if isinstance(value, list) else value

    values = [without(value) for value in documents(fixture)]
    if name in ("claude_code", "openhands_events"):  # a line without any id is no longer told as one of theirs
        values = [value if isinstance(value, list) else value | {"uuid": "x"} for value in values]
    report = check(fixture, written(fixture, values))
    assert report.turns_read + report.dropped_traces.total() > 0


@structured
def test_a_row_that_stands_twice_is_counted_and_kept_once(name: str) -> None:
    fixture = FIXTURES[name]
    values = documents(fixture)
    with tempfile.TemporaryDirectory() as folder:
        for copy_of in ("a", "b"):
            (Path(folder) / copy_of).mkdir()
            (Path(folder) / copy_of / fixture.name).write_text(written(fixture, values))
        traces, report = import_chat([folder], on_error="drop", **fixture.options)
    once = whole(name)
    assert report.adds_up
    assert (len(traces), report.turns_kept) == (once.traces_kept, once.turns_kept)
    assert report.turns_read == 2 * once.turns_read
    assert report.dropped_traces["duplicate"] == once.traces_kept


@pytest.mark.parametrize(
    ("name", "key"), [("openhands", "trajectory_id"), ("sharegpt", "id"), ("atif", "session_id"), ("opencode", "info")]
)
def test_one_id_with_two_contents_stops_or_counts_the_second_with_its_turns(name: str, key: str) -> None:
    fixture = FIXTURES[name]
    [one] = documents(fixture)
    other = json.loads(json.dumps(one).replace("look", "glance").replace("the issue", "it"))
    assert other != one
    text = "".join(json.dumps(row) + "\n" for row in (one, other))
    lines = Fixture("rows.jsonl", text, 0, 0, {})
    with pytest.raises(InputError, match="names another trace already"):
        imported(lines)
    _, report = imported(lines, on_error="drop")
    assert report.dropped_traces == {"duplicate_id": 1}
    assert report.dropped_turns["duplicate_id"] == fixture.turns and report.adds_up
