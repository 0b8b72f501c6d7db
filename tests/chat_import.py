"""Source files as traces in memory."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from turntree.traces.chat import ImportConfig, ImportReport, stream_chat
from turntree.traces.schema import Trace


def import_chat(paths: Iterable[str | Path], **options: Any) -> tuple[list[Trace], ImportReport]:
    traces: list[Trace] = []
    tools = options.pop("tools", ())
    report = stream_chat(paths, traces.append, ImportConfig(**options), tools)
    return traces, report
