"""A few example pivots: the state as the policy saw it, the demonstrated action, and the sampled actions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Sampled:
    text: str
    count: int
    reward: float | None
    strict: float | None


@dataclass(frozen=True)
class Example:
    row: Row
    task: str  # the first message of the trace, where it is not the last observation itself
    previous: str  # the demonstrated action before this turn, or nothing
    observation: str
    demonstration: str
    samples: int
    successes: int  # of the samples: reward above 0
    actions: tuple[Sampled, ...]
    more_actions: int
    more_samples: int


@dataclass(frozen=True)
class Examples:
    """Either some examples, or why there are none."""

    shown: tuple[Example, ...] = ()
    absent: str = ""


def examples(run: Run) -> Examples:
    """The most evenly mixed pivot of each of the most frequent action kinds."""
    if run.profile is None:
        return Examples(absent="There is no profile.jsonl, so no sampled actions can be shown.")
    chosen = choose(run.profile.rows, threshold(run))
    if not chosen:
        return Examples(absent="The profile holds no candidate with mixed rewards below the threshold.")
    path, absent = _traces_path(run.path, run.profile)
    if path is None:
        return Examples(absent=absent)
    traces = _wanted(path, {row["trace_id"] for row in chosen})
    return Examples(tuple(_example(row, traces, run.path / "profile.jsonl") for row in chosen))


def choose(rows: Sequence[Row], below: float) -> list[Row]:
    """One row a kind, frequent kinds first; within a kind the highest variance, then the most distinct actions."""
    pivots = [row for row in rows if is_pivot(row, below) and row.get("actions")]
    frequent = Counter(row["kind"] for row in pivots)
    kinds = sorted(frequent, key=lambda kind: (-frequent[kind], kind))[:EXAMPLES]

    def rank(row: Row) -> tuple[float, int, str, int]:
        return -row["reward_var"], -len(row["actions"]), str(row["trace_id"]), row["turn"]

    return [min((row for row in pivots if row["kind"] == kind), key=rank) for kind in kinds]


def _traces_path(folder: Path, profile: Table) -> tuple[Path | None, str]:
    """The traces of the run directory, else the file that the profile names; or None and why.

    A relative name is looked up in the current folder too. Another file of that name may lie there, so it is
    taken by its content only, and a page does not depend on where it was made."""
    named = Path(str(profile.header.get("config", {}).get("traces", "traces.jsonl")))
    known = [folder / "traces.jsonl", folder / named.name, *([named] if named.is_absolute() else [])]
    found = [place for place in (*known, named) if place.is_file()]
    fitting = next((place for place in found if file_hash(place) == profile.header.get("traces_hash")), None)
    changed = next((place.name for place in found if place in known), None)
    if changed is None:
        return fitting, "The traces were not found, so the states of pivots cannot be shown."
    return fitting, f"{changed} is not the file that was profiled, so its states would not fit."


def _wanted(path: Path, ids: set[str]) -> dict[str, Trace]:
    """Only the traces asked for; reading stops at the last of them."""
    found: dict[str, Trace] = {}
    for trace in read_traces(path):
        if trace.id in ids:
            found[trace.id] = trace
            if len(found) == len(ids):
                break
    return found


def _example(row: Row, traces: Mapping[str, Trace], path: Path) -> Example:
    trace = traces.get(row["trace_id"])
    if trace is None or not 0 <= row["turn"] < len(trace.turn_positions):
        raise InputError(f"names turn {row['turn']} of trace {row['trace_id']!r}, which the traces lack", path=path)
    at = trace.turn_positions[row["turn"]]
    history = trace.messages[:at]
    with reading(path):
        actions = [Sampled(a["text"], int(a["count"]), a["reward"], a["strict"]) for a in row["actions"]]
    before = next((message for message in reversed(history[:-1]) if message.role == "assistant"), None)
    return Example(
        row=row,
        task=_clipped(message_text(history[0])) if len(history) > 1 else "",
        previous="" if before is None else _clipped(message_text(before)),
        observation=_clipped(message_text(history[-1])) if history else "",
        demonstration=_clipped(message_text(trace.labels.get(row["turn"]) or trace.messages[at])),
        samples=sum(action.count for action in actions),
        successes=sum(action.count for action in actions if action.reward),
        actions=tuple(actions[:ACTIONS]),
        more_actions=len(actions[ACTIONS:]),
        more_samples=sum(action.count for action in actions[ACTIONS:]),
    )


def _clipped(text: str) -> str:
    cut = len(text) - CHARACTERS
    return text if cut <= 0 else f"{text[:CHARACTERS]} … ({cut:,} more characters)"
