"""What sessions ask is sampled: one thread owns a streaming engine, and requests of all sessions join its batch."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import json
import queue
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from turntree.core import seeds
from turntree.core.completion import Completion, GenerationRequest, Sampling
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import InputError, TurntreeError
from turntree.core.messages import Message
from turntree.core.protocols import Renderer, StreamingEngine
from turntree.core.tree import StopReason
from turntree.engine.requests import polled
from turntree.gateway.calls import Call, Lineage, Session, Status, Tools
from turntree.gateway.config import CONTEXT, WAITING, Refused, Reward, ServingConfig, bad_request
from turntree.gateway.listening import Listener, RequestGuide, cut_at
from turntree.gateway.store import Head
from turntree.render.grammar import Constraint
from turntree.render.turns import TurnByTurn

T = TypeVar("T")

_TICK = 0.005  # seconds that the engine works before new requests are taken
_LONGEST_TOKEN = 32  # characters: more than any text has on average
_SHARE = 4  # one session takes at most a quarter of the places
_NO_ROOM = "This model's maximum context length is {} tokens ({}): {}"  # words that LiteLLM and LangChain look for


class Fault(TurntreeError):
    """The engine gave no completion for one request."""


class EngineDriver:
    """Drives `engine` until `close`. Nobody else may use the engine until then."""

    def __init__(self, engine: StreamingEngine) -> None:
        self.engine = engine
        self.failure: TurntreeError | None = None  # of the engine itself: no request can be answered any more
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flying: dict[int, Future[Completion]] = {}  # by ticket
        self._thread = threading.Thread(target=self._run, name="turntree-gateway-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Future[Completion]:
        """Its completion, or `Fault`, `failure`, the engine's `InputError` for a request that it refuses,
        `concurrent.futures.CancelledError` once it was cancelled."""
        done: Future[Completion] = Future()
        self._commands.put(lambda: self._submit(request, done))
        return done

    def cancel(self, done: Future[Completion]) -> Future[Cost]:
        """Give up a request; returns what it had cost by then, all of it where it had its completion before."""
        cost: Future[Cost] = Future()
        self._commands.put(lambda: self._cancel(done, cost))
        return cost

    def close(self) -> None:
        """Cancel what is in flight and stop the thread."""
        self._commands.put(None)
        self._thread.join()

    # in the thread

    def _run(self) -> None:
        while True:
            try:
                if not self._take():
                    return
                for finished in polled(self.engine, self._flying, _TICK) if self._flying else ():
                    done = self._flying.pop(finished.ticket)
                    if finished.completion is not None:
                        done.set_result(finished.completion)
                    else:
                        done.set_exception(Fault(finished.fault or "the engine gave no reason"))
            except Exception as error:  # a diverged policy, a lost server: nobody would be answered
                self.failure = TurntreeError(f"the engine failed: {error}")
                self.failure.__cause__ = error
                for done in self._flying.values():
                    done.set_exception(self.failure)
                self._flying.clear()

    def _take(self) -> bool:
        """Do what was asked, waiting for it where the engine has nothing to do. False: stop."""
        wait = not self._flying
        while wait or not self._commands.empty():
            wait = False
            command = self._commands.get()
            if command is None:
                for ticket, done in self._flying.items():
                    with contextlib.suppress(Exception):  # the boundary to an engine that is lost: nobody waits for it
                        self.engine.cancel(ticket)
                    done.cancel()
                self._flying.clear()
                return False
            command()
        return True

    def _submit(self, request: GenerationRequest, done: Future[Completion]) -> None:
        if not done.set_running_or_notify_cancel():
            return
        if self.failure is not None:
            done.set_exception(self.failure)
            return
        try:
            self._flying[self.engine.submit(request)] = done
        except Exception as error:  # a bad request is data
            done.set_exception(error)

    def _cancel(self, done: Future[Completion], cost: Future[Cost]) -> None:
        ticket, spent = next((ticket for ticket, one in self._flying.items() if one is done), None), NO_COST
        try:
            if ticket is not None:
                del self._flying[ticket]
                spent = self.engine.cancel(ticket)
            elif done.done() and not done.cancelled() and done.exception() is None:
                spent = done.result().cost
        finally:  # also where the engine fails at it: somebody waits for the cost
            if not done.done() and not done.cancel():
                done.set_exception(Fault("cancelled"))
            cost.set_result(spent)


@dataclass(frozen=True, kw_only=True)
class Form:
    """What an answer must be: JSON of a schema, a call of one of the tools named `calls`, or either."""

    schema: dict[str, Any] | None = None
    calls: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One request of an agent, read and checked, and how it wants to be answered."""

    messages: tuple[Message, ...]
    tools: Tools = ()
    max_tokens: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    form: Form | None = None
    logprobs: bool = False  # the agent reads those of its tokens
    stream: bool = False
    with_usage: bool = False  # of a stream
    namespaces: frozenset[str] = frozenset()  # of its tools
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(eq=False)
class LiveSession:
    """A session of this process."""

    head: Head
    lineage: Lineage
    places: asyncio.Semaphore  # for requests that are sampled at once; the others wait in line
    over: bool = False
    calls: list[Call] = field(default_factory=list[Call])  # in the order in which they ended
    asked: int = 0  # calls so far, those under way included
    tokens: int = 0
    draws: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # by the digest of the prompt
    continued: set[str] = field(default_factory=set[str])  # calls that were gone on from
    running: set[asyncio.Task[Any]] = field(default_factory=set[asyncio.Task[Any]])  # requests, those in line included
    reward: Reward | None = None
    limit: str = ""  # the limit that the agent ran into, in words; it is over where a later call went through
    stop: StopReason = StopReason.COMPLETED  # the same limit, by its name
    refused: str = ""  # why the last request was refused; over where a later call went through
    ending: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def session_id(self) -> str:
        return self.head.session

    def value(self, reason: str = "") -> Session:
        return self.head.value(self.calls, self.reward, reason, self.stop)

    def ran_into(self, stop: StopReason, limit: str) -> str:
        self.stop, self.limit = stop, limit
        return limit

    def call_id(self) -> str:
        """The name of the next call. A rollout that is repeated has the same names, which a chat template may write
        into a prompt with the calls of tools."""
        return f"{seeds.derive(self.head.seed, 'call', self.session_id, self.asked):016x}"

    def keep(self, call: Call) -> None:
        self.refused = ""
        self.calls.append(call)
        self.lineage.add(call)
        self.tokens += len(call.added_ids) + len(call.sampled_ids)

    def restore(self, call: Call) -> None:
        """Keep a call of an earlier process."""
        self.keep(call)
        used = self.draws[_digest(call.prompt_ids)]
        used.add(_unused(used) if call.draw in used else call.draw)
        if call.base is not None and call.goes_on:
            self.continued.add(call.base.call_id)
        self.asked = max(self.asked, call.index + 1)

    def draw_of(self, call: Call, seed: int | None) -> int:
        """The seed of a call that begins. The conversation that began the session has the draws of a rollout whose
        environment is stepped; every other call has draws by its prompt, because sub-agents that run at once have no
        order."""
        head = self.head
        name = _digest(call.prompt_ids)
        before, turn = _unused(self.draws[name]), call.turn
        call.draw = before
        self.draws[name].add(before)
        self.asked += 1
        first = call.base is None or call.base.call_id not in self.continued  # of several that go on from one answer
        if call.base is not None and call.goes_on:
            self.continued.add(call.base.call_id)
        if turn is not None and first and not before and seed is None:
            return seeds.of_turn(head.seed, head.task, (head.sample,), turn)
        keys = ("gateway", head.task, head.sample, *(() if seed is None else (seed,)), name)
        return seeds.derive(head.seed, *keys, before)


