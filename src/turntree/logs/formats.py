"""Logs with one rollout per line: verl, NeMo Gym, and the documented generic JSONL.

verl (`trainer.rollout_data_dir`, one `STEP.jsonl` a step; `RayPPOTrainer._dump_generations`): `input` and `output` are
decoded text without special tokens, `score` is the sum of token-level scores, `gts` the ground truth, `step`; then
whatever the reward function returns beside the score, `request_id` where the agent loop sets one, and in trainer v1
`uid` = "{prompt}_{rollout}_{output}". There are no token counts; `output` of a multi-turn rollout holds the tools'
answers too.

NeMo Gym (`ng_collect_rollouts`, one file a collection, in order of completion): `responses_create_params.input` (the
prompt), `response.output` (OpenAI Responses items), `response.usage`, `reward`, `_ng_task_index`, `_ng_rollout_index`;
`mask_sample` where an agent says that its reward must not be trained on, `_ng_failure_class` in the sidecar of
failures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, cast

from turntree.logs.grouping import by_rows
from turntree.logs.groups import LoggedGroup, LoggedRollout, call_text
from turntree.logs.rows import (
    LoggedRow,
    ReadReport,
    RowRefused,
    count,
    counts,
    facts_of,
    flag,
    named_prompt,
    needed,
    reward,
    split,
    text,
    texts,
)

Row = dict[str, Any]
_OWN_UID = re.compile(r"_\d+_\d+$")  # what follows the name of the prompt in the uid of one rollout


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of a log whose turns are apart."""

    rewards: tuple[str, ...] = ()
    """Columns whose sum is the reward (none: the format's own)."""


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    """Of a log that has a rollout as one text."""

    turn_separator: str | None = None
    """Regular expression of what stands between two assistant turns of a text."""

    def __post_init__(self) -> None:
        split("", self.turn_separator)  # checks it


def generic(row: Row, *, rewards: tuple[str, ...] = ("reward",)) -> LoggedRow:
    """The documented JSONL (docs/audit.md), also what a custom format function returns for a row: `group` and `reward`,
    and optionally task, iteration (or step), task_type, actions, turn_tokens, observations, tokens, completed, stop.
    `task` defaults to the group's name; then the same group must have the same name in later iterations.

    Args:
        rewards: Columns whose sum is the reward.
    """
    group = needed(row, "group")
    try:
        rollout = LoggedRollout(
            actions=texts(row, "actions") or (),
            reward=reward(row, rewards),
            completed=flag(row, "completed"),
            turn_tokens=counts(row, "turn_tokens"),
            observations=texts(row, "observations"),
            tokens=count(row, "tokens"),
            characters=count(row, "characters"),
            stop=text(row, "stop"),
        )
    except ValueError as error:
        raise RowRefused("lists of different lengths", str(error)) from error
    return LoggedRow(
        group=group,
        task=text(row, "task") or group,
        rollout=rollout,
        iteration=count(row, "iteration", "step"),
        task_type=text(row, "task_type"),
        facts=facts_of(row, task=row.get("task"), task_type=row.get("task_type")),
    )


@dataclass(frozen=True, kw_only=True)
class Verl(TextOptions):
    """verl's rollout dumps. Rollouts of one step with the same `uid` (or prefix of it, where every rollout has a uid of
    its own), or else the same prompt, are one group; a prompt with its gold answer is a task."""

    rewards: tuple[str, ...] = ("score",)
    """Columns whose sum is the reward."""

    def __call__(self, row: Row) -> LoggedRow:
        prompt, output = row.get("input"), row.get("output")
        if not isinstance(prompt, str) or not isinstance(output, str):
            raise RowRefused("no text in field 'input' or 'output'")
        actions, observations = split(output, self.turn_separator)
        uid = (text(row, "uid") or "").strip()
        if not prompt.strip() and not uid:
            raise RowRefused("neither a prompt nor a uid: its group is not known")
        group = _OWN_UID.sub("", uid) or named_prompt(prompt)
        return LoggedRow(
            group=group,
            task=named_prompt(prompt) if prompt.strip() else group,
            rollout=LoggedRollout(
                actions=actions,
                reward=reward(row, self.rewards),
                observations=observations,
                characters=sum(map(len, actions)) if actions else len(output),
            ),
            iteration=count(row, "step"),
            task_type=text(row, "data_source"),
            facts=facts_of(row, input=prompt),
            name=uid or None,
        )


# NeMo Gym


@dataclass(frozen=True, kw_only=True)
class NemoGym(Options):
    """Rollouts of NeMo Gym. A file is an iteration."""

    rewards: tuple[str, ...] = ("reward",)
    """Columns whose sum is the reward."""

    def groups(self, paths: Sequence[Path], report: ReadReport) -> Iterator[LoggedGroup]:
        for number, path in enumerate(paths):
            yield from by_rows(partial(_nemo_row, rewards=self.rewards, iteration=number), [path], report)


