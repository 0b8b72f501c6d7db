"""`turntree serve` and the port that it listens at, with a stub in place of vLLM."""

import asyncio
import importlib
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from turntree.core.errors import ConfigError, InputError, TurntreeError
from turntree.engine import vllm_server
from turntree.engine.vllm_server import ServeConfig, Supervised, serving, settings

STUB = """#!{python}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
import turntree_guard

class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["authorization"] == "Bearer " + os.environ["VLLM_API_KEY"] else 401)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


class Stranger(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Not started; its vLLM is the stub."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/lib/python3/site-packages/vllm").mkdir(parents=True)
    python = tmp_path / "venv/bin/python"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(0o755)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(vllm_server, "_FREE", 0.2)
    monkeypatch.setattr(vllm_server, "_LOOK", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    supervised = Supervised(ServeConfig(venv=str(tmp_path / "venv"), port=port), tmp_path, tmp_path / "log")
    yield supervised
    supervised.end()


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/collective_rpc", "/reset_prefix_cache", "/health", "/", "//v1/.."]
)
@pytest.mark.parametrize(
    "key", [None, "Bearer ", "Bearer no", "bearer the-key", "Bearer the-key ", "Basic the-key", "é"]
)
def test_no_path_of_a_server_is_open_without_its_key(path, key, monkeypatch):
    """vLLM's own key guards /v1 alone, and not the paths that replace the weights."""
    monkeypatch.setenv("VLLM_API_KEY", "the-key")
    monkeypatch.syspath_prepend(vllm_server._GUARD)
    reached = []

    async def app(scope, receive, send):
        reached.append(scope["type"])

    def asked(kind, *headers):
        sent = []

        async def send(message):
            sent.append(message)

        scope = {"type": kind, "path": path, "headers": [(b"authorization", one.encode()) for one in headers]}
        asyncio.run(importlib.import_module("turntree_guard").Guard(app)(scope, None, send))
        return sent

    given = [] if key is None else [key]
    assert asked("http", *given)[0]["status"] == 401
    assert asked("websocket", *given)[0]["type"] == "websocket.close"
    assert not asked("http", "Bearer the-key") and not asked("lifespan") and reached == ["http", "lifespan"]


def test_the_key_is_that_of_the_run_or_a_new_one_and_no_process_can_read_it_from_the_command(server, monkeypatch):
    assert server.made_key and len(server.key) > 20
    assert not any(server.key in word for word in server._command)
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    given = Supervised(server.config, server.log.parent)
    assert (given.key, given.made_key, given._environment["VLLM_API_KEY"]) == ("mine", False, "mine")
    at = server._command.index("--middleware")
    assert server._command[at + 1] == "turntree_guard.Guard"


def test_a_server_is_healthy_when_it_is_reported_and_started_again_when_it_dies(server):
    server.start()
    assert server.healthy()
    pids = [server.pid]

    def say(text):
        if "back" in text:
            pids.append(server.pid)
            server.end()

    server._child.kill()
    server.keep(say)
    assert len(set(pids)) == 2 and None not in pids


@pytest.mark.parametrize("bad", [{"port": 0}, {"port": 70000}, {"start_seconds": 0.0}])
def test_what_no_server_can_have_is_refused(bad):
    with pytest.raises(ConfigError):
        ServeConfig(**bad)


def test_the_run_is_told_what_it_can_do():
    assert settings(ServeConfig(lora_rank=8)).endswith("url=http://127.0.0.1:8000 --set device.lora.rank=8")
    told = settings(ServeConfig(lora_rank=8), adapted=True)
    assert told.endswith("url=http://127.0.0.1:8000"), "a policy with an adapter takes no second one"
    assert settings(ServeConfig(host="::1")).endswith("url=http://[::1]:8000")


def test_a_port_where_another_server_answers_is_refused_before_anything_is_started(server):
    with HTTPServer(("127.0.0.1", server.config.port), Stranger) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        refused = pytest.raises(InputError, match=f"{server.config.port} of .*Address already in use.* --port")
        with refused, serving(server.config, server.log.parent, server.log):
            pass
        assert not server.log.exists()
        stranger.shutdown()


def test_an_answer_of_another_server_is_not_that_of_a_process_that_ended(server, monkeypatch):
    """It took the port while ours was starting, and ours could not bind it."""
    monkeypatch.setattr(server, "_command", ["false"])
    monkeypatch.setattr(server, "healthy", lambda: server._child.wait() >= 0)
    with pytest.raises(TurntreeError, match="did not start"):
        server.start()


def test_a_server_whose_port_was_taken_meanwhile_is_given_up(server):
    server.start()
    taken = []

    def take(text):
        server.stop()
        taken.append(socket.create_server(("127.0.0.1", server.config.port)))

    server._child.kill()
    with pytest.raises(InputError, match="cannot be used"):
        server.keep(take)
    assert len(taken) == 1
    taken[0].close()
