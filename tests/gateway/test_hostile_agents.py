"""What an agent, or whoever stands between, posts: the gateway answers in the API's form, and others go on."""

import copy
import http.client
import json
import secrets
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from gateway_world import ADMIN, SEARCH, World, renderer, world
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.gateway import calls, server
from turntree.gateway.config import GatewayLimits, last_words
from turntree.gateway.dialects import common
from turntree.gateway.server import Gateway
from turntree.gateway.store import SessionStore, read_session
from turntree.gateway.upstream import Redaction

MESSAGES = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def gate() -> World:
    with world(limits=GatewayLimits(body_bytes=100_000)) as served:
        yield served


def raw(gate: World, path: str, body: bytes, key: str = "", *, method: str = "POST", **headers: str):
    """One request of a client that closes its connection, as urllib does, and reads only once all is written."""
    connection = http.client.HTTPConnection(gate.url.removeprefix("http://"), timeout=30)
    given = {"authorization": f"Bearer {key}", "connection": "close", **headers}
    connection.request(method, path, body, given)
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found


# answers that arrive


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/v1/chat/completions", "the session's", 413),
        ("/v1/responses", "the session's", 413),
        ("/sessions", ADMIN, 413),
        ("/v1/chat/completions", "wrong", 401),
        ("/sessions", "wrong", 401),
        ("/v1/messages", "wrong", 401),
        ("/v1/embeddings", "wrong", 404),
        ("/status", ADMIN, 405),
    ],
)
def test_whoever_sends_too_much_gets_an_answer_and_no_reset(gate, path, key, status):
    key = gate.open()["key"] if key == "the session's" else key
    found, body = raw(gate, path, b"x" * 20_000_000, key)
    assert found == status
    assert set(body["error"]) == ({"message", "type"} if "messages" in path else {"message", "type", "param", "code"})


# keys and names


def test_the_address_that_keys_are_sent_to_is_the_sockets_and_no_headers(gate):
    forged = {"host": "evil.example", "x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    status, opened = raw(gate, "/sessions", b"{}", ADMIN, **forged, forwarded="host=evil.example;proto=https")
    assert status == 201
    assert opened["base_url"] == f"{gate.url}/v1" and opened["reward_url"].startswith(f"{gate.url}/sessions/")


@pytest.mark.parametrize("model", ["{folder}/mine", "./mine", "{folder}/deep/../mine/"])
def test_no_answer_says_where_a_model_lies(gate, tmp_path, monkeypatch, model):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    told = Gateway(gate.sessions, model=model.format(folder=tmp_path), admin_key="x").model
    assert told == "mine"
    assert Gateway(gate.sessions, model="mine", admin_key="x").model == "mine"
    assert Gateway(gate.sessions, model="org/name", admin_key="x").model == "org/name"


def test_no_error_says_where_a_gateways_files_lie(tmp_path, monkeypatch, capsys):
    def full(path, *_):
        raise OSError(28, "No space left on device", str(tmp_path))

    with world(folder=tmp_path) as gate:
        key = gate.open()["key"]
        monkeypatch.setattr("os.write", full)
        answer = gate.post("/v1/chat/completions", {"messages": MESSAGES}, key)
    assert answer.status_code == 500 and str(tmp_path) not in answer.text
    assert "disk" in capsys.readouterr().err, "whoever runs it is told"


# rewards

UNUSABLE = {
    "nothing": "",
    "a word": "bye",
    "a text": '"1"',
    "a sentence": "reward: 1.0",
    "a share": "100%",
    "truth": "true",
    "python's truth": "True",
    "NaN": "NaN",
    "infinity": "-Infinity",
    "beyond float32": "1e39",
    "far beyond": "1e200",
    "no float": "1" + "0" * 400,
    "thousands of digits": "1" * 5000,
    "deep": "[" * 100_000,
    "a list": "[1]",
    "an empty object": "{}",
    "success alone": '{"success": true}',
    "success as a number": '{"reward": 1, "success": 1}',
    "a reason that is no text": '{"reward": 1, "reason": 7}',
    "null without a reason": '{"reward": null}',
    "a misspelled field": '{"reward": 1, "sucess": true}',
    "a call that was not made": '{"reward": 1, "call_rewards": {"none": 1}}',
    "two rewards": '{"reward": 1, "reward": 0}',
    "a call under two names": '{"reward": 1, "call_rewards": {"chatcmpl-a": 0, "a": 1}}',
    "colours": "\x1b[32m1.0\x1b[0m",
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_last_line_that_holds_no_reward_is_quoted_with_what_is_wrong(what):
    with pytest.raises(InputError) as caught:
        last_words(UNUSABLE[what], ["a"])
    told = str(caught.value)
    assert repr(UNUSABLE[what][:60])[:-1] in told if UNUSABLE[what] else "no line" in told
    assert '{"reward"' in told and len(told) < 400 and "\n" not in told


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("0.5", {"reward": 0.5}),
        ("-1", {"reward": -1.0}),
        ("1e30", {"reward": 1e30}),
        ('{"reward": null, "reason": "no idea"}', {"reward": None, "reason": "no idea"}),
        (
            '{"reward": 1, "success": false, "call_rewards": {"chatcmpl-a": 0}}',
            {"reward": 1.0, "success": False, "call_rewards": {"a": 0.0}},
        ),
    ],
)
def test_a_last_line_says_what_a_posted_reward_would(line, said):
    assert last_words(line, ["a"]).to_json() == said


