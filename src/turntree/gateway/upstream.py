"""`turntree gateway --upstream`: everything passes through unchanged to a server of others, and what agents do there
becomes traces.

Calls are joined by what they say: a call whose messages begin with an earlier call's messages and answer continues that
conversation. A conversation that nobody has continued for a while is a trace (docs/traces.md), so an agent's sub-agents
and compactions give traces of their own. Only bodies are looked at, headers never; texts pass the rules of redaction
before they are kept anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from turntree.core.config import require_url
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.gateway.calls import chained, digest_of
from turntree.gateway.config import Refused
from turntree.gateway.dialects.common import UNREAD_SPEECH, read_message
from turntree.gateway.store import append_row
from turntree.run.jsonl import json_line, parse_json, parse_object
from turntree.traces.schema import FILE_SCHEMA, Trace
from turntree.traces.splits import assign_split

_MOST = 32_000_000  # bytes of a request; of an answer that is traced (a larger one passes through)
_FLUSH = 5.0  # seconds between two looks for conversations that nobody continues
_DONE = b"data: [DONE]"  # the event that ends a stream
_HOP = frozenset(  # belongs to one connection, or would hide the answer from us
    {"connection", "keep-alive", "transfer-encoding", "te", "trailer", "upgrade", "proxy-authorization", "host"}
    | {"proxy-authenticate", "content-length", "accept-encoding", "x-turntree-session"}
)
_METHODS = ["GET", "POST", "DELETE", "PUT", "PATCH"]
REDACTED = "[redacted]"
SECRETS = (  # always redacted: the shapes of common keys
    r"\b(?:sk|rk|pk|gh[oprsu]|github_pat|glpat|xox[abeprs]|hf)[-_][A-Za-z0-9_-]{16,}",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    # a JSON Web Token, signed or encrypted; one look ahead for each word keeps it linear
    r"(?<![A-Za-z0-9_-])(?=[A-Za-z0-9_-]++\.[A-Za-z0-9_-]*+\.)[A-Za-z0-9_-]*?\beyJ[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*){2,4}",
    r"\bBearer\s+[A-Za-z0-9._~+/-]{16,}=*",
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:(?!-----BEGIN )(?:.|\n))*?-----END [A-Z ]*PRIVATE KEY-----",
)


class Redaction:
    """Replaces what a rule (a regular expression) matches in every text of a message and of its calls."""

    def __init__(self, rules: Iterable[str] = ()) -> None:
        self._rules: list[re.Pattern[str]] = []
        for rule in (*SECRETS, *rules):
            try:
                self._rules.append(re.compile(rule))
            except re.error as error:
                problem = f"{rule!r} is not a regular expression ({error})"
                raise InputError(problem, field="upstream.redact", hint="write it as Python's re does") from error

    def text(self, text: str) -> str:
        for rule in self._rules:
            text = rule.sub(REDACTED, text)
        return text

    def value(self, value: Any) -> Any:
        """A JSON value with its texts redacted."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, list):
            return [self.value(item) for item in cast("list[Any]", value)]
        if isinstance(value, dict):
            return {self.text(key): self.value(item) for key, item in cast("dict[str, Any]", value).items()}
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return REDACTED if number and self.text(written := json.dumps(value)) != written else value

    def message(self, message: Message) -> Message:
        calls = tuple(
            replace(call, arguments=self.value(call.arguments), id=self.value(call.id)) for call in message.tool_calls
        )
        content, reasoning = self.text(message.content), self.text(message.reasoning)
        named = {"name": self.value(message.name), "tool_call_id": self.value(message.tool_call_id)}
        return replace(message, content=content, reasoning=reasoning, tool_calls=calls, **named)


@dataclass(eq=False)
class _Dialogue:
    """A conversation so far; `messages` are shared with the one it continues."""

    name: str
    session: str
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...]
    model: str
    seen: float
    cut: dict[str, str] = field(default_factory=dict[str, str])  # turns that the token limit cut


