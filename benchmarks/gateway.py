"""A gateway under a thousand sessions: is anything lost or mixed up, and what does it cost per call?

    python benchmarks/gateway.py [--sessions 1000] [--repeats 5] [--json PATH]

The policy is a script that repeats the word by which a session names itself and its turn, so an answer that reached
another session shows. The gateway runs in a process of its own and is killed once (SIGKILL) in the middle and started
again on the same folder; agents go on when it is back. All on the loopback device, at most `--sessions` connections.

`drill`: agents of seven kinds (`KINDS`) at once, each with four turns. At the end what every agent was told is compared
with what the gateway has on disk: `lost` counts answers that an agent had and the gateway has not, `mixed_up` answers
that belong to another session or turn. `memory` is the gateway's resident memory.

`overhead`: seconds of a call through the gateway (HTTP, reading, rendering, keeping on disk) against the same requests
to the engine direct, whose answers take no time: one caller, and 64 at once. Conversations of 20 turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from scripted_engine import ScriptedEngine
from turntree.cli.common import finish
from turntree.core.completion import Finished, GenerationRequest, Sampling
from turntree.core.messages import Message
from turntree.engine.tokenizer import load_tokenizer
from turntree.gateway.config import GatewayLimits, ServingConfig
from turntree.gateway.sampling import EngineDriver
from turntree.gateway.server import Gateway, Served, serving
from turntree.gateway.sessions import Sessions
from turntree.gateway.store import SessionStore, read_session
from turntree.render.template import ChatRenderer
from turntree.stages.policy import resolve

ADMIN = "the key of this benchmark"
KINDS = ("plain", "stream", "slow", "hangs up", "malformed", "wrong key", "deserter")
TURNS = 4


# the gateway


class Timed(ScriptedEngine):
    """A script whose steps take a moment."""

    def poll(self, timeout: float | None = None) -> list[Finished]:
        finished = super().poll(0)
        if not finished:
            time.sleep(0.0005)
        return finished


def policy(*, latency: Callable[[GenerationRequest], int]) -> tuple[ChatRenderer, ScriptedEngine]:
    """An engine that repeats what the last user message says after "I am"."""
    tokenizer = load_tokenizer(resolve("qa"))
    renderer = ChatRenderer(tokenizer)
    stop = min(renderer.stop_ids)

    def answer(prompt: tuple[int, ...], seed: int) -> tuple[int, ...]:
        said = tokenizer.decode(list(prompt[-40:])).rpartition("I am ")[2].partition(".")[0]
        return (*tokenizer.encode(said, add_special_tokens=False), stop)

    return renderer, Timed(answer, renderer.stop_ids, vocab_size=len(tokenizer), latency=latency, max_context=16_384)


@contextlib.contextmanager
def gateway(folder: Path, port: int = 0, *, latency: int = 6) -> Iterator[tuple[Served, Sessions]]:
    renderer, engine = policy(latency=lambda request: 1 + request.seed % latency)
    driver = EngineDriver(engine)
    limits = GatewayLimits(sessions=10_000)
    config = ServingConfig(sampling=Sampling(max_tokens=64), limits=limits)
    sessions = Sessions(driver, renderer, config, store=SessionStore(folder))
    sessions.restore()
    app = Gateway(sessions, model="echo", admin_key=ADMIN).app
    try:
        with serving(app, most=10_000, port=port) as served:
            yield served, sessions
    finally:
        driver.close()


def serve(folder: Path, port: int) -> None:
    """The process that is killed."""
    with gateway(folder, port) as (served, _):
        print(served.url, flush=True)
        time.sleep(3600)


class Process:
    """The gateway in a process of its own, on one port all the time."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.peak = folder, 0, 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, __file__, "--serve", str(self.folder), "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()
        self.port = int(self.url.rpartition(":")[2])
        self.at_start = self.memory()

    def memory(self) -> int:
        """Megabytes of resident memory."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        found = pages * os.sysconf("SC_PAGE_SIZE") // 2**20
        self.peak = max(self.peak, found)
        return found

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


# the agents


@dataclass
class Report:
    """What agents saw: answers by session, in order; errors by status; seconds of the calls that were answered."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    refused: Counter[int] = field(default_factory=Counter)
    mixed_up: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    returned: int = 0  # calls that were made again because the gateway was away

    @property
    def answered(self) -> int:
        return sum(map(len, self.answers.values()))


