"""Rows of parquet files with columns of JSON, as the package `datasets` reads them.

Chat messages with tool calls have no common schema: a struct column would add a null for every argument of every other
row, and chat templates print those. So such a column is JSON, marked in the file's metadata as the feature `Json` of
`datasets` (4.7 and later), which gives back the objects as they were.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turntree.core.foreign import package
from turntree.logs.generic import TextOptions
from turntree.logs.groups import LoggedRollout
from turntree.logs.rows import reward, split
from turntree.logs.suspects import suspect_of

if TYPE_CHECKING:
    from turntree.stages.export import ExportedPivot


def rollout_of_text(
    row: dict[str, Any],
    said: str,
    options: TextOptions,
    *,
    tokens: int | None = None,
    stop: str | None = None,
    completed: bool | None = None,
) -> LoggedRollout:
    """The rollout of a log that has it as one text; its reward is the sum of the columns that the options name."""
    actions, observations = split(said, options.turn_separator)
    return LoggedRollout(
        actions=actions,
        reward=reward(row, options.rewards),
        observations=observations,
        tokens=tokens,
        characters=sum(map(len, actions)) if actions else len(said),
        stop=stop,
        completed=completed,
        suspect=suspect_of(said, stop=stop, completed=completed),
    )


def columns(pivot: ExportedPivot) -> dict[str, Any]:
    """What every format records of a pivot."""
    state = pivot.state
    return {
        "trace_id": state.trace_id,
        "turn": state.turn,
        "kind": pivot.kind,
        "role": pivot.role,
        "pass_rate": pivot.pass_rate,
        "reward_var": pivot.reward_var,
        "weight": pivot.weight,
    }


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], json_columns: Sequence[str]) -> None:
    """Write the rows; a column of `json_columns` may hold any JSON values, the others scalars of one type."""
    pa, pq = (package(name, "parquet", "--to") for name in ("pyarrow", "pyarrow.parquet"))
    arrays: dict[str, Any] = {}
    features: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in json_columns:
            texts = pa.array([json.dumps(value, ensure_ascii=False) for value in values], pa.string())
            arrays[name] = pa.ExtensionArray.from_storage(pa.json_(pa.string()), texts)
            features[name] = {"_type": "Json"}
        else:
            kind = _type(values)
            arrays[name] = pa.array(values, {"string": pa.string(), "int64": pa.int64(), "float64": pa.float64()}[kind])
            features[name] = {"dtype": kind, "_type": "Value"}
    told = json.dumps({"info": {"features": features}})
    table = pa.table(arrays).replace_schema_metadata({"huggingface": told})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, compression="zstd")


def _type(values: Sequence[Any]) -> str:
    kinds = {type(value) for value in values if value is not None}
    return "int64" if kinds == {int} else "float64" if kinds <= {int, float} and kinds else "string"
