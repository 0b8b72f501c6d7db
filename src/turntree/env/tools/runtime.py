"""Tool calls as a run makes them: each distinct one executed once, in bounded time, and counted."""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from turntree.core.config import FIXED, Above0, Amount, Bounded, Count, Positive
from turntree.core.cost import Additive
from turntree.core.errors import ConfigError
from turntree.core.foreign import EnvironmentGone, described
from turntree.core.messages import ToolCall
from turntree.env.tools.tool import Tool, ToolOutput, ToolResult, ToolStatus
from turntree.verify.arguments import SchemaUnusable, rules_of

_UNKNOWN = "(unknown)"  # where the ledger counts calls of tools that do not exist: a policy may make up any name


@dataclass(frozen=True, kw_only=True)
class ToolCounts(Additive):
    """Additive counters of one tool. Laws: calls = hits + joined + misses + refused (once nothing is in flight), and
    executions = misses + retries; executions are the *fresh* calls, `failures` and `abandoned` are among them."""

    calls: int = 0
    hits: int = 0  # answered before
    joined: int = 0  # waited for an identical call that was under way
    misses: int = 0  # had to be executed
    refused: int = 0  # no such tool, or wrong arguments
    retries: int = 0  # executed again because an execution failed
    failures: int = 0  # calls that no execution answered
    abandoned: int = 0  # executions that were still running at their time limit
    truncated: int = 0  # answers cut to the output cap
    seconds: float = 0.0  # of executions

    @property
    def executions(self) -> int:
        return self.misses + self.retries