def _unused(numbers: set[int]) -> int:
    return next(number for number in itertools.count() if number not in numbers)


class Sampler:
    """Samples what sessions ask, within their limits. `write` keeps a row of a session on disk."""

    def __init__(
        self,
        driver: EngineDriver,
        renderer: Renderer,
        config: ServingConfig,
        ledger: Counter[str],
        *,
        write: Callable[[LiveSession, Call], None],
    ) -> None:
        self.driver, self._renderer, self.config, self._ledger = driver, renderer, config, ledger
        self._write = write
        self._waiting = 0
        limit = driver.engine.max_context
        self.max_context = limit if config.max_context is None else min(limit, config.max_context)

    async def ask(self, session: LiveSession, asked: Ask, listener: Listener | None = None) -> Call:
        """Sample the answer to one request and keep it. A request waits in line for its place: clients that are refused
        give up after two tries. Cancelling this coroutine (the agent hung up) cancels the call in the engine; it is
        kept as disconnected. Raises `Refused`."""
        if self._waiting >= WAITING or len(session.running) > WAITING // _SHARE:
            raise Refused(429, "too many calls are under way; try again", code="too_many_calls")
        task = asyncio.current_task()
        assert task is not None
        session.running.add(task)
        self._waiting += 1
        try:
            async with session.places:
                restriction = await self._restriction(asked)
                self._admit(session)
                call = self._placed(session, asked)
                if listener is not None:
                    listener.call = call
                guide = None
                if asked.stop or restriction is not None or listener is not None:
                    guide = RequestGuide(self._renderer, call.tools, asked.stop, restriction, listener)
                await self._sample(session, call, asked, guide)
                return call
        except Refused as refused:
            if refused.limit:
                session.ran_into(StopReason.MAX_TOKENS, refused.limit)
            raise
        finally:
            self._waiting -= 1
            session.running.discard(task)

    def _admit(self, session: LiveSession) -> None:
        limits = self.config.limits
        if session.over or session.reward or session.ending.locked():
            raise Refused(403, f"session {session.session_id!r} is over", code="session_over")
        seconds = time.time() - session.head.opened
        for reached, stop, what, words in (
            (session.asked >= limits.calls, StopReason.MAX_TURNS, "calls", f"made its {limits.calls} calls"),
            (session.tokens >= limits.tokens, StopReason.MAX_TOKENS, "tokens", f"used its {limits.tokens} tokens"),
            (seconds > limits.seconds, StopReason.MAX_SECONDS, "seconds", f"used its {limits.seconds:g} seconds"),
        ):
            if reached:
                raise Refused(403, session.ran_into(stop, f"the session has {words}"), code=f"session_{what}")

    def _placed(self, session: LiveSession, asked: Ask) -> Call:
        size = len(json.dumps(asked.tools)) + sum(map(_size, asked.messages))
        if size > _LONGEST_TOKEN * self.max_context:  # rendering it would keep everybody waiting
            raise self._no_room(f"{size} characters")
        try:
            call = session.lineage.place(asked.messages, asked.tools, session.call_id(), session.asked)
        except InputError as error:
            raise bad_request(error) from error
        except Exception as error:  # the boundary to foreign templates
            raise Refused(400, f"the messages cannot be rendered ({type(error).__name__}: {error})") from error
        call.meta = asked.meta
        return call

    def _sampling(self, session: LiveSession, call: Call, asked: Ask) -> Sampling:
        """How a call is sampled. Raises `Refused` where the context has no room."""
        room = self.max_context - call.prompt_tokens
        if room < 1:
            raise self._no_room(f"{call.prompt_tokens} tokens")
        session.ran_into(StopReason.COMPLETED, "")
        sampling = self.config.sampling
        longest = min(sampling.max_tokens, room, asked.max_tokens or room)
        return replace(sampling, max_tokens=longest)

    def _no_room(self, size: str) -> Refused:
        limit = f"the prompt has {size}, and the context holds {self.max_context} tokens"
        message = _NO_ROOM.format(self.max_context, CONTEXT, limit)
        return Refused(400, message, code=CONTEXT, param="messages", limit=limit)

    def count(self, session: LiveSession, asked: Ask) -> int:
        """The tokens of the prompt that a request would have. Raises `Refused`."""
        return self._placed(session, asked).prompt_tokens

    async def _restriction(self, asked: Ask) -> Constraint | None:
        """Compiled beside the event loop. Raises `Refused` for a form that cannot be had."""
        if asked.form is None:
            return None
        tools = [tool for tool in asked.tools if tool["function"]["name"] in asked.form.calls]
        try:
            if not isinstance(self._renderer, TurnByTurn):
                raise InputError("the policy's renderer knows no grammars", field="grammar")
            return await asyncio.to_thread(self._renderer.constraint, asked.form.schema, tools)
        except InputError as error:
            param = "tool_choice" if asked.form.schema is None else "response_format"
            raise Refused(400, f"the form of the answer: {error}", code="unsupported_form", param=param) from error

    def listener(self, asked: Ask) -> Listener | None:
        """Who hears the text of an answer before it is whole; None where the renderer does not know it before."""
        return Listener(self._renderer, asked.stop) if isinstance(self._renderer, TurnByTurn) else None

    async def _sample(self, session: LiveSession, call: Call, asked: Ask, guide: RequestGuide | None) -> None:
        """Sample a call and keep what became of it."""
        sampling = self._sampling(session, call, asked)
        call.constrained = guide is not None and guide.grammar is not None
        draw = session.draw_of(call, asked.seed)
        request = GenerationRequest(prompt_ids=call.prompt_ids, sampling=sampling, seed=draw, retain=True)
        for left in reversed(range(self.config.retries + 1)):
            flying = self.driver.submit(replace(request, guide=guide))
            try:
                completion = await asyncio.wrap_future(flying)
            except asyncio.CancelledError:
                call.cost = await _at_last(asyncio.wrap_future(self.driver.cancel(flying)))
                self._end(session, call, "disconnected", "the agent hung up")
                raise
            except TurntreeError as error:
                if left and isinstance(error, Fault):  # asked again, with the same draws
                    self._ledger["retried"] += 1
                    guide = guide and guide.again()
                    continue
                self._end(session, call, "failed", str(error))
            else:
                self._take(session, call, completion, asked.stop)
            break
        if call.error:
            raise Refused(503 if self.driver.failure is not None else 500, call.error, code="engine_fault")

    def _take(self, session: LiveSession, call: Call, ended: Completion, stops: tuple[str, ...]) -> None:
        """Keep a call that has its completion."""
        base = call.base
        if ended.routes and base is not None and base.completion is not None and base.completion.routes:
            known = min(call.base_tokens, base.prompt_tokens + len(base.sampled_ids) - 1)
            ended = replace(ended, routes=ended.routes[known:])  # its base has the others
        call.completion = ended
        try:
            answer, call.stop = cut_at(self._renderer.parse(ended.token_ids, call.tools), stops)
        except Exception as error:  # the boundary to foreign parsers
            return self._end(session, call, "failed", f"the answer cannot be read ({error})")
        cut = ended.finish == "length" and call.stop is None
        tool_calls = [replace(made, id=f"call_{call.call_id}_{i}") for i, made in enumerate(answer.tool_calls)]
        call.answer = replace(answer, cut=cut, tool_calls=() if cut else tuple(tool_calls))
        self._end(session, call)

    def _end(self, session: LiveSession, call: Call, status: Status = "kept", error: str = "") -> None:
        call.status, call.error = status, error
        self._write(session, call)
        session.keep(call)
        self._ledger[f"calls_{status}"] += 1
        if call.constrained:
            self._ledger["calls_constrained"] += 1
        self._ledger[f"cause_{call.cause}"] += 1


async def _at_last(work: asyncio.Future[T]) -> T:
    """The result of `work`, also in a task that is cancelled again while it waits: an agent that is stopped hangs up,
    and its session is closed."""
    while not work.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(work)
    return work.result()


def _size(message: Message) -> int:
    calls = sum(len(json.dumps(call.arguments)) for call in message.tool_calls)
    return len(message.content) + len(message.reasoning) + calls


def _digest(prompt: tuple[int, ...]) -> int:
    """A name for a prompt that costs little to keep."""
    return int.from_bytes(hashlib.blake2b(repr(prompt).encode(), digest_size=8).digest(), "big") >> 1
