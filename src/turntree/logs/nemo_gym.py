"""NeMo Gym's rollouts (`ng_collect_rollouts`): one JSONL file a collection, one line a rollout, in order of completion.

Fields: `responses_create_params.input` (the prompt), `response.output` (OpenAI Responses items), `response.usage`,
`reward`, `_ng_task_index`, `_ng_rollout_index`; `mask_sample` where an agent says that its reward must not be trained
on, `_ng_failure_class` in the sidecar of failures.
"""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any, cast

from turntree.logs.actions import call_text
from turntree.logs.groups import LoggedRollout
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, count, named_prompt, reward, text

Item = dict[str, Any]


def read_row(row: dict[str, Any], config: ReadConfig, file_number: int) -> LoggedRow:
    """A group are the rollouts of one task index in one file; without an index, of one instance, else of one prompt. A
    file is an iteration. Masked and failed rollouts are censored, whatever reward they carry. Raises `RowRefused`
    where none of the three says which rollouts belong together."""
    response = row.get("response")
    items = cast(Item, response).get("output") if isinstance(response, dict) else None
    if not isinstance(items, list):
        raise RowRefused("no list in field 'response.output'")
    index, task = text(row, "_ng_task_index"), text(row, "instance_id")
    group = task or _prompt_name(row) if index is None else f"task {index}"
    if group is None:
        raise RowRefused("no task index, instance or prompt: its group is not known")
    stop = text(row, "_ng_failure_class") or ("masked" if _masked(row) else None)
    actions, observations = _turns(_flat(cast("list[Any]", items)))
    return LoggedRow(
        group=group,
        task=task or group,
        rollout=LoggedRollout(
            actions=actions,
            reward=None if stop else reward(row, config.rewards or ("reward",)),
            observations=observations,
            tokens=_output_tokens(cast(Item, response)),
            characters=sum(map(len, actions)),
            stop=stop,
        ),
        iteration=file_number,
    )


def _prompt_name(row: Item) -> str | None:
    """None for a prompt without a word: an agent that makes its own prompt logs an empty one for every task."""
    request = row.get("responses_create_params")
    prompt = cast(Item, request).get("input") if isinstance(request, dict) else None
    said = [_words(item) for item in _flat(prompt)] if isinstance(prompt, list) else [str(prompt or "")]
    return named_prompt(json.dumps(prompt, sort_keys=True)) if any(words.strip() for words in said) else None


def _flat(items: list[Any]) -> list[Item]:
    """The items in order, those of lists inside the list too. Raises `RowRefused` for what is not an item."""
    found: list[Item] = []
    for item in items:
        if isinstance(item, list):
            found += _flat(cast("list[Any]", item))
        elif isinstance(item, dict):
            found.append(cast(Item, item))
        else:
            raise RowRefused("an item of the prompt or the output is not an object")
    return found


def _masked(row: Item) -> bool:
    instance = row.get("instance_config")
    return bool(row.get("mask_sample") or (isinstance(instance, dict) and cast(Item, instance).get("mask_sample")))


def _output_tokens(response: Item) -> int | None:
    """None where usage is absent or zero: several agents write zeros for what they do not count."""
    usage = response.get("usage")
    return count(cast(Item, usage), "output_tokens") or None if isinstance(usage, dict) else None


def _turns(items: list[Item]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A turn is a run of items by the model (words, reasoning, calls); what lies between two is observed."""
    actions, observations, seen = [], [], ""
    for by_model, run in groupby(items, key=_is_by_model):
        if by_model:
            actions.append(_action(list(run)))
            observations.append(seen)
        else:
            seen = "\n".join(_words(item) for item in run)
    return tuple(actions), tuple(observations)


def _is_by_model(item: Item) -> bool:
    kind = item.get("type") or "message"
    return kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant")


def _action(items: list[Item]) -> str:
    """The calls of a turn; its words where it calls nothing (a reasoning alone is no action: an empty text)."""
    calls = [call_text(str(i.get("name")), i.get("arguments")) for i in items if i.get("type") == "function_call"]
    said = [_words(item) for item in items if (item.get("type") or "message") == "message"]
    return "\n".join(calls or said)


def _words(item: Item) -> str:
    return _text(item.get("output") if item.get("type") == "function_call_output" else item.get("content"))


def _text(content: Any) -> str:
    """Text as it is, or in parts, which may hold parts."""
    if isinstance(content, list):
        return "".join(map(_text, cast("list[Any]", content)))
    if isinstance(content, dict):
        part = cast(Item, content)
        return _text(part.get("text", part.get("content", part.get("output"))))
    return content if isinstance(content, str) else ""
