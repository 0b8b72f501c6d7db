"""A gateway in front of a server of others: nothing changes on the way, and conversations become traces."""

import asyncio
import json

import httpx
import openai
import pytest
from gateway_world import HTTP, SEARCH, engine, spelled, world
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from completions_server import serve as serve_other
from turntree.core.completion import Sampling
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message, ToolCall
from turntree.gateway.server import serving
from turntree.gateway.upstream import REDACTED, Redaction, TraceWriter, Upstream, answers_in
from turntree.traces.candidates import candidates
from turntree.traces.schema import read_traces

USER = {"role": "user", "content": "What is it?"}
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "sk-abcdefghijklmnopqrstuv"}}\n</tool_call>'


def words(prompt, seed):
    return spelled(CALL if seed % 2 else f"it is {seed % 97}")


@pytest.fixture
def place(tmp_path):
    """Another server (a gateway as well) and one in front of it that writes traces: its URL, a key of the server, the
    traces so far."""
    path = tmp_path / "traces.jsonl"
    with world(engine(words), sampling=Sampling(max_tokens=256)) as other:
        upstream = Upstream(f"{other.url}/v1", TraceWriter(path, Redaction([r"\d{4}-\d{4}"])))
        with serving(upstream.app, most=100) as served:
            yield served.url, other, path
        assert not upstream.writer._live


def traces_of(path):
    return list(read_traces(path))


def play(url, key, first="What is it?", *, stream=False, turns=3, prefix=""):
    """What the agent saw: every answer of a conversation of some turns."""
    client = openai.OpenAI(base_url=f"{url}{prefix}/v1", api_key=key, http_client=HTTP, max_retries=0)
    messages, seen = [{"role": "user", "content": first}], []
    for turn in range(turns):
        reply = client.chat.completions.create(model="m", messages=messages, tools=[SEARCH], stream=stream)
        if stream:
            deltas = [chunk.choices[0].delta for chunk in reply if chunk.choices]
            message = {"role": "assistant", "content": deltas[0].content}
            if deltas[0].tool_calls:
                message["tool_calls"] = [call.model_dump(exclude={"index"}) for call in deltas[0].tool_calls]
        else:
            message = reply.choices[0].message.model_dump(exclude_none=True)
        seen.append(message)
        calls = message.get("tool_calls") or []
        told = [{"role": "tool", "tool_call_id": call["id"], "content": "card 1234-5678"} for call in calls]
        messages += [message, *(told or [{"role": "user", "content": f"turn {turn}"}])]
    return seen


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_gets_what_the_server_says_and_its_conversation_is_one_trace(place, stream):
    url, other, _ = place
    first = other.open(seed=1)
    direct = play(other.url, first["key"], stream=stream)
    through = play(url, other.open(seed=1)["key"], stream=stream)
    contents = [message.get("content") or "" for message in direct]
    assert [message.get("content") or "" for message in through] == contents
    assert len(other.calls(first["session"])) == 3


def test_traces_are_written_when_the_gateway_ends_and_pivots_are_found_in_them(tmp_path):
    path = tmp_path / "traces.jsonl"
    with world(engine(words), sampling=Sampling(max_tokens=256)) as other:
        upstream = Upstream(f"{other.url}/v1", TraceWriter(path, Redaction([r"\d{4}-\d{4}"])))
        with serving(upstream.app, most=100) as served:
            whole = play(served.url, other.open(seed=2)["key"], "one")
            play(served.url, other.open(seed=3)["key"], "two", stream=True)
    one, two = sorted(read_traces(path), key=lambda trace: trace.messages[0].content)
    assert [len(trace.turn_positions) for trace in (one, two)] == [3, 3]
    calls = [len(message.get("tool_calls") or []) for message in whole]
    assert [len(one.messages[i].tool_calls) for i in one.turn_positions] == calls
    assert one.tools == (SEARCH,) and one.split is not None
    assert list(candidates(one))
    text = path.read_text()
    assert "Bearer" not in text and "1234-5678" not in text and "sk-abc" not in text and REDACTED in text


def test_a_conversation_that_forks_gives_a_trace_for_every_end(tmp_path):
    path, clock = tmp_path / "traces.jsonl", [0.0]
    writer = TraceWriter(path, Redaction(), idle=10.0, clock=lambda: clock[0])
    said = {"role": "assistant", "content": "a"}
    writer.call("s", {"messages": [USER]}, [said])
    writer.call("s", {"messages": [USER, said, USER]}, [{"role": "assistant", "content": "b"}])
    writer.call("other", {"messages": [USER]}, [said, {"role": "assistant", "content": "c", "finish_reason": "length"}])
    assert not traces_of(path)
    clock[0] = 11.0
    writer.flush()
    found = [[message.content for message in trace.messages] for trace in traces_of(path)]
    assert found == [["What is it?", "a", "What is it?", "b"], ["What is it?", "a"], ["What is it?", "c"]]
    assert len({trace.id for trace in traces_of(path)}) == 3
    assert [trace.meta.get("skip_turns") for trace in traces_of(path)] == [None, None, {"0": "cut"}]
    assert len({trace.split for trace in traces_of(path)}) == 1  # of one task