def _nemo_row(row: Row, *, rewards: tuple[str, ...], iteration: int) -> LoggedRow:
    """A group are the rollouts of one task index in one file; without an index, of one instance, else of one prompt. An
    index that begins again stands for other tasks, or for another collection where its rollouts have the same numbers.
    Masked and failed rollouts are censored, whatever reward they carry. Raises `RowRefused` where nothing says which
    rollouts belong together."""
    response = row.get("response")
    items = cast(Row, response).get("output") if isinstance(response, dict) else None
    if not isinstance(items, list):
        raise RowRefused("no list in field 'response.output'")
    index, task, asked = text(row, "_ng_task_index"), text(row, "instance_id"), _asked(row)
    group = task or _prompt_name(asked["prompt"]) if index is None else f"task {index}"
    if group is None:
        raise RowRefused("no task index, instance or prompt: its group is not known")
    stop = text(row, "_ng_failure_class") or ("masked" if _masked(row) else None)
    actions, observations = _turns(_flat(cast("list[Any]", items)))
    return LoggedRow(
        group=group,
        task=task or group,
        rollout=LoggedRollout(
            actions=actions,
            reward=None if stop else reward(row, rewards),
            observations=observations,
            tokens=_output_tokens(cast(Row, response)),
            characters=sum(map(len, actions)),
            stop=stop,
        ),
        iteration=iteration,
        facts=facts_of(row, uuid=row.get("uuid"), task=row.get("task"), **asked),
        sample=count(row, "_ng_rollout_index"),
    )


def _asked(row: Row) -> Row:
    """The prompt and what is said of it. Where a row names its task, a simulated user may speak in the prompt, other
    words in every rollout: then it goes as far as the policy's first."""
    asked = cast(Row, row["responses_create_params"]) if isinstance(row.get("responses_create_params"), dict) else {}
    prompt: Any = asked.get("input")
    if row.get("task") is not None and isinstance(prompt, list):
        prompt = list(takewhile(lambda item: not _is_by_model(item), _flat(cast("list[Any]", prompt))))
    return {"prompt": prompt or None, "metadata": asked.get("metadata")}


def _prompt_name(prompt: Any) -> str | None:
    """None for a prompt without a word: an agent that makes its own prompt logs an empty one for every task."""
    said = [_words(item) for item in _flat(prompt)] if isinstance(prompt, list) else [str(prompt or "")]
    return named_prompt(json.dumps(prompt, sort_keys=True)) if any(words.strip() for words in said) else None


def _flat(items: list[Any]) -> list[Row]:
    """The items in order, those of lists inside the list too. Raises `RowRefused` for what is not an item."""
    found: list[Row] = []
    for item in items:
        if isinstance(item, list):
            found += _flat(cast("list[Any]", item))
        elif isinstance(item, dict):
            found.append(cast(Row, item))
        else:
            raise RowRefused("an item of the prompt or the output is not an object")
    return found


def _masked(row: Row) -> bool:
    instance = row.get("instance_config")
    return bool(row.get("mask_sample") or (isinstance(instance, dict) and cast(Row, instance).get("mask_sample")))


def _output_tokens(response: Row) -> int | None:
    """None where usage is absent or zero: several agents write zeros for what they do not count."""
    usage = response.get("usage")
    return count(cast(Row, usage), "output_tokens") or None if isinstance(usage, dict) else None


def _turns(items: list[Row]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A turn is a run of items by the model (words, reasoning, calls); what lies between two is observed."""
    actions, observations, seen = [], [], ""
    for by_model, run in groupby(items, key=_is_by_model):
        if by_model:
            actions.append(_action(list(run)))
            observations.append(seen)
        else:
            seen = "\n".join(_words(item) for item in run)
    return tuple(actions), tuple(observations)


def _is_by_model(item: Row) -> bool:
    kind = item.get("type") or "message"
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _action(items: list[Row]) -> str:
    """The calls of a turn, or its text where it calls nothing (reasoning alone is not an action: an empty text)."""
    calls = [_call(item) for item in items if item.get("type") == "function_call"]
    said = [_words(item) for item in items if (item.get("type") or "message") == "message"]
    return "\n".join(calls or said)


def _call(item: Row) -> str:
    """Raises `RowRefused` for a call whose arguments stand elsewhere: it would read as one without any."""
    if not isinstance(name := item.get("name"), str) or not isinstance(item.get("arguments"), str | dict):
        raise RowRefused("a call without 'name' or 'arguments' in field 'response.output'")
    return call_text(name, item["arguments"])


def _words(item: Row) -> str:
    return _text(item.get("output") if item.get("type") == "function_call_output" else item.get("content"))


def _text(content: Any) -> str:
    """Text as it is, or in parts, which may hold parts; what is no text stands as its JSON, for two of them differ."""
    if isinstance(content, list):
        return "".join(map(_text, cast("list[Any]", content)))
    if isinstance(content, dict):
        part = cast(Row, content)
        held = next((part[key] for key in ("text", "content", "output", "refusal") if part.get(key) is not None), None)
        content = json.dumps(part, sort_keys=True) if held is None else held
        return content if held is None else _text(held)
    return content if isinstance(content, str) else "" if content is None else json.dumps(content)