def test_a_reward_that_comes_twice_is_one_and_another_one_is_refused_by_name(gate):
    """The answer to the first may have been lost on its way."""
    given = {"reward": 0.25, "success": True}
    opened = gate.open(session=f"twice-{secrets.token_hex(4)}")
    path, key = f"/sessions/{opened['session']}/reward", opened["reward_key"]
    answers = [gate.post(path, body, key) for body in (given, given, {**given, "reason": "again"})]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.text for answer in answers}) == 1
    for other in ({"reward": 0.5}, {"reward": 0.25}, {"reward": None, "reason": "x"}):
        refused = gate.post(path, other, key)
        assert refused.status_code == 409 and "0.25" in refused.json()["error"]["message"], other
    assert gate.post(path, given, opened["key"]).status_code == 401
    closed = gate.open()
    gate.post(f"/sessions/{closed['session']}/close", {})
    late = gate.post(f"/sessions/{closed['session']}/reward", {"reward": 1}, closed["reward_key"])
    assert (late.status_code, late.json()["error"]["code"]) == (403, "session_over")


def test_a_reward_that_was_kept_when_the_gateway_was_killed_may_be_posted_again(tmp_path, monkeypatch):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        path, key = f"/sessions/{opened['session']}/reward", opened["reward_key"]
        monkeypatch.setattr(gate.sessions, "close", lambda session: 1 / 0)  # killed between the two
        assert gate.post(path, {"reward": 1}, key).status_code == 500
        monkeypatch.undo()
    with world(folder=tmp_path) as gate:
        assert gate.post(path, {"reward": 1}, key).json()["reward"] == 1.0
        assert gate.post(path, {"reward": 0}, key).status_code == 409


# choices that change nothing


@pytest.mark.parametrize(
    ("choice", "status"),
    [
        ("auto", 200),
        ("none", 200),
        ({"type": "auto"}, 200),
        ({"type": "none"}, 200),
        (None, 200),
        ("required", 400),
        ("any", 400),
        ({"type": "required"}, 400),
        ({"type": "any"}, 400),
        ({"type": "auto", "name": "search"}, 400),
        ({"type": "function", "function": {"name": "search"}}, 400),
        ([], 400),
    ],
)
def test_a_choice_of_tools_that_forces_nothing_is_taken_in_every_spelling(gate, choice, status):
    answer = gate.post("/v1/chat/completions", {"messages": MESSAGES, "tool_choice": choice}, gate.open()["key"])
    assert answer.status_code == status
    assert status == 200 or answer.json()["error"]["param"] == "tool_choice"


# bounded work

EMPTY, SAID = {"role": "user", "content": ""}, {"role": "assistant", "content": "so"}
CALL = {"function": {"name": "f", "arguments": "{}"}}
MANY = 50_000
HUGE = {
    "empty messages": {"messages": [EMPTY] * MANY},
    "turns": {"messages": [EMPTY, SAID] * 2000 + [EMPTY]},
    "turns without end": {"messages": [EMPTY, SAID] * MANY + [EMPTY]},
    "tools": {"messages": [EMPTY], "tools": [SEARCH] * MANY},
    "a list of numbers": {"messages": [EMPTY], "metadata": {"a": [1] * 10 * MANY}},
    "a long text": {"messages": [{"role": "user", "content": "x" * 5_000_000}]},
    "a text of braces": {"messages": [{"role": "user", "content": "{[," * 100_000}]},
    "unknown fields": {"messages": [EMPTY], **{f"k{i}": 1 for i in range(MANY)}},
}
ITEMS = {
    "items": {"input": [EMPTY] * MANY},
    "turns": {"input": [EMPTY, SAID] * 2000 + [EMPTY]},
    "one turn in many items": {"input": [EMPTY, *[{**SAID, "content": "x" * 1000}] * 4000, EMPTY]},
    "tools": {"input": "x", "tools": [{"type": "function", "name": "f"}] * MANY},
}
REQUESTS = [("/v1/chat/completions", f"chat: {name}", body) for name, body in HUGE.items()]
REQUESTS += [("/v1/responses", f"responses: {name}", body) for name, body in ITEMS.items()]


