"""`turntree traces import`: a user's logs to the documented schema, with every dropped turn counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turntree.observe.files import write_json
from turntree.traces.chat import import_chat
from turntree.traces.schema import write_traces
from turntree.traces.splits import split_traces


def import_traces(
    files: list[Path],
    out: Path,
    *,
    form: Any = "auto",
    on_error: Any = "stop",
    unknown_keys: Any = "stop",
    success_only: bool = False,
    dev: float = 0.1,
    seed: int = 0,
) -> dict[str, Any]:
    """Import, split by trajectory, write `out` and its report `OUT.report.json`."""
    traces, report = import_chat(
        files, format=form, on_error=on_error, unknown_keys=unknown_keys, success_only=success_only
    )
    split = split_traces(traces, seed, {"train": 1 - dev, "dev": dev})
    counts = report.to_json()
    write_traces(out, split, {"made_by": "import", "sources": [str(file) for file in files], "report": counts})
    write_json(out.with_name(out.name + ".report.json"), counts)
    return {"path": str(out), **counts}
