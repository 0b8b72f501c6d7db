"""`turntree traces import`: a user's logs to the documented schema, with every dropped turn counted."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.core.progress import progress
from turntree.run.files import require_table, require_writable, write_json, writing
from turntree.traces.assemble import tools_of
from turntree.traces.chat import ImportConfig, ImportReport, stream_chat
from turntree.traces.schema import FILE_SCHEMA, Split, Trace, write_rows
from turntree.traces.splits import assign_splits

Key = tuple[str, str, Split | None]


def import_traces(files: list[Path], out: Path, config: ImportConfig) -> dict[str, Any]:
    """Import, split by trajectory, write `out` and its report `OUT.report.json`. Raises `InputError` with the counts by
    reason, and writes nothing, where no trace is kept, or none in a split that has a share."""
    if out.exists() and any(out.resolve().is_relative_to(file.resolve()) for file in files):
        raise InputError("would replace one of the files that are read", path=out, hint="choose another --out")
    tools = tools_of(config.tools)
    keys: list[Key] = []
    require_writable(out)
    require_table(out, FILE_SCHEMA)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (  # the traces may exceed the memory, and the header counts them
        writing(out),
        tempfile.TemporaryFile("w+", dir=out.parent, prefix=f".{out.name}.", suffix=".import") as spool,
        progress((), "traces imported") as bar,
    ):

        def keep(trace: Trace) -> None:
            bar.update()
            keys.append((trace.id, trace.group, trace.split))
            spool.write(json.dumps(trace.to_json()) + "\n")

        report = stream_chat(files, keep, config, tools)
        counts, splits = _split(files, keys, report, config.dev, config.seed)
        spool.seek(0)
        rows = (json.loads(line) | {"split": split} for line, split in zip(spool, splits, strict=True))
        header = {"made_by": "import", "sources": [str(file) for file in files], "report": counts}
        write_rows(out, rows, {**header, "traces": len(splits)})
    write_json(out.with_name(out.name + ".report.json"), counts)
    return {"path": str(out), **counts}


_REMEDIES = {
    "unknown_format": "name the format with --format",
    "not_a_json_object": "check that the files are JSON, JSON lines or a text of a known format",
    "unknown_key": "keep such keys with --unknown-keys keep",
    "not_successful": "import failures too: leave --success-only away",
    "success_unknown": "the source does not say what succeeded: leave --success-only away",
    "no_candidate_turn": "see dropped_turns; --set candidates=turns takes what the format's rule leaves out",
    "no_assistant_turn": "the files hold tasks, not episodes: record some with `turntree traces record`",
}


def _split(
    files: list[Path], keys: list[Key], report: ImportReport, dev: float, seed: int
) -> tuple[dict[str, Any], list[Split]]:
    if not keys:
        reasons = ", ".join(f"{count} {reason}" for reason, count in report.dropped_traces.most_common())
        turns = ", ".join(f"{count} {reason}" for reason, count in report.dropped_turns.most_common())
        problem = f"keeps none of {report.traces_read} traces ({reasons or 'the files are empty'})"
        problem += f" and none of {report.turns_read} turns ({turns})" if turns else ""
        problem += f", read as {', '.join(sorted(report.formats))}" if report.formats else ""
        first = next((reason for reason, _ in report.dropped_traces.most_common() if reason in _REMEDIES), "")
        remedy = _REMEDIES.get(first, "see what is dropped with --on-error stop")
        raise InputError(problem, path=files[0], hint=f"{remedy}; nothing was written")
    splits = assign_splits(keys, seed, {"train": 1 - dev, "dev": dev})
    sizes = Counter(splits)
    if not sizes["train"] and dev < 1:
        problem = f"leaves nothing to train on ({', '.join(f'{count} in {name}' for name, count in sizes.items())})"
        raise InputError(problem, path=files[0], hint="import more traces, or lower --dev; nothing was written")
    counts = {**report.to_json(), "splits": dict(sorted(sizes.items()))}
    return counts, splits