class Counted:
    """A renderer that counts the messages that it is shown."""

    def __init__(self) -> None:
        self._inner, self.seen = renderer(), 0
        self.stop_ids, self.parse = self._inner.stop_ids, self._inner.parse

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def prompt(self, messages, tools=()):
        self.seen += len(messages)
        return self._inner.prompt(messages, tools)

    def extend(self, messages, new, tools=(), *, stopped=True):
        self.seen += len(messages) + len(new)
        return self._inner.extend(messages, new, tools, stopped=stopped)

    def completion(self, message):
        self.seen += 1
        return self._inner.completion(message)


@pytest.mark.parametrize(("path", "name", "body"), REQUESTS, ids=[name for _, name, _ in REQUESTS])
def test_no_request_makes_the_event_loop_do_more_than_a_bounded_work(path, name, body, monkeypatch):
    speaks, read, loop = Counted(), [0], [threading.get_ident()]
    from_chat, parse = Message.from_chat.__func__, server.parse_object

    def counted(cls, row):
        read[0] += 1
        return from_chat(cls, row)

    def parsed(data, *more, **named):
        assert len(data) <= server._SMALL or threading.get_ident() != loop[0], "a large body is read beside the loop"
        return parse(data, *more, **named)

    monkeypatch.setattr(Message, "from_chat", classmethod(counted))
    monkeypatch.setattr(server, "parse_object", parsed)
    with world(speaks=speaks) as gate:
        loop[0] = gate.served.call(here())
        status, answer = raw(gate, path, json.dumps(body).encode(), gate.open()["key"])
        assert status in (400, 413), answer
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert read[0] <= common._MOST and speaks.seen <= calls._MOST_WORK + 2 * common._MOST
        assert gate.post("/v1/chat/completions", {"messages": MESSAGES}, gate.open()["key"]).status_code == 200


async def here() -> int:
    return threading.get_ident()


def test_an_answer_that_is_repeated_without_end_is_work_within_bounds_too():
    """Answers that were sampled in the session keep their tokens, so each is rendered by itself."""
    speaks = Counted()
    with world(speaks=speaks) as gate:
        key = gate.open()["key"]
        said = gate.post("/v1/chat/completions", {"messages": MESSAGES}, key).json()["choices"][0]["message"]
        speaks.seen = 0
        for turns in (100, 300, 1000, 2000):
            body = {"messages": [{**EMPTY, "content": f"{turns}"}, *[said, EMPTY] * turns]}
            answer = gate.post("/v1/chat/completions", body, key)
            assert answer.status_code == (200 if turns == 100 else 400), answer.text
        assert speaks.seen <= 4 * calls._MOST_WORK


def test_while_a_large_request_is_read_others_are_answered(monkeypatch):
    reading, go_on, parse = threading.Event(), threading.Event(), server.parse_object

    def slow(data):
        if len(data) > server._SMALL:
            reading.set()
            assert go_on.wait(30)
        return parse(data)

    monkeypatch.setattr(server, "parse_object", slow)
    with world() as gate, ThreadPoolExecutor(1) as pool:
        large = {"messages": [{"role": "user", "content": "x" * 2 * server._SMALL}]}
        asked = pool.submit(gate.post, "/v1/chat/completions", large, gate.open()["key"])
        try:
            assert reading.wait(30)
            other = gate.post("/v1/chat/completions", {"messages": MESSAGES}, gate.open()["key"])
            assert other.status_code == 200 and not asked.done()
        finally:
            go_on.set()
        assert asked.result().status_code == 400


@pytest.mark.parametrize("piece", ["eyJ-", "-----BEGIN PRIVATE KEY-----", "eyJabcdefgh-", "sk-", "Bearer ", "AKIA"])
def test_no_text_keeps_the_rules_of_redaction_busy(piece):
    """Python's expressions let no other thread work: a text that is searched once for every piece of it stops all."""
    code = "import sys; from turntree.gateway.upstream import Redaction; Redaction().text(sys.argv[1] * 400_000)"
    subprocess.run([sys.executable, "-c", code, piece], check=True, timeout=120)


def test_what_is_redacted_does_not_depend_on_what_stands_before_it():
    token = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N"
    key = "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----"
    for before in ("", "x ", "x-", "-----BEGIN PRIVATE KEY-----\n", "a.b.", "eyJ-", "token="):
        for secret in (token, key):
            assert secret[-20:] not in Redaction().text(f"{before}{secret} and more"), (before, secret)


# what a session's file could not hold


def deep(levels):
    return json.loads("[" * levels + "]" * levels)


