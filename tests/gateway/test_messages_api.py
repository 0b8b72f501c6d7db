"""Anthropic's Messages API: the same session in other words, driven by Anthropic's SDK where it is installed."""

from __future__ import annotations

import json

import pytest
from gateway_world import HTTP, World, engine, renderer, spelled, tokenizer, world

from turntree.core.completion import Sampling
from turntree.core.messages import Message

CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
TOOL = {"name": "search", "description": "Search.", "input_schema": {"type": "object", "properties": {}}}
USER = {"role": "user", "content": "What is it?"}
ASKED = {"model": "m", "max_tokens": 256}


def answers(prompt, seed):
    return spelled("It is Oslo." if "a city" in tokenizer().decode(prompt) else f"Let me look.\n{CALL}")


@pytest.fixture(scope="module")
def gate() -> World:
    with world(engine(answers), sampling=Sampling(max_tokens=256)) as served:
        yield served


def ask(gate: World, key: str, path: str = "/v1/messages", **body):
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    return HTTP.post(gate.url + path, json={**ASKED, **body}, headers=headers)


def events(text: str) -> list[dict]:
    lines = [line for line in text.split("\n") if line]
    pairs = zip(lines[::2], lines[1::2], strict=True)
    found = [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in pairs]
    assert all(name == data["type"] for name, data in found)
    return [data for _, data in found]


def rebuilt(stream: list[dict]) -> list[dict]:
    """The blocks that the deltas of a stream add up to."""
    blocks: dict[int, dict] = {}
    for one in stream:
        if one["type"] == "content_block_start":
            assert one["index"] == len(blocks)
            blocks[one["index"]] = dict(one["content_block"])
        if one["type"] == "content_block_delta":
            block, delta = blocks[one["index"]], one["delta"]
            if delta["type"] == "input_json_delta":
                block["input"] = json.loads(delta["partial_json"])
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] = block[key] + delta[key]
    return list(blocks.values())


def test_a_turn_with_a_tool_is_one_conversation_and_its_stream_adds_up_to_the_same_answer(gate):
    opened = gate.open()
    body = {"system": [{"type": "text", "text": "Be brief."}], "tools": [TOOL], "messages": [USER]}
    first = ask(gate, opened["key"], **body).json()
    assert first["stop_reason"] == "tool_use" and first["type"] == "message"
    said, called = first["content"]
    assert said == {"type": "text", "text": "Let me look."}
    assert (called["type"], called["name"], called["input"]) == ("tool_use", "search", {"query": "Oslo"})
    again = ask(gate, opened["key"], **body, stream=True)
    stream = events(again.text)
    assert (stream[0]["type"], stream[-1]["type"]) == ("message_start", "message_stop")
    blocks = rebuilt(stream)
    assert blocks[0] == said and blocks[1] | {"id": ""} == called | {"id": ""}
    assert stream[-2]["delta"]["stop_reason"] == "tool_use" and stream[-2]["usage"]["output_tokens"] > 0
    # the answer comes back with the marks of their caches, and so does what was said before
    marked = {"type": "text", "text": USER["content"], "cache_control": {"type": "ephemeral"}}
    result = {"type": "tool_result", "tool_use_id": called["id"], "content": [{"type": "text", "text": "a city"}]}
    whole = [{"role": "user", "content": [marked]}, {"role": "assistant", "content": first["content"]}]
    whole.append({"role": "user", "content": [{**result, "is_error": False}, {"type": "text", "text": "So?"}]})
    last = ask(gate, opened["key"], **{**body, "messages": whole}).json()
    assert last["content"] == [{"type": "text", "text": "It is Oslo."}] and last["stop_reason"] == "end_turn"
    calls = gate.calls(opened["session"])
    assert [call.cause for call in calls] == ["start", "retry", "continue"]
    assert [(one.role, one.content) for one in calls[-1].added] == [("tool", "a city"), ("user", "So?")]


