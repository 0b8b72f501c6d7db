"""The gateway over HTTP: what agents get, and what hostile or broken ones are told."""

import asyncio
import itertools
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from gateway_world import ADMIN, HTTP, SEARCH, World, engine, spelled, tokenizer, user, world
from random_sessions import sequence_of
from starlette.applications import Starlette

from turntree.core.completion import GenerationRequest, Sampling
from turntree.core.errors import TurntreeError
from turntree.gateway.config import GatewayLimits
from turntree.gateway.sampling import Ask, EngineDriver
from turntree.gateway.server import listening, server_of
from turntree.render.template import ChatRenderer

MESSAGES = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def gate() -> World:
    with world() as served:
        yield served


def test_an_agent_of_the_openai_sdk_talks_turn_by_turn_and_nothing_is_tokenised_twice(gate):
    opened = gate.open()
    client, messages = gate.client(opened["key"]), list(MESSAGES)
    for _ in range(3):
        reply = client.chat.completions.create(model="any", messages=messages)
        messages += [reply.choices[0].message, {"role": "user", "content": "And now?"}]
    calls = gate.calls(opened["session"])
    assert [call.cause for call in calls] == ["start", "continue", "continue"]
    for before, after in itertools.pairwise(calls):
        assert after.prompt_ids[: len(sequence_of(before))] == sequence_of(before)
    assert reply.usage.prompt_tokens == len(calls[-1].prompt_ids)
    assert reply.choices[0].message.content == tokenizer().decode(calls[-1].completion.token_ids[:-1])


def test_a_stream_says_what_the_answer_would(gate):
    whole, streamed = gate.open(seed=5), gate.open(seed=5)
    reply = gate.client(whole["key"]).chat.completions.create(model="m", messages=MESSAGES)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(gate.client(streamed["key"]).chat.completions.create(model="m", messages=MESSAGES, **options))
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert said == reply.choices[0].message.content
    assert chunks[-1].usage == reply.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_a_stream_has_the_logprobs_that_the_answer_would(gate):
    whole, streamed = gate.open(seed=5), gate.open(seed=5)
    asked = {"model": "m", "messages": MESSAGES, "logprobs": True}
    reply = gate.client(whole["key"]).chat.completions.create(**asked)
    chunks = gate.client(streamed["key"]).chat.completions.create(**asked, stream=True)
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.logprobs]
    found = {choice.index: choice.logprobs.model_dump() for choice in choices}
    assert found == {choice.index: choice.logprobs.model_dump() for choice in reply.choices}
    assert len(found) == len(choices) == 1 and all(scores["content"] for scores in found.values())


def test_tool_calls_are_called_with_ids_by_which_their_results_come_back():
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
    with world(engine(lambda prompt, seed: spelled(call)), sampling=Sampling(max_tokens=256)) as gate:
        opened = gate.open()
        client = gate.client(opened["key"])
        for stream in (False, True):
            reply = client.chat.completions.create(model="m", messages=MESSAGES, tools=[SEARCH], stream=stream)
            if stream:
                deltas = [chunk.choices[0] for chunk in reply]
                asked, finish = deltas[0].delta.tool_calls[0], deltas[-1].finish_reason
            else:
                message, finish = reply.choices[0].message, reply.choices[0].finish_reason
                asked = message.tool_calls[0]
            assert (asked.function.name, json.loads(asked.function.arguments)) == ("search", {"query": "Oslo"})
            assert finish == "tool_calls"
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a city"}
        client.chat.completions.create(model="m", messages=[*MESSAGES, message, result], tools=[SEARCH])
        assert [kept.cause for kept in gate.calls(opened["session"])] == ["start", "retry", "continue"]


