"""A worker pool without Ray: it plays each unit here, when it is submitted."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from turntree.rollout.cluster.config import WorkersConfig


class InlinePool:
    def __init__(self, factory: str, settings: dict[str, Any], config: WorkersConfig, *, gpus: float = 0.0) -> None:
        module, _, name = factory.partition(":")
        self._build: Callable[[dict[str, Any]], Any] = getattr(importlib.import_module(module), name)
        self._settings, self.config = settings, config
        self._open = contextlib.ExitStack()

    def __enter__(self) -> InlinePool:
        self._play = self._open.enter_context(self._build(self._settings))
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def submit(self, unit: dict[str, Any], *, urgent: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(self._play(unit))
        except Exception as error:
            future.set_exception(error)
        return future

    def share(self, value: Any) -> Any:
        return value