def test_a_turn_that_the_token_limit_cut_stays_marked_in_every_conversation_that_goes_on_from_it(tmp_path):
    path, clock = tmp_path / "traces.jsonl", [0.0]
    writer = TraceWriter(path, Redaction(), idle=10.0, clock=lambda: clock[0])
    said = {"role": "assistant", "content": "cut answ"}
    writer.call("s", {"messages": [USER]}, [said | {"finish_reason": "length"}])
    for clock[0], text in ((0.0, "one"), (0.0, "a retry"), (99.0, "long after")):
        writer.flush()
        writer.call("s", {"messages": [USER, said, USER]}, [{"role": "assistant", "content": text}])
    writer.call("other", {"messages": [USER, said, USER]}, [{"role": "assistant", "content": "of another session"}])
    writer.flush(everything=True)
    found = {trace.messages[-1].content: trace.meta.get("skip_turns") for trace in traces_of(path)}
    marked = {text: {"0": "cut"} for text in ("one", "a retry", "long after")}
    assert found == marked | {"of another session": None}


def test_cut_turns_that_are_forgotten_are_counted(tmp_path):
    writer = TraceWriter(tmp_path / "traces.jsonl", Redaction(), most=1)
    for text in ("a", "b"):
        writer.call("s", {"messages": [USER]}, [{"role": "assistant", "content": text, "finish_reason": "length"}])
    assert writer.counts["cut turns forgotten"] == 1


def streamed(*deltas):
    chunks = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks[-1]["choices"][0]["finish_reason"] = "stop"
    lines = [f"data: {json.dumps(chunk, ensure_ascii=False)}\r\n\r\n" for chunk in chunks]
    [answer] = answers_in("".join([*lines, "data: [DONE]\n\n"]).encode(), streamed=True)
    return answer


def test_a_thought_that_a_stream_says_under_two_names_is_kept_once():
    parts = [{"reasoning": text, "reasoning_content": text} for text in ("Let me ", "look.")]
    assert streamed(*parts, {"reasoning": " Now.", "reasoning_content": ""})["reasoning_content"] == "Let me look. Now."


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_a_line_separator_inside_a_streamed_text_is_text(mark):
    assert streamed({"content": f"a{mark}b"}, {"content": "c"})["content"] == f"a{mark}bc"


def part_of(index, call_id, name, arguments):
    return {"tool_calls": [{"index": index, "id": call_id, "function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("second", [0, 1])
def test_parallel_calls_of_a_stream_are_calls_of_their_own_whatever_their_index(second):
    begun = [part_of(0, "a", "f", '{"x":'), part_of(0, None, None, " 1}"), part_of(second, "b", "g", '{"y":')]
    calls = streamed(*begun, part_of(second, "", "", " 2}"))["tool_calls"]
    found = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls]
    assert found == [("a", "f", '{"x": 1}'), ("b", "g", '{"y": 2}')]


def test_an_id_that_only_changes_begins_no_call():
    [call] = streamed(part_of(0, "a", "f", '{"x":'), part_of(0, "b", None, " 1}"))["tool_calls"]
    assert call == {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}}


def test_what_is_no_conversation_passes_and_is_counted(tmp_path):
    writer = TraceWriter(tmp_path / "t.jsonl", Redaction())
    with serve_other(lambda request: (200, {"choices": "none"}) if "messages" in request else 429) as other:
        upstream = Upstream(other.url, writer)
        with serving(upstream.app, most=100) as served:
            replies = [
                HTTP.post(f"{served.url}/v1/chat/completions", json={"messages": "?"}),
                HTTP.post(f"{served.url}/v1/embeddings", json={"input": "x"}),
                HTTP.post(f"{served.url}/v1/a/../../secret", json={}),
            ]
    assert [reply.status_code for reply in replies[:2]] == [200, 429]
    assert replies[0].json() == {"choices": "none"}
    assert {"passed: 429", "not traced: InputError"} <= set(writer.counts)


def test_a_conversation_that_no_trace_can_hold_is_counted_and_spoils_no_other(tmp_path):
    def answered(arguments, call_id="1"):
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": call_id, "function": {"name": "f", "arguments": arguments}}],
        }

    said = {"role": "assistant", "content": "done"}
    odd = [
        ({}, answered('{"x": "\\ud83d"}')),
        ({}, answered("{}", call_id=5)),
        ({}, answered('{"x": ' + "[" * 150 + "]" * 150 + "}")),
        ({"tools": ["f"]}, said),
    ]
    path = tmp_path / "traces.jsonl"
    writer = TraceWriter(path, Redaction())
    for number, (more, answer) in enumerate([*odd, ({}, said)]):
        writer.call(f"s{number}", {"messages": [USER], **more}, [answer])
    writer.flush(everything=True)
    assert sum(count for why, count in writer.counts.items() if why.startswith("not traced")) == len(odd)
    assert [trace.messages[1].content for trace in read_traces(path)] == ["done"]


