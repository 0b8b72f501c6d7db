"""The candidates of a traces file, and those that a pivots file names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core import seeds
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState
from turntree.run.artifacts import PIVOTS
from turntree.run.files import file_hash
from turntree.run.jsonl import placed
from turntree.traces.candidates import candidates, skipped_turns
from turntree.traces.schema import read_traces


@dataclass(frozen=True)
class Survey:
    """Result of a first pass over the traces: the number of candidates and, by reason, of turns that are not
    candidates."""

    traces_hash: str
    candidates: int
    skipped: Counter[str]

    def draw(self, limit: int, seed: int) -> Collection[int]:
        """The places of `limit` candidates (0: all), drawn by `seed`: files are often sorted, so the first ones
        would be of a few kinds of tasks."""
        everything = range(self.candidates)
        if not 0 < limit < self.candidates:
            return everything
        return set(seeds.generator(seed, "candidates").sample(everything, limit))


def survey(traces: str, split: str, profiled: str | None = None) -> Survey:
    """Read all the traces once, so that errors in them are found before anything is sampled. Raises `InputError` where
    the file is not the one that was `profiled` (its hash), a line is malformed, a group lies in two splits, or the
    split holds no candidate."""
    found_hash = file_hash(Path(traces))
    if profiled not in (None, found_hash):
        hint = "name it with --traces, or profile again"
        raise InputError("is not the file that was profiled", path=traces, hint=hint)
    splits: dict[str, Any] = {}
    found, skipped = 0, Counter[str]()
    for trace in read_traces(traces):
        if splits.setdefault(trace.group, trace.split) != trace.split:
            problem = f"of trace {trace.id!r} is {trace.split!r}, but its group {trace.group!r} is also in"
            hint = "give a group one split, or what is trained on is tested on"
            raise InputError(f"{problem} {splits[trace.group]!r}", path=traces, field="split", hint=hint)
        if split in ("", trace.split):
            with placed(path=traces):
                reasons = skipped_turns(trace)
            found += len(trace.turn_positions) - len(reasons)
            skipped.update(reasons.values())
    if not found:
        raise InputError(
            f"holds no candidate in split {split!r}", path=traces, hint="choose another split, or --split '' for all"
        )
    return Survey(found_hash, found, skipped)


def stream_candidates(traces: str, split: str, chosen: Collection[int] | None = None) -> Iterator[TurnState]:
    """The candidates of a split in order of the file: all, or those in the `chosen` places (`Survey.draw`)."""
    states = (state for trace in read_traces(traces, split) for state in candidates(trace))
    return (state for place, state in enumerate(states) if chosen is None or place in chosen)


def read_candidates(traces: str, split: str, limit: int, seed: int) -> list[TurnState]:
    """The candidates of a split, at most `limit` drawn by `seed` (0: all). Raises `InputError` when nothing is left."""
    return list(stream_candidates(traces, split, survey(traces, split).draw(limit, seed)))


@dataclass(frozen=True)
class SelectedState:
    """A row of a pivots file with the state that it names, and the group of its trace."""

    row: dict[str, Any]
    state: TurnState
    group: str


def traces_of(header: Mapping[str, Any], path: str | Path) -> str:
    """Where the traces of a profile or of pivots lie: where they were, seen from here, or beside the file."""
    told = Path(str(header["traces"]))
    found = next((place for place in (told, Path(path).parent / told.name) if place.exists()), None)
    if found is None:
        raise InputError("no such file", path=told, hint=f"{path} was made of it: say with --traces where it lies")
    return str(found)


def read_selected(path: str, traces: str | None = None) -> tuple[dict[str, Any], list[SelectedState]]:
    """The header of a pivots file, and its rows with their states (`traces`: where the traces lie now). Raises
    `InputError` when traces and pivots do not fit."""
    header, rows = PIVOTS.read(Path(path))
    source = traces or traces_of(header, path)
    split, groups = str(header["split"]), dict[str, str]()
    states: dict[tuple[str, int], TurnState] = {}
    survey(source, split, header["traces_hash"])
    for trace in read_traces(source):
        if split in ("", trace.split):
            groups[trace.id] = trace.group
            states |= {(trace.id, state.turn): state for state in candidates(trace)}
    found: list[SelectedState] = []
    for row in rows:
        state = states.get((row["trace_id"], row["turn"]))
        if state is None:
            problem = f"names turn {row['turn']} of trace {row['trace_id']!r}, which is no candidate of {source}"
            raise InputError(problem, path=path, hint="select again from the profile of these traces")
        found.append(SelectedState({"weight": PIVOTS.row.weight} | row, state, groups[state.trace_id]))
    return header, found
