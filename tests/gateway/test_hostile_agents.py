"""What an agent, or whoever stands between, posts: the gateway answers in the API's form, and others go on."""

import http.client
import json
import secrets

import pytest
from gateway_world import ADMIN, World, world

from turntree.gateway.config import GatewayLimits, Refused
from turntree.gateway.rewards import last_words
from turntree.gateway.server import Gateway

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
        ("/v1/messages", "wrong", 404),
        ("/status", ADMIN, 405),
    ],
)
def test_whoever_sends_too_much_gets_an_answer_and_no_reset(gate, path, key, status):
    key = gate.open()["key"] if key == "the session's" else key
    found, body = raw(gate, path, b"x" * 20_000_000, key)
    assert found == status
    assert set(body["error"]) == {"message", "type", "param", "code"}


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
    "colours": "\x1b[32m1.0\x1b[0m",
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_a_last_line_that_holds_no_reward_is_quoted_with_what_is_wrong(what):
    with pytest.raises(Refused) as caught:
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
    assert last_words(line, ["a"]) == said


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