def test_the_responses_api_is_the_same_conversation_in_other_words():
    call = '<tool_call>\n{"name": "search", "arguments": {"query": "Oslo"}}\n</tool_call>'
    tool = {"type": "function", **SEARCH["function"]}
    says = engine(lambda prompt, seed: spelled("It is Oslo." if "a city" in tokenizer().decode(prompt) else call))
    with world(says, sampling=Sampling(max_tokens=256)) as gate:
        opened = gate.open()
        create = gate.client(opened["key"]).responses.create
        asked = {"model": "m", "instructions": "Be brief.", "tools": [tool]}
        first = create(input="What is it?", **asked)
        wants = first.output[0]
        assert (wants.type, wants.name, json.loads(wants.arguments)) == ("function_call", "search", {"query": "Oslo"})
        result = {"type": "function_call_output", "call_id": wants.call_id, "output": "a city"}
        whole = [{"role": "user", "content": "What is it?"}, *(item.model_dump() for item in first.output), result]
        by_items, by_id = create(input=whole, **asked), create(input=[result], previous_response_id=first.id, **asked)
        assert by_items.output_text == by_id.output_text == "It is Oslo."
        seen = list(create(input=whole, stream=True, **asked))
        assert seen[-1].response.output_text == "It is Oslo." and seen[0].type == "response.created"
        assert "".join(event.delta for event in seen if event.type == "response.output_text.delta") == "It is Oslo."
        assert [kept.cause for kept in gate.calls(opened["session"])] == ["start", "continue", "retry", "retry"]
        for bad in (
            {"input": []},
            {"input": 7},
            {"input": "x", "previous_response_id": "resp_none"},
            {"input": "x", "text": 1},
            {"input": "x", "text": {"format": [1]}},
            {"input": "x", "text": {"format": {"type": "json_schema"}}},
            {"input": "x", "include": ["message.output_text.logprobs"]},
        ):
            assert gate.post("/v1/responses", bad, opened["key"]).status_code == 400


ITEM = {"call_id": "c", "name": "pay"}
UNREAD = {f"a call's {key}": {**ITEM, "type": "function_call", key: {"to": "Eve"}} for key in (
    "args", "parameters", "input", "tool_input", "kwargs", "action_input",
)}  # fmt: skip
UNREAD["a call's args beside none"] = {**ITEM, "type": "function_call", "arguments": "{}", "args": {"to": "Eve"}}
UNREAD["an answer's content"] = {"type": "function_call_output", "call_id": "c", "content": "paid"}
UNREAD["a message's text"] = {"role": "user", "text": "Pay Ann"}


@pytest.mark.parametrize("what", UNREAD)
def test_what_stands_under_another_key_of_an_item_is_refused_and_never_read_as_nothing(gate, what):
    asked = {"input": [{"role": "user", "content": "Pay."}, UNREAD[what]]}
    answer = gate.post("/v1/responses", asked, gate.open()["key"])
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("input[1].")


def test_a_tool_whose_parameters_stand_under_another_key_is_refused(gate):
    tool = {"type": "function", "name": "f", "input_schema": {"type": "object"}}
    answer = gate.post("/v1/responses", {"input": "x", "tools": [tool]}, gate.open()["key"])
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("tools[0].input_schema")


def test_draws_depend_on_the_session_the_prompt_and_how_often_it_was_asked_only(gate):
    def answers(seed, prompts):
        client = gate.client(gate.open(seed=seed)["key"])
        create = client.chat.completions.create
        return [
            create(model="m", messages=[{"role": "user", "content": p}]).choices[0].message.content for p in prompts
        ]

    one = answers(7, ["plan", "a", "b", "a"])
    other = answers(7, ["plan", "b", "a", "a"])  # sub-agents may ask in any order
    assert one == [other[0], other[2], other[1], other[3]]
    assert one[1] != one[3] and not set(one) & set(answers(8, ["plan", "a", "b", "a"]))
    assert answers(7, ["b"]) != one[2:3]  # it begins its session here, and so has other draws


def test_calls_that_go_on_from_one_answer_draw_each_for_itself(monkeypatch):
    """As an agent that fans out: with one seed for all of them, different prompts would share random numbers."""
    seen = []

    def watched(prompt, seed):
        seen.append(seed)
        return spelled("so")

    with world(engine(watched)) as gate:
        create = gate.client(gate.open(seed=7)["key"]).chat.completions.create
        plan = [
            *MESSAGES,
            {"role": "assistant", "content": create(model="m", messages=MESSAGES).choices[0].message.content},
        ]
        for item in range(3):
            create(model="m", messages=[*plan, {"role": "user", "content": f"do item {item}"}])
    assert len(set(seen)) == 4


def test_sessions_of_a_task_that_are_opened_without_a_seed_draw_each_for_itself(gate):
    def answer(**named):
        client = gate.client(gate.open(task="room-7", **named)["key"])
        return client.chat.completions.create(model="m", messages=MESSAGES).choices[0].message.content

    assert len({answer() for _ in range(4)}) == 4
    assert answer(seed=3) == answer(seed=3) != answer(seed=3, sample=1)


