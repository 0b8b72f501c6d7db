"""TRL's completions logs: `log_completions=True` writes `OUTPUT_DIR/completions/completions_STEP.parquet`.

Columns (`GRPOTrainer.log`): step, prompt, completion, one for every reward function, columns of `log_extra`,
advantage. The tables that wandb keeps (`*.table.json`) have the same columns. Texts are decoded without special
tokens; there are no token counts, no reward weights, and nothing tells rewards from extra columns: what their names do
not say, the advantages have to (`reward_columns`), and whatever was taken is checked against them.

The file of a step holds the latest generation batch. When one batch serves several updates, or logging comes more
often than generation, it is written again: a file that repeats the one before is dropped, and counted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.outcome import is_zero_variance
from turntree.logs.grouping import grouped
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.report import ReadReport
from turntree.logs.reward_columns import RewardColumns, is_number, numeric
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, count, named_prompt, parse_row, reward

_TEXT_COLUMNS = ("prompt", "completion")
_NOT_REWARDS = ("step", "advantage", *_TEXT_COLUMNS)
Record = dict[str, Any]


def read_groups(paths: Sequence[Path], config: ReadConfig, report: ReadReport) -> Iterator[LoggedGroup]:
    """Rows of one step with the same prompt are one group; a prompt is a task."""
    rewards = config.rewards or _reward_columns(paths, report)
    before: list[tuple[Any, Any]] = []
    for path in paths:
        records = _records(path)
        report.files += 1
        generated = [(record.get("prompt"), record.get("completion")) for record in records]
        again, before = generated == before, generated
        rows: list[LoggedRow] = []
        scored: list[Record] = []
        for line, record in enumerate(records, start=1):
            report.saw_line()
            if again:
                continue
            try:
                rows.append(_row(record, rewards, config))
                scored.append(record)
            except RowRefused as refused:
                report.drop(refused.reason, path, line)
        if again:
            report.drop("the generation batch of the step before, logged again", path, count=len(records))
        _check_advantages(rows, scored, rewards, path)
        yield from grouped([(row.iteration, row.group) for row in rows], rows.__getitem__, report)


def _records(path: Path) -> list[Record]:
    """The rows of one file, which is one generation batch."""
    if path.name.endswith(".table.json"):
        return _table(path)
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError("needs pyarrow to be read", path=path, hint="pip install 'turntree[parquet]'") from error
    try:
        return pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        problem = f"is not a Parquet file that can be read ({str(error)[:200]})"
        raise InputError(problem, path=path, hint="copy it again") from error


def _table(path: Path) -> list[Record]:
    """A table of wandb: the names of the columns, and a list of values for every row."""
    try:
        table = parse_row(path.read_bytes())
    except RowRefused as refused:
        raise InputError(f"is not a table ({str(refused)[:200]})", path=path, hint="copy it again") from refused
    columns, data = (cast("list[Any]", table[key]) if isinstance(table.get(key), list) else None
                     for key in ("columns", "data"))  # fmt: skip
    if columns is None or data is None:
        raise InputError("has no lists of columns and data", path=path, hint="name wandb's *.table.json files")
    if not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise InputError("has columns without a name of their own", path=path, field="columns", hint="copy it again")
    for number, values in enumerate(data, start=1):
        if not isinstance(values, list) or len(cast("list[Any]", values)) != len(columns):
            problem = f"row {number} is not a list of {len(columns)} values"
            raise InputError(problem, path=path, field="data", hint="copy the file again")
    return [dict(zip(columns, values, strict=True)) for values in data]


def _reward_columns(paths: Sequence[Path], report: ReadReport) -> tuple[str, ...]:
    """The columns that were rewards, from the whole log: one step may have nothing but groups of equal rewards."""
    names = list(dict.fromkeys(name for path in paths for name in numeric(_records(path), _NOT_REWARDS)))
    if not names:
        raise InputError("has no reward column", path=paths[0], hint="name it with --reward")
    columns = RewardColumns(names)
    for path in paths if len(names) > 1 else ():
        batch: dict[str, list[Record]] = {}
        for record in _records(path):
            batch.setdefault(json.dumps([record.get("step"), record.get("prompt")], default=str), []).append(record)
        for group in batch.values():
            columns.see(group)
    found = columns.found()
    if isinstance(found, str):
        flags = " ".join(f"--reward {name[:60]}" for name in names[:3])
        hint = f"name the columns that were rewards, e.g. {flags} (weights other than 1 are not known)"
        raise InputError(found, path=paths[0], hint=hint)
    rewards, why = found
    left = [name for name in names if name not in rewards]
    others = f"; {', '.join(left)} left out" if left else ""
    report.note(f"the reward is the sum of {', '.join(rewards)} ({why}){others}; --reward says otherwise")
    return rewards


def _row(record: Record, rewards: tuple[str, ...], config: ReadConfig) -> LoggedRow:
    prompt, completion = (_text(record.get(name)) for name in _TEXT_COLUMNS)
    actions, observations = config.split(completion)
    if not prompt.strip():
        raise RowRefused("an empty prompt: its group is not known")
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
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _check_advantages(rows: list[LoggedRow], records: list[Record], rewards: tuple[str, ...], path: Path) -> None:
    """Equal rewards exactly where the advantages vanish, or the wrong columns were summed."""
    groups: dict[tuple[int | None, str], list[tuple[float, float]]] = {}
    for row, record in zip(rows, records, strict=True):
        value, advantage = row.rollout.reward, record.get("advantage")
        if value is not None and is_number(advantage):
            groups.setdefault((row.iteration, row.group), []).append((value, float(cast(float, advantage))))
    for pairs in groups.values():
        values, advantages = zip(*pairs, strict=True)
        flat = max(map(abs, cast("tuple[float, ...]", advantages))) <= 1e-6
        if len(pairs) > 1 and is_zero_variance(values) != flat:
            raise InputError(
                f"the advantages are not those of the sum of {', '.join(rewards)}",
                path=path,
                hint="name the columns that were rewards with --reward (weights other than 1 are not known)",
            )
