"""TRL's completions logs: `log_completions=True` writes `OUTPUT_DIR/completions/completions_STEP.parquet`.

Columns (`GRPOTrainer.log`): step, prompt, completion, one for every reward function, columns of `log_extra`,
advantage. The tables that wandb keeps (`*.table.json`) have the same columns. Texts are decoded without special
tokens; there are no token counts, no reward weights, and nothing tells rewards from extra columns: so the sum of the
columns taken for rewards is checked against the advantages.

The file of a step holds the latest generation batch. When one batch serves several updates, or logging comes more
often than generation, it is written again: a file that repeats the one before is dropped, and counted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.outcome import is_zero_variance
from turntree.logs.grouping import grouped
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.report import ReadReport
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, count, named_prompt, reward

_TEXT_COLUMNS = ("prompt", "completion")
_NOT_REWARDS = ("step", "advantage", *_TEXT_COLUMNS)
Record = dict[str, Any]


def read_groups(paths: Sequence[Path], config: ReadConfig, report: ReadReport) -> Iterator[LoggedGroup]:
    """Rows of one step with the same prompt are one group; a prompt is a task."""
    before: list[tuple[Any, Any]] = []
    for path in paths:
        records = _records(path)
        report.files += 1
        report.lines += len(records)
        generated = [(record.get("prompt"), record.get("completion")) for record in records]
        if generated == before:
            report.drop("the generation batch of the step before, logged again", path, count=len(records))
            continue
        before = generated
        rewards = config.rewards or _reward_columns(records, path, report)
        rows: list[LoggedRow] = []
        scored: list[Record] = []
        for line, record in enumerate(records, start=1):
            try:
                rows.append(_row(record, rewards, config))
                scored.append(record)
            except RowRefused as refused:
                report.drop(refused.reason, path, line)
        _check_advantages(rows, scored, rewards, path)
        yield from grouped(rows, report)


def _records(path: Path) -> list[Record]:
    """The rows of one file, which is one generation batch."""
    if path.name.endswith(".table.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        if not {"columns", "data"} <= set(table):
            raise InputError("has no columns and data", path=path, hint="name wandb's *.table.json files")
        return [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("needs pyarrow to be read", path=path, hint="pip install 'turntree[parquet]'") from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:
        raise InputError(f"is no Parquet file ({error})", path=path, hint="copy it again") from error


def _reward_columns(records: list[Record], path: Path, report: ReadReport) -> tuple[str, ...]:
    """Every column of numbers that is not known to be something else."""
    names = {name: None for record in records for name in record if name not in _NOT_REWARDS}
    found = tuple(
        name
        for name in names
        if any(record.get(name) is not None for record in records)
        and all(type(record.get(name)) in (float, int, type(None)) for record in records)
    )
    if not found:
        raise InputError("has no reward column", path=path, hint="name it with --reward")
    report.note(f"the reward is the sum of {', '.join(found)}, as the advantages confirm")
    return found


def _row(record: Record, rewards: tuple[str, ...], config: ReadConfig) -> LoggedRow:
    prompt, completion = (_text(record.get(name)) for name in _TEXT_COLUMNS)
    actions, observations = config.split(completion)
    task = named_prompt(prompt)
    return LoggedRow(
        group=task,
        task=task,
        rollout=LoggedRollout(
            actions=actions,
            reward=reward(record, rewards),
            observations=observations,
            characters=sum(map(len, actions)) if actions else len(completion),
        ),
        iteration=count(record, "step"),
    )


def _text(value: Any) -> str:
    """Conversations of older versions are lists of messages."""
    if value is None:
        raise RowRefused("no prompt or no completion")
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _check_advantages(rows: list[LoggedRow], records: list[Record], rewards: tuple[str, ...], path: Path) -> None:
    """Equal rewards exactly where the advantages vanish, or the wrong columns were summed."""
    groups: dict[tuple[int | None, str], list[tuple[float, float]]] = {}
    for row, record in zip(rows, records, strict=True):
        value, advantage = row.rollout.reward, record.get("advantage")
        if value is not None and isinstance(advantage, float) and math.isfinite(advantage):
            groups.setdefault((row.iteration, row.group), []).append((value, advantage))
    for pairs in groups.values():
        values, advantages = zip(*pairs, strict=True)
        flat = max(map(abs, cast("tuple[float, ...]", advantages))) <= 1e-6
        if len(pairs) > 1 and is_zero_variance(values) != flat:
            raise InputError(
                f"the advantages are not those of the sum of {', '.join(rewards)}",
                path=path,
                hint="name the columns that were rewards with --reward (weights other than 1 are not known)",
            )
