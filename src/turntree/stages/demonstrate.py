"""`turntree traces NAME`: the demonstrations of a demonstrator, which is a part (`core.parts`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.progress import progress
from turntree.run.files import require_table
from turntree.traces.schema import FILE_SCHEMA, Trace, write_traces


def demonstrate(demonstrator: Part, out: Path) -> dict[str, Any]:
    """Write the traces of a demonstrator to `out` and return how many there are, and what was dropped by reason.

    A demonstrator is a dataclass whose fields are its options. Iterating over it gives, for every task, a `Trace` or
    the reason why there is none. Its `noun` names its tasks ("games"). Raises `InputError` where it gives something
    else, or no trace at all.
    """
    require_table(out, FILE_SCHEMA)
    demonstrator = parts.resolve("demonstrators", demonstrator)
    made = parts.build("demonstrators", demonstrator)
    if not isinstance(made, Iterable):
        raise _unfit(demonstrator, made)
    counts: Counter[str] = Counter()
    traces: list[Trace] = []
    for trace in progress(cast("Iterable[Any]", made), "demonstrations"):
        counts[getattr(made, "noun", "tasks")] += 1
        if isinstance(trace, str):
            counts[f"dropped: {trace}"] += 1
        elif isinstance(trace, Trace):
            counts["traces"] += 1
            counts["turns"] += len(trace.turn_positions)
            traces.append(trace)
        else:
            raise _unfit(demonstrator, trace)
    if not traces:
        raise InputError(f"{demonstrator.name!r} keeps no trace ({dict(counts)})", hint="raise its count of tasks")
    header = {"made_by": demonstrator.name, "config": dict(demonstrator.options), "counts": dict(counts)}
    write_traces(out, traces, header)
    return {"path": str(out), **counts}


def _unfit(demonstrator: Part, given: Any) -> InputError:
    problem = f"{demonstrator.name!r} gave {type(given).__name__}, not traces"
    return InputError(problem, field="demonstrator", hint="for every task give a Trace, or why there is none as text")
