"""TRL: pivots for its trainer, its environments, and its completions logs.

*Pivots out* (`--to trl`, `verifier_reward`): the dataset of a `GRPOTrainer`, and our verifier as its reward
function. TRL drops an unjudged completion from its group (None), so a verifier that fails gives no reward here either.

*Environments in* (`trl:module:Class`): the class that TRL's `environment_factory` takes, unchanged.

`tasks` is a JSONL file. The columns of a row are the arguments of `reset`. The column `prompt` is among them where
`reset` takes it: these are the opening messages, to the last of which is appended what `reset` returns. An exception
in a tool is answered as text. The reward is what `get_reward` of the object returns, or its attribute `reward`, or
what the option `reward` (`module:function`) returns, called as TRL does: `reward(environments=[...], prompts=[...],
completions=[...], **columns)` gives a list of numbers.

*Completions logs*: `log_completions=True` writes `OUTPUT_DIR/completions/completions_STEP.parquet`.

Columns (`GRPOTrainer.log`): step, prompt, completion, one for every reward function, columns of `log_extra`,
advantage. The tables that wandb keeps (`*.table.json`) have the same columns. Texts are decoded without special
tokens; there are no token counts, no reward weights, and nothing marks which extra columns are rewards. Where their
names do not say it, `--reward` must; the advantages are checked against them.

The file of a step holds the latest generation batch. When one batch serves several updates, or logging comes more
often than generation, it is written again: a file that repeats the one before is dropped, and counted.
"""

from __future__ import annotations

import inspect
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import numpy as np
from numpy.typing import NDArray

from turntree.core import parts
from turntree.core.errors import ConfigError, InputError
from turntree.core.outcome import is_zero_variance
from turntree.core.protocols import Environment
from turntree.env.adapted import named, prompt_of, rows_of, scored
from turntree.env.tool_environment import ToolEnvironment
from turntree.logs.generic import TextOptions
from turntree.logs.grouping import grouped
from turntree.logs.groups import LoggedGroup, LoggedRollout
from turntree.logs.rows import (
    LoggedRow,
    ReadReport,
    RowRefused,
    count,
    facts_of,
    named_prompt,
    parse_row,
    reward,
    split,
)
from turntree.logs.suspects import suspect_of
from turntree.render.tool_calls import ToolFormat
from turntree.rollout.local import CutTurns
from turntree.run.jsonl import read_bytes
from turntree.run.opening import parquet_rows
from turntree.stages.export import Bundle, ExportedPivot
from turntree_interop.judging import Judge, write_reward
from turntree_interop.rows import row_of, write_parquet

PromptForm = Literal["auto", "messages", "text"]
"""messages: TRL applies the chat template, to which it passes no tools. text: rendered here, exact with tools too.
auto: text where a model was named and pivots have tools."""


