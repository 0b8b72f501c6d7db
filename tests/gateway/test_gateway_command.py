"""`turntree gateway`: from the command to trees on disk."""

import contextlib
import json
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
from gateway_world import HTTP, World, world

from turntree.cli.main import main
from turntree.core.errors import ConfigError
from turntree.gateway import server
from turntree.gateway.config import GatewayLimits, Reward
from turntree.logs.trees import read as read_trees
from turntree.stages.gateway import GatewayConfig, _worth_of, run_gateway, write_trees


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def running(monkeypatch):
    """Runs a gateway in a thread; leaving the block stops it as a signal would."""
    servers, made = [], server.server_of

    def remembered(*arguments, **options):
        servers.append(made(*arguments, **options))
        return servers[-1]

    monkeypatch.setattr(server, "server_of", remembered)

    class Running:
        def __init__(self, out):
            self.port, self.out = free_port(), out
            config = GatewayConfig(model="qa", port=self.port)
            self.thread = threading.Thread(target=lambda: run_gateway(config, out), daemon=True)

        def __enter__(self):
            before = len(servers)
            self.thread.start()
            until = time.monotonic() + 60
            while not (len(servers) > before and servers[-1].started) and time.monotonic() < until:
                time.sleep(0.02)
            self.key = (self.out / "gateway.key").read_text().strip()
            return self

        def __exit__(self, *_):
            servers[-1].should_exit = True
            self.thread.join()

        def post(self, path, body, key=None):
            headers = {"authorization": f"Bearer {key or self.key}"}
            return HTTP.post(f"http://127.0.0.1:{self.port}{path}", json=body, headers=headers)

    return Running


