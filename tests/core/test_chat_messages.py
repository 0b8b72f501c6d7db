"""Chat messages in the field's standard shape; whatever is not understood is refused by name, never dropped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree.core.messages import ROLES, Message, ToolCall

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
        ({"content": "hello"}, "field 'role': unknown role None; use one of system, user, assistant, tool"),
        ({"role": "robot"}, "field 'role': unknown role 'robot'"),
        ({"role": "user", "content": 3}, "field 'content': is neither text nor null"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "field 'content': holds a part that is not text"),
        ({"role": "assistant", "tool_calls": {"name": "go"}}, "field 'tool_calls': is not a list"),
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