def verifier_reward(
    verifier: str = "recommended",
    *,
    options: Mapping[str, Any] | None = None,
    tool_format: ToolFormat = "hermes",
    cut_turns: CutTurns = "fail",
    stop_ids: Collection[int] = (),
) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainers: `reward(prompts, completions, **columns)`, one reward per completion and
    None where the verifier does not judge.

    It needs the column `state` of an exported dataset. `stop_ids` are the ids that end a turn of the policy: with them
    a completion that was cut off gets 0 (`cut_turns`); without them TRL does not say which one was, and its text is
    judged.
    """
    judge = Judge(verifier, options=options, tool_format=tool_format, cut_turns=cut_turns)
    ends = frozenset(stop_ids)

    def reward(
        prompts: Sequence[Any],
        completions: Sequence[Any],
        completion_ids: Sequence[Sequence[int]] | None = None,
        state: Sequence[str] | None = None,
        **_: Any,
    ) -> list[float | None]:
        if state is None:
            hint = "train on the dataset of `turntree export pivots --to trl`, without remove_unused_columns"
            raise InputError("is not among the columns of the dataset", field="state", hint=hint)
        sampled: Sequence[Sequence[int]] = completion_ids or [()] * len(completions)
        cut = [bool(ends) and len(ids) > 0 and ids[-1] not in ends for ids in sampled]
        actions = [judge.action(said, cut=one) for said, one in zip(completions, cut, strict=True)]
        return [verdict.reward for verdict in judge(list(zip(state, actions, strict=True)))]

    reward.__name__ = f"turntree_{verifier.replace(':', '_').replace('.', '_')}"  # TRL logs it by this name
    return reward


def export_trl(bundle: Bundle, out: Path, *, prompt: PromptForm = "auto") -> dict[str, Any]:
    """Write `pivots.parquet` and `reward.py`, whose `reward` is the verifier.

    Args:
        prompt: As messages, to which TRL passes no tools, or as text that is rendered here (auto: text where a model
            was named and pivots have tools).
    """
    rows = _rows(bundle.pivots, prompt)
    texts = isinstance(rows[0]["prompt"], str)
    write_parquet(out / "pivots.parquet", rows, ("demonstration",) if texts else ("prompt", "demonstration"))
    names = ("turntree_interop.trl", "verifier_reward", "reward")
    settings = {**bundle.reward_settings(), "stop_ids": bundle.stop_ids}
    write_reward(out, "The verifier of these pivots, as a reward function of TRL.", names, settings)
    return {"files": ["pivots.parquet", "reward.py"], "prompt": "text" if texts else "messages"}


def _rows(pivots: Sequence[ExportedPivot], prompt: PromptForm) -> list[dict[str, Any]]:
    rendered = all(pivot.text is not None for pivot in pivots)
    if prompt == "text" and not rendered:
        raise ConfigError("needs the policy's chat template", field="pivot_format.prompt", hint="name it with --model")
    texts = prompt == "text" or (prompt == "auto" and rendered and any(pivot.state.tools for pivot in pivots))
    return [{**row_of(pivot), **({"prompt": pivot.text} if texts else {})} for pivot in pivots]


def tasks(
    split: str,
    count: int,
    *,
    seed: int,
    argument: str | None,
    tasks: str,
    held_out: str | None = None,
    reward: str | None = None,
) -> list[Environment]:
    """At most `count` rows of the split, one environment each (`env.adapted.rows_of` says which row is in which split).

    Args:
        tasks: A file of rows: what `reset` takes, and a prompt.
        held_out: A second such file, for held-out tasks (default: the first one is split by a hash of the row).
        reward: A reward function of TRL that judges an episode, as module:function.
    """
    name = named(argument, "trl:module:Class")
    owner = parts.load("environments", name).target
    if not inspect.isclass(owner) or not callable(getattr(owner, "reset", None)):
        raise InputError(f"{name!r} is not a class with a reset", field="environment", hint="name the class itself")
    return [
        scored(
            ToolEnvironment(
                owner,
                task_id=task_id,
                arguments={key: value for key, value in row.items() if key != "prompt" or _takes_prompt(owner)},
                prompt=prompt_of(row.get("prompt"), tasks),
                task_type=owner.__name__,
            ),
            reward,
            row,
        )
        for task_id, row in rows_of(tasks, held_out, split, count, seed)
    ]


def _takes_prompt(owner: type) -> bool:
    """Whether `reset` has a place for the column `prompt`, which TRL gives to every class."""
    taken = inspect.signature(owner.reset).parameters  # pyright: ignore[reportAttributeAccessIssue]
    return "prompt" in taken or any(one.kind is one.VAR_KEYWORD for one in taken.values())


_TEXT_COLUMNS = ("prompt", "completion")
_NOT_REWARDS = ("step", "advantage", *_TEXT_COLUMNS)
Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompletionsTables(TextOptions):
    """TRL's tables. Rows of one step with the same prompt, and facts about it, are one group, or several where other
    prompts show that a group is smaller; a prompt with its facts is a task."""

    file_marks: ClassVar = (".parquet", ".table.json")

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        yield from _groups(self, paths, self.rewards or _reward_columns(paths, report), report)


def _groups(
    options: CompletionsTables, paths: Sequence[Path], rewards: tuple[str, ...], report: ReadReport
) -> Iterator[LoggedGroup]:
    before: list[tuple[Any, Any]] = []
    for path in paths:
        records = _records(path)
        report.files += 1
        generated = [(record.get("prompt"), record.get("completion")) for record in records]
        again, before = generated == before, generated
        rows: list[LoggedRow] = []
        batches: dict[tuple[str, int], list[tuple[float | None, Record]]] = {}
        for line, (record, group) in enumerate(zip(records, _groups_of(records), strict=True), start=1):
            report.saw_line()
            if again:
                continue
            try:
                rows.append(_row(record, rewards, options.turn_separator, group[1]))
                batches.setdefault(group, []).append((rows[-1].rollout.reward, record))
            except RowRefused as refused:
                report.drop(refused.reason, path, line)
        if again:
            report.drop("the generation batch of the step before, logged again", path, count=len(records))
        _check_advantages(list(batches.values()), rewards, path, weighted=bool(options.rewards))
        yield from grouped(rows, path, report)


def _records(path: Path) -> list[Record]:
    """The rows of one file, which is one generation batch."""
    if path.name.endswith(".table.json"):
        return _table(path)
    return list(parquet_rows(path))


def _table(path: Path) -> list[Record]:
    """A table of wandb: the names of the columns, and a list of values for every row."""
    try:
        table = parse_row(read_bytes(path))
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
    """The columns that were rewards: the only one of numbers, else those that are named so. (Where the advantages are
    not theirs, `_check_advantages` refuses them.)"""
    names = list(dict.fromkeys(name for path in paths for name in _numeric(_records(path), _NOT_REWARDS)))
    rewards = tuple(names if len(names) == 1 else [name for name in names if "reward" in name.lower()])
    if not rewards:
        problem = f"does not tell which of {', '.join(names)[:300]} were rewards" if names else "has no reward column"
        raise InputError(problem, path=paths[0], hint="name every column that was one with --reward NAME (repeatable)")
    left = [name for name in names if name not in rewards]
    others = f"; {', '.join(left)} left out" if left else ""
    report.note(f"the reward is the sum of {', '.join(rewards)}{others}; --reward says otherwise")
    return rewards


def _groups_of(records: Sequence[Record]) -> Iterator[tuple[str, int]]:
    """The group of every row: its prompt, and how often that was drawn before. All groups of TRL have one size, and lie
    one after the other: so where the rows of every prompt are a multiple of the fewest, more rows are more draws."""
    told = [json.dumps([record.get("step"), facts_of(record)], default=str) for record in records]
    sizes, seen = Counter(told), Counter[str]()
    least = min(sizes.values(), default=1)
    for place in told:
        size = least if least > 1 and all(many % least == 0 for many in sizes.values()) else sizes[place]
        yield place, seen[place] // size
        seen[place] += 1


def _row(record: Record, rewards: tuple[str, ...], separator: str | None, drawn: int) -> LoggedRow:
    prompt, completion = (_text(record.get(name)) for name in _TEXT_COLUMNS)
    actions, observations = split(completion, separator)
    if not prompt.strip():
        raise RowRefused("an empty prompt: its group is not known")
    task = named_prompt(prompt)
    return LoggedRow(
        group=f"{task} ({drawn + 1})" if drawn else task,
        task=task,
        rollout=LoggedRollout(
            actions=actions,
            reward=reward(record, rewards),
            observations=observations,
            characters=sum(map(len, actions)) if actions else len(completion),
            suspect=suspect_of(completion),
        ),
        iteration=count(record, "step"),
        facts=facts_of(record),
    )


def _text(value: Any) -> str:
    """Conversations of older versions are lists of messages."""
    if value is None:
        raise RowRefused("no prompt or no completion")
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _check_advantages(
    groups: Sequence[Sequence[tuple[float | None, Record]]], rewards: tuple[str, ...], path: Path, *, weighted: bool
) -> None:
    """Raise `InputError` where the advantages of a group do not rise with its reward on a straight line: the wrong
    columns were summed, or one prompt stands for several tasks. `weighted`: any weights but negative ones will do."""
    for group in groups:
        pairs = [(value, row) for value, row in group if value is not None and _is_number(row.get("advantage"))]
        if len(pairs) < 2:
            continue
        advantage = np.array([float(row["advantage"]) for _, row in pairs])
        sums = [value for value, _ in pairs]
        columns = [[float(row[name]) if _is_number(row.get(name)) else 0.0 for name in rewards] for _, row in pairs]
        values = np.array(columns if weighted else [[value] for value in sums])
        off = _off(values - values.mean(axis=0), advantage - advantage.mean())
        largest = float(np.abs(advantage).max())
        fits = off <= max(FLAT, FIT * largest) * math.sqrt(len(pairs))
        if not fits or is_zero_variance(sums) != (largest <= FLAT):
            raise InputError(
                f"the advantages of {len(pairs)} rows of one step with one prompt are not those of a group "
                f"whose reward is the sum of {', '.join(rewards)}",
                path=path,
                hint="name the columns that were rewards with --reward (weights other than 1 are not known); where "
                "several tasks share a prompt, this log does not tell their groups apart",
            )


def _off(columns_NC: NDArray[np.float64], target_N: NDArray[np.float64]) -> float:
    """The least distance from the target of a sum of the columns with weights from 0: that of the best set of columns
    whose least squares need no negative weight. Rewards are few."""
    best = float(np.linalg.norm(target_N))
    for size in range(1, columns_NC.shape[1] + 1):
        for chosen in itertools.combinations(range(columns_NC.shape[1]), size):
            weights = np.linalg.lstsq(columns_NC[:, chosen], target_N)[0]
            if (weights >= 0).all():
                best = min(best, float(np.linalg.norm(columns_NC[:, chosen] @ weights - target_N)))
    return best


FLAT, FIT = 1e-6, 1e-2  # advantages are written in float32, and some scales have an epsilon


def _numeric(rows: Iterable[Record], but: Sequence[str]) -> list[str]:
    """The columns, in order, whose values are all numbers or null, and not null alone."""
    kinds: dict[str, set[type]] = {}
    for row in rows:
        for name, value in row.items():
            if name not in but:
                kinds.setdefault(name, set()).add(type(value))
    return [name for name, found in kinds.items() if found & {int, float} and found <= {int, float, type(None)}]


def _is_number(value: Any) -> bool:
    if type(value) not in (int, float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