@dataclass
class Agent:
    url: str
    report: Report
    kind: str
    number: int
    draw: random.Random

    async def live(self) -> None:
        asked = {"task": f"task-{self.number % 100}", "seed": self.number}
        opened = json.loads(await self._post("/sessions", asked, ADMIN))
        self.session, self.key = opened["session"], opened["key"]
        answers = self.report.answers.setdefault(self.session, [])
        messages: list[dict[str, str]] = []
        for turn in range(TURNS):
            word = f"session {self.number} at turn {turn}"
            messages.append({"role": "user", "content": f"I am {word}."})
            await asyncio.sleep(self.draw.random() * 0.2)
            await self._trouble(messages)
            started = time.perf_counter()
            said = await self._ask(messages)
            self.report.seconds.append(time.perf_counter() - started)
            answers.append(said)
            if said != word:
                self.report.mixed_up.append(f"{word}: {said}")
            messages.append({"role": "assistant", "content": said})
        if self.kind != "deserter":
            await self._post(f"/sessions/{self.session}/reward", {"reward": 1.0}, opened["reward_key"], ends=True)

    async def _trouble(self, messages: list[dict[str, str]]) -> None:
        body = {"messages": messages}
        if self.kind == "malformed":
            broken = self.draw.choice([b"{", b"\xff", b'{"messages": 7}', b"[" * 5000, b'{"n": -1, "messages": []}'])
            await self._post("/v1/chat/completions", broken, self.key, expect=400)
        if self.kind == "wrong key":
            await self._post("/v1/chat/completions", body, self.key[:-1] + "~", expect=401)
            await self._post(f"/sessions/{self.session}/reward", {"reward": 9}, self.key, expect=401)
        if self.kind == "hangs up":
            with contextlib.suppress(ConnectionError):
                await self._once("/v1/chat/completions", json.dumps(body).encode(), self.key, answer=False)

    async def _ask(self, messages: list[dict[str, str]]) -> str:
        body = {"messages": messages, "stream": self.kind == "stream"}
        text = await self._post("/v1/chat/completions", body, self.key, pause=0.05 * (self.kind == "slow"))
        if self.kind != "stream":
            return json.loads(text)["choices"][0]["message"]["content"]
        chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)

    async def _post(
        self, path: str, body: Any, key: str, *, expect: int = 0, ends: bool = False, pause: float = 0.0
    ) -> str:
        """A request, made again while the gateway is away. `ends`: it may have been heard the first time."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        again = False
        for _ in range(2000):
            try:
                status, text = await self._once(path, data, key, pause=pause)
                break
            except ConnectionError:
                self.report.returned, again = self.report.returned + 1, True
                await asyncio.sleep(0.2 + 0.2 * self.draw.random())
        else:
            raise TimeoutError("the gateway did not come back")
        if status >= 400 and not (ends and again and status == 401):
            self.report.refused[status] += 1
            assert status == expect, (self.kind, status, text)
        else:
            assert not expect, (self.kind, path)
        return text

    async def _once(
        self, path: str, data: bytes, key: str, *, pause: float = 0.0, answer: bool = True
    ) -> tuple[int, str]:
        """Status and body of one request over a socket of its own: with `pause` sent and read in small pieces, without
        `answer` left before there is any. (An HTTP client with a pool of a thousand connections would be the slowest
        part of the drill.)"""
        host, _, port = self.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            head = f"POST {path} HTTP/1.0\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
            writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode())
            size = 40 if pause else len(data)
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()
                await asyncio.sleep(pause)
            if not answer:
                return 0, ""
            found = bytearray()
            while piece := await reader.read(64 if pause else 65536):
                found += piece
            return _response(bytes(found))
        finally:
            writer.close()


def _response(data: bytes) -> tuple[int, str]:
    """Status and body. Raises `ConnectionError` where the gateway died before it had said all."""
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    length = next((int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:")), None)
    whole = len(body) >= length if length is not None else b"[DONE]" in body
    if not head or not whole:
        raise ConnectionError("cut off")
    return int(head.split()[1]), body.decode()


async def drill(
    url: str, sessions: int, *, seed: int = 0, midway: Callable[[], Awaitable[None]] | None = None
) -> Report:
    """All agents at once. `midway` is awaited once a quarter of the answers is there."""
    report = Report()
    agents = [Agent(url, report, KINDS[i % len(KINDS)], i, random.Random(f"{seed} {i}")) for i in range(sessions)]
    playing = asyncio.gather(*(agent.live() for agent in agents))
    while midway is not None and not playing.done() and report.answered < sessions * TURNS // 4:
        await asyncio.sleep(0.05)
    if midway is not None:
        await midway()
    await playing
    for agent in agents:
        if agent.kind == "deserter":
            await agent._post(f"/sessions/{agent.session}/close", {"reason": "left"}, ADMIN)
    return report


def lost(report: Report, store: SessionStore) -> list[str]:
    """Answers that an agent had and that are not on disk, or not in their order."""
    found: list[str] = []
    for name, answers in report.answers.items():
        session = read_session(store, name)
        kept = iter([call.answer.content for call in session.calls if call.answer is not None])
        found += [f"{name}: {answer}" for answer in answers if answer not in kept]
    return found


def run_drill(sessions: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as made:
        process, started = Process(Path(made)), time.perf_counter()
        at_start, away = process.at_start, 0.0

        async def midway() -> None:
            nonlocal away
            process.memory()
            process.kill()
            begun = time.perf_counter()
            await asyncio.to_thread(process.start)
            away = time.perf_counter() - begun

        try:
            report = asyncio.run(drill(process.url, sessions, midway=midway))
            process.memory()
            status = httpx.get(f"{process.url}/status", headers={"authorization": f"Bearer {ADMIN}"}, trust_env=False)
        finally:
            process.kill()
        store = SessionStore(Path(made))
        closed = [read_session(store, name) for name in report.answers]
        causes = Counter(call.cause for session in closed for call in session.calls)
        states = Counter(call.status for session in closed for call in session.calls)
        return {
            "sessions": sessions,
            "agents": dict(Counter(KINDS[i % len(KINDS)] for i in range(sessions))),
            "answered": report.answered,
            "lost": len(lost(report, store)),
            "mixed_up": len(report.mixed_up),
            "rewarded": sum(session.reward == 1.0 for session in closed),
            "censored": sum(session.reward is None for session in closed),
            "open_at_the_end": status.json()["open"],
            "refused": dict(sorted(report.refused.items())),
            "asked_again": report.returned,
            "calls": dict(states),
            "causes": dict(causes),
            "seconds": round(time.perf_counter() - started, 1),
            "seconds_away": round(away, 1),
            "call_seconds_median": round(statistics.median(report.seconds), 3),
            "memory_mb": {"at_start": at_start, "most_seen": process.peak},
        }


# overhead


def conversation(number: int, turns: int) -> list[list[dict[str, str]]]:
    """The messages of every turn; the policy's answers are known."""
    found: list[list[dict[str, str]]] = []
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        word = f"session {number} at turn {turn}"
        messages = [*messages, {"role": "user", "content": f"{'A longer text. ' * 8}I am {word}."}]
        found.append(messages)
        messages = [*messages, {"role": "assistant", "content": word}]
    return found