class ToolLedger:
    """Counts of every tool, by name; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, ToolCounts] = {}

    def add(self, tool: str, counts: ToolCounts) -> None:
        with self._lock:
            self._counts[tool] = self._counts.get(tool, ToolCounts()) + counts

    def counts(self) -> dict[str, ToolCounts]:
        with self._lock:
            return dict(self._counts)

    def total(self) -> ToolCounts:
        return sum(self.counts().values(), ToolCounts())

    def figures(self) -> dict[str, Any]:
        """What the tools of this process were asked so far and what they executed, by name: hits of their cache and
        joined calls depend on when things happened, so this belongs to the timing of a run."""
        return {"tools": {name: asdict(count) for name, count in sorted(self.counts().items())}}


@dataclass(frozen=True, kw_only=True)
class ToolRuntimeConfig(Bounded):
    """How tools are executed."""

    seconds: Above0 = 30.0
    """Time of one execution."""
    retries: Count = 2
    """Further tries after a failed one, of pure tools."""
    pause_seconds: Amount = field(default=0.1, metadata=FIXED)
    """Pause before the first of them; each further one is twice as long."""
    concurrent: Positive = field(default=64, metadata=FIXED)
    """Executions that run at once."""
    output_chars: Positive = field(default=8000, metadata=FIXED)
    """Most characters of an answer."""
    cached_answers: Count = field(default=100_000, metadata=FIXED)
    """Number of cached answers of pure tools."""


class ToolRuntime:
    """Calls tools for any number of threads at once.

    Laws (tests/env/test_runtime.py): calls of a pure tool with equal arguments execute once, however many are made
    and whenever; a slow call delays its own callers only; `call` returns within the time limits whatever a tool does
    and its schema declares; a failure is a typed result, shared with those who wait for it and never kept.

    Raises `ConfigError` for a tool whose parameters are not a JSON schema, or refer to anything outside it.
    """

    def __init__(self, tools: Iterable[Tool], config: ToolRuntimeConfig | None = None) -> None:
        self.config = config if config is not None else ToolRuntimeConfig()
        self.ledger = ToolLedger()
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise ConfigError(f"two tools are named {tool.spec.name!r}", hint="name each tool once")
            try:
                rules_of(tool.spec.parameters)
            except SchemaUnusable as error:
                raise ConfigError(str(error), field=tool.spec.name, hint="leave this tool out") from error
            self._tools[tool.spec.name] = tool
        self._slots = threading.BoundedSemaphore(self.config.concurrent)
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, Future[ToolResult]] = OrderedDict()  # least recently used first

    @property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The tools as `Environment.tools` shows them."""
        return tuple(tool.spec.to_chat() for tool in self._tools.values())

    def call(self, call: ToolCall) -> ToolResult:
        """Answer one call, waiting for it. Never raises for errors of a policy or a tool, but `EnvironmentGone` where
        there is no tool any more."""
        tool = self._tools.get(call.name)
        try:
            mistake = self._mistake(tool, call)
        except SchemaUnusable as error:
            self.ledger.add(call.name, ToolCounts(calls=1, refused=1, failures=1))
            return ToolResult(f"{call.name}: {error}", ToolStatus.FAILED)
        if tool is None or mistake is not None:
            self.ledger.add(call.name if tool else _UNKNOWN, ToolCounts(calls=1, refused=1))
            return ToolResult(mistake or "", ToolStatus.REFUSED)
        arguments = _with_integers(tool, call.arguments)
        if tool.pure:
            return self._shared(tool, arguments)
        self.ledger.add(call.name, ToolCounts(calls=1, misses=1))
        return self._execute(tool, arguments, retries=0)[0]

    def _mistake(self, tool: Tool | None, call: ToolCall) -> str | None:
        if tool is None:
            return f"error: there is no tool {call.name!r}; use one of {', '.join(sorted(self._tools))}"
        try:
            _key(tool, call.arguments)
            problem = rules_of(tool.spec.parameters).problem(call.arguments)
        except (ValueError, RecursionError) as error:
            problem = f"{error}"
        return None if problem is None else self._capped(call.name, f"error: wrong arguments: {problem}")

    def _shared(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """The kept answer, or that of the call under way, or that of this call, which others may then join."""
        name, key = tool.spec.name, _key(tool, arguments)
        with self._lock:
            earlier = self._answers.get(key)
            future = self._answers.setdefault(key, Future())
            self._answers.move_to_end(key)
        if earlier is not None:
            hit = earlier.done()
            self.ledger.add(name, ToolCounts(calls=1, hits=int(hit), joined=int(not hit)))
            return earlier.result()
        self.ledger.add(name, ToolCounts(calls=1, misses=1))
        ended, final = ToolResult("the caller was interrupted", ToolStatus.FAILED), False
        try:
            ended, final = self._execute(tool, arguments, retries=self.config.retries)
        finally:
            with self._lock:
                future.set_result(ended)
                if not final:
                    del self._answers[key]
                elif len(self._answers) > self.config.cached_answers:  # a call under way stays: others may join it
                    del self._answers[next(kept for kept, other in self._answers.items() if other.done())]
        return ended

    def _execute(self, tool: Tool, arguments: Mapping[str, Any], retries: int) -> tuple[ToolResult, bool]:
        """How a call ended, and whether that may be kept."""
        reasons: list[str] = []
        for attempt in range(retries + 1):
            if attempt:
                time.sleep(self.config.pause_seconds * 2 ** (attempt - 1))
                self.ledger.add(tool.spec.name, ToolCounts(retries=1))
            output = self._attempt(tool, arguments)
            if isinstance(output, ToolOutput):
                return ToolResult(self._capped(tool.spec.name, output.text), ToolStatus.ANSWERED), output.final
            reasons.append(output)
        self.ledger.add(tool.spec.name, ToolCounts(failures=1))
        tried = f" ({len(reasons)} times)" if len(reasons) > 1 else ""
        return ToolResult(f"{tool.spec.name}: {reasons[-1]}{tried}", ToolStatus.FAILED), False

    def _attempt(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolOutput | str:
        """The output, or why there is none. The tool runs in its own thread to enforce the limit: one that does not
        return is abandoned, and its place is freed."""
        answer: Future[ToolOutput] = Future()

        def work() -> None:
            try:
                answer.set_result(tool.call(arguments, self.config.seconds))
            except BaseException as error:  # the boundary to foreign code
                answer.set_exception(error)

        with self._slots:
            started = time.perf_counter()
            threading.Thread(target=work, name=f"tool {tool.spec.name}", daemon=True).start()
            counted = ToolCounts()
            try:
                return answer.result(self.config.seconds)
            except BaseException as error:
                if isinstance(error, EnvironmentGone):
                    raise
                if not answer.done():
                    if not isinstance(error, TimeoutError):
                        raise  # an interrupt of the caller, not of the tool
                    counted = ToolCounts(abandoned=1)
                    return f"no answer within {self.config.seconds:g} s"
                return described(error)
            finally:
                spent = ToolCounts(seconds=time.perf_counter() - started)
                self.ledger.add(tool.spec.name, counted + spent)

    def _capped(self, name: str, text: str) -> str:
        left_out = len(text) - self.config.output_chars
        if left_out <= 0:
            return text
        self.ledger.add(name, ToolCounts(truncated=1))
        return f"{text[: self.config.output_chars]}\n[{left_out} more characters]"


def _with_integers(tool: Tool, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Valid arguments with ints where the parameters declare integers: 2.0 is one in JSON, but not in Python."""
    declared: Mapping[str, Any] = tool.spec.parameters.get("properties", {})
    whole = {name for name, kind in declared.items() if isinstance(kind, Mapping) and kind.get("type") == "integer"}
    return {name: int(value) if name in whole else value for name, value in arguments.items()}


def _key(tool: Tool, arguments: Mapping[str, Any]) -> str:
    """Equal for equal calls, whatever the order of the arguments. JSON tells 1 from 1.0 and true."""
    return json.dumps([tool.spec.name, tool.version, arguments], sort_keys=True, separators=(",", ":"))
