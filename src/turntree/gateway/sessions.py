"""The sessions of a gateway: who may ask, what is asked, what is kept of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turntree.core import seeds
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.cost import Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.progress import notice
from turntree.core.protocols import Renderer
from turntree.core.tree import StopReason
from turntree.gateway.calls import Session
from turntree.gateway.config import Refused, ServingConfig, bad_request
from turntree.gateway.driver import EngineDriver, Fault, Pending
from turntree.gateway.lineage import Kept, Lineage, Tools, again
from turntree.gateway.rewards import equal
from turntree.gateway.store import SCHEMA, SessionStore, StoredSession, call_to_json

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_LONGEST_TOKEN = 32  # characters: more than any text has on average
_REMEMBERED = 4096  # sessions that ended
_SHARE = 4  # one session takes at most a quarter of `limits.waiting`
_CONTEXT = "context_length_exceeded"  # OpenAI's code, which agents look for before they compact
_NO_ROOM = "This model's maximum context length is {} tokens ({}): {}"  # words that LiteLLM and LangChain look for


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of an agent, read and checked."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    candidates: int = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(eq=False)
class LiveSession:
    """A session that is open."""

    session_id: str
    task_id: str
    sample: int
    seed: int
    opened: float  # wall-clock time, which goes on while a gateway is down
    keys: dict[str, str]  # digests of its keys, by what they allow: "ask", "reward"
    lineage: Lineage
    places: asyncio.Semaphore  # for requests that are sampled at once; the others wait in line
    meta: dict[str, Any] = field(default_factory=dict[str, Any])
    calls: list[Kept] = field(default_factory=list[Kept])  # in the order in which they ended
    asked: int = 0  # calls so far, those under way included
    tokens: int = 0
    draws: Counter[tuple[int, ...]] = field(default_factory=Counter[tuple[int, ...]])  # calls by a digest of the prompt
    continued: set[str] = field(default_factory=set[str])  # calls that were gone on from
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])  # requests, those in line included
    reward: dict[str, Any] = field(default_factory=dict[str, Any])
    limit: str = ""  # the limit that the agent ran into, in words; it is over where a later call went through
    stop: StopReason = StopReason.COMPLETED  # the same limit, by its name
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    def value(self, reason: str = "") -> Session:
        calls = sorted(self.calls, key=lambda kept: kept.index)
        said = {name: self.reward[name] for name in ("reward", "success", "call_rewards") if name in self.reward}
        return Session(
            session_id=self.session_id,
            task_id=self.task_id,
            sample=self.sample,
            calls=tuple(kept.call(self.session_id, self.task_id) for kept in calls),
            reason=self.reward.get("reason") or reason,
            stop=self.stop,
            **said,
        )

    def ran_into(self, stop: StopReason, limit: str) -> str:
        self.stop, self.limit = stop, limit
        return limit

    def call_id(self, after: int = 0) -> str:
        """The name of the next call, or of one after it. A rollout that is repeated has the same names, which a chat
        template may write into a prompt with the calls of tools."""
        return f"{seeds.derive(self.seed, 'call', self.session_id, self.asked + after):016x}"

    def keep(self, kept: Kept) -> None:
        self.calls.append(kept)
        self.lineage.add(kept)
        self.tokens += len(kept.added_ids) + (0 if kept.completion is None else len(kept.completion.token_ids))


class Sessions:
    """The open sessions. Not thread-safe: everything runs in one event loop; the engine has a thread of its own.

    With a `store` they survive the process: `restore` goes on with those that were open.
    """

    def __init__(
        self,
        driver: EngineDriver,
        renderer: Renderer,
        config: ServingConfig,
        *,
        store: SessionStore | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.driver, self.config, self.ledger = driver, config, Counter[str]()
        self._renderer, self._store, self._clock = renderer, store, clock
        self._open: dict[str, LiveSession] = {}
        self._over = OrderedDict[str, LiveSession]()  # those that ended last, without their calls
        self._waiting = 0
        limit = driver.engine.max_context
        self.max_context = limit if config.max_context is None else min(limit, config.max_context)

    # opening and closing

    def open(
        self,
        task_id: str,
        *,
        seed: int | None = None,
        sample: int = 0,
        session_id: str | None = None,
        meta: dict[str, Any] | None = None,
    ) -> tuple[LiveSession, dict[str, str]]:
        """A new session and its keys: one to ask with, one to reward with. Without a seed it draws as no other does."""
        if len(self._open) >= self.config.limits.sessions:
            raise Refused(429, f"{len(self._open)} sessions are open, as many as are allowed", code="too_many_sessions")
        name = secrets.token_hex(8) if session_id is None else session_id
        if not _ID.fullmatch(name):
            raise Refused(400, "a session id has up to 64 letters, digits, - and _", param="session_id")
        if name in self._open or (self._store is not None and self._store.has(name)):
            raise Refused(409, f"there is a session {name!r} already", param="session_id")
        keys = {use: f"{name}.{secrets.token_urlsafe(24)}" for use in ("ask", "reward")}
        digests = {use: digest(key) for use, key in keys.items()}
        seed = seeds.derive(0, "session", name) if seed is None else seed
        session = self._made(name, task_id, sample, seed, self._clock(), digests, meta or {})
        row = {"schema": SCHEMA, "session": name, "task": task_id, "sample": sample, "seed": seed}
        self._write(session, {**row, "opened": session.opened, "keys": digests, "meta": session.meta})
        self._open[name] = session
        self.ledger["sessions"] += 1
        return session, keys

    def _made(
        self, name: str, task: str, sample: int, seed: int, opened: float, keys: dict[str, str], meta: dict[str, Any]
    ) -> LiveSession:
        lineage, places = Lineage(self._renderer, self.config.thoughts), asyncio.Semaphore(self.config.limits.parallel)
        return LiveSession(name, task, sample, seed, opened, keys, lineage, places, meta)

    def find(self, key: str, named: str | None, *, use: str = "ask", admin: bool = False) -> LiveSession:
        """The session of a key, also one of those that ended last. An unknown session and a wrong key are not told
        apart."""
        name = named or key.partition(".")[0]
        session = self._open.get(name) or self._over.get(name)
        held = session.keys[use] if session is not None else digest("")
        right = secrets.compare_digest(digest(key), held)
        if session is None or not (right or admin):
            message = "no session has this key: it is wrong, or the session was over long ago"
            raise Refused(401, message, code="invalid_api_key")
        return session

    def get(self, session_id: str) -> LiveSession:
        if session_id not in self._open:
            raise Refused(404, f"no session {session_id!r} is open", code="no_session")
        return self._open[session_id]

    def __len__(self) -> int:
        return len(self._open)

    def reward(self, session: LiveSession, given: dict[str, Any]) -> None:
        """Keep the reward of a session, once. Raises `Refused` where it has another one already, or ended without one
        (its file is closed, and nobody would read a reward behind that)."""
        if session.reward:
            if equal(session.reward, given):
                return
            told = f"session {session.session_id!r} has another reward already: {session.reward['reward']}"
            raise Refused(409, told, code="rewarded", param="reward")
        if self._open.get(session.session_id) is not session:
            raise Refused(403, f"session {session.session_id!r} ended without a reward", code="session_over")
        self._write(session, {"reward": given}, sync=True)
        session.reward = given

    async def close(self, session: LiveSession, reason: str = "") -> Session:
        """End a session, with what it has under way; or give what came of it when it was ended before. It stays open
        where that cannot be written, so that it can be ended later."""
        async with session.ending:
            if self._open.get(session.session_id) is not session:
                return session.value(reason)
            running = [task for task in session.running if task is not asyncio.current_task()]
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            self._write(session, {"closed": reason, "stop": session.stop}, sync=True)
            if self._store is not None:
                self._store.close(session.session_id)
            del self._open[session.session_id]
            self._remember(session)
            self.ledger["rewarded" if session.reward.get("reward") is not None else "unrewarded"] += 1
            return session.value(reason)

    def _remember(self, session: LiveSession) -> None:
        """Know a session that ended: whoever asks or rewards again is told so, and not that the key is wrong."""
        it = session
        over = self._made(it.session_id, it.task_id, it.sample, it.seed, it.opened, it.keys, {})
        over.reward, self._over[it.session_id] = it.reward, over
        if len(self._over) > _REMEMBERED:
            self._over.popitem(last=False)

    async def expire(self) -> None:
        """Close the sessions that took too long, those that cannot be written (a full disk, a file that was moved away)
        another time."""
        limit = self.config.limits.seconds
        for session in [each for each in self._open.values() if self._clock() - each.opened > limit]:
            reason = session.ran_into(StopReason.MAX_SECONDS, f"the session took longer than {limit:g} seconds")
            try:
                await self.close(session, reason)
                self.ledger["expired"] += 1
            except (OSError, TurntreeError) as error:
                notice(f"warning: session {session.session_id} cannot be closed: {error}")

    # asking

    async def ask(self, session: LiveSession, asked: Ask) -> list[Kept]:
        """Sample the candidates of one request and keep them. A request waits in line for its place: clients that are
        refused give up after two tries. Cancelling this coroutine (the agent hung up) cancels the candidates in the
        engine; they are kept as disconnected. Raises `Refused`."""
        limit = self.config.limits.waiting
        if self._waiting + asked.candidates > limit or len(session.running) > limit // _SHARE:
            raise Refused(429, "too many calls are under way; try again", code="too_many_calls")
        task = asyncio.current_task()
        assert task is not None
        session.running.add(task)
        self._waiting += asked.candidates
        try:
            async with session.places:
                self._admit(session, asked)
                calls = self._placed(session, asked)
                sampling = self._sampling(session, calls[0], asked)
                await self._sample(session, calls, sampling, asked)
                return calls
        finally:
            self._waiting -= asked.candidates
            session.running.discard(task)

    def _admit(self, session: LiveSession, asked: Ask) -> None:
        limits, count = self.config.limits, asked.candidates
        if session.session_id not in self._open or session.reward or session.ending.locked():
            raise Refused(403, f"session {session.session_id!r} is over", code="session_over")
        if count > limits.candidates:
            raise Refused(400, f"{count} candidates, and {limits.candidates} are allowed", param="n")
        calls, seconds = session.asked + count, self._clock() - session.opened
        used_up = [
            (calls > limits.calls, StopReason.MAX_TURNS, "calls", f"made its {limits.calls} calls"),
            (session.tokens >= limits.tokens, StopReason.MAX_TOKENS, "tokens", f"used its {limits.tokens} tokens"),
            (seconds > limits.seconds, StopReason.MAX_SECONDS, "seconds", f"used its {limits.seconds:g} seconds"),
        ]
        for reached, stop, what, said in used_up:
            if reached:
                raise Refused(403, session.ran_into(stop, f"the session has {said}"), code=f"session_{what}")

    def _placed(self, session: LiveSession, asked: Ask) -> list[Kept]:
        size = len(json.dumps(asked.tools)) + sum(map(_size, asked.messages))
        if size > _LONGEST_TOKEN * self.max_context:  # rendering it would keep everybody waiting
            raise self._no_room(session, f"{size} characters")
        try:
            first = session.lineage.place(asked.messages, asked.tools, session.call_id(), session.asked)
        except InputError as error:
            raise bad_request(error) from error
        except Exception as error:  # the boundary to foreign templates
            raise Refused(400, f"the messages cannot be rendered ({type(error).__name__}: {error})") from error
        more = range(1, asked.candidates)
        calls = [first, *(again(first, session.call_id(i), session.asked + i, "candidate") for i in more)]
        for kept in calls:
            kept.request_id, kept.meta = first.call_id, asked.meta
        return calls

    def _sampling(self, session: LiveSession, first: Kept, asked: Ask) -> Sampling:
        """How these candidates are sampled. Raises `Refused` where the context has no room."""
        room = self.max_context - first.prompt_tokens
        if room < 1:
            raise self._no_room(session, f"{first.prompt_tokens} tokens")
        session.ran_into(StopReason.COMPLETED, "")
        sampling = self.config.sampling
        longest = min(sampling.max_tokens, room, asked.max_tokens or room)
        if self.config.parameters == "agent":
            temperature = sampling.temperature if asked.temperature is None else asked.temperature
            top_p = sampling.top_p if asked.top_p is None else asked.top_p
            sampling = replace(sampling, temperature=temperature, top_p=top_p)
        return replace(sampling, max_tokens=longest)

    def _no_room(self, session: LiveSession, size: str) -> Refused:
        limit = f"the prompt has {size}, and the context holds {self.max_context} tokens"
        session.ran_into(StopReason.MAX_TOKENS, limit)
        return Refused(400, _NO_ROOM.format(self.max_context, _CONTEXT, limit), code=_CONTEXT, param="messages")

    async def _sample(self, session: LiveSession, calls: list[Kept], sampling: Sampling, asked: Ask) -> None:
        """Sample the calls and keep what became of each. The conversation that began the session has the draws of a
        rollout whose environment is stepped; every other call has draws by its prompt, because sub-agents that run at
        once have no order."""
        prompt = calls[0].prompt_ids
        before, session.draws[_short(prompt)] = (
            session.draws[_short(prompt)],
            session.draws[_short(prompt)] + len(calls),
        )
        session.asked += len(calls)
        turn, base = calls[0].turn, calls[0].base
        first = base is None or base.call_id not in session.continued  # of several that go on from one answer
        if base is not None and calls[0].goes_on:
            session.continued.add(base.call_id)
        if turn is not None and first and len(calls) == 1 and not before and asked.seed is None:
            draws = [seeds.of_turn(session.seed, session.task_id, (session.sample,), turn)]
        else:
            keys = ("gateway", session.task_id, session.sample, *(() if asked.seed is None else (asked.seed,)))
            draws = [seeds.derive(session.seed, *keys, *_short(prompt), before + i) for i in range(len(calls))]
        requests = [
            GenerationRequest(prompt_ids=prompt, sampling=sampling, seed=draw, retain=len(calls) == 1) for draw in draws
        ]
        pending = [self.driver.submit(request) for request in requests]
        try:
            ended = await asyncio.gather(*map(self._completed, pending), return_exceptions=True)
        except asyncio.CancelledError:
            costs = await _at_last(asyncio.gather(*(asyncio.wrap_future(self.driver.cancel(one)) for one in pending)))
            for kept, cost in zip(calls, costs, strict=True):
                self._end(session, kept, status="disconnected", error="the agent hung up", cost=cost)
            raise
        failed = [self._take(session, kept, end, asked) for kept, end in zip(calls, ended, strict=True)]
        if any(failed):
            status = 503 if self.driver.failure is not None else 500
            raise Refused(status, next(filter(None, failed)), code="engine_fault")

    async def _completed(self, pending: Pending) -> Completion:
        """The completion of a request, which is asked again where the engine failed on it."""
        for _ in range(self.config.retries):
            try:
                return await asyncio.wrap_future(pending.done)
            except Fault:
                self.ledger["retried"] += 1
                self.driver.again(pending)
        return await asyncio.wrap_future(pending.done)

    def _take(self, session: LiveSession, kept: Kept, ended: Completion | BaseException, asked: Ask) -> str:
        """Keep a call that ended; returns why it failed."""
        if isinstance(ended, BaseException):
            if not isinstance(ended, TurntreeError):
                raise ended
            self._end(session, kept, status="failed", error=str(ended))
            return str(ended)
        kept.completion = ended
        try:
            answer = self._renderer.parse(ended.token_ids, kept.tools)
        except Exception as error:  # the boundary to foreign parsers
            self._end(session, kept, status="failed", error=f"the answer cannot be read ({error})")
            return kept.error
        cut = ended.finish == "length"
        calls = (
            ()
            if cut
            else tuple(replace(call, id=f"call_{kept.call_id}_{i}") for i, call in enumerate(answer.tool_calls))
        )
        kept.answer = replace(answer, cut=cut, tool_calls=calls)
        self._end(session, kept)
        return ""

    def _end(
        self, session: LiveSession, kept: Kept, *, status: str = "kept", error: str = "", cost: Cost | None = None
    ) -> None:
        kept.status, kept.error = status, error  # pyright: ignore[reportAttributeAccessIssue]
        kept.cost = cost or kept.cost
        self._write(session, {"call": call_to_json(kept)})
        session.keep(kept)
        self.ledger[f"calls_{status}"] += 1
        self.ledger[f"cause_{kept.cause}"] += 1

    # on disk

    def _write(self, session: LiveSession, row: dict[str, Any], *, sync: bool = False) -> None:
        if self._store is not None:
            self._store.append(session.session_id, row, sync=sync)

    def restore(self) -> int:
        """Go on with the sessions that are open on disk; returns their number."""
        store = self._store
        for name in store.sessions() if store is not None else ():
            assert store is not None
            try:
                held = store.read(name)
            except InputError as error:  # the other sessions go on
                self.ledger["damaged"] += 1
                notice(f"warning: {error}; this session does not go on: its file is now {store.set_aside(name)}")
                continue
            if held is None:  # killed while it was opened: nobody has its key
                store.path(name).unlink()
            elif held.reward or held.end is not None:  # killed while it was ended
                if held.end is None:
                    store.append(name, {"closed": ""}, sync=True)
                store.close(name)
                self._remember(self._restored(held))
            else:
                self._open[name] = self._restored(held)
        self.ledger["restored"] += len(self._open)
        return len(self._open)

    def _restored(self, held: StoredSession) -> LiveSession:
        head = held.head
        session = self._made(
            head.session, head.task, head.sample, head.seed, head.opened, dict(head.keys), dict(head.meta)
        )
        for kept in held.calls:
            session.keep(kept)
            session.draws[_short(kept.prompt_ids)] += 1
            if kept.base is not None and kept.goes_on:
                session.continued.add(kept.base.call_id)
            session.asked = max(session.asked, kept.index + 1)
        session.reward = held.reward or session.reward
        return session


async def _at_last(work: asyncio.Future[T]) -> T:
    """The result of `work`, also in a task that is cancelled again while it waits: an agent that is stopped hangs up,
    and its session is closed."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(work)
    return work.result()


def digest(key: str) -> str:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _size(message: Message) -> int:
    calls = sum(len(json.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + calls


def _short(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """A name for a prompt that costs little to keep."""
    told = hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest()
    return (int.from_bytes(told, "big") >> 1,)
