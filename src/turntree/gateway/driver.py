"""One thread that owns a streaming engine: requests of any number of sessions join its running batch."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from turntree.core.completion import Completion, GenerationRequest
from turntree.core.cost import NO_COST, Cost
from turntree.core.errors import TurntreeError
from turntree.core.protocols import StreamingEngine
from turntree.engines.requests import polled

_TICK = 0.005  # seconds that the engine works before new requests are taken


class Fault(TurntreeError):
    """The engine gave no completion for one request."""


class EngineFailed(TurntreeError):
    """The engine itself failed: no request can be answered any more."""


@dataclass(eq=False)
class Pending:
    """A request under way. `done` gives its completion, or raises: `Fault`, `EngineFailed`, the engine's `InputError`
    for a request that it refuses, `concurrent.futures.CancelledError` once it was cancelled."""

    request: GenerationRequest
    done: Future[Completion] = field(default_factory=Future[Completion])
    ticket: int | None = None


class EngineDriver:
    """Drives `engine` until `close`. Nobody else may use the engine except while nothing is in flight (`settle`)."""

    def __init__(self, engine: StreamingEngine) -> None:
        self.engine = engine
        self.failure: EngineFailed | None = None
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._flying: dict[int, Pending] = {}
        self._thread = threading.Thread(target=self._run, name="turntree-gateway-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest) -> Pending:
        return self.again(Pending(request))

    def again(self, pending: Pending) -> Pending:
        """Ask a request once more that ended with a fault."""
        pending.done, pending.ticket = Future(), None
        self._commands.put(lambda: self._submit(pending))
        return pending

    def cancel(self, pending: Pending) -> Future[Cost]:
        """Give up a request; returns what it had cost by then, all of it where it had its completion before."""
        cost: Future[Cost] = Future()
        self._commands.put(lambda: self._cancel(pending, cost))
        return cost

    def settle(self) -> None:
        """Wait until everything that was asked so far is in the engine or out of it."""
        reached = threading.Event()
        self._commands.put(reached.set)
        while not reached.wait(1.0):
            if not self._thread.is_alive():
                return

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
                if self._flying:
                    self._advance()
            except Exception as error:  # a diverged policy, a lost server: nobody would be answered
                self._fail(error)

    def _take(self) -> bool:
        """Do what was asked, waiting for it where the engine has nothing to do. False: stop."""
        wait = not self._flying
        while wait or not self._commands.empty():
            wait = False
            command = self._commands.get()
            if command is None:
                for ticket, pending in self._flying.items():
                    self.engine.cancel(ticket)
                    pending.done.cancel()
                self._flying.clear()
                return False
            command()
        return True

    def _submit(self, pending: Pending) -> None:
        if not pending.done.set_running_or_notify_cancel():
            return
        if self.failure is not None:
            pending.done.set_exception(self.failure)
            return
        try:
            pending.ticket = self.engine.submit(pending.request)
        except Exception as error:  # a bad request is data
            pending.done.set_exception(error)
        else:
            self._flying[pending.ticket] = pending

    def _cancel(self, pending: Pending, cost: Future[Cost]) -> None:
        done, spent = pending.done, NO_COST
        try:
            if pending.ticket is not None and self._flying.pop(pending.ticket, None) is not None:
                spent = self.engine.cancel(pending.ticket)
            elif done.done() and not done.cancelled() and done.exception() is None:
                spent = done.result().cost
        finally:  # also where the engine fails at it: somebody waits for the cost
            if not done.done() and not done.cancel():
                done.set_exception(Fault("cancelled"))
            cost.set_result(spent)

    def _advance(self) -> None:
        for finished in polled(self.engine, self._flying, _TICK):
            pending = self._flying.pop(finished.ticket)
            if finished.completion is not None:
                pending.done.set_result(finished.completion)
            else:
                pending.done.set_exception(Fault(finished.fault or "the engine gave no reason"))

    def _fail(self, error: Exception) -> None:
        self.failure = EngineFailed(f"the engine failed: {error}")
        self.failure.__cause__ = error
        for pending in self._flying.values():
            pending.done.set_exception(self.failure)
        self._flying.clear()
