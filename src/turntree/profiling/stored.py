"""A finished profile as a store of samples and verdicts: to extend it, or to judge it anew, without sampling."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from turntree.core.completion import Sampling
from turntree.core.config import to_mapping
from turntree.core.errors import InputError
from turntree.core.protocols import TurnState
from turntree.observe.artifacts import PROFILE, policy_of
from turntree.profiling.rows import Judgement, Row, judgements_of, reference_hash, samples_of, state_hash
from turntree.profiling.samples import Sample


class StoredProfile:
    """The rows of a profile by candidate. Only their places in the file are held in memory.

    A row answers for a state whose id, history and tools are those that were profiled: then its samples are what the
    same policy would draw again with the same sampling and seed (`check_draws`).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header, rows = PROFILE.stream(path)
        self._places: dict[tuple[str, int], int] = {}
        for place, row in enumerate(rows, start=1):
            self._places[row["trace_id"], row["turn"]] = place
        self._offsets = array("Q")  # of the header, then of the rows
        offset = 0
        with path.open("rb") as handle:
            for line in handle:
                if line.strip():
                    self._offsets.append(offset)
                offset += len(line)
        self._read = lru_cache(maxsize=256)(self._read_place)

    def check_draws(self, policy: Mapping[str, str], sampling: Sampling, seed: int, engine: str = "hf") -> None:
        """Raise `InputError` unless this policy (`POLICY` by name) would draw the
        stored samples again with the engine of this name."""
        made = self.header["config"].get("profile") or {}
        found = policy_of(self.header) | {key: made.get(key) for key in ("sampling", "seed")}
        found["engine"] = _engine(self.header["config"])
        wanted: dict[str, Any] = {**policy, "sampling": to_mapping(sampling), "seed": seed, "engine": engine}
        for key, value in wanted.items():
            if found[key] != value:
                hint = "its samples are not those that this run would draw: use the same, or leave --reuse out"
                raise InputError(f"was made with {found[key]!r}, not {value!r}", path=self.path, field=key, hint=hint)

    def row(self, state: TurnState) -> Row | None:
        """The row of a state, unless its history or tools were others."""
        place = self._places.get((state.trace_id, state.turn))
        row = None if place is None else self._read(place)
        return row if row is not None and row.get("state") == state_hash(state) else None

    def samples(self, state: TurnState) -> Sequence[Sample]:
        """The samples of a state in order; none where it was not profiled."""
        row = self.row(state)
        return () if row is None else samples_of(row)

    def judgements(self, state: TurnState, verifier: str) -> dict[str, Judgement]:
        """What `verifier` (and the strict rule) said at a state; nothing where another one judged there, or beside
        another demonstration."""
        row = self.row(state)
        if row is None or self.header["verifier"] != verifier or row["reference"] != reference_hash(state):
            return {}
        return judgements_of(row)

    def _read_place(self, place: int) -> Mapping[str, Any]:
        with self.path.open("rb") as handle:
            handle.seek(self._offsets[place])
            return PROFILE.parse(handle.readline(), self.path, place + 1)


def _engine(config: Mapping[str, Any]) -> str:
    """The name of the engine that sampled; profiles of before engines were parts name none."""
    device = config.get("device")
    engine = device.get("engine") if isinstance(device, Mapping) else None
    return str(engine.get("name", "hf")) if isinstance(engine, Mapping) else "hf"