def test_sessions_go_on_after_a_stop_and_become_one_tree_a_task(running, tmp_path, capsys):
    asked = {"messages": [{"role": "user", "content": "Who?"}], "max_tokens": 4}
    with running(tmp_path / "gate") as gate:
        opened = [gate.post("/sessions", {"task": task, "sample": i}).json() for i, task in enumerate(("a", "a", "b"))]
        for one in opened:
            assert gate.post("/v1/chat/completions", asked, one["key"]).status_code == 200
        gate.post(f"/sessions/{opened[0]['session']}/reward", {"reward": 1.0}, opened[0]["reward_key"])
    assert (tmp_path / "gate" / "gateway.key").stat().st_mode & 0o77 == 0
    with running(tmp_path / "gate") as gate:
        assert gate.post("/v1/chat/completions", asked, opened[1]["key"]).status_code == 200
        gate.post(f"/sessions/{opened[1]['session']}/reward", {"reward": 0.0}, opened[1]["reward_key"])
        gate.post(f"/sessions/{opened[2]['session']}/close", {"reason": "left"})
    main(["gateway", "--out", str(tmp_path / "gate"), "--merge", str(tmp_path / "trees.jsonl"), "--json", "-"])
    assert json.loads(capsys.readouterr().out)["sessions"] == 3
    one, other = read_trees(tmp_path / "trees.jsonl")
    assert sorted(verdict.reward for verdict in one.rewards.verdicts.values()) == [0.0, 1.0]
    assert [verdict.reason for verdict in other.rewards.verdicts.values()] == ["left"]
    assert sum(node.sampled for node in one.tree) == 3


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["gateway"], "--out"),
        (["gateway", "--out", "x", "--merge", "t.jsonl"], "no sessions"),
        (["gateway", "--upstream", "http://localhost:1/v1"], "--traces"),
        (["gateway", "--out", "x", "--port", "70000"], "port"),
        (["gateway", "--upstream", "localhost", "--traces", "t.jsonl"], "not a URL"),
        (["gateway", "--upstream", "http://h/v1", "--traces", "t.jsonl", "--out", "o"], "--out"),
        (["gateway", "--upstream", "http://h/v1", "--traces", "t.jsonl", "--merge", "m.jsonl"], "--merge"),
        (["gateway", "--upstream", "http://h/v1", "--traces", "t.jsonl", "--redact", "("], "regular expression"),
        (["gateway", "exec"], "names no command"),
        (["gateway", "run", "x"], "'run'"),
        (["gateway", "exec", "--merge", "x", "--", "true"], "--merge"),
        (["gateway", "exec", "--upstream", "http://h/v1", "--", "true"], "--upstream"),
        (["gateway", "--out", "x", "--ask"], "--ask"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(arguments, word, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and word in said and len(said.splitlines()) == 1


def test_a_port_that_is_taken_is_told():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Exception, match="cannot listen"), server.listening("127.0.0.1", taken.getsockname()[1]):
            pass
    with pytest.raises(ConfigError, match="port"):
        GatewayConfig(port=-1)


AGENT = """
import json, os, sys, urllib.request
body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Who wrote it?"}]}
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read()
sys.exit(int(sys.argv[1]))
"""


def test_exec_runs_a_command_as_one_session_whose_reward_is_its_exit_code(tmp_path, capsys, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    out = tmp_path / "runs"
    with socket.socket() as other:
        with contextlib.suppress(OSError):  # the usual port is taken, by this or by somebody else
            other.bind(("127.0.0.1", 8080))
            other.listen()
        for code, reward in (("0", 1.0), ("3", 0.0), ("130", None)):
            words = ["gateway", "exec", "--model", "qa", "--out", str(out), "--task", "t", "--json", "-"]
            main([*words, "--", sys.executable, str(tmp_path / "agent.py"), code])
            told = json.loads(capsys.readouterr().out)
            assert (told["code"], told["reward"], told["calls"]) == (int(code), reward, 1)
    (kept,) = read_trees(out / "trees.jsonl")
    assert sorted((one.reward for one in kept.rewards.verdicts.values()), key=str) == [0.0, 1.0, None]
    assert len(kept.tree.starts()) == 3, "three attempts at one task"
    main(["report", str(out)])
    assert "Who wrote it?" in (out / "trees.html").read_text(encoding="utf-8")


ASKS_TOO_MUCH = """
import json, os, sys, urllib.error, urllib.request
body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "who? " * 20000}]}
headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"}
url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
if sys.argv[1:]:
    sys.exit(1)
try:
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
except urllib.error.HTTPError:
    sys.exit(1)
"""


@pytest.mark.parametrize(("words", "why"), [((), "the context holds"), (("silent",), "no call was answered")])
def test_a_command_that_was_never_answered_has_no_reward_and_is_told_why(tmp_path, capsys, words, why):
    """As Claude Code ends whose first prompt does not fit: its exit code says nothing about the policy."""
    (tmp_path / "agent.py").write_text(ASKS_TOO_MUCH)
    given = ["gateway", "exec", "--model", "qa", "--port", "0", "--out", str(tmp_path / "runs"), "--json", "-"]
    main([*given, "--", sys.executable, str(tmp_path / "agent.py"), *words])
    told = json.loads(capsys.readouterr().out)
    assert (told["code"], told["reward"], told["calls"]) == (1, None, 0) and why in told["reason"]


def worth(world_: World, code: int, answers: Sequence[str] | None = None, **asked: Any) -> Reward:
    """Of a session whose second request has these fields, and whose command ended with a code."""
    opened = world_.open()
    live = world_.sessions.get(opened["session"])
    for more in ({}, asked):
        world_.post("/v1/chat/completions", {"messages": MESSAGES, **more}, opened["key"])
    given = None if answers is None else iter(answers)
    return _worth_of(live, code, None if given is None else lambda: next(given))


MESSAGES = [{"role": "user", "content": "What is it?"}]


def test_an_exit_code_after_a_refused_call_is_no_reward():
    with world() as gate:
        assert worth(gate, 3, n=2).reward is None and worth(gate, 0, n=2).reward == 1.0
        assert worth(gate, 3).reward == 0.0
    with world(limits=GatewayLimits(calls=1)) as gate:
        assert worth(gate, 3).reward is None


def test_whoever_is_asked_for_a_reward_may_mistype_it(capsys):
    with world() as gate:
        assert worth(gate, 0, ["yes", "0.25"]).reward == 0.25 and "yes" in capsys.readouterr().err
        assert worth(gate, 0, ["yes", ""]).reward is None


def test_a_session_ends_also_where_its_command_cannot_be_started(tmp_path, capsys):
    out = tmp_path / "runs"
    with pytest.raises(SystemExit):
        main(["gateway", "exec", "--model", "qa", "--out", str(out), "--", str(tmp_path / "none")])
    assert "cannot be started" in capsys.readouterr().err
    assert write_trees(out, out / "trees.jsonl")["open"] == 0
