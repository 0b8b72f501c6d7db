"""Tool calls are found where they are whole, and nothing else is ever touched."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiny_models import tiny_tokenizer
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.render.template import ChatRenderer
from turntree.render.tool_calls import TAGS, detect_format, in_text, parse_message

LOOK = '{"name": "look", "arguments": {"at": "map"}}'
CALL = ToolCall("look", {"at": "map"})


def text(content: str) -> Message:
    return Message("assistant", content)


def calls(content: str, *found: ToolCall) -> Message:
    return Message("assistant", content, found)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (f"<tool_call>\n{LOOK}\n</tool_call>", calls("", CALL)),
        (f"<tool_call>{LOOK}</tool_call>", calls("", CALL)),
        (f"I look.\n<tool_call>\n{LOOK}\n</tool_call>", calls("I look.", CALL)),
        (f"I look.\n\nThere.\n<tool_call>{LOOK}</tool_call>\n", calls("I look.\n\nThere.", CALL)),
        (f"Before.\n<tool_call>{LOOK}</tool_call>\nAfter.", calls("Before.\nAfter.", CALL)),
        (f"<tool_call>{LOOK}</tool_call>\n<tool_call>{LOOK}</tool_call>", calls("", CALL, CALL)),
        ('<tool_call>{"name": "wait", "arguments": {}}</tool_call>', calls("", ToolCall("wait", {}))),
        (
            '<tool_call>{"name": "f", "parameters": {"x": [1, null]}}</tool_call>',
            calls("", ToolCall("f", {"x": [1, None]})),
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', calls("", ToolCall("f", {"x": 1}))),
    ],
)
def test_hermes_calls_are_found(sampled: str, message: Message) -> None:
    assert parse_message(sampled, "hermes") == message


@pytest.mark.parametrize(
    "sampled",
    [
        "Go left.",
        "  white space stays \n",
        LOOK,
        f"<tool_call>{LOOK}",
        f"{LOOK}</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>look at map</tool_call>",
        '<tool_call>{"name": "look"}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "look", "arguments": "map"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {}, "parameters": {}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": 1e999}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": ' + "[" * 60 + "]" * 60 + "}}</tool_call>",
        '<tool_call>{"name": "look", "arguments": "{\\"at\\": [-1e999]}"}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": "\\ud800"}}</tool_call>',
        '<tool_call>{"name": "look", "arguments": {"at": ' + "9" * 5000 + "}}</tool_call>",
        '<tool_call>{"name": "look", "arguments": {"at": ' + "[" * 100_000 + "}}</tool_call>",
        f"[{LOOK}]",
    ],
)
def test_what_is_no_whole_call_stays_text(sampled: str) -> None:
    assert parse_message(sampled, "hermes") == text(sampled)


def test_one_broken_call_makes_the_turn_text() -> None:
    """Half of what the policy meant must not be executed."""
    for other in ("<tool_call>{</tool_call>", f"<tool_call>{LOOK}"):
        sampled = f"<tool_call>{LOOK}</tool_call>\n{other}"
        assert parse_message(sampled, "hermes") == text(sampled)


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        (LOOK, calls("", CALL)),
        (f" {LOOK}\n", calls("", CALL)),
        ('{"name": "look", "parameters": {"at": "map"}}', calls("", CALL)),
        ('{"name": "Ada"}', text('{"name": "Ada"}')),
        (f"I look: {LOOK}", text(f"I look: {LOOK}")),
        (f"{LOOK}{LOOK}", text(f"{LOOK}{LOOK}")),
        (f"<tool_call>{LOOK}</tool_call>", text(f"<tool_call>{LOOK}</tool_call>")),
    ],
)
def test_a_bare_object_is_a_call_when_it_is_the_whole_turn(sampled: str, message: Message) -> None:
    assert parse_message(sampled, "json") == message


@given(st.text())
def test_without_a_format_everything_is_text(sampled: str) -> None:
    assert parse_message(sampled, "none") == text(sampled)


@given(st.text(alphabet='<>/tool_cal{}"name:rgumts, \n\\u0'), st.sampled_from(["hermes", "json"]))
def test_no_text_breaks_the_parser(sampled: str, tool_format: str) -> None:
    message = parse_message(f"<tool_call>{sampled}</tool_call>{sampled}", tool_format)
    assert message.role == "assistant"


@pytest.mark.parametrize(
    ("template", "tool_format"),
    [
        ("{{ '<tool_call>' }}{{ message.tool_calls }}", "hermes"),
        ("{{ message.tool_calls }}", "json"),
        ("{{ message.content }}", "none"),
    ],
)
def test_the_format_is_found_in_the_template(template: str, tool_format: str) -> None:
    assert detect_format(template) == tool_format


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("[look(at='map')]", [("look", {"at": "map"})]),
        ("[look(at='a \\'b\\' \\\\ \\n'), go()]", [("look", {"at": "a 'b' \\ \n"}), ("go", {})]),
        ("[look(n=-2, f=1.5, deep=True, z=None)]", [("look", {"n": -2, "f": 1.5, "deep": True, "z": None})]),
        (
            '[look(l=[1, "x", null, true], o={"a": {"b": []}})]',
            [("look", {"l": [1, "x", None, True], "o": {"a": {"b": []}}})],
        ),
        ("[shop.look(at='two\nlines')]", [("shop.look", {"at": "two\nlines"})]),
    ],
)
def test_calls_in_the_manner_of_python_are_read(text: str, calls: list[Any]) -> None:
    read = parse_message(f"I look.<|tool_call_start|>{text}<|tool_call_end|>", "pythonic")
    assert [(call.name, call.arguments) for call in read.tool_calls] == calls
    assert read.content == "I look."


_NO_CALLS = (
    "[look('map')] [look(at=open('x'))] [look(**{})] look(at='map') [1] [look(at= [] [look(at=b'x')] [look(at={1:2})]"
)


@pytest.mark.parametrize("text", [*_NO_CALLS.split(), "[look(at=float)]", "[" * 3000])
def test_what_is_no_list_of_calls_with_literal_arguments_stays_text(text: str) -> None:
    said = f"<|tool_call_start|>{text}<|tool_call_end|>"
    assert parse_message(said, "pythonic") == Message("assistant", said)


def test_the_form_of_lfm2_is_seen_in_its_template() -> None:
    assert detect_format("{{- '<|tool_call_start|>[' -}}") == "pythonic"


# the words of Tool-Star and ARPO, and of ReAct

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="<>"), max_size=30)


@given(thought=PLAIN, name=st.sampled_from([*TAGS]), value=PLAIN)
def test_a_tagged_call_is_read_as_it_is_written(thought: str, name: str, value: str) -> None:
    message = Message("assistant", thought, (ToolCall(name, {TAGS[name]: value}),))
    written = in_text(message, "tags")
    assert written.content == f"{thought}<{name}>{value}</{name}>" and not written.tool_calls
    assert parse_message(written.content, "tags") == message


@pytest.mark.parametrize(
    "sampled",
    [
        "<answer>4</answer>",
        "<search>a</search> and so on",
        "<search>a",
        "<search>a</python>",
        "<search>a</search><python>b</python> c",
        "<search><search>a</search></search>",
        "<browse>a</browse>",
    ],
)
def test_a_turn_that_does_not_end_with_one_whole_tag_is_text(sampled: str) -> None:
    assert parse_message(sampled, "tags") == Message("assistant", sampled)


def test_results_are_the_users_between_their_tags_and_other_calls_have_no_tag() -> None:
    assert in_text(Message("tool", "42", tool_call_id="1"), "tags") == Message("user", "<result>\n42\n</result>")
    two = (ToolCall("search", {"query": "a"}),) * 2
    for calls_ in ((ToolCall("look", {"at": "map"}),), two, (ToolCall("search", {"q": "a"}),)):
        with pytest.raises(InputError, match="cannot be written as tags"):
            in_text(Message("assistant", "", calls_), "tags")


def test_an_action_is_the_rest_of_its_first_line_and_what_stands_before_it_is_thought() -> None:
    """Appendix F: "Thought: ... Action: <action>"."""
    sampled = "Thought: the fridge.\nAction: go to fridge 1 \nObservation: It is open.\nAction: look"
    read = parse_message(sampled, "react")
    assert read == Message("assistant", "Thought: the fridge.\n", (ToolCall("act", {"command": "go to fridge 1"}),))
    assert in_text(read, "react").content == "Thought: the fridge.\nAction: go to fridge 1"
    assert parse_message("Thought: no action", "react") == Message("assistant", "Thought: no action")
    assert in_text(Message("tool", "It is open."), "react") == Message("user", "It is open.")


@pytest.mark.parametrize("tool_format", ["tags", "react"])
def test_a_tool_loop_in_these_words_grows_turn_by_turn_and_its_results_are_never_the_policys(tool_format) -> None:
    name, value = ("search", {"query": "a"}) if tool_format == "tags" else ("act", {"command": "look"})
    loop = [
        Message("user", "q"),
        Message("assistant", "t\n", (ToolCall(name, value),)),
        Message("tool", "r"),
        Message("assistant", "b"),
    ]
    renderer = ChatRenderer(tiny_tokenizer(), tool_format=tool_format)
    said = renderer.completion(loop[1])
    assert renderer.parse(said) == loop[1]
    grown = (*renderer.prompt(loop[:1]), *said, *renderer.extend(loop[:2], loop[2:3]))
    assert grown == renderer.prompt(loop[:3])


def test_a_list_of_calls_may_have_lines_and_a_line_may_go_on() -> None:
    made = _pythonic("[look(at='map'),\n look(at='door')]")
    assert [call.arguments for call in made] == [{"at": "map"}, {"at": "door"}]
    (run,) = _pythonic("[run(command='docker run \\\n  img')]")
    assert run.arguments == {"command": "docker run   img"}
    (told,) = _pythonic("[say(text='two\nlines')]")
    assert told.arguments == {"text": "two\nlines"}


def _pythonic(text: str) -> tuple[ToolCall, ...]:
    return parse_message(f"<|tool_call_start|>{text}<|tool_call_end|>", "pythonic").tool_calls


def test_a_call_that_was_not_opened_makes_the_turn_text() -> None:
    call = '{"name": "look", "arguments": {}}'
    sampled = f"<tool_call>\n{call}\n</tool_call>\n{call}\n</tool_call>"
    assert parse_message(sampled, "hermes") == Message("assistant", sampled)