def called(name, arguments):
    calls = [
        {"id": one, "function": {"name": "f", "arguments": given}} for one, given in (("a", {}), (name, arguments))
    ]
    return [*MESSAGES, {"role": "assistant", "tool_calls": calls}]


def declared(levels):
    return [
        SEARCH,
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": deep(levels)}}},
    ]


USED = [*MESSAGES, {"role": "assistant", "content": [{"type": "tool_use", "id": 7, "name": "f", "input": {}}]}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("chat/completions", {"messages": called(5, {})}, "messages[1].tool_calls[1].id"),
        ("chat/completions", {"messages": called("b", {"x": deep(91)})}, "messages[1].tool_calls[1].arguments"),
        (
            "chat/completions",
            {"messages": called("b", json.dumps({"x": deep(200)}))},
            "messages[1].tool_calls[1].arguments",
        ),
        ("messages", {"max_tokens": 4, "messages": USED}, "messages[1].tool_calls[0].id"),
        ("chat/completions", {"messages": MESSAGES, "metadata": {"x": deep(97)}}, "metadata"),
        ("chat/completions", {"messages": MESSAGES, "tools": declared(94)}, "tools[1].function"),
    ],
)
def test_what_the_file_of_a_session_could_not_hold_is_refused_by_its_field(tmp_path, path, body, field):
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        answer = gate.post(f"/v1/{path}", body, opened["key"])
        assert answer.status_code == 400 and field in answer.json()["error"]["message"]
    assert read_session(SessionStore(tmp_path), opened["session"]).calls == ()


def test_what_is_nested_as_deep_as_it_may_be_is_read_again(tmp_path):
    body = {"messages": MESSAGES, "metadata": {"x": deep(89)}, "tools": declared(86)}
    with world(folder=tmp_path) as gate:
        opened = gate.open()
        answer = gate.post("/v1/chat/completions", body, opened["key"])
        assert answer.status_code == 200, answer.text
    assert len(read_session(SessionStore(tmp_path), opened["session"]).calls) == 1


# whatever is posted

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
VALID = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function", **CALL}]},
            {"role": "tool", "tool_call_id": "a", "content": "7"},
        ],
        "tools": [SEARCH],
        "tool_choice": "auto",
        "n": 1,
        "max_tokens": 4,
        "temperature": 1,
        "stream": False,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "text"},
        "metadata": {"a": "b"},
        "logprobs": False,
        "stop": ["x"],
    },
    "/v1/responses": {
        "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Which?"}]}],
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "f", "parameters": {}}],
        "tool_choice": {"type": "auto"},
        "text": {"format": {"type": "text"}},
        "previous_response_id": None,
        "max_output_tokens": 4,
        "include": [],
    },
    "/v1/messages": {
        "model": "m",
        "max_tokens": 4,
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
        ],
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "adaptive"},
    },
    "/sessions": {"task": "t", "seed": 1, "sample": 0, "meta": {"a": [1]}},
    "reward": {"reward": 0.5, "success": True, "reason": "so", "call_rewards": {}},
    "close": {"reason": "so"},
}


def places(value, path=()):
    """The paths of all values inside a value, its own first."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places(one, (*path, key))


@st.composite
def mutants(draw):
    """A valid request in which one to three values are replaced, left out or repeated."""
    path = draw(st.sampled_from(sorted(VALID)))
    holder = {"body": copy.deepcopy(VALID[path])}
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from([("body", *place) for place in places(holder["body"])]))
        at = holder
        for key in above:
            at = at[key]
        how = draw(st.sampled_from(["replace", "replace", "drop", "repeat", "rename"]))
        if how == "replace" or last == "body":
            at[last] = draw(JSON)
        elif how == "drop":
            del at[last]
        elif how == "repeat" and isinstance(at, list):
            at += [at[last]] * draw(st.integers(1, 3))
        elif isinstance(at, dict):
            at[draw(st.text(max_size=6))] = at.pop(last)
    return path, holder["body"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutants())
def test_whatever_is_posted_is_answered_in_the_form_of_the_api(gate, mutant):
    path, body = mutant
    opened = gate.open()
    if path in ("reward", "close"):
        path = f"/sessions/{opened['session']}/{path}"
    key = opened["key"] if path.startswith("/v1") else ADMIN
    answer = gate.post(path, body, key)
    assert answer.status_code in (200, 201, 400, 409, 413), answer.text
    if answer.headers["content-type"].startswith("application/json") and answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == ({"message", "type"} if path == "/v1/messages" else {"message", "type", "param", "code"})
        assert error["message"] and "\n" not in error["message"] and len(error["message"]) <= 600
    if opened["session"] in gate.sessions._open:
        gate.post(f"/sessions/{opened['session']}/close", {})
