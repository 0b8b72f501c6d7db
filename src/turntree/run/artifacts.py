"""The tables that stages pass to each other: name, header and row schema of each.

A table is JSON lines: a header object that names the schema, then one row a line. Reading is strict: every field has a
type and a range (`core.config`), an unknown field is an error, and where the header states the number of rows, it is
checked. Writing makes the same checks, so that no stage writes a table that the next one refuses.

Traces have their own schema and reader (`traces.schema`), because people write them too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from turntree.core.completion import Sampling
from turntree.core.config import Amount, Between, Count, Part, Share, from_mapping
from turntree.core.cost import Cost
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.run.files import parse_line
from turntree.run.identity import FREE, require_same
from turntree.run.jsonl import read_lines, write_lines

MOST_ROLLOUTS = 10_000  # of one candidate

Reward = float | None  # None: not judged
Variance = Amount | None
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """One kind of table. `header` and `row` are the dataclasses that check them (a header's "schema" apart);
    `counted` is the number of rows in the header's `summary`."""

    name: str
    schema: str
    header: type
    row: type
    counted: str = ""

    def read(self, path: Path) -> tuple[Row, list[Row]]:
        """The header and all rows. Raises `InputError` naming file, line and field."""
        header, rows = self.stream(path)
        return header, list(rows)

    def stream(self, path: Path) -> tuple[Row, Iterator[Row]]:
        """`read` as an iterator: the header is checked at once, each row when it is reached, their number after the
        last."""
        hint = f"the stage before makes it ({self.schema})"
        if not path.exists():
            raise InputError("no such file", path=path, hint=hint)
        rows = (parse_line(line, path, number) for number, line in read_lines(path))
        header = next(rows, None)
        if header is None:
            raise InputError("is empty", path=path, hint=hint)
        if (found := header.get("schema")) != self.schema:
            problem = f"is {found!r}, not {self.schema!r}"
            raise InputError(problem, path=path, line=1, field="schema", hint="name the right file")
        self._check(self.header, {key: header[key] for key in header if key != "schema"}, path, 1)
        return header, self._checked(header, rows, path)

    def parse(self, line: bytes, path: Path, number: int) -> Row:
        """One line of the table as a row."""
        row = parse_line(line, path, number)
        self._check(self.row, row, path, number)
        return row

    def write(self, path: Path, header: Row, rows: Iterable[Row]) -> int:
        """Write the table atomically (`header` without its schema); returns the number of rows."""
        self._check(self.header, header, path, 1)
        lines = chain([{"schema": self.schema, **header}], self._checked(header, iter(rows), path))
        return write_lines(path, lines) - 1

    def _checked(self, header: Row, rows: Iterator[Row], path: Path) -> Iterator[Row]:
        seen: set[tuple[str, int]] = set()
        number = 1
        for number, row in enumerate(rows, start=2):
            self._check(self.row, row, path, number)
            place = row["trace_id"], row["turn"]
            if place in seen:
                raise InputError(f"turn {place[1]} of trace {place[0]!r} is there twice", path=path, line=number)
            seen.add(place)
            yield row
        if self.counted and (counted := header["summary"][self.counted]) != number - 1:
            problem = f"holds {number - 1} rows, and its header counts {counted}"
            raise InputError(problem, path=path, hint="it is damaged: make it again")

    def _check(self, shape: type, value: Row, path: Path, line: int) -> None:
        try:
            from_mapping(shape, value)
        except InputError as error:
            hint = error.hint or f"make the {self.name} again"
            raise InputError(error.problem, path=path, line=line, field=error.field, hint=hint) from error


# profiles


@dataclass(frozen=True, kw_only=True)
class Action:
    """One distinct action of a candidate; `message` is the whole message where `text` is not all of it."""

    text: str
    reward: Reward
    strict: Reward
    count: Annotated[int, Between(1, MOST_ROLLOUTS)]
    message: dict[str, Any] | None = None
    truncated: bool = False

    def __post_init__(self) -> None:
        if self.message is not None:
            Message.from_chat(self.message)


@dataclass(frozen=True, kw_only=True)
class Audit:
    """After how many rollouts an audited candidate (run to K) could have stopped, and with which class."""

    rollouts: Annotated[int, Between(0, MOST_ROLLOUTS)]
    forecast: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A row of a profile. Fields with a default are missing in profiles of older versions, which can be selected from,
    but neither extended nor rescored."""

    trace_id: str
    turn: Count
    kind: str
    rollouts: Annotated[int, Between(0, MOST_ROLLOUTS)]
    successes: Count
    unjudged: Count
    reward_mean: Reward
    reward_var: Variance
    actions: list[Action]
    cost: Cost
    stop: Literal["K reached", "settled", "audited", "open"] = "K reached"
    certainty: Share = 1.0
    audit: Audit | None = None
    faults: dict[str, Count] = field(default_factory=dict[str, int])
    truncated: Count = 0
    gold: Reward = None
    low: float | None = None
    high: float | None = None
    demonstrated: str | None = None
    state: str | None = None
    reference: str | None = None
    samples: list[Count | None] | None = None

    def __post_init__(self) -> None:
        _check_moments(self.reward_mean, self.reward_var)
        if min(vars(self.cost).values()) < 0:
            raise ValueError("has a cost below zero")
        if self.successes + self.unjudged > self.rollouts:
            raise ValueError(f"counts more than its {self.rollouts} rollouts")
        judged = self.rollouts - self.unjudged
        if judged != 1 and (self.reward_mean is None) != (judged == 0):  # of one reward nothing follows
            raise ValueError("has a reward_mean exactly where rollouts were judged")
        absent = [value is None for value in (self.demonstrated, self.state, self.reference, self.samples)]
        if any(absent) != all(absent):
            raise ValueError("holds demonstrated, state, reference and samples together or not at all")
        if self.samples is None:
            return
        drawn = [0] * len(self.actions)
        for place in self.samples:
            if place is not None:
                if place >= len(drawn):
                    raise ValueError(f"samples name action {place} of {len(drawn)}")
                drawn[place] += 1
        if drawn != [action.count for action in self.actions] or len(self.samples) != self.rollouts:
            raise ValueError("samples do not name every action as often as it is counted")
        if sum(self.faults.values()) != len(self.samples) - sum(drawn):
            raise ValueError("faults do not count the samples without an action")


@dataclass(frozen=True, kw_only=True)
class ProfileHeader:
    """`summary` and `config` belong to the stage; the parts that other stages read are checked."""

    config: dict[str, Any]
    policy_hash: str
    verifier: str
    traces_hash: str
    summary: dict[str, Any]
    tokenizer_hash: str
    template_hash: str
    renderer: str = "template"
    timing: dict[str, Amount] = field(default_factory=dict[str, float])

    def __post_init__(self) -> None:
        for key in ("traces", "split"):
            if not isinstance(self.config.get(key), str):
                raise ValueError(f"config.{key} is not text")
        Part.from_value(self.config.get("verifier"), "config.verifier")
        _check_count(self.summary, "candidates")
        skipped = self.summary.get("skipped_turns", {})
        if not isinstance(skipped, dict) or not all(type(count) is int for count in skipped.values()):
            raise ValueError("summary.skipped_turns holds no counts")
        profile = self.config.get("profile")
        if not isinstance(profile, dict) or not isinstance(profile.get("sampling"), dict):
            raise ValueError("config.profile.sampling is not an object")
        adaptive = profile.get("adaptive")
        if adaptive is not None and (not isinstance(adaptive, dict) or type(adaptive.get("threshold")) is not float):
            raise ValueError("config.profile.adaptive holds no threshold")


POLICY = {
    "policy_hash": "weights",
    "tokenizer_hash": "tokenizer",
    "template_hash": "chat template",
    "renderer": "renderer",
}
"""The header fields that identify the policy that sampled, and what each means."""


def require_same_profile(out: Path, header: Row, *, overwrite: bool) -> None:
    """Raise `InputError` where a finished profile of other settings or inputs than those of `header`, or no profile,
    lies at `out`, unless `overwrite`. How a server is reached and the number of processes may differ."""
    if overwrite or not out.exists():
        return
    try:
        found, _ = PROFILE.stream(out)
    except InputError as error:
        hint = "choose another --out, or pass --overwrite to replace it"
        raise InputError(error.problem, path=out, line=error.line, field=error.field, hint=hint) from error
    require_same(_settings(found), _settings(header), out, free=FREE)


def _settings(header: Row) -> Row:
    return {**{key: header.get(key) for key in ("config", "verifier", "traces_hash")}, **policy_of(header)}


def policy_of(header: Mapping[str, Any]) -> dict[str, str]:
    """The policy fields of a profile or pivots header. Older headers name no renderer: it was the template renderer."""
    return {name: header.get(name, "template") for name in POLICY}


# pivots


@dataclass(frozen=True, kw_only=True)
class Pivot:
    """A row of a pivots file: a training state and why it is in the mix."""

    trace_id: str
    turn: Count
    kind: str
    reward_mean: Reward
    reward_var: Variance
    role: Literal["pivot", "anchor", "random"]
    weight: Amount = 1.0
    """How often it is drawn, relative to the others."""

    def __post_init__(self) -> None:
        _check_moments(self.reward_mean, self.reward_var)
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight is {self.weight}, not a number above 0")


@dataclass(frozen=True, kw_only=True)
class PivotsHeader:
    """`verifier_source` is the verifier as it was given to the profile. Custom code is only named there: reading the
    file never runs it."""

    config: dict[str, Any]
    policy_hash: str
    verifier: str
    traces_hash: str
    traces: str
    verifier_source: Part
    split: str
    summary: dict[str, Any]
    tokenizer_hash: str
    template_hash: str
    sampling: Sampling
    cut: Count
    renderer: str = "template"

    def __post_init__(self) -> None:
        _check_count(self.summary, "selected")


PROFILE = Table("profile", "turntree.profile/2", ProfileHeader, Candidate, "candidates")
PIVOTS = Table("pivots file", "turntree.pivots/2", PivotsHeader, Pivot, "selected")


def _check_moments(mean: float | None, variance: float | None) -> None:
    if (mean is None) != (variance is None):
        raise ValueError("reward_mean and reward_var are known together or not at all")


def _check_count(summary: dict[str, Any], key: str) -> None:
    count = summary.get(key)
    if type(count) is not int or count < 1:
        raise ValueError(f"summary.{key} is not a number of rows")
