"""A few example pivots: the state as the policy saw it, the demonstrated action, and the sampled actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.pivots.rows import message_text
from turntree.pivots.select import is_pivot
from turntree.report.read import Row, Run, Table, reading
from turntree.report.results import threshold
from turntree.run.files import file_hash
from turntree.traces.schema import Trace, read_traces

EXAMPLES = 4
ACTIONS = 8  # distinct sampled actions shown of one pivot
CHARACTERS = 1200  # of one message


def examples(run: Run) -> dict[str, Any]:
    """The most evenly mixed pivot of each of the most frequent action kinds, or why their states cannot be shown;
    empty without a pivot."""
    chosen = choose(run.profile.rows, threshold(run)) if run.profile is not None else []
    if run.profile is None or not chosen:
        return {}
    path = _traces_path(run.path, run.profile)
    if path is None:
        absent = "The traces that were profiled were not found, so the states of pivots cannot be shown."
        return {"shown": [], "absent": absent}
    wanted = {row["trace_id"] for row in chosen}
    traces = {trace.id: trace for trace in read_traces(path) if trace.id in wanted}
    source = run.path / "profile.jsonl"
    return {"shown": [_example(row, traces.get(row["trace_id"]), source) for row in chosen]}


def choose(rows: Sequence[Row], below: float) -> list[Row]:
    """One row a kind, frequent kinds first; within a kind the highest variance, then the most distinct actions."""
    pivots = [row for row in rows if is_pivot(row, below) and row.get("actions")]
    frequent = Counter(row["kind"] for row in pivots)
    kinds = sorted(frequent, key=lambda kind: (-frequent[kind], kind))[:EXAMPLES]

    def rank(row: Row) -> tuple[float, int, str, int]:
        return -row["reward_var"], -len(row["actions"]), str(row["trace_id"]), row["turn"]

    return [min((row for row in pivots if row["kind"] == kind), key=rank) for kind in kinds]


def _traces_path(folder: Path, profile: Table) -> Path | None:
    """The traces of the run directory, else the file that the profile names: by its content only, because another
    file of a relative name may lie in the current folder."""
    named = Path(str(profile.header.get("config", {}).get("traces", "traces.jsonl")))
    places = (folder / "traces.jsonl", folder / named.name, named)
    wanted = profile.header.get("traces_hash")
    return next((place for place in places if place.is_file() and file_hash(place) == wanted), None)


def _example(row: Row, trace: Trace | None, path: Path) -> dict[str, Any]:
    """`task` is the first message of the trace, where it is not the last observation itself; `previous` the
    demonstrated action before this turn."""
    if trace is None or not 0 <= row["turn"] < len(trace.turn_positions):
        raise InputError(f"names turn {row['turn']} of trace {row['trace_id']!r}, which the traces lack", path=path)
    at = trace.turn_positions[row["turn"]]
    history = trace.messages[:at]
    before = next((message for message in reversed(history[:-1]) if message.role == "assistant"), None)
    with reading(path):
        actions = [{key: action[key] for key in ("text", "count", "reward", "strict")} for action in row["actions"]]
        return {
            "kind": row["kind"],
            "turn": row["turn"],
            "trace": row["trace_id"],
            "task": _clipped(message_text(history[0])) if len(history) > 1 else "",
            "previous": "" if before is None else _clipped(message_text(before)),
            "observation": _clipped(message_text(history[-1])) if history else "",
            "demonstration": _clipped(message_text(trace.labels.get(row["turn"]) or trace.messages[at])),
            "samples": sum(action["count"] for action in actions),
            "successes": sum(action["count"] for action in actions if action["reward"]),
            "actions": actions[:ACTIONS],
            "more_actions": len(actions[ACTIONS:]),
            "more_samples": sum(action["count"] for action in actions[ACTIONS:]),
        }


def _clipped(text: str) -> str:
    cut = len(text) - CHARACTERS
    return text if cut <= 0 else f"{text[:CHARACTERS]} … ({cut:,} more characters)"