async def through(url: str, callers: int, turns: int) -> None:
    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120, trust_env=False) as client:

        async def live(number: int) -> None:
            admin = {"authorization": f"Bearer {ADMIN}"}
            opened = (await client.post(f"{url}/sessions", json={"task": "t"}, headers=admin)).json()
            headers = {"authorization": f"Bearer {opened['key']}"}
            for messages in conversation(number, turns):
                reply = await client.post(f"{url}/v1/chat/completions", json={"messages": messages}, headers=headers)
                assert reply.status_code == 200, reply.text

        await asyncio.gather(*map(live, range(callers)))


def direct(renderer: ChatRenderer, engine: ScriptedEngine, callers: int, turns: int) -> None:
    """The same prompts to the engine, rendered before."""
    prompts = [
        [renderer.prompt([Message.from_chat(m) for m in messages]) for messages in conversation(i, turns)]
        for i in range(callers)
    ]
    for turn in range(turns):
        for one in prompts:
            engine.submit(GenerationRequest(prompt_ids=one[turn], sampling=Sampling(max_tokens=64), seed=0))
        while engine.in_flight:
            ScriptedEngine.poll(engine, 0)


def overhead(repeats: int, turns: int = 20) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        process = Process(Path(made))
        try:
            for callers in (1, 64):
                renderer, engine = policy(latency=lambda request: 1)
                asyncio.run(through(process.url, callers, 2))  # warm
                found = []
                for _ in range(repeats):
                    started = time.perf_counter()
                    asyncio.run(through(process.url, callers, turns))
                    taken = time.perf_counter() - started
                    started = time.perf_counter()
                    direct(renderer, engine, callers, turns)
                    found.append((taken - (time.perf_counter() - started)) / (callers * turns))
                figures = {"median": statistics.median(found), "low": min(found), "high": max(found)}
                milliseconds = {name: round(1000 * value, 2) for name, value in figures.items()}
                cases.append({"callers": callers, "turns": turns, "overhead_ms_per_call": milliseconds})
        finally:
            process.kill()
    return cases


def main() -> None:
    parser = argparse.ArgumentParser(description="A gateway under load.")
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=["drill", "overhead"], help="one of the two")
    parser.add_argument("--quick", action="store_true", help="few sessions, to see that it runs")
    parser.add_argument("--json", metavar="PATH", help="'-' is standard output, and only it")
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        return serve(arguments.serve, arguments.port)
    found = {} if arguments.only == "overhead" else run_drill(28 if arguments.quick else arguments.sessions)
    repeats, turns = (1, 3) if arguments.quick else (arguments.repeats, 20)
    cases = [] if arguments.only == "drill" else overhead(repeats, turns)
    lines = [f"{name}: {value}" for name, value in found.items()]
    finish({"drill": found, "cases": cases}, arguments.json, [*lines, *map(str, cases)])
    return None


if __name__ == "__main__":
    main()