class TraceWriter:
    """Appends traces to `path`. At most `most` conversations wait for more; the oldest is written first. As many cut
    turns are remembered; those forgotten are counted."""

    def __init__(
        self,
        path: Path,
        redaction: Redaction,
        *,
        idle: float = 300.0,
        most: int = 10_000,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path, self.counts = path, Counter[str]()
        self._redaction, self._idle, self._most, self._clock = redaction, idle, most, clock
        self._live: OrderedDict[tuple[str, bytes], _Dialogue] = OrderedDict()  # the least recent first
        # The conversations that end in a cut answer. They outlive `_live`: a retry continues what was continued before.
        self._cut: OrderedDict[tuple[str, bytes], None] = OrderedDict()
        self._run = f"{clock():.6f}".replace(".", "-")
        if not path.exists() or not path.stat().st_size:
            self._append({"schema": FILE_SCHEMA, "made_by": "gateway"})

    def call(self, session: str, request: dict[str, Any], answers: Sequence[dict[str, Any]]) -> None:
        """Keep one call: its request and the messages (with `finish_reason`) that it was answered with. What is not a
        conversation of texts is counted and left out."""
        try:
            asked = tuple(self._message(row) for row in request.get("messages") or ())
            said = [(self._message(row), row.get("finish_reason") == "length") for row in answers]
            tools = tuple(self._redaction.value(list(request.get("tools") or ())))
        except (InputError, AttributeError, TypeError):
            self.counts["not traced: no conversation of texts"] += 1
            return
        self.counts["calls"] += 1
        names = chained([digest_of(message, thoughts=False) for message in asked])
        before = next((i for i in range(len(asked), 0, -1) if (session, names[i - 1]) in self._live), 0)
        begun = self._live.pop((session, names[before - 1])) if before else None
        turns = [(session, name) for message, name in zip(asked, names, strict=True) if message.role == "assistant"]
        marked = {str(turn): "cut" for turn, key in enumerate(turns) if key in self._cut}
        for answer, cut in said:
            dialogue = _Dialogue(
                name=f"gateway-{self._run}-{self.counts['calls']}-{self.counts['answers']}",
                session=session,
                messages=(*(begun.messages if begun else ()), *asked[before:], answer),
                tools=tools,
                model=str(request.get("model", "")),
                seen=self._clock(),
                cut={**(begun.cut if begun else {}), **marked, **({str(len(turns)): "cut"} if cut else {})},
            )
            self.counts["answers"] += 1
            whole = chained([digest_of(answer, thoughts=False)], names[-1] if names else b"")[-1]
            if self._live.pop((session, whole), None) is not None:  # a key that is there would keep its place
                self.counts["not traced: the same was said again"] += 1
            self._live[session, whole] = dialogue
            if cut:
                self._remember((session, whole))
        self.flush()

    def _remember(self, key: tuple[str, bytes]) -> None:
        self._cut[key] = None
        self._cut.move_to_end(key)
        if len(self._cut) > self._most:
            self._cut.popitem(last=False)
            self.counts["cut turns forgotten"] += 1

    def flush(self, *, everything: bool = False) -> None:
        """Write the conversations that nobody has continued for a while. Where the disk is full they go on waiting, and
        those that cannot are counted as lost."""
        now = self._clock()
        while self._live:
            key, oldest = next(iter(self._live.items()))
            if not everything and now - oldest.seen < self._idle and len(self._live) <= self._most:
                return
            try:
                self._write(oldest)
            except TurntreeError as error:
                notice(f"warning: {error}")
                if not everything and len(self._live) <= self._most:
                    return
                self.counts["not traced: the disk is full"] += 1
            del self._live[key]

    def _write(self, dialogue: _Dialogue) -> None:
        first = next((one for one in dialogue.messages if one.role == "user"), dialogue.messages[0])
        group = digest_of(first, thoughts=False).hex()
        meta: dict[str, Any] = {"group": group, "model": dialogue.model}
        meta |= {"session": dialogue.session} if dialogue.session else {}
        meta |= {"skip_turns": dialogue.cut} if dialogue.cut else {}
        try:
            trace = Trace(
                id=dialogue.name,
                messages=dialogue.messages,
                tools=dialogue.tools,
                domain="gateway",
                split=assign_split(group, 0),
                meta=meta,
            )
            row = trace.to_json()
            Trace.from_json(parse_json(json_line(row)))  # or the whole file could not be read again
        except (InputError, AttributeError):  # a tool declared twice, or none; half a character; an id that is no text
            self.counts["not traced: no valid trace"] += 1
            return
        self._append(row)
        self.counts["traces"] += 1

    def _message(self, row: Any) -> Message:
        return self._redaction.message(read_message(row, "messages"))

    def _append(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        append_row(self.path, row)


class ServerFailed(InputError):
    """Within its answer, which is not whole."""


def answers_in(data: bytes, *, streamed: bool) -> list[dict[str, Any]]:
    """The messages of a chat completion, or of the chunks of its stream, each with its `finish_reason`. Raises
    `ServerFailed` for a stream with an error or without an end, `InputError` for anything else."""
    if not streamed:
        choices: Any = parse_object(data).get("choices")
        if not isinstance(choices, list):
            raise InputError("holds no choices", field="choices")
        return [{**one["message"], "finish_reason": one.get("finish_reason")} for one in choices]
    found: dict[int, dict[str, Any]] = {}
    for chunk in _events(data):
        if chunk.get("error"):
            raise ServerFailed("tells of an error of the server", field="error")
        for choice in chunk.get("choices") or ():
            _add_delta(found.setdefault(choice.get("index", 0), {"role": "assistant", "content": ""}), choice)
    if not found:
        raise InputError("holds no choices", field="choices")
    if not all("finish_reason" in one for one in found.values()):
        raise ServerFailed("is missing", field="finish_reason")
    return [one | {"tool_calls": list(one.get("tool_calls", {}).values())} for _, one in sorted(found.items())]


def _events(data: bytes) -> Iterator[dict[str, Any]]:
    for raw in data.splitlines():  # of bytes: text would be split at U+2028 too, which JSON may hold as it is
        line = raw.decode("utf-8", "replace")
        text = line.removeprefix("data:").strip()
        if line.startswith("data:") and text != "[DONE]":
            yield parse_object(text)


def _add_delta(message: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice.get("delta") or {}
    message["content"] += delta.get("content") or ""
    message |= {name: delta[name] for name in UNREAD_SPEECH if delta.get(name)}
    thoughts = (delta.get(name) for name in ("reasoning_content", "reasoning"))
    thought = next((text for text in thoughts if isinstance(text, str) and text), None)  # some servers send it twice
    if thought is not None:
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    calls: dict[tuple[int, int], dict[str, Any]] = message.setdefault("tool_calls", {})
    for part in delta.get("tool_calls") or ():
        call = _call_of(calls, part)
        call["id"] = call["id"] or part.get("id")
        for name, text in (part.get("function") or {}).items():
            call["function"][name] = call["function"].get(name, "") + (text or "")
    if choice.get("finish_reason"):
        message["finish_reason"] = choice["finish_reason"]


def _call_of(calls: dict[tuple[int, int], dict[str, Any]], part: dict[str, Any]) -> dict[str, Any]:
    """The call that a part belongs to, by its index and the number of calls with that index: some servers give all
    parallel calls the index 0. A new id begins a new call where a name comes with it (an id alone may only change)."""
    index = part.get("index") or 0
    number = sum(one == index for one, _ in calls)
    last = calls.get((index, number - 1))
    begins = part.get("id") and (part.get("function") or {}).get("name")
    if last is not None and not (begins and last["function"]["name"] and part["id"] != last["id"]):
        return last
    return calls.setdefault((index, number), {"id": None, "function": {"name": "", "arguments": ""}})


class Upstream:
    """The application. `url` is the base of the other server's API (`https://host/v1`)."""

    def __init__(self, url: str, writer: TraceWriter, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        require_url(url, "upstream.url", "write https://host/v1")
        self._url, self.writer = url.rstrip("/"), writer
        limits = httpx.Limits(max_connections=None)  # whoever asks has a connection here, and needs one there
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(600, connect=30), limits=limits, transport=transport)
        self._tracer = ThreadPoolExecutor(1, thread_name_prefix="turntree-traces")  # in nobody's way, one by one
        paths = ("/v1/{path:path}", "/s/{session}/v1/{path:path}")
        routes = [Route(path, self.forward, methods=_METHODS) for path in paths]
        self.app = Starlette(routes=routes, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        async def flush() -> None:
            while True:
                await asyncio.sleep(_FLUSH)
                await asyncio.get_running_loop().run_in_executor(self._tracer, self.writer.flush)

        task = asyncio.create_task(flush())
        yield
        task.cancel()
        await asyncio.to_thread(self._tracer.shutdown)
        self.writer.flush(everything=True)
        await self._client.aclose()

    async def forward(self, request: Request) -> Response:
        path = request.path_params["path"]
        if any(part in ("..", ".") for part in path.split("/")):
            return _error(400, "the path leaves the API")
        data = bytearray()
        try:
            async for part in request.stream():
                data += part
                if len(data) > _MOST:
                    return _error(413, f"the request has more than {_MOST:,} bytes")
        except ClientDisconnect:
            self.writer.counts["hung up"] += 1
            return Response(status_code=499)
        written = request.scope["raw_path"].partition(b"/v1/")[2].decode("latin-1")  # as the client encoded it
        asked = self._client.build_request(
            request.method,
            f"{self._url}/{written}" + (f"?{request.url.query}" if request.url.query else ""),
            headers=[*_passed(request.headers.raw), (b"accept-encoding", b"identity")],
            content=bytes(data),
        )
        try:
            response = await self._client.send(asked, stream=True)
        except httpx.HTTPError as error:
            self.writer.counts["unreachable"] += 1
            return _error(502, f"the server behind the gateway does not answer ({type(error).__name__})")
        traced = path == "chat/completions" and response.status_code == 200
        if path in ("messages", "responses"):
            if not self.writer.counts[f"not traced: {path}"]:
                notice(f"warning: requests to /v1/{path} pass through and are not traced: only /v1/chat/completions is")
            self.writer.counts[f"not traced: {path}"] += 1
        if not traced:
            self.writer.counts[f"passed: {response.status_code}"] += 1
        session = request.path_params.get("session") or request.headers.get("x-turntree-session", "")
        relay = self._relay(response, session.partition(".")[0], bytes(data) if traced else None)
        answer = StreamingResponse(relay, response.status_code)
        answer.raw_headers = _passed(response.headers.raw)
        return answer

    async def _relay(self, response: httpx.Response, session: str, asked: bytes | None) -> AsyncIterator[bytes]:
        """The answer as it comes. It is traced before its last part is given, because a client may leave with that."""
        seen, held, traced = bytearray(), b"", asked is None
        streamed = _is_streamed(response)
        try:
            async for part in response.aiter_raw():
                if asked is not None and len(seen) <= _MOST:
                    seen += part
                if asked is not None and not traced and streamed and seen.rstrip().endswith(_DONE):
                    traced = True
                    await self._traced(session, asked, seen, response)
                now, held = (part, b"") if streamed else (held, part)
                if now:
                    yield now
            if asked is not None and not traced:
                traced = True
                await self._traced(session, asked, seen, response)
            if held:
                yield held
        finally:
            if not traced:
                self.writer.counts["not traced: the answer was cut off"] += 1
            await response.aclose()

    async def _traced(self, session: str, asked: bytes, seen: bytearray, response: httpx.Response) -> None:
        """Trace a whole answer, one by one."""
        if len(seen) > _MOST:
            self.writer.counts["not traced: too large"] += 1
        else:
            tracing = (self._trace, session, asked, bytes(seen), response)
            await asyncio.get_running_loop().run_in_executor(self._tracer, *tracing)

    def _trace(self, session: str, asked: bytes, answered: bytes, response: httpx.Response) -> None:
        try:
            answers = answers_in(answered, streamed=_is_streamed(response))
            self.writer.call(session, parse_object(asked), answers)
        except (InputError, KeyError, TypeError, AttributeError) as error:  # foreign data: counted, never in the way
            self.writer.counts[f"not traced: {type(error).__name__}"] += 1


def _is_streamed(response: httpx.Response) -> bool:
    return "event-stream" in response.headers.get("content-type", "")


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.decode("latin-1").lower() not in _HOP]


def _error(status: int, message: str) -> Response:
    return JSONResponse(Refused(status, message).body, status)
