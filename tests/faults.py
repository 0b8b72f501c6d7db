"""What foreign code may do in place of its answer. Light, so that a process of its own has it soon."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from fault_drill import Corridor
from turntree.core.messages import Message
from turntree.core.protocols import Observation

Behave = Callable[[], Any]


class Odd(ValueError):
    """An exception of a user's."""


def raising(error: BaseException) -> Behave:
    def behave() -> Any:
        raise error

    return behave


FAULTS: dict[str, Behave] = {
    "exception": raising(Odd("odd")),
    "`SystemExit`": raising(SystemExit(0)),
    "`CancelledError`": raising(asyncio.CancelledError()),
    "`GeneratorExit`": raising(GeneratorExit()),
    "`MemoryError`": raising(MemoryError()),
    "lost connection": raising(ConnectionResetError(104, "reset")),
    "hangs": lambda: time.sleep(60),
    "None": lambda: None,
    "NaN": lambda: math.nan,
    "infinity": lambda: math.inf,
    "another type": lambda: {"a": object},
    "text": lambda: "1",
    "empty": lambda: "",
}


class Named(Corridor):
    """Knows its fault by name, so that it can be sent to a process."""

    def __init__(self, fault: str) -> None:
        super().__init__("named", 1)
        self.fault = fault

    def step(self, action: Message) -> Observation:
        return FAULTS[self.fault]() if self.fault else super().step(action)

    def fork(self) -> Any:
        return Named(self.fault)
