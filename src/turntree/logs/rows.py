"""The lines of a log: how their fields are read, and what reading counted. Every line becomes one rollout, or is
refused for a reason that is counted."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from turntree.core.errors import ConfigError
from turntree.core.messages import each_key_once
from turntree.logs.groups import LARGEST, LoggedRollout
from turntree.run.identity import digest
from turntree.run.jsonl import read_lines
from turntree.run.opening import parquet_lines


class RowRefused(Exception):
    """A line that cannot be read. `reason` is one of few fixed texts, for counting."""

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason, self.detail = reason, detail
        super().__init__(f"{reason}{': ' if detail else ''}{detail}")


@dataclass(frozen=True, kw_only=True)
class LoggedRow:
    """A rollout and where it belongs. Rows with equal `iteration` and `group` in one file are one group, unless they
    contradict each other (`logs.grouping`): in `facts` about their task, by field; in a `name` that several of them
    have, which is then that of a group; in having the same number `sample` within it. Rows of a group with an equal
    `whole` are the outputs of one rollout, in the order of `output`: its reward is that of the last."""

    group: str
    rollout: LoggedRollout
    task: str | None = None  # None: it is called as its group
    iteration: int | None = None
    task_type: str | None = None
    facts: Mapping[str, int] = field(default_factory=dict[str, int])
    name: str | None = None
    sample: int | None = None
    whole: str | None = None
    output: int = 0


FACTS = frozenset({
    "prompt", "question", "problem", "instruction", "goal", "system_prompt", "image", "images", "video", "videos",
    "prompt_id", "question_id", "problem_id", "instance_id", "example_id", "task_id", "verifier_metadata",
    "gts", "gt", "gold", "gold_answer", "gold_answers", "golden_answer", "golden_answers", "ground_truth",
    "ground_truths", "expected", "expected_answer", "expected_output", "expected_action", "reference",
    "reference_answer", "correct_answer", "target", "test_cases", "reward_model",
    "data_source", "task_source", "source", "dataset", "dataset_name", "env_class", "env_name",
    "agent", "agent_name", "agent_ref",
})  # fmt: skip
"""Fields that say what was asked, what is right, where the task comes from and who played it. Names that a policy's own
answer may have (answer, solution) are not among them."""


def facts_of(row: Mapping[str, Any], **more: Any) -> dict[str, int]:
    """A number for every fact of a row that is not null, and for those in `more`: equal for equal values."""
    found = {name: row[name] for name in sorted(FACTS.intersection(row))} | more
    told = {name: json.dumps(value, sort_keys=True, default=repr) for name, value in found.items() if value is not None}
    return {name: int(digest(text.encode(), 8), 16) for name, text in told.items()}


def split(text: str, separator: str | None) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """The turns of a rollout's text and what was seen before each (unknown before the first: the task). `separator`: a
    regular expression of what stands between two assistant turns (dot matches newline); without it the turns are
    unknown."""
    if separator is None:
        return (), None
    try:
        between = list(re.compile(separator, re.DOTALL).finditer(text))
    except re.error as error:
        problem = f"is not a regular expression ({error})"
        raise ConfigError(problem, field="turn_separator", hint=r"e.g. '\nuser\n.*?\nassistant\n'") from error
    edges = [0, *(place for match in between for place in match.span()), len(text)]
    turns = [text[edges[i] : edges[i + 1]].strip() for i in range(0, len(edges), 2)]
    return tuple(turns), ("", *(match.group() for match in between))


def read_rows(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a log, those of a table (Parquet) as JSON, with their numbers from 1. Raises `InputError`."""
    return enumerate(parquet_lines(path), start=1) if path.suffix == ".parquet" else read_lines(path)


def parse_row(line: bytes | str) -> dict[str, Any]:
    """Read NaN, which Python writes into JSON, as null: such a reward was never given. A key twice is refused."""
    try:
        value = json.loads(line, parse_constant=lambda _: None, object_pairs_hook=each_key_once)
    except (ValueError, RecursionError) as error:
        raise RowRefused("not JSON", str(error)) from error
    if not isinstance(value, dict):
        raise RowRefused("not a JSON object")
    return cast("dict[str, Any]", value)


def text(row: dict[str, Any], *names: str) -> str | None:
    """The first of the fields that is not null, text or a whole number, as text that every file can hold."""
    name, value = _first(row, names)
    if not isinstance(value, str | int | None) or isinstance(value, bool):
        raise RowRefused(f"field {name!r} is not text")
    if isinstance(value, int) and abs(value) > LARGEST:
        raise RowRefused(f"field {name!r} is too large")
    return None if value is None else writable(str(value))


def _first(row: dict[str, Any], names: tuple[str, ...]) -> tuple[str, Any]:
    return next(((name, row[name]) for name in names if row.get(name) is not None), ("", None))


