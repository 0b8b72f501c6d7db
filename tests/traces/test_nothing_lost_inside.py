"""Strictness does not end at the message: what a reader does not understand inside a call, a part of a content or a
tool's declaration is refused or counted, in every format."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_importers import imported
from trace_fixtures import (
    ATIF,
    FIXTURES,
    FUSE,
    GYM,
    OLD,
    OPENHANDS,
    RECORD,
    SHAREGPT,
    SMITH_OPENAI,
    SWE_GYM,
    TAU2,
    TOOL,
    TRAJ,
    adds_up,
    lines,
)

from turntree.core import parts
from turntree.core.errors import InputError
from turntree.traces.chat import ImportReport
from turntree.traces.schema import Trace

Path = tuple[Any, ...]
JSON, TAGGED = "(JSON text)", "(in <tool_call>)"  # steps into a text
WORDS = ("text", "input_text", "output_text")
PLACES = {  # format: how many calls, parts and declarations its file below holds
    "chat": (1, 3, 1), "responses": (1, 2, 1), "tau2": (1, 4, 1), "sweagent": (1, 9, 1), "openhands": (3, 8, 1),
    "swe_gym": (1, 5, 1), "openhands_events sdk": (2, 3, 2), "atif": (3, 4, 1),
    "opencode": (3, 3, 0), "codex": (3, 4, 0), "claude_code": (5, 8, 0), "sharegpt": (2, 0, 1), "verifiers": (1, 5, 1),
    "terminus": (0, 0, 0), "agentbench": (0, 4, 0), "react": (0, 0, 0), "intercode": (0, 0, 0),
    "inspect": (0, 1, 0), "smolagents": (3, 15, 0),
    "langsmith": (2, 6, 1), "langfuse": (2, 6, 1),
}  # fmt: skip
with_a_call = st.sampled_from([name for name, (calls, _, _) in PLACES.items() if calls])
with_a_part = st.sampled_from([name for name, (_, texts, _) in PLACES.items() if texts])
with_a_tool = st.sampled_from([name for name, (_, _, tools) in PLACES.items() if tools])
with_any = st.sampled_from([name for name, counts in PLACES.items() if any(counts)])


def in_parts(row: Any, key: str = "content") -> Any:
    """The row with every text of a message as a list of parts."""
    if isinstance(row, list):
        return [in_parts(one, key) for one in row]
    if not isinstance(row, dict):
        return row
    told = {name: in_parts(value, key) for name, value in row.items()}
    if isinstance(told.get(key), str) and ("role" in row or "source" in row):
        told[key] = [{"type": "text", "text": told[key]}]
    return told


@functools.cache
def rows_of(name: str) -> list[Any]:
    """The rows of a format's fixture, with declared tools and with parts wherever the format has them."""
    changed: dict[str, Any] = {
        "chat": in_parts(OLD | {"messages": json.loads(OLD["messages"])}),
        "responses": GYM | {"responses_create_params": {"input": "go", "tools": [TOOL["function"]]}},
        "tau2": in_parts(TAU2)["simulations"][0] | {"environment_info": {"tool_defs": [renamed_tool("cancel")]}},
        "sweagent": in_parts(TRAJ) | {"tools": [renamed_tool("find_file")]},
        "openhands": in_parts(OPENHANDS),
        "swe_gym": in_parts(SWE_GYM) | {"tools": [renamed_tool("execute_bash")]},
        "atif": in_parts(ATIF, "message")
        | {"agent": ATIF["agent"] | {"tool_definitions": [renamed_tool("bash_command")]}},
        "verifiers": in_parts(RECORD) | {"tool_defs": [TOOL]},
        "sharegpt": SHAREGPT,
        "langsmith": in_parts(SMITH_OPENAI),
        "langfuse": in_parts(FUSE[2]),
    }
    if name in changed:
        return [changed[name]]
    text = FIXTURES[name].text
    document = FIXTURES[name].name.endswith(".json")
    rows = [json.loads(one) for one in ([text] if document else text.splitlines())]
    if name == "openhands_events sdk":
        rows[0]["history"][0]["tools"] = [renamed_tool("terminal"), renamed_tool("edit")]
    return in_parts(rows) if name == "agentbench" else rows


def renamed_tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": TOOL["function"] | {"name": name}}


def read(name: str, rows: list[Any]) -> tuple[list[Trace], ImportReport]:
    fixture = FIXTURES[name]
    document = fixture.name.endswith(".json") and len(rows) == 1
    format = name.split()[0]
    return imported(replace(fixture, name="x.json" if document else "x.jsonl"), lines(*rows), format=format)