def test_the_three_dialects_are_one_session(gate):
    """A conversation that is begun in one and gone on with in another is the same conversation."""
    opened = gate.open()
    first = ask(gate, opened["key"], tools=[TOOL], messages=[USER]).json()
    called = first["content"][1]
    function = {"name": "search", "description": "Search.", "parameters": TOOL["input_schema"]}
    made = {"id": called["id"], "type": "function", "function": {"name": "search", "arguments": '{"query": "Oslo"}'}}
    said = {"role": "assistant", "content": "Let me look.", "tool_calls": [made]}
    result = {"role": "tool", "tool_call_id": called["id"], "content": "a city"}
    body = {"messages": [USER, said, result], "tools": [{"type": "function", "function": function}]}
    reply = gate.post("/v1/chat/completions", body, opened["key"]).json()
    assert reply["choices"][0]["message"]["content"] == "It is Oslo."
    assert [call.cause for call in gate.calls(opened["session"])] == ["start", "continue"]


def test_a_thought_goes_out_as_a_block_and_comes_back_as_the_same_answer():
    def thinks(prompt, seed):
        return renderer().completion(Message("assistant", "So it is.", reasoning="Hm, which?"))

    with world(engine(thinks)) as gate:
        opened = gate.open()
        whole = ask(gate, opened["key"], messages=[USER], thinking={"type": "adaptive"}).json()
        assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
        assert whole["content"][0]["thinking"] == "Hm, which?" and whole["content"][0]["signature"]
        stream = events(ask(gate, opened["key"], messages=[USER], stream=True).text)
        assert rebuilt(stream)[0]["thinking"] == "Hm, which?"
        later = [USER, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": "Sure?"}]
        ask(gate, opened["key"], messages=later)
        assert [call.cause for call in gate.calls(opened["session"])] == ["start", "retry", "continue"]


def test_what_a_user_says_in_a_row_and_a_late_system_message_are_one_message_of_the_user(gate):
    opened = gate.open()
    said = [{"role": "user", "content": "Hello."}, {"role": "system", "content": "Mind the step."}, USER]
    assert ask(gate, opened["key"], messages=said).status_code == 200
    (message,) = gate.calls(opened["session"])[0].added
    assert message.content == "Hello.\n\n<system-reminder>\nMind the step.\n</system-reminder>\n\nWhat is it?"


def test_tokens_are_counted_without_a_call(gate):
    opened = gate.open()
    counted = ask(gate, opened["key"], "/v1/messages/count_tokens", messages=[USER], tools=[TOOL]).json()
    assert not gate.calls(opened["session"])
    used = ask(gate, opened["key"], messages=[USER], tools=[TOOL]).json()["usage"]
    assert counted["input_tokens"] == used["input_tokens"] + used["cache_read_input_tokens"]


WRONG = {
    "no key": ({"messages": [USER]}, 401, "authentication_error"),
    "a tool that they know": ({"messages": [USER], "tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, None),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, None),
    "a role": ({"messages": [{"role": "tool", "content": "x"}]}, 400, None),
    "a result of the assistant": (
        {"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}, USER]},
        400,
        None,
    ),
    "a choice of no tool": (
        {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}},
        400,
        None,
    ),
    "no messages": ({"messages": []}, 400, None),
    "an unknown field": ({"messages": [USER], "beam_width": 3}, 400, None),
    "too long a prompt": ({"messages": [{"role": "user", "content": "x " * 9000}]}, 400, None),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_an_error_in_anthropics_form(gate, what):
    body, status, kind = WRONG[what]
    opened = gate.open()
    answer = ask(gate, "none" if what == "no key" else opened["key"], **body)
    assert answer.status_code == status
    told = answer.json()
    assert told["type"] == "error" and set(told["error"]) == {"type", "message"}
    assert told["error"]["type"] == (kind or "invalid_request_error") and "\n" not in told["error"]["message"]
    if what == "too long a prompt":  # the words for which Claude Code looks before it compacts
        assert told["error"]["message"].startswith("prompt is too long")
    assert not gate.calls(opened["session"])


def test_anthropics_sdk_reads_answers_streams_and_errors():
    anthropic = pytest.importorskip("anthropic")
    with world(engine(answers), sampling=Sampling(max_tokens=256)) as gate:
        opened = gate.open()
        client = anthropic.Anthropic(base_url=gate.url, api_key=opened["key"], max_retries=0)
        asked = {"model": "claude", "max_tokens": 256, "tools": [TOOL]}
        first = client.messages.create(messages=[USER], **asked)
        called = next(block for block in first.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": called.id, "content": "a city"}
        later = [USER, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        with client.messages.stream(messages=later, **asked) as stream:
            assert "".join(stream.text_stream) == "It is Oslo."
            assert stream.get_final_message().stop_reason == "end_turn"
        assert client.messages.count_tokens(model="m", messages=[USER]).input_tokens > 0
        assert [model.id for model in client.models.list()] == ["policy"]
        with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
            client.messages.create(messages=[{"role": "user", "content": "x " * 9000}], **asked)
        assert [call.cause for call in gate.calls(opened["session"])] == ["start", "continue"]


def test_what_claude_code_sends_by_default_is_taken(gate):
    """Fields of version 2.1.197; the client itself runs in `make test-agents`."""
    more = {
        "metadata": {"user_id": "u"},
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "max_tokens": 64_000,
        "temperature": 1,
    }
    opened = gate.open()
    answer = ask(gate, opened["key"], "/v1/messages?beta=true", messages=[USER], tools=[TOOL], **more)
    assert answer.status_code == 200, answer.text
    (call,) = gate.calls(opened["session"])
    assert call.meta["context_management"] == more["context_management"] and call.meta["thinking"] == more["thinking"]


def test_a_tool_that_the_server_would_run_is_not_shown_to_the_policy_and_recorded(gate):
    opened = gate.open()
    for path, body in (
        ("/v1/messages", {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}], "messages": [USER]}),
        ("/v1/responses", {"tools": [{"type": "web_search", "external_web_access": True}], "input": "What is it?"}),
    ):
        body = {k: v for k, v in {**ASKED, **body}.items() if k != "max_tokens" or path == "/v1/messages"}
        assert gate.post(path, body, opened["key"]).status_code == 200
    first, second = gate.calls(opened["session"])
    assert (first.meta["hosted_tools"], second.meta["hosted_tools"]) == (["web_search_20250305"], ["web_search"])
    assert [tool["function"]["name"] for tool in first.tools] == ["search"] and not second.tools


def test_a_tool_of_a_namespace_is_called_and_answered_under_both_names():
    """As Codex declares the tools of its sub-agents."""
    call = '<tool_call>\n{"name": "team__close", "arguments": {"id": "a"}}\n</tool_call>'
    says = engine(lambda prompt, seed: spelled("So." if "closed" in tokenizer().decode(prompt) else call))
    inner = {"type": "function", "name": "close", "parameters": {"type": "object"}, "strict": False}
    body = {"model": "m", "tools": [{"type": "namespace", "name": "team", "description": "", "tools": [inner]}]}
    with world(says, sampling=Sampling(max_tokens=256)) as gate:
        opened = gate.open()
        first = gate.post("/v1/responses", {**body, "input": "Go."}, opened["key"]).json()["output"][0]
        assert (first["name"], first["namespace"]) == ("close", "team")
        result = {"type": "function_call_output", "call_id": first["call_id"], "output": "closed"}
        later = [{"role": "user", "content": "Go."}, first, result]
        gate.post("/v1/responses", {**body, "input": later}, opened["key"])
        assert [call.cause for call in gate.calls(opened["session"])] == ["start", "continue"]


def test_whom_claude_code_bills_begins_no_other_conversation(gate):
    """It says so in a block that differs in every request."""
    opened, brief = gate.open(), {"type": "text", "text": "You are brief."}
    said = [USER]
    for turn in range(2):
        bill = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.177; cch={turn:05x};"}
        answer = ask(gate, opened["key"], messages=said, system=[bill, brief], max_tokens=64).json()
        said = [*said, {"role": "assistant", "content": answer["content"]}, USER]
    first, second = gate.calls(opened["session"])
    assert (first.cause, second.cause) == ("start", "continue") and first.messages[0].content == "You are brief."
    assert first.meta["billing"] != second.meta["billing"]
