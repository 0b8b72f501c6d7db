"""One event loop for asynchronous packages, because their connections and locks stay bound to their first loop."""

from __future__ import annotations

import concurrent.futures
import functools
import inspect
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from turntree.core.foreign import EnvironmentFault, described

if TYPE_CHECKING:
    import asyncio  # loaded with the first loop: most commands make none

T = TypeVar("T")
LOOP = "turntree-adapters"  # the name of its thread


@functools.cache
def event_loop() -> asyncio.AbstractEventLoop:
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=LOOP, daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T], seconds: float | None) -> T:
    """What the coroutine returns. Raises `EnvironmentFault` after `seconds` (None: no limit), and where it
    exits or cancels itself."""
    import asyncio

    future = asyncio.run_coroutine_threadsafe(_contained(coroutine), event_loop())
    try:
        return future.result(seconds)
    except concurrent.futures.CancelledError as error:
        raise EnvironmentFault("was cancelled") from error
    except concurrent.futures.TimeoutError as error:
        if not future.cancel():
            raise  # its own
        raise EnvironmentFault(f"did not answer within {seconds:g} s") from error


def awaited(value: Any) -> Any:
    """What a call returned: of an `async` function what it ends with."""
    return run(value, None) if inspect.iscoroutine(value) else value


def start(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Begin and do not wait. May be called in any thread, the loop's own included (by the garbage collector)."""
    import asyncio

    asyncio.run_coroutine_threadsafe(_contained(coroutine), event_loop())


async def _contained(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        return await coroutine
    except (
        SystemExit,
        KeyboardInterrupt,
    ) as error:  # they would end the loop, for which others wait
        raise EnvironmentFault(described(error)) from error
