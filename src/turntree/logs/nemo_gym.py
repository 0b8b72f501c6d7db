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
from turntree.logs.rows import LoggedRow, ReadConfig, RowRefused, named_prompt, reward, text

Item = dict[str, Any]


def read_row(row: dict[str, Any], config: ReadConfig, file_number: int) -> LoggedRow:
    """A group are the rollouts of one task index in one file; without an index, of one prompt. A file is an
    iteration. Masked and failed rollouts are censored, whatever reward they carry."""
    response, request = row.get("response"), row.get("responses_create_params")
    items = cast(Item, response).get("output") if isinstance(response, dict) else None
    if not isinstance(items, list):
        raise RowRefused("no list in field 'response.output'")
    index = row.get("_ng_task_index")
    prompt = json.dumps(cast(Item, request).get("input") if isinstance(request, dict) else None, sort_keys=True)
    stop = text(row, "_ng_failure_class") or ("masked" if _masked(row) else None)
    actions, observations = _turns(cast("list[Any]", items))
    tokens = _output_tokens(cast(Item, response))
    return LoggedRow(
        group=named_prompt(prompt) if index is None else f"task {index}",
        task=text(row, "instance_id") or (named_prompt(prompt) if index is None else f"task {index}"),
        rollout=LoggedRollout(
            actions=actions,
            reward=None if stop else reward(row, config.rewards or ("reward",)),
            observations=observations,
            tokens=tokens,
            characters=sum(map(len, actions)),
            stop=stop,
        ),
        iteration=file_number,
    )


def _masked(row: Item) -> bool:
    instance = row.get("instance_config")
    return bool(row.get("mask_sample") or (isinstance(instance, dict) and cast(Item, instance).get("mask_sample")))


def _output_tokens(response: Item) -> int | None:
    """None where usage is absent or zero: several agents write zeros for what they do not count."""
    usage = response.get("usage")
    return cast(Item, usage).get("output_tokens") or None if isinstance(usage, dict) else None


def _turns(items: list[Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A turn is a run of items by the model (words, reasoning, calls); what lies between two is observed."""
    actions, observations, seen = [], [], ""
    for by_model, run in groupby((item for item in items if isinstance(item, dict)), key=_is_by_model):
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
    content = item.get("output") if item.get("type") == "function_call_output" else item.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in cast("list[Any]", content) if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) else ""