def test_a_session_is_named_by_its_key_a_header_or_the_base_url(gate):
    opened = gate.open()
    name, key = opened["session"], opened["key"]
    ways = [
        gate.post("/v1/chat/completions", {"messages": MESSAGES}, key),
        gate.post(f"/s/{name}/v1/chat/completions", {"messages": MESSAGES}, key),
        gate.post(f"/s/{key}/v1/chat/completions", {"messages": MESSAGES}, "unused"),
        HTTP.post(
            f"{gate.url}/v1/chat/completions",
            json={"messages": MESSAGES},
            headers={"authorization": f"Bearer {ADMIN}", "x-turntree-session": name},
        ),
    ]
    assert [way.status_code for way in ways] == [200] * 4
    assert len(gate.calls(name)) == 4
    assert gate.get(f"/s/{name}/v1/models", key).json()["data"][0]["id"] == "policy"
    assert gate.client(key).models.retrieve("org/any").id == "org/any"


def test_a_wrong_key_opens_nothing_and_is_not_told_from_an_unknown_session(gate):
    first, second = gate.open(), gate.open()
    asked = {"messages": MESSAGES}
    refused = [
        gate.post("/v1/chat/completions", asked, "nonsense"),
        gate.post("/v1/chat/completions", asked, "x"),
        gate.post("/v1/chat/completions", asked, "unknown.key"),
        gate.post("/v1/chat/completions", asked, first["key"] + "x"),
        gate.post(f"/s/{first['session']}/v1/chat/completions", asked, second["key"]),
        gate.post(f"/sessions/{first['session']}/reward", {"reward": 1}, first["key"]),  # asking is not rewarding
        gate.post(f"/sessions/{first['session']}/reward", {"reward": 1}, second["reward_key"]),
        gate.post(f"/sessions/{first['session']}/close", {}, first["reward_key"]),
        gate.post("/sessions", {"task": "t"}, first["key"]),
        gate.get("/status", first["key"]),
    ]
    assert [response.status_code for response in refused] == [401] * len(refused)
    texts = {response.json()["error"]["message"] for response in refused[:7]}
    assert len(texts) == 1
    assert not gate.calls(first["session"]) and not gate.calls(second["session"])