def writable(text: str) -> str:
    """The text with lone surrogates, which UTF-8 cannot hold, written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def text_within(content: Any) -> str:
    """Text as it is, or in parts, which may hold parts; what is no text stands as its JSON, for two of them differ."""
    if isinstance(content, list):
        return "".join(map(text_within, cast("list[Any]", content)))
    if isinstance(content, dict):
        part = cast("dict[str, Any]", content)
        held = next((part[key] for key in ("text", "content", "output", "refusal") if part.get(key) is not None), None)
        content = json.dumps(part, sort_keys=True) if held is None else held
        return content if held is None else text_within(held)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)


def needed(row: dict[str, Any], name: str) -> str:
    if (found := text(row, name)) is None:
        raise RowRefused(f"no text in field {name!r}")
    return found


def number(row: dict[str, Any], name: str) -> float | None:
    """A finite number; null and NaN are None. Raises `RowRefused` where the field is missing or not a number."""
    if name not in row:
        raise RowRefused(f"no field {name!r}")
    value = row[name]
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise RowRefused(f"field {name!r} is not a number", repr(value)[:40])
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError as error:
        raise RowRefused(f"field {name!r} is too large") from error


def reward(row: dict[str, Any], names: tuple[str, ...]) -> float | None:
    """The sum of the columns; one that does not apply (null) is left out, None where none applies."""
    values = [value for name in names if (value := number(row, name)) is not None]
    try:
        return math.fsum(values) if values else None
    except OverflowError as error:
        raise RowRefused("a reward that is too large") from error


def count(row: dict[str, Any], *names: str) -> int | None:
    """The first of the fields that is not null, as a whole number from 0. Raises `RowRefused` for anything else."""
    name, value = _first(row, names)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int | None) or isinstance(value, bool) or (value is not None and value < 0):
        raise RowRefused(f"field {name!r} is not a whole number from 0")
    if value is not None and value > LARGEST:
        raise RowRefused(f"field {name!r} is too large")
    return value


def flag(row: dict[str, Any], name: str) -> bool | None:
    value = row.get(name)
    if value is not None and not isinstance(value, bool):
        raise RowRefused(f"field {name!r} is not true or false")
    return value


def texts(row: dict[str, Any], name: str) -> tuple[str, ...] | None:
    """A list of texts. Raises `RowRefused` for anything else but null."""
    values = row.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in cast("list[Any]", values)):
        raise RowRefused(f"field {name!r} is not a list of texts")
    return tuple(cast("list[str]", values))


def counts(row: dict[str, Any], name: str) -> tuple[int, ...] | None:
    values = row.get(name)
    if values is None:
        return None
    good = isinstance(values, list) and all(type(v) is int and v >= 0 for v in cast("list[Any]", values))
    if not good:
        raise RowRefused(f"field {name!r} is not a list of whole numbers")
    if max(cast("list[int]", values), default=0) > LARGEST:
        raise RowRefused(f"field {name!r} is too large")
    return tuple(cast("list[int]", values))


def items(row: Mapping[str, Any], name: str, kind: type = object, *, needed: bool = False) -> list[Any]:
    """A list of values of one kind; empty where there is none, unless one is `needed`. Raises `RowRefused`."""
    value = row.get(name)
    if value is None and not needed:
        return []
    if not isinstance(value, list):
        raise RowRefused(f"no list in field {name!r}")
    if not all(isinstance(one, kind) for one in cast("list[Any]", value)):
        raise RowRefused(f"a value in field {name!r} is not {'an object' if kind is dict else kind.__name__}")
    return cast("list[Any]", value)


_STEP = re.compile(r"(?:^|_)step_?(\d+)")


def step_of(path: Path) -> int | None:
    """The step that the folders of a log, or its own name, tell: step_3, global_step_40_evals; as a name of a file also
    a number alone (a folder's may be a date or a job)."""
    name = path.name.split(".")[0]
    found = map(_STEP.search, (name, *(folder.name for folder in path.absolute().parents[:3])))
    told = [name] if name.isdecimal() else [each[1] for each in found if each]
    return int(told[0]) if told else None


def named_prompt(prompt: str) -> str:
    """A stable name for a prompt: its hash, followed by its last words for readers. Raises `RowRefused` for an empty
    one, which several tasks may have."""
    if not prompt.strip():
        raise RowRefused("an empty prompt: its group is not known")
    end = writable(" ".join(prompt[-1000:].split())[-60:])
    return f"{digest(prompt.encode(errors='surrogatepass'), 6)} …{end}"


@dataclass
class ReadReport:
    """Complete once the groups are read. `first` shows where each reason was met first, as "file:line"."""

    format: str
    files: int = 0
    lines: int = 0
    rollouts: int = 0
    groups: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)  # in order, each once
    apart: Counter[str] = field(default_factory=Counter)  # what names stood for several of
    tasks: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)  # the facts of those of one name
    bar: Any = field(default=None, repr=False, compare=False)

    def saw_line(self) -> None:
        self.lines += 1
        if self.bar is not None:
            self.bar.update()

    def saw_group(self, rollouts: int) -> None:
        self.groups += 1
        self.rollouts += rollouts

    def drop(self, reason: str, path: Path, line: int | None = None, count: int = 1, detail: str = "") -> None:
        """`reason` is one of few fixed texts; `detail` says more about the first line that was dropped for it."""
        self.dropped[reason] += count
        if reason not in self.first:
            place = str(path) if line is None else f"{path}:{line}"
            self.first[reason] = f"{place} ({detail[:200]})" if detail else place

    def task(self, name: str, facts: int) -> str:
        """The name of a task with these facts: a number is added where earlier tasks of this name have others."""
        known = self.tasks.get(name, ())
        if facts not in known:
            self.tasks[name] = known = (*known, facts)
            if len(known) > 1:
                self.apart["tasks of one name"] += 1
        return f"{name} ({known.index(facts) + 1})" if known.index(facts) else name

    def note(self, text: str) -> None:
        self.notes[text] = None

    def to_json(self) -> dict[str, Any]:
        return {
            "format": self.format,
            "files": self.files,
            "lines": self.lines,
            "rollouts": self.rollouts,
            "groups": self.groups,
            "dropped": dict(sorted(self.dropped.items())),
            "first_dropped": dict(sorted(self.first.items())),
            "notes": [
                *self.notes,
                *(f"one name for several, split: {count} x {what}" for what, count in self.apart.most_common()),
            ],
        }