def inner(value: Any) -> Iterator[tuple[Path, Any]]:
    """Every object in a value with its place, those in JSON text too."""
    if isinstance(value, dict):
        yield (), value
        for key, one in value.items():
            yield from (((key, *path), found) for path, found in inner(one))
    elif isinstance(value, list):
        for i, one in enumerate(value):
            yield from (((i, *path), found) for path, found in inner(one))
    elif isinstance(value, str):
        step, text = (TAGGED, value) if "<tool_call>" in value else (JSON, value)
        try:
            held = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0] if step == TAGGED else text)
        except ValueError:
            return
        if isinstance(held, dict | list):
            yield from (((step, *path), found) for path, found in inner(held))


def changed(value: Any, path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    if not path:
        return change(value)
    step, *rest = path
    if step == JSON:
        return json.dumps(changed(json.loads(value), tuple(rest), change))
    if step == TAGGED:
        before, _, behind = value.partition("<tool_call>")
        held, _, after = behind.partition("</tool_call>")
        return f"{before}<tool_call>{json.dumps(changed(json.loads(held), tuple(rest), change))}</tool_call>{after}"
    copied = copy.copy(value)
    copied[step] = changed(value[step], tuple(rest), change)
    return copied


def key_of_arguments(row: dict[str, Any]) -> str | None:
    """Of a call, the key that holds its arguments."""
    if row.get("type") in ("tool_use", "custom_tool_call") or ("input" in row and "status" in row):
        return "input"
    if row.get("type") == "local_shell_call":
        return "action"
    named = isinstance(row.get("name") or row.get("function_name"), str)
    return "arguments" if named and "arguments" in row and row.get("requestor") != "user" else None


def is_part(row: dict[str, Any]) -> bool:
    return row.get("type") in WORDS and isinstance(row.get("text"), str)


def places(name: str) -> tuple[list[Path], list[Path], list[Path]]:
    found = [] if name == "react" else list(inner(rows_of(name)))
    found = [one for one in found if not told_elsewhere(name, one[0])]
    calls = [path for path, row in found if key_of_arguments(row) and "parameters" not in row]
    return calls, [path for path, row in found if is_part(row)], [path for path, row in found if "parameters" in row]


def told_elsewhere(name: str, path: Path) -> bool:
    """Whether a place is read nowhere: each action of the events repeats all parallel calls of its response, and what a
    tool of the simulated user returned is left out whole."""
    if name == "tau2" and path[:3] == (0, "messages", 5):
        return True
    if "tool_call_metadata" not in path or "tool_calls" not in path:
        return False
    told: Any = rows_of(name)
    for step in path[: path.index("tool_call_metadata") + 1]:
        told = told[step]
    calls = told["model_response"]["choices"][0]["message"]["tool_calls"]
    return calls[path[path.index("tool_calls") + 1]]["id"] != told["tool_call_id"]


def arguments(traces: list[Trace]) -> list[dict[str, Any]]:
    return [call.arguments for trace in traces for message in trace.messages for call in message.tool_calls]


def test_every_registered_format_is_looked_into() -> None:
    assert {name.split()[0] for name in PLACES} == set(parts.names("trace_formats"))


@pytest.mark.parametrize("name", PLACES)
def test_the_files_hold_so_many_calls_parts_and_declarations_and_are_read(name: str) -> None:
    assert tuple(map(len, places(name))) == PLACES[name]
    traces, report = read(name, rows_of(name)) if name != "react" else imported(FIXTURES[name])
    assert traces and adds_up(report)


unknown_keys = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=3, max_size=12).map("x_{}".format)
json_values = st.sampled_from([1, "more", {"city": "Eve"}, [{"city": "Eve"}], True])


@settings(max_examples=200)
@given(with_any, st.data(), unknown_keys, json_values)
def test_an_unknown_key_in_a_call_a_part_or_a_declaration_is_refused_or_counted(
    name: str, data: st.DataObject, key: str, value: Any
) -> None:
    place = data.draw(st.sampled_from([path for kind in places(name) for path in kind]))
    rows = changed(rows_of(name), place, lambda row: {**row, key: value})
    try:
        _, report = read(name, rows)
    except InputError as error:
        assert key in str(error.field)
    else:
        assert any(key in said for said in report.ignored), (place, report.ignored)


@settings(max_examples=120)
@given(with_a_call, st.data(), unknown_keys | st.sampled_from(["args", "argument", "params", "kwargs", "action_input"]))
def test_arguments_under_another_key_never_become_empty_ones(name: str, data: st.DataObject, key: str) -> None:
    place = data.draw(st.sampled_from(places(name)[0]))

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        known = key_of_arguments(row)
        return {(key if name == known else name): value for name, value in row.items()}

    before, _ = read(name, rows_of(name))
    try:
        traces, _ = read(name, changed(rows_of(name), place, rename))
    except InputError as error:
        assert "tool_calls" in str(error.field)
    else:
        assert arguments(traces).count({}) <= arguments(before).count({})