REFUSED = {
    "no JSON": (b"{", None),
    "not an object": (b"[]", None),
    "half a character": (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', None),
    "deep": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "not UTF-8": (b'{"messages": "\xff"}', None),
    "no messages": ({}, "messages"),
    "empty messages": ({"messages": []}, "messages"),
    "a text": ({"messages": "hello"}, "messages"),
    "a number": ({"messages": [7]}, "messages[0]"),
    "unknown role": ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
    "an image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    "bad arguments": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls.arguments",
    ),
    "an id that is no text": (
        {"messages": [{"role": "tool", "tool_call_id": 7, "content": ""}]},
        "messages[0].tool_call_id",
    ),
    "a call in an old form": (
        {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[0].function_call",
    ),
    "a beginning to go on from": (
        {"messages": [*MESSAGES, {"role": "assistant", "content": "So", "prefix": True}]},
        f"messages[{len(MESSAGES)}].prefix",
    ),
    "nothing to answer": ({"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]}, "messages"),
    "tools": ({"messages": MESSAGES, "tools": [{"name": "f"}]}, "tools[0]"),
    "a forced call of no tool": ({"messages": MESSAGES, "tool_choice": "required"}, "tool_choice"),
    "stop texts": ({"messages": MESSAGES, "stop": ["x", 7]}, "stop"),
    "temperature": ({"messages": MESSAGES, "temperature": -1}, "temperature"),
    "NaN": (b'{"messages": [], "temperature": NaN}', None),
    "several answers": ({"messages": MESSAGES, "n": 2}, "n"),
    "max_tokens": ({"messages": MESSAGES, "max_tokens": "many"}, "max_tokens"),
    "a penalty": ({"messages": MESSAGES, "frequency_penalty": 0.5}, "frequency_penalty"),
    "a bias": ({"messages": MESSAGES, "logit_bias": {"5": 3}}, "logit_bias"),
    "no schema": ({"messages": MESSAGES, "response_format": {"type": "json_schema"}}, "response_format"),
    "unknown": ({"messages": MESSAGES, "beam_width": 3}, "beam_width"),
    "logprobs as a number": ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
    "stream": ({"messages": MESSAGES, "stream": "no"}, "stream"),
    "stream options": ({"messages": MESSAGES, "stream": True, "stream_options": 7}, "stream_options"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_request_gets_an_error_in_openais_form_that_names_the_field(gate, what):
    body, param = REFUSED[what]
    opened = gate.open()
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {opened['key']}"}
    response = HTTP.post(f"{gate.url}/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == 400
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"] and len(error["message"]) < 600
    assert not gate.calls(opened["session"])


def test_what_an_agent_asks_of_the_distribution_is_recorded_and_changes_nothing(gate):
    seeds = [gate.open(seed=3) for _ in range(2)]
    asked = [{"model": "gpt", "temperature": 0.0, "top_p": 0.1, "user": "u"}, {"model": "m"}]
    asked[0] |= {"reasoning_effort": "low", "verbosity": "low"}  # the Agents SDK's own for models of these names
    replies = [
        gate.client(opened["key"]).chat.completions.create(messages=MESSAGES, **more)
        for opened, more in zip(seeds, asked, strict=True)
    ]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    assert [gate.calls(opened["session"])[0].meta for opened in seeds] == asked


def test_what_a_message_says_beside_its_text_is_recorded_by_name_and_changes_nothing(gate):
    marked = [{**message, "cache_control": {"type": "ephemeral"}, "refusal": None, "my_id": 7} for message in MESSAGES]
    opened = [gate.open(seed=3) for _ in range(2)]
    replies = [
        gate.client(session["key"]).chat.completions.create(messages=messages, model="m")
        for session, messages in zip(opened, (MESSAGES, marked), strict=True)
    ]
    assert replies[0].choices[0].message.content == replies[1].choices[0].message.content
    metas = [gate.calls(session["session"])[0].meta for session in opened]
    assert metas == [{"model": "m"}, {"model": "m", "message_keys": ["cache_control", "my_id"]}]


def test_an_answer_is_as_short_as_the_agent_asks(gate):
    opened = gate.open()
    reply = gate.client(opened["key"]).chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (3, "length")


def test_a_prompt_beyond_the_context_is_told_by_openais_code_so_that_an_agent_can_compact():
    with world(engine(max_context=100)) as gate:
        client = gate.client(gate.open()["key"])
        for text in ("word " * 90, "x" * 10**6):
            with pytest.raises(openai.BadRequestError) as caught:
                client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
            assert caught.value.code == "context_length_exceeded"
            # what LangChain and LiteLLM search the words for: neither reads the code
            assert "context_length_exceeded" in str(caught.value)
            assert "This model's maximum context length is 100 tokens" in str(caught.value)
        client.chat.completions.create(model="m", messages=MESSAGES)


def test_a_field_that_nobody_reads_is_refused_where_sessions_begin_and_end(gate):
    """A misspelled task would be the default one, and the sessions of all tasks one group."""
    for path, body in (
        ("/sessions", {"task_id": "room-7"}),
        (f"/sessions/{gate.open()['session']}/close", {"reward": 1}),
    ):
        refused = gate.post(path, body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == next(iter(body)), path


def test_every_limit_is_kept_and_named():
    limits = GatewayLimits(sessions=2, calls=3, tokens=60, seconds=1000, body_bytes=5000)
    with world(limits=limits) as gate:
        first, second = gate.open(), gate.open()
        assert gate.post("/sessions", {"task": "t"}).json()["error"]["code"] == "too_many_sessions"
        ask = {"messages": MESSAGES, "max_tokens": 2}
        codes = [gate.post("/v1/chat/completions", ask, first["key"]) for _ in range(4)]
        assert [each.status_code for each in codes] == [200, 200, 200, 403]
        assert codes[3].json()["error"]["code"] == "session_calls"
        for _ in range(3):
            gate.post("/v1/chat/completions", {"messages": MESSAGES}, second["key"])
        over = gate.post("/v1/chat/completions", {"messages": MESSAGES}, second["key"])
        assert over.json()["error"]["code"] in ("session_calls", "session_tokens")
        large = {"messages": [{"role": "user", "content": "x" * 6000}]}
        assert gate.post("/v1/chat/completions", large, first["key"]).status_code == 413


def test_an_agent_that_fans_out_is_answered_in_turn(monkeypatch):
    monkeypatch.setattr("turntree.gateway.sessions._PARALLEL", 2)
    asked = [{"messages": [{"role": "user", "content": f"item {item}"}]} for item in range(6)]
    with world() as gate, ThreadPoolExecutor(len(asked)) as pool:
        opened = gate.open()
        answers = pool.map(lambda body: gate.post("/v1/chat/completions", body, opened["key"]), asked)
        assert [answer.status_code for answer in answers] == [200] * 6
        calls = gate.calls(opened["session"])
        assert [kept.index for kept in calls] == list(range(6)) and len({kept.prompt_ids for kept in calls}) == 6


def test_an_agent_that_fans_out_without_end_leaves_places_to_others(monkeypatch):
    monkeypatch.setattr("turntree.gateway.sessions._PARALLEL", 2)
    monkeypatch.setattr("turntree.gateway.sampling.WAITING", 20)
    with world(engine(latency=lambda request: 10**9)) as gate:
        wide, other = (gate.sessions.get(gate.open()["session"]) for _ in range(2))

        async def asks(session, count):
            asking = [
                asyncio.create_task(gate.sessions.sampler.ask(session, Ask(messages=(user("x"),))))
                for _ in range(count)
            ]
            await asyncio.sleep(0)
            return [task.exception().status for task in asking if task.done()]

        assert gate.served.call(asks(wide, 20)) == [429] * 14
        assert gate.served.call(asks(other, 1)) == []
        ended = [gate.served.call(gate.sessions.close(session)) for session in (wide, other)]
        assert [len(session.calls) for session in ended] == [2, 1]  # what waited in line is no call


def test_a_session_that_takes_too_long_is_closed_without_a_reward():
    with world(limits=GatewayLimits(seconds=0.01)) as gate:
        opened = gate.open()
        live = gate.sessions.get(opened["session"])
        time.sleep(0.02)
        assert gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"]).status_code in (401, 403)
        gate.served.call(gate.sessions.expire())
        assert live.value().reward is None and len(gate.sessions) == 0
        assert gate.sessions.ledger["expired"] == 1


@pytest.mark.parametrize("error", [TurntreeError("the disk is full"), FileNotFoundError("moved away")], ids=str)
def test_a_session_that_cannot_be_written_is_closed_when_it_can_and_keeps_no_other_open(error, monkeypatch, tmp_path):
    monkeypatch.setattr("turntree.gateway.server._SWEEP", 0.01)
    with world(limits=GatewayLimits(seconds=0.05), folder=tmp_path) as gate:
        store, writes = gate.sessions._store, gate.sessions._store.append
        failing = []

        def append(name, row, **more):
            if "closed" in row and failing and name == failing[0]:
                raise error
            writes(name, row, **more)

        monkeypatch.setattr(store, "append", append)
        failing += [gate.open()["session"]]
        other = gate.open()["session"]
        _settled(lambda: list(store.folder.glob(f"closed/{other}.jsonl")), 1)
        failing.clear()
        _settled(lambda: list(store.folder.glob("closed/*.jsonl")), 2)
        assert not store.sessions() and gate.sessions.ledger["expired"] == 2


def test_a_reward_that_could_not_end_its_session_ends_it_when_it_is_posted_again(monkeypatch, tmp_path):
    with world(folder=tmp_path) as gate:
        opened, store, writes, full = gate.open(), gate.sessions._store, gate.sessions._store.append, [True]

        def append(name, row, **more):
            if "closed" in row and full:
                raise TurntreeError("the disk is full")
            writes(name, row, **more)

        monkeypatch.setattr(store, "append", append)
        path, told = f"/sessions/{opened['session']}/reward", []
        for _ in range(2):
            told.append(gate.post(path, {"reward": 1}, opened["reward_key"]).status_code)
            full.clear()
        assert told == [500, 200] and list(store.folder.glob("closed/*.jsonl")) and not store.sessions()


def test_a_reward_ends_the_session_and_comes_once():
    with world() as gate:
        opened = gate.open()
        live, path = gate.sessions.get(opened["session"]), f"/sessions/{opened['session']}/reward"
        strange = {"reward": 1, "call_rewards": {"chatcmpl-none": 1}}
        numbers = ({"reward": value} for value in (10**400, 1e200, 1e39, "much", "1", True, None, [1], {}))
        for bad in (strange, {}, {"reward": 1, "x": 1}, *numbers):
            assert gate.post(path, bad, opened["reward_key"]).status_code == 400
        gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"])
        assert gate.post(path, {"reward": 0.5, "reason": "half"}, opened["reward_key"]).status_code == 200
        again = gate.post(path, {"reward": 0.5}, opened["reward_key"])  # its first answer may have been lost
        assert (again.status_code, again.json()["reward"]) == (200, 0.5)
        other = gate.post(path, {"reward": 1.0}, opened["reward_key"])
        assert (other.status_code, other.json()["error"]["code"]) == (409, "rewarded")
        assert gate.post(path, {"reward": 0.5}, opened["key"]).status_code == 401
        asked = gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"])
        assert (asked.status_code, asked.json()["error"]["code"]) == (403, "session_over")
        session = live.value()
        assert (session.reward, session.reason, len(session.calls)) == (0.5, "half", 1)


def test_single_calls_are_rewarded_by_the_ids_that_the_agent_saw():
    with world() as gate:
        opened = gate.open()
        live, create = gate.sessions.get(opened["session"]), gate.client(opened["key"]).chat.completions.create
        given = {create(model="m", messages=MESSAGES).id: reward for reward in (1.0, 0.0)}
        body = {"reward": 1.0, "call_rewards": given}
        assert gate.post(f"/sessions/{opened['session']}/reward", body, opened["reward_key"]).status_code == 200
        assert live.value().call_rewards == {live.calls[1].call_id: 0.0, live.calls[0].call_id: 1.0}


def test_a_call_with_half_a_character_reaches_the_agent():
    call = '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'
    with world(engine(lambda prompt, seed: spelled(call)), sampling=Sampling(max_tokens=256)) as gate:
        reply = gate.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [SEARCH]}, gate.open()["key"])
        assert reply.status_code == 200 and "d800" in reply.text


def test_an_agent_that_hangs_up_frees_its_place_in_the_engine():
    with world(engine(latency=lambda request: 10**9)) as gate:
        opened = gate.open()
        for stream in (False, True):
            body = {"messages": MESSAGES, "stream": stream}
            with pytest.raises(httpx.TimeoutException):
                HTTP.post(
                    f"{gate.url}/v1/chat/completions",
                    json=body,
                    headers={"authorization": f"Bearer {opened['key']}"},
                    timeout=0.3,
                )
        calls = _settled(lambda: gate.calls(opened["session"]), 2)
        assert {call.status for call in calls} == {"disconnected"}
        assert gate.driver.engine.in_flight == 0
        assert sum(call.cost.prefilled_tokens for call in calls) > 0


def test_a_session_that_is_closed_takes_its_calls_with_it():
    with world(engine(latency=lambda request: 10**9)) as gate:
        opened = gate.open()
        with socket.create_connection(gate.url.removeprefix("http://").split(":")) as raw:
            raw.settimeout(30)
            body = json.dumps({"messages": MESSAGES}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {opened['key']}\r\n"
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            live = gate.sessions.get(opened["session"])
            _settled(lambda: live.running, 1)
            gate.post(f"/sessions/{opened['session']}/close", {})
            assert b" 403 " in raw.recv(1000).split(b"\r\n")[0]
        assert [kept.status for kept in live.calls] == ["disconnected"] and gate.driver.engine.in_flight == 0


def test_an_agent_that_hangs_up_while_its_session_is_closed_leaves_its_calls_and_their_cost():
    """As one that is stopped does: its connection breaks, and its session is closed at once."""
    policy = engine(latency=lambda request: 10**9)
    gives_up = policy.cancel

    def busy(ticket):
        time.sleep(0.2)  # a step of a large model
        return gives_up(ticket)

    policy.cancel = busy
    with world(policy) as gate:
        opened = gate.open()
        live, asked = gate.sessions.get(opened["session"]), Ask(messages=(user("What is it?"),))

        async def stopped():
            asking = asyncio.create_task(gate.sessions.sampler.ask(live, asked))
            await asyncio.sleep(0.1)
            asking.cancel()
            await asyncio.sleep(0.05)
            return await gate.sessions.close(live, "stopped")

        session = gate.served.call(stopped())
        assert [call.status for call in session.calls] == ["disconnected"]
        assert session.calls[0].cost.prefilled_tokens == len(session.calls[0].prompt_ids) > 0


def test_an_engine_that_fails_at_giving_up_keeps_nobody_waiting():
    policy = engine(latency=lambda request: 10**9)

    def fails(ticket):
        raise RuntimeError("lost")

    with world(policy) as gate:
        opened = gate.open()
        live, asked = gate.sessions.get(opened["session"]), Ask(messages=(user("What is it?"),))
        policy.cancel = fails

        async def stopped():
            asking = asyncio.create_task(gate.sessions.sampler.ask(live, asked))
            await asyncio.sleep(0.1)
            asking.cancel()
            return await asyncio.wait_for(gate.sessions.close(live, "stopped"), 20)

        session = gate.served.call(stopped())
        assert [call.status for call in session.calls] == ["disconnected"]
        while gate.driver.failure is None:  # it is cancelled in the driver's thread
            time.sleep(0.01)
        assert "lost" in str(gate.driver.failure)


def test_a_client_that_sends_its_request_too_slowly_is_dropped(monkeypatch):
    monkeypatch.setattr("turntree.gateway.server._BODY", 0.2)
    monkeypatch.setattr("turntree.gateway.server._DROPPING", 0.2)
    with world() as gate:
        key = gate.open()["key"]
        with socket.create_connection(gate.url.removeprefix("http://").split(":")) as raw:
            raw.settimeout(30)
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
            raw.sendall(f"{head}Content-Length: 100\r\n\r\n{{".encode())
            assert b" 408 " in raw.recv(1000).split(b"\r\n")[0]


def test_a_generation_that_fails_is_asked_again_with_the_same_draws_and_then_refused():
    failures: dict[int, int] = {}

    def fault(request):
        failures[request.seed] = failures.get(request.seed, 0) + 1
        return "lost" if failures[request.seed] <= (2 if len(failures) == 1 else 9) else None

    with world(engine(fault=fault)) as gate:
        opened = gate.open()
        assert gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"]).status_code == 200
        assert list(failures.values()) == [3]
        lost = gate.post("/v1/chat/completions", {"messages": MESSAGES}, opened["key"])
        assert (lost.status_code, lost.json()["error"]["type"]) == (500, "server_error")
        assert [kept.status for kept in gate.calls(opened["session"])] == ["kept", "failed"]


def test_a_stream_that_fails_is_an_error_of_the_sdk_which_tries_again():
    asked = []

    def fault(request):
        asked.append(request)
        return "lost" if len(asked) <= 3 else None  # the gateway itself asks three times

    with world(engine(latency=lambda request: 100, fault=fault)) as gate:
        client = gate.client(gate.open()["key"]).with_options(max_retries=1)
        for make, more in (
            (client.chat.completions.create, {"messages": MESSAGES}),
            (client.responses.create, {"input": "What is it?"}),
        ):
            asked.clear()
            assert list(make(model="m", stream=True, **more)) and len(asked) == 4


def test_an_engine_that_breaks_answers_everybody_and_no_one_waits():
    class Broken:
        def __init__(self):
            self.inner = engine()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def poll(self, timeout=None):
            raise RuntimeError("the policy diverged")

    with world(Broken()) as gate:
        key = gate.open()["key"]
        for _ in range(2):
            response = gate.post("/v1/chat/completions", {"messages": MESSAGES}, key)
            assert response.status_code == 503 and "diverged" in response.json()["error"]["message"]


def test_an_engine_that_loses_a_request_keeps_no_agent_waiting():
    class Losing:
        def __init__(self):
            self.inner = engine()

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def poll(self, timeout=None):
            self.inner.poll(timeout)
            return []

    with world(Losing()) as gate:
        response = gate.post("/v1/chat/completions", {"messages": MESSAGES}, gate.open()["key"], timeout=20)
        assert response.status_code == 503 and "the engine lost 1 requests" in response.json()["error"]["message"]


def test_paths_that_do_not_exist_are_told_in_openais_form(gate):
    for response in (gate.get("/nothing"), gate.get("/v1/chat/completions")):
        assert response.status_code in (404, 405) and "docs" in response.json()["error"]["message"]


def _settled(look, count, seconds=20.0):
    until = time.monotonic() + seconds
    while len(found := look()) < count and time.monotonic() < until:
        time.sleep(0.01)
    assert len(found) == count
    return found


def test_small_answers_are_not_held_back_for_more_to_send():
    """asyncio switches Nagle off only for sockets that name their protocol: with it a call takes 40 ms more."""

    async def nodelay() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            found.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        with listening("127.0.0.1", 0) as bound:
            async with await asyncio.start_server(connected, sock=bound):
                _, writer = await asyncio.open_connection(*bound.getsockname())
                writer.close()
                return await found

    assert asyncio.run(nodelay()) != 0


def test_a_connection_that_waits_longer_than_clients_keep_theirs_is_not_ended_by_the_server():
    """A client that asks at the very moment gets a broken connection. LiteLLM keeps its connections for 120 seconds."""
    assert server_of(Starlette(), most=1).config.timeout_keep_alive > 120


def test_a_body_whose_last_piece_is_too_much_is_refused_at_once():
    with world(limits=GatewayLimits(body_bytes=2000)) as gate:
        begun = time.monotonic()
        assert gate.post("/v1/chat/completions", {"x": "y" * 3000}, gate.open()["key"]).status_code == 413
        assert time.monotonic() - begun < 5


def test_counting_tokens_is_no_limit_that_an_agent_ran_into(gate):
    opened = gate.open()
    long = {"messages": [{"role": "user", "content": "x" * 5000}]}
    assert gate.post("/v1/messages/count_tokens", {**long, "max_tokens": 8}, opened["key"]).status_code in (200, 400)
    assert gate.sessions.get(opened["session"]).limit == ""
    assert gate.post("/v1/chat/completions", long, opened["key"]).status_code == 400
    assert gate.sessions.get(opened["session"]).limit


class Strict(ChatRenderer):
    """Reads whole answers only."""

    def parse(self, ids, tools=()):
        if ids[-1] not in self.stop_ids:
            raise ValueError("unterminated")
        return super().parse(ids, tools)


def test_a_parser_that_fails_on_half_an_answer_ends_no_other_session():
    with world(speaks=Strict(tokenizer())) as gate:
        body = {"messages": MESSAGES, "stop": ["x"]}
        assert gate.post("/v1/chat/completions", body, gate.open()["key"]).status_code == 200
        assert gate.driver.failure is None


def test_a_gateway_ends_where_its_engine_is_lost():
    class Lost(type(engine(latency=lambda request: 10**6))):
        def cancel(self, ticket):
            raise ConnectionError("the server is lost")

    slow = engine(latency=lambda request: 10**6)
    slow.__class__ = Lost
    driver = EngineDriver(slow)
    driver.submit(GenerationRequest(prompt_ids=spelled("a"), sampling=Sampling(max_tokens=4), seed=0))
    closing = threading.Thread(target=driver.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/chat/completions", {"role": "user", "text": "hi"}),
        ("/v1/messages", {"role": "user", "text": "hi"}),
        ("/v1/messages", {"role": "assistant", "content": [{"type": "tool_use", "name": "s", "arguments": {"q": 1}}]}),
        ("/v1/messages", {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "output": "b"}]}),
        ("/v1/responses", {"type": "reasoning", "text": "hm"}),
    ],
)
def test_what_stands_under_another_key_is_not_read_as_nothing(gate, path, said):
    opened = gate.open()
    rows = [*MESSAGES, said, *MESSAGES]
    body = {"input": rows} if path == "/v1/responses" else {"messages": rows, "max_tokens": 8}
    answer = gate.post(path, body, opened["key"])
    assert answer.status_code == 400 and "is missing" in answer.json()["error"]["message"]


def test_calls_are_rewarded_by_every_name_they_were_answered_with_and_once(gate):
    opened = gate.open()
    named = gate.post("/v1/messages", {"messages": MESSAGES, "max_tokens": 8}, opened["key"]).json()["id"]
    twice = {named: 0.5, named.removeprefix("msg_"): 0.25}
    url = f"/sessions/{opened['session']}/reward"
    assert gate.post(url, {"reward": 1, "call_rewards": twice}, opened["reward_key"]).status_code == 400
    assert gate.post(url, {"reward": 1, "call_rewards": {named: 0.5}}, opened["reward_key"]).status_code == 200


def test_a_session_may_be_closed_again(gate):
    opened = gate.open()
    codes = [gate.post(f"/sessions/{opened['session']}/close", {}).status_code for _ in range(2)]
    assert codes == [200, 200]