@pytest.mark.parametrize("ends", [True, False])
def test_a_client_may_leave_with_the_event_that_ends_a_stream(tmp_path, ends):
    """As openai's does; the connection to the server is still open then. One that leaves earlier has no answer."""

    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "it is 7"}}]}\n\n'
            if ends:
                yield b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\n'
                yield b"data: [DONE]\n\n"
            await asyncio.Event().wait()

    headers = {"content-type": "text/event-stream"}
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=Stream()))
    writer = TraceWriter(tmp_path / "t.jsonl", Redaction())
    with serving(Upstream("http://other/v1", writer, transport=transport).app, most=100) as served:
        asked = {"json": {"messages": [USER], "stream": True}, "timeout": 10}
        with HTTP.stream("POST", f"{served.url}/v1/chat/completions", **asked) as response:
            last = "[DONE]" if ends else "it is 7"
            assert any(last in line for line in response.iter_lines())
    traces = traces_of(tmp_path / "t.jsonl") if ends else []
    assert [trace.messages[-1].content for trace in traces] == (["it is 7"] if ends else [])
    assert writer.counts["not traced: the answer was cut off"] == (0 if ends else 1)


@pytest.mark.parametrize("then", [b'data: {"error": {"message": "engine died", "code": 500}}\n\n', b""])
def test_an_answer_that_a_failure_of_the_server_ended_is_not_traced_and_counted(tmp_path, then):
    class Stream(httpx.AsyncByteStream):
        async def __aiter__(self):
            yield content

    said = b'data: {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "It is"}}]}\n\n'
    headers = {"content-type": "text/event-stream"}
    content = said + then + b"data: [DONE]\n\n"
    transport = httpx.MockTransport(lambda request: httpx.Response(200, headers=headers, stream=Stream()))
    writer = TraceWriter(tmp_path / "t.jsonl", Redaction())
    with serving(Upstream("http://other/v1", writer, transport=transport).app, most=100) as served:
        assert HTTP.post(f"{served.url}/v1/chat/completions", json={"messages": [USER]}).content == content
    assert traces_of(tmp_path / "t.jsonl") == []
    assert writer.counts["not traced: ServerFailed"] == 1


def test_a_request_that_is_repeated_keeps_no_other_trace_waiting_and_is_counted(tmp_path):
    path, clock = tmp_path / "traces.jsonl", [0.0]
    writer = TraceWriter(path, Redaction(), idle=10.0, clock=lambda: clock[0])
    said = {"role": "assistant", "content": "pong"}
    writer.call("", {"messages": [USER]}, [said])
    writer.call("s", {"messages": [USER]}, [said])
    for clock[0] in (6.0, 12.0):
        writer.call("", {"messages": [USER]}, [said])
    assert [trace.meta.get("session") for trace in traces_of(path)] == ["s"]
    assert writer.counts["not traced: the same was said again"] == 2


def test_a_server_that_is_gone_is_told_in_openais_form(tmp_path):
    upstream = Upstream("http://127.0.0.1:9/v1", TraceWriter(tmp_path / "t.jsonl", Redaction()))
    with serving(upstream.app, most=100) as served:
        response = HTTP.post(f"{served.url}/v1/chat/completions", json={"messages": [USER]})
    assert (response.status_code, response.json()["error"]["type"]) == (502, "server_error")


@pytest.mark.parametrize(
    "key",
    [
        *(f"gh{kind}_16C7e42F292c6912E7710c838347Ae178B4a" for kind in "oprsu"),
        "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ",
        "sk-proj-abcdefghijklmnop1234",
        "AIzaSyA-1234567890abcdefghijklmnopqrstu",
        "AKIAIOSFODNN7EXAMPLE",
        "ASIAIOSFODNN7EXAMPLE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
        "eyJhbGciOiJkaXIiLCJlbmMiOiJBMjU2R0NNIn0..48V1_ALb6US04U3b.5eym8TW_c8SuK0ltJ3rpYI.XFBoMYUZodetZdvT",
    ],
)
def test_keys_of_common_shapes_are_not_written(key):
    assert Redaction().text(f'KEY="{key}" # {key}') == f'KEY="{REDACTED}" # {REDACTED}'


