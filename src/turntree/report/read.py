"""The contents of a run directory as plain values. Missing files give None or empty values, broken ones an
`InputError`.

Everything is optional: a folder with only a profile, only an evaluation, or a single training run is a run too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turntree.core.errors import InputError
from turntree.run import artifacts
from turntree.run.artifacts import PIVOTS, PROFILE
from turntree.run.files import parse_line, read_json
from turntree.run.jsonl import read_lines

EVALUATION_SCHEMA = "turntree.evaluation/1"  # written by the stage of that name, which lies beside this floor
QUICKSTART_SCHEMA = "turntree.quickstart/1"  # of summary.json
ARMS = ("base", "sft", "pivotrl", "own", "grpo")  # the order of the quickstart; other arms follow by name

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """A JSONL table of the project: its header and its rows."""

    header: Row
    rows: Sequence[Row]


@dataclass(frozen=True)
class Arm:
    """A policy of the run: how it was trained (nothing for the base) and how it did (None: not evaluated).

    `evaluation` is the file of `turntree evaluate`, but its `outcomes` are the mean reward of every task that was
    scored, by task id."""

    name: str
    stage: str | None = None
    config: Row | None = None
    metrics: tuple[Row, ...] = ()
    cost: Row | None = None
    evaluation: Row | None = None
    folder: Path | None = None  # of its training run


@dataclass(frozen=True)
class Run:
    name: str
    path: Path
    profile: Table | None = None
    pivots: Table | None = None
    arms: tuple[Arm, ...] = ()
    summary: Row | None = None
    config: Any = None  # what the pipeline that made the whole folder wrote down

    def arm(self, name: str) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def seed(self) -> int:
        """Of a quickstart; its intervals are drawn with it."""
        return int(((self.config or {}).get("config") or {}).get("seed", 0))


def read_run(path: Path) -> Run:
    """Everything under `path` that a report can show. Raises `InputError` where there is nothing, or where a file
    that is there cannot be read."""
    if not path.is_dir():
        raise InputError("no such folder", path=path, hint="name the folder that a run wrote")
    summary = _optional_json(path / "summary.json")
    run = Run(
        name=path.resolve().name,
        path=path,
        profile=_table(path / "profile.jsonl", PROFILE),
        pivots=_table(path / "pivots.jsonl", PIVOTS),
        arms=_arms(path, _quickstart_arms(summary, path / "summary.json")),
        summary=summary,
        config=_optional_json(path / "config.json"),
    )
    if not (run.profile or run.pivots or run.arms):
        hint = "name a run directory: profile.jsonl, evaluation/*.json, or a training run with config.json"
        raise InputError("holds nothing that a report can show", path=path, hint=hint)
    return run


@contextlib.contextmanager
def reading(path: Path, line: int | None = None) -> Iterator[None]:
    """A key that is missing or of the wrong type becomes one line that names the file."""
    from jinja2 import UndefinedError

    try:
        yield
    except KeyError as error:
        raise InputError("is missing", path=path, line=line, field=str(error.args[0]), hint="make it again") from error
    except (TypeError, ValueError, AttributeError, OverflowError, UndefinedError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"holds a value of the wrong type ({error})", path=path, line=line) from error


def _optional_json(path: Path) -> Any:
    return read_json(path) if path.exists() else None


def _table(path: Path, of: artifacts.Table) -> Table | None:
    return Table(*of.read(path)) if path.exists() else None


def _quickstart_arms(summary: Any, path: Path) -> list[str]:
    """Raises `InputError` for the summary of an experiment."""
    if summary is None:
        return []
    with reading(path):
        if summary.get("schema", "" if "seeds" in summary else QUICKSTART_SCHEMA) == QUICKSTART_SCHEMA:
            return list(summary.get("arms", {}).keys())
    hint = "its numbers are in this file; name a run of the folder (seedN/ARM) for a page"
    raise InputError("is a summary of an experiment, not of a run or a quickstart", path=path, hint=hint)


def _arms(path: Path, mentioned: Iterable[str]) -> tuple[Arm, ...]:
    folders = {folder.name: folder for folder in sorted(path.iterdir()) if _is_training(folder)}
    if _is_training(path):
        folders[path.resolve().name] = path  # a single training run, named directly
    evaluations = {file.stem: file for file in sorted((path / "evaluation").glob("*.json"))}
    names = {*folders, *evaluations, *mentioned}
    ordered = [name for name in ARMS if name in names] + sorted(names.difference(ARMS))
    return tuple(_arm(name, folders.get(name), evaluations.get(name)) for name in ordered)


def _is_training(folder: Path) -> bool:
    """Whether a training stage wrote this folder. A model's own folder holds a config.json too, which names no stage;
    a pipeline names itself there and logs no metrics."""
    path = folder / "config.json"
    if not path.exists() or not (folder / "metrics.jsonl").exists():
        return False
    written = read_json(path)
    return isinstance(written, dict) and "stage" in written


def _arm(name: str, folder: Path | None, evaluation: Path | None) -> Arm:
    evaluated = None if evaluation is None else _evaluation(evaluation)
    if folder is None:
        return Arm(name, evaluation=evaluated)
    written = read_json(folder / "config.json")
    with reading(folder / "config.json"):
        stage, config = str(written["stage"]), written["config"]
    cost = _optional_json(folder / "cost.json")
    return Arm(name, stage, config, read_metrics(folder / "metrics.jsonl"), cost, evaluated, folder)


def read_metrics(path: Path) -> tuple[Row, ...]:
    """What a training stage logged, one row a step. Raises `InputError` naming the line that cannot be read."""
    rows: list[Row] = []
    for number, line in read_lines(path):
        row = parse_line(line, path, number)
        with reading(path, number):
            if not isinstance(row["step"], int):
                raise TypeError(f"step is {row['step']!r}")
        rows.append(row)
    return tuple(rows)


def _evaluation(path: Path) -> Row:
    value = read_json(path)
    with reading(path):
        if value.get("schema") != EVALUATION_SCHEMA:
            raise InputError(f"is {value.get('schema')!r}, not {EVALUATION_SCHEMA!r}", path=path, field="schema")
        return {
            "config": value["config"],
            "policy_hash": value["policy_hash"],
            "sampled": _play(value["sampled"]),
            "greedy": _play(value["greedy"]) if "greedy" in value else None,
            "retention": value.get("retention") or {},
            "cost": value.get("cost", {}),
        }


def _play(value: Row) -> Row:
    outcomes = {
        str(row["task"]): sum(row["rewards"]) / len(row["rewards"]) for row in value["outcomes"] if row["rewards"]
    }
    by_task_type = {kind: _share(share) for kind, share in value["by_task_type"].items()}
    return {
        **_share(value),
        "by_task_type": by_task_type,
        "outcomes": outcomes,
        "invalid_share": value.get("invalid_share"),
    }


def _share(value: Row) -> Row:
    """A success rate with its Wilson interval; None where no episode was scored."""
    success = value["success"]
    return {
        "success": None if success is None else float(success),
        "low": float(value["low"]),
        "high": float(value["high"]),
        "episodes": int(value["episodes"]),
    }
