"""Chat messages in the field's standard shape; whatever is not understood is refused by name, never dropped."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree.core.messages import ROLES, Message, ToolCall

# keys of calls and parts that have a meaning, or none for the words (`messages._BESIDE`)
KNOWN = (
    *("id", "type", "index", "function", "name", "arguments", "text", "cache_control", "cache_prompt", "annotations"),
    *("logprobs", "citations", "signature", "extra_content", "parsed_arguments", "provider_specific_fields"),
    "prompt_cache_breakpoint",
)
values = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=4), st.lists, max_leaves=4)
calls = st.builds(ToolCall, st.text(min_size=1), st.dictionaries(st.text(), values), st.none() | st.text(min_size=1))
messages = st.builds(
    Message,
    role=st.sampled_from(ROLES),
    content=st.text(),
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    tool_call_id=st.none() | st.text(),
    name=st.none() | st.text(),
)
unknown_keys = st.text(min_size=1, max_size=50).filter(lambda key: key not in KNOWN)
json_objects = st.dictionaries(st.text(max_size=8), values, max_size=2)


@given(messages)
def test_chat_and_back(message: Message) -> None:
    assert Message.from_chat(message.to_chat()) == message


def test_absent_fields_are_left_out() -> None:
    assert Message("user", "hi").to_chat() == {"role": "user", "content": "hi"}
    assert Message.from_chat({"role": "assistant", "content": None, "tool_calls": None}) == Message("assistant")


def test_arguments_may_be_an_object_its_json_text_or_absent() -> None:
    for arguments in ({"q": 1}, '{"q": 1}'):
        call = {"function": {"name": "search", "arguments": arguments}, "id": "c1"}
        chat = {"role": "assistant", "tool_calls": [call]}
        assert Message.from_chat(chat).tool_calls == (ToolCall("search", {"q": 1}, "c1"),)
    empty = {"function": {"name": "look", "arguments": ""}}
    for call in ({"name": "look"}, {"name": "look", "arguments": None}, empty):
        chat = {"role": "assistant", "tool_calls": [call]}
        assert Message.from_chat(chat).tool_calls == (ToolCall("look", {}),)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert Message.from_chat({"role": "user", "content": parts}).content == "one two"


@pytest.mark.parametrize(
    ("chat", "line"),
    [
        ("hello", "field 'messages': is not an object"),
        ({"content": "hello"}, "field 'role': is missing; use one of system, user, assistant, tool"),
        ({"role": "human"}, "field 'role': unknown role 'human'; write 'user' for it"),
        ({"role": "ai"}, "field 'role': unknown role 'ai'; write 'assistant' for it"),
        ({"role": "robot"}, "field 'role': unknown role 'robot'"),
        ({"role": "user", "content": 3}, "field 'content': is neither text nor null"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "field 'content': holds a part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "thinking", "text": "x"}]}, "field 'content': holds a part of type 't"),
        ({"role": "user", "content": ["x"]}, "field 'content': holds a part 'x' that is not text"),
        (
            {"role": "assistant", "tool_calls": [{"type": "custom", "name": "go"}]},
            "field 'tool_calls': holds a call of",
        ),
        ({"role": "assistant", "tool_calls": {"name": "go"}}, "field 'tool_calls': is not a list"),
        ({"role": "tool", "tool_call_id": 7}, "field 'tool_call_id': is int, not text; quote it"),
        (
            {"role": "assistant", "tool_calls": [{"id": 7, "function": {"name": "go"}}]},
            "field 'tool_calls[0].id': is int, not text; quote it",
        ),
        ({"role": "assistant", "tool_calls": ["go"]}, "field 'tool_calls': has no function name"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "field 'tool_calls': has no function name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": '{"to": '}}]},
            "field 'tool_calls.arguments': the arguments of 'go' are not JSON (Expecting value at character 7)",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": "[1]"}}]},
            "field 'tool_calls.arguments': the arguments of 'go' are not an object",
        ),
        *(
            (
                {"role": "assistant", "tool_calls": [{"function": {"name": "go", "arguments": f'{{"to": {number}}}'}}]},
                f"field 'tool_calls.arguments': the arguments of 'go' are not JSON ({number} is not a JSON number)",
            )
            for number in ("NaN", "-Infinity", "1e999")
        ),
    ],
)
def test_what_is_wrong_is_named(chat, line: str) -> None:
    with pytest.raises(InputError) as error:
        Message.from_chat(chat)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_by_all_its_names_and_written_by_one(key: str) -> None:
    message = Message.from_chat({"role": "assistant", "content": "Left.", key: "Which way?"})
    assert message.reasoning == "Which way?"
    assert message.to_chat() == {"role": "assistant", "content": "Left.", "reasoning_content": "Which way?"}


def test_reasoning_that_is_no_text_is_refused_by_its_name() -> None:
    with pytest.raises(InputError, match="field 'thinking': is neither text nor null"):
        Message.from_chat({"role": "assistant", "content": "", "thinking": {"signature": "x"}})


def call_with(**keys) -> dict:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "pay", **keys}}]}


@pytest.mark.parametrize("strict", [True, False])
@given(
    unknown_keys,
    st.sampled_from([None, "", "{}", {}]),
    json_objects,
)
def test_arguments_under_another_key_are_never_empty_arguments(strict: bool, key: str, empty, held: dict) -> None:
    with pytest.raises(InputError) as error:
        Message.from_chat(call_with(arguments=empty, **{key: held}), strict=strict)
    assert error.value.field == f"tool_calls.{key}"


@pytest.mark.parametrize("strict", [True, False])
def test_what_a_client_parsed_stands_beside_arguments_not_for_them(strict: bool) -> None:
    parsed = {"to": "Ann"}
    read = Message.from_chat(call_with(arguments='{"to": "Ann"}', parsed_arguments=parsed), strict=strict)
    assert read.tool_calls == (ToolCall("pay", parsed),)
    for nothing in (None, {}):
        read = Message.from_chat(call_with(arguments="{}", parsed_arguments=nothing), strict=strict)
        assert read.tool_calls == (ToolCall("pay", {}),)
    with pytest.raises(InputError) as error:
        Message.from_chat(call_with(arguments="{}", parsed_arguments=parsed), strict=strict)
    assert error.value.field == "tool_calls.parsed_arguments"


@given(
    unknown_keys,
    st.dictionaries(st.text(max_size=8), values, min_size=1, max_size=2),
)
def test_what_is_unknown_in_a_call_or_a_part_is_refused_or_counted(key: str, held: dict) -> None:
    whole = call_with(arguments={"to": "Ann"}, **{key: held}) | {"content": [{"type": "text", "text": "x", key: held}]}
    with pytest.raises(InputError, match="unknown key"):
        Message.from_chat(whole)
    ignored: Counter[str] = Counter()
    read = Message.from_chat(whole, ignored, strict=False)
    assert (read.content, read.tool_calls) == ("x", (ToolCall("pay", {"to": "Ann"}),))
    assert ignored == {f"unknown key content[].{key}": 1, f"unknown key tool_calls[].{key}": 1}


@given(st.sampled_from(["reasoning", "thinking", "document", "image"]) | st.text(min_size=1), st.sampled_from(ROLES))
def test_the_words_of_a_part_that_is_not_text_are_never_content(kind: str, role: str) -> None:
    assume(kind not in ("text", "input_text", "output_text"))
    parts = [{"type": kind, "text": "SECRET"}, {"type": "text", "text": "51"}]
    try:
        read = Message.from_chat({"role": role, "content": parts})
    except InputError as error:
        assert error.field == "content"
    else:
        assert (read.role, read.content, read.reasoning) == ("assistant", "51", "SECRET")


@given(st.text(max_size=8), json_objects, json_objects)
def test_arguments_that_say_a_key_twice_are_refused_at_any_depth(key: str, one: dict, two: dict) -> None:
    name = json.dumps(key)
    twice = f"{{{name}: {json.dumps(one)}, {name}: {json.dumps(two)}}}"
    for text in (twice, f'{{"deep": [{twice}]}}'):
        with pytest.raises(InputError, match="stands in one object twice"):
            Message.from_chat(call_with(arguments=text))


def test_arguments_that_were_encoded_twice_are_refused_with_what_they_are() -> None:
    with pytest.raises(InputError, match="JSON text inside JSON text"):
        Message.from_chat(call_with(arguments=json.dumps(json.dumps({"to": "Ann"}))))