def test_numbers_and_names_of_calls_are_redacted_too():
    call = ToolCall("pay", {"card": 4111111111111111, "cents": 4}, id="customer-77")
    messages = Message("assistant", "", (call,)), Message("tool", "Paid.", tool_call_id="customer-77")
    made, told = map(Redaction([r"\d{16}", r"customer-\d+"]).message, messages)
    assert made.tool_calls[0].arguments == {"card": REDACTED, "cents": 4}
    assert made.tool_calls[0].id == told.tool_call_id == REDACTED


def test_a_rule_that_is_no_regular_expression_and_a_url_that_is_none_are_refused(tmp_path):
    with pytest.raises(InputError, match="regular expression"):
        Redaction(["("])
    with pytest.raises(InputError, match="not a URL"):
        Upstream("api.example.com", TraceWriter(tmp_path / "t.jsonl", Redaction()))


def test_a_full_disk_is_in_nobodys_way_and_what_waits_is_written_when_there_is_room(tmp_path, monkeypatch):
    path, full = tmp_path / "traces.jsonl", [True]
    writer = TraceWriter(path, Redaction(), idle=0.0, most=2)
    append = writer._append

    def fails_at_first(row):
        if full:
            raise TurntreeError("the disk is full")
        append(row)

    monkeypatch.setattr(writer, "_append", fails_at_first)
    with world() as other, serving(Upstream(f"{other.url}/v1", writer).app, most=100) as served:
        for first in ("one", "two", "three"):
            assert play(served.url, other.open()["key"], first, turns=1)
        full.clear()
    assert [trace.messages[0].content for trace in traces_of(path)] == ["two", "three"]
    assert writer.counts["not traced: the disk is full"] == 1


def test_as_many_agents_as_ask_are_served_at_once(tmp_path):
    """The client's own pool holds 100 connections; the others would wait in it."""
    count, came = 101, asyncio.Event()
    asked = []

    async def answer(request):
        asked.append(request)
        if len(asked) == count:
            came.set()
        await asyncio.wait_for(came.wait(), 20)
        return JSONResponse({"choices": []})

    async def all_at_once(url):
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=30, limits=limits, trust_env=False) as client:
            sent = (client.post(f"{url}/v1/chat/completions", json={"messages": [USER]}) for _ in range(count))
            return [answer.status_code for answer in await asyncio.gather(*sent)]

    there = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    with serving(there, most=1000) as other:
        upstream = Upstream(f"{other.url}/v1", TraceWriter(tmp_path / "traces.jsonl", Redaction()))
        with serving(upstream.app, most=1000) as served:
            assert asyncio.run(all_at_once(served.url)) == [200] * count


@pytest.mark.parametrize("more", [{"refusal": "I cannot."}, {"function_call": {"name": "f", "arguments": "{}"}}])
@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_no_trace_has_a_place_for_is_no_empty_turn(tmp_path, more, streamed):
    choice = {"index": 0, "finish_reason": "stop", "delta" if streamed else "message": {"content": None, **more}}
    body = json.dumps({"choices": [choice]})
    answers = answers_in(f"data: {body}\n\ndata: [DONE]\n".encode() if streamed else body.encode(), streamed=streamed)
    writer = TraceWriter(tmp_path / "traces.jsonl", Redaction())
    writer.call("s", {"messages": [USER]}, [{"role": "assistant", **one} for one in answers])
    assert writer.counts == {"not traced: no conversation of texts": 1}


def test_a_path_and_headers_pass_as_they_were_written(tmp_path):
    seen = []

    async def other(request):
        seen.append((request.scope["raw_path"], request.scope["query_string"], request.headers.getlist("x-a")))
        answer = JSONResponse({})
        answer.raw_headers += [(b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        return answer

    app = Starlette(routes=[Route("/v1/{path:path}", other)])
    with (
        serving(app, most=10) as server,
        serving(Upstream(f"{server.url}/v1", TraceWriter(tmp_path / "t.jsonl", Redaction())).app, most=10) as front,
    ):
        url = f"{front.url}/v1/models/meta%2Fllama%3Fx?a=%26&a=2"
        answer = HTTP.get(url, headers=[("x-a", "1"), ("x-a", "2")])
    assert seen == [(b"/v1/models/meta%2Fllama%3Fx", b"a=%26&a=2", ["1", "2"])]
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