@settings(max_examples=120)
@given(with_a_part, st.data(), st.sampled_from(["reasoning", "thinking", "document", "image"]) | unknown_keys)
def test_the_words_of_a_part_that_is_not_text_are_no_words_of_a_message(
    name: str, data: st.DataObject, kind: str
) -> None:
    place = data.draw(st.sampled_from(places(name)[1]))
    rows = changed(rows_of(name), place, lambda row: {**row, "type": kind, "text": "SECRET WORDS"})
    try:
        traces, report = read(name, rows)
    except InputError as error:
        assert kind in error.problem
        return
    messages = [message for trace in traces for message in trace.messages]
    assert not any("SECRET" in message.content for message in messages)
    thought = any("SECRET" in message.reasoning for message in messages)
    assert thought or not traces or report.ignored.total() > read(name, rows_of(name))[1].ignored.total()


@settings(max_examples=50)
@given(with_a_tool, st.data(), unknown_keys | st.sampled_from(["schema", "args_schema", "arguments"]))
def test_parameters_under_another_key_are_refused(name: str, data: st.DataObject, key: str) -> None:
    place = data.draw(st.sampled_from(places(name)[2]))
    rename = lambda row: {(key if name == "parameters" else name): value for name, value in row.items()}  # noqa: E731
    with pytest.raises(InputError) as error:
        read(name, changed(rows_of(name), place, rename))
    assert str(error.value.field).endswith(f"].{key}") or key in error.value.problem


@given(with_a_tool, st.data(), st.sampled_from(["input_schema", "inputSchema", "text"]))
def test_a_schema_in_the_form_of_another_api_is_the_schema(name: str, data: st.DataObject, form: str) -> None:
    place = data.draw(st.sampled_from(places(name)[2]))

    def rename(row: dict[str, Any]) -> dict[str, Any]:
        if form == "text":
            return {**row, "parameters": json.dumps(row["parameters"])}
        return {(form if key == "parameters" else key): value for key, value in row.items()}

    traces, _ = read(name, changed(rows_of(name), place, rename))
    assert [trace.tools for trace in traces] == [trace.tools for trace in read(name, rows_of(name))[0]]


schemas = st.sampled_from([
    {"city": {"type": "string"}}, {"city": {"type": "str"}}, "a city", ["city"],
    {"type": "dict", "properties": {}}, {"type": "object", "properties": {"city": "string"}},
    {"type": "object", "properties": {"city": {"type": "int, optional"}}},
    {"type": "object", "properties": {"city": {"type": "array", "items": {"type": "float"}}}},
    {"type": "object", "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "None"}]}}},
])  # fmt: skip


@given(with_a_tool, st.data(), schemas)
def test_parameters_that_are_no_json_schema_are_refused(name: str, data: st.DataObject, schema: Any) -> None:
    place = data.draw(st.sampled_from(places(name)[2]))
    with pytest.raises(InputError) as error:
        read(name, changed(rows_of(name), place, lambda row: {**row, "parameters": schema}))
    assert str(error.value.field).endswith("].function.parameters")


plain = st.sampled_from(["string", "number", "integer", "boolean", "null", ["string", "null"]])
argument_names = st.sampled_from(["type", "title", "properties", "items", "city"])
good_schemas = st.recursive(
    plain.map(lambda kind: {"type": kind}),
    lambda one: (
        st.dictionaries(argument_names, one, max_size=3).map(lambda table: {"type": "object", "properties": table})
        | one.map(lambda item: {"type": "array", "items": item})
    ),
    max_leaves=5,
)


@given(good_schemas)
def test_a_json_schema_is_taken_whatever_its_arguments_are_called(schema: dict[str, Any]) -> None:
    whole = {"type": "object", "properties": {"it": schema}}
    tool = {"type": "function", "function": {"name": "bash", "parameters": whole}}
    [trace], _ = read("openhands", [OPENHANDS | {"tools": [tool]}])
    assert trace.tools == (tool,)


@pytest.mark.parametrize(
    "item",
    [
        {"type": "function_call_output", "call_id": "c", "content": "paid"},
        {"type": "function_call_output", "call_id": "c", "result": "paid"},
        {"type": "message", "role": "user", "text": "Pay Ann"},
    ],
    ids=json.dumps,
)
def test_an_item_whose_words_stand_under_another_key_is_refused_and_not_read_as_empty(item):
    call = {"type": "function_call", "call_id": "c", "name": "pay", "arguments": "{}"}
    said = {"type": "message", "role": "assistant", "content": "Done."}
    asked = {"input": [{"role": "user", "content": "Pay."}]}
    row = {"responses_create_params": asked, "response": {"output": [call, item, said]}, "reward": 1.0}
    with pytest.raises(InputError) as refused:
        imported(FIXTURES["responses"], lines(row))
    assert refused.value.field == "messages[2]"
