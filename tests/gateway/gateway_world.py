"""A gateway whose policy is a script, served on a free port of this machine.

The policy spells: it samples its words letter by letter, which no tokenizer would do. So a sampled answer that is
tokenised again anywhere shows in the ids.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from scripted_engine import ScriptedEngine
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.core.protocols import Renderer
from turntree.gateway.calls import Call, Thoughts
from turntree.gateway.config import GatewayLimits, ServingConfig
from turntree.gateway.sampling import EngineDriver
from turntree.gateway.server import Gateway, Served, serving
from turntree.gateway.sessions import Sessions
from turntree.gateway.store import SessionStore
from turntree.render.template import ChatRenderer

HTTP = httpx.Client(timeout=30, trust_env=False)  # making one takes longer than most tests
ADMIN = "the-admin-key"
SAMPLING = Sampling(max_tokens=64)
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
TEMPLATE = "{% for tool in tools or [] %}<|system|>{{ tool | tojson }}<|end|>{% endfor %}" + CHAT_TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}",
)


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer(TEMPLATE)


@functools.cache
def renderer() -> ChatRenderer:
    return ChatRenderer(tokenizer())


def spelled(text: str) -> tuple[int, ...]:
    """The text letter by letter, ended."""
    letters = [token for letter in text for token in tokenizer().encode(letter, add_special_tokens=False)]
    return (*letters, min(renderer().stop_ids))


def words(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
    """What the policy says: a number that depends on the request."""
    return spelled(f"the answer is {seed}")


class Timed(ScriptedEngine):
    """A script whose steps take time, so that an answer can be waited for."""

    def poll(self, timeout: float | None = None) -> list[Finished]:
        finished = super().poll(0)
        if not finished:
            time.sleep(0.001)
        return finished


def engine(
    answer: Callable[[tuple[int, ...], int], Any] = words,
    *,
    latency: Callable[[GenerationRequest], int] = lambda request: 1,
    fault: Callable[[GenerationRequest], str | None] = lambda request: None,
    max_context: int = 4096,
) -> ScriptedEngine:
    return Timed(
        answer, renderer().stop_ids, vocab_size=len(tokenizer()), latency=latency, fault=fault, max_context=max_context
    )


@dataclass
class World:
    """A served gateway, and how to talk to it."""

    url: str
    sessions: Sessions
    driver: EngineDriver
    served: Served

    def open(self, task: str = "t", **more: Any) -> dict[str, Any]:
        response = self.post("/sessions", {"task": task, **more})
        assert response.status_code == 201, response.text
        return response.json()

    def post(self, path: str, body: Any = None, key: str = ADMIN, **more: Any) -> httpx.Response:
        return HTTP.post(self.url + path, json=body, headers={"authorization": f"Bearer {key}"}, **more)

    def get(self, path: str, key: str = ADMIN) -> httpx.Response:
        return HTTP.get(self.url + path, headers={"authorization": f"Bearer {key}"})

    def client(self, key: str, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, http_client=HTTP, **more)

    def calls(self, session: str) -> list[Call]:
        return sorted(self.sessions.get(session).calls, key=lambda kept: kept.index)


@contextlib.contextmanager
def world(
    policy: Any = None,
    *,
    limits: GatewayLimits | None = None,
    thoughts: Thoughts = "fork",
    folder: Path | None = None,
    sampling: Sampling = SAMPLING,
    speaks: Renderer | None = None,
    **more: Any,
) -> Iterator[World]:
    driver = EngineDriver(policy if policy is not None else engine())
    config = ServingConfig(sampling=sampling, limits=limits or GatewayLimits(), thoughts=thoughts, **more)
    sessions = Sessions(driver, speaks or renderer(), config, store=None if folder is None else SessionStore(folder))
    sessions.restore()
    gateway = Gateway(sessions, model="policy", admin_key=ADMIN)
    try:
        with serving(gateway.app, most=4096) as served:
            yield World(served.url, sessions, driver, served)
    finally:
        driver.close()


def user(text: str) -> Message:
    return Message("user", text)
