"""Rows of OpenAI Responses items, as NeMo Gym writes its rollouts and its pivot data sets.

A rollout row holds `responses_create_params.input` and `response.output`; together they are the episode. A pivot row
holds `expected_action` (or, for a Terminus harness, the text `expected_answer`): then that is the demonstration, its
last turn and its only one. A policy's sample in `response` is ignored, and so is `reward`, which judged that sample.

Some agents get their task without `input`: then the prompt is what `metadata` says it is, after the system prompt of
the agent's configuration (`instance_config.agent_kwargs.system_prompt`).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from turntree.core.errors import InputError
from turntree.core.messages import as_object, joined_text
from turntree.traces.formats.row import (
    ACT,
    BrokenMessage,
    ChatRow,
    acts_in,
    call_of,
    count_unknown,
    list_of,
    misfit,
    object_of,
    part_of,
    role_of,
    text_of,
    told_by,
    was_cut,
    words,
)

PROMPTS = ("problem_statement", "prompt", "instruction", "instructions", "task_description", "question")
_ROW_KEYS = words(
    "responses_create_params response reward success resolved uuid trajectory_id instance_id domain environment_name "
    "expected_action expected_answer metadata agent_ref category instance_config _ng_task_index _ng_rollout_index "
    "harness declared_tools threshold mask_sample _ng_failure_class "
    # of the published Pivot-v1 data sets
    "pass_rate pass_rate_total pass_rate_passed scenario num_unique_actions meta_info source_trajectory_uid "
    "pivot_agent_turn_index"
)
EVERY_ITEM = words(  # the last four are for training without tokenizing again
    "type id status prompt_token_ids generation_token_ids generation_log_probs routed_experts"
)
_ITEM_KEYS = {
    "message": words("role content phase"),
    "reasoning": words("summary content encrypted_content"),
    "function_call": words("name arguments call_id"),
    "custom_tool_call": words("name input call_id"),
    "local_shell_call": words("action call_id"),
    **dict.fromkeys(
        ("function_call_output", "custom_tool_call_output", "local_shell_call_output"), words("call_id output")
    ),
}
_META_KEYS = (
    "_ng_rollout_index _ng_task_index category instance_id meta_info pass_rate pass_rate_passed pass_rate_total "
    "pivot_agent_turn_index scenario source_trajectory_uid trajectory_id"
)


@told_by(lambda row: misfit(row, responses_create_params=dict))
def read_responses_row(row: dict[str, Any]) -> ChatRow:
    """Items other than messages, calls, outputs and reasoning are broken messages. Raises `InputError`."""
    request = object_of(row, "responses_create_params")
    expected = _expected_items(row)
    pivot = expected is not None
    items = list_of(object_of(row, "response"), "output", "a list of Responses items") if expected is None else expected
    profiled = {key for key, value in row.items() if key.endswith("_info") and isinstance(value, dict)} - {"meta_info"}
    profiled = {key for key in profiled if "rewards" in row[key]}
    # of the group's keys the task first: each rollout of it has a trajectory of its own
    group, told = "instance_id source_trajectory_uid trajectory_id _ng_task_index", None if pivot else row
    chat = ChatRow.of(row, _ROW_KEYS | profiled, id="uuid", group=group, meta=_META_KEYS, told=told)
    chat.domain = text_of(row, ("domain", "environment_name")) or ""
    chat.only_last_turn = pivot
    if profiled:  # the key names the model (qwen_235b_info)
        chat.meta["rewards"] = object_of(row, min(profiled))["rewards"]
    chat.declare(request)
    asked = _input_items(request)
    if not any(isinstance(item, dict) and item.get("role") in ("user", "system", "developer") for item in asked):
        asked = [*_prompt_elsewhere(row, request, chat), *asked]
    if not chat.tools and _restated(items):
        items = _as_said(items, chat)
    chat.messages = [message for item in [*asked, *items] if (message := read_item(item, chat.ignored)) is not None]
    if chat.rule == "bash":
        for message in chat.messages:
            if isinstance(message, dict) and message.get("role") == "assistant":
                message |= acts_in(joined_text(message["content"], Counter()))
    response = part_of(row, "response")
    if row.get("mask_sample") or row.get("_ng_failure_class") or response.get("status") == "failed":
        chat.drop_turns()
    elif was_cut(response) and role_of((chat.messages or [None])[-1]) == "assistant":
        chat.messages[-1] |= {"weight": 0}
    return chat


def _restated(items: list[Any]) -> bool:
    """Whether the calls of an episode only repeat what its texts say, as NeMo Gym's harbor agent (Terminus) writes
    them: the policy was given no tools and answers with the keystrokes as JSON text."""
    calls = [item for item in items if isinstance(item, dict) and item.get("type") == "function_call"]
    said = [item for item in items if isinstance(item, dict) and item.get("type") == "message"]
    texts = [joined_text(item.get("content"), Counter()) for item in said]
    keys_only = bool(calls) and all(call.get("name") == "bash_command" for call in calls)
    return keys_only and any(acts_in(text)[ACT] for text in texts)


def _as_said(items: list[Any], chat: ChatRow) -> list[Any]:
    """The items as the policy said and saw them: its texts, and each screen as the user's message."""
    chat.rule = "bash"
    found: list[Any] = []
    for item in items:
        kind = item.get("type") if isinstance(item, dict) else None
        if kind == "function_call":
            chat.ignored["calls that repeat the turn's text"] += 1
        elif kind == "function_call_output":
            found.append({"type": "message", "role": "user", "content": item.get("output")})
        else:
            found.append(item)
    return found


def _prompt_elsewhere(row: dict[str, Any], request: dict[str, Any], chat: ChatRow) -> list[dict[str, Any]]:
    """The task of a row without input, as `metadata` has it; nothing where it has none."""
    for place, metadata in (
        ("responses_create_params.metadata", object_of(request, "metadata")),
        ("metadata", object_of(row, "metadata")),
    ):
        key = next((key for key in PROMPTS if isinstance(metadata.get(key), str) and metadata[key].strip()), None)
        if key is not None:
            chat.meta["prompt_from"] = f"{place}.{key}"
            system = object_of(object_of(row, "instance_config"), "agent_kwargs").get("system_prompt")
            spoken = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
            return [*spoken, {"role": "user", "content": metadata[key]}]
    return []


def _input_items(request: dict[str, Any]) -> list[Any]:
    """The request's items; `instructions` come first, and a plain text input is a user message."""
    instructions = request.get("instructions")
    first = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(request.get("input"), str):
        return [*first, {"role": "user", "content": request["input"]}]
    return [*first, *list_of(request, "input", "text or a list of Responses items")]


def _expected_items(row: dict[str, Any]) -> list[Any] | None:
    """The demonstration of a pivot row; None for a rollout."""
    if row.get("expected_action") is not None:
        action = object_of(row, "expected_action")
        if action.get("type") == "function_call_batch":
            return list_of(action, "calls", "a list of function calls")
        return [{"role": "assistant", "content": action.get("content")} if action.get("type") == "message" else action]
    if row.get("expected_answer") is not None and "harness" in object_of(row, "metadata"):
        return [{"role": "assistant", "content": row["expected_answer"]}]
    return None


def read_item(item: Any, ignored: Counter[str]) -> Any:
    """One item as a chat message, None for what a trace has no place for (counted); consecutive assistant items become
    one turn later, in the importer."""
    row = as_object(item)
    kind = row.get("type") or ("message" if "role" in row else None)
    unread = count_unknown(row, EVERY_ITEM | _ITEM_KEYS.get(str(kind), frozenset()), "items[].", ignored)
    place = "output" if str(kind).endswith("_output") else "content"
    if unread and row.get(place) is None and (kind == "message" or place == "output"):
        hint = f"what stands under {', '.join(unread)} is not read as it"
        return BrokenMessage(f"holds an item of type {kind!r} without {place!r}", hint=hint)
    cut = {"weight": 0} if row.get("status") == "incomplete" else {}  # the token limit ended the turn
    if kind == "message":
        return {"role": row.get("role"), "content": row.get("content"), **cut}
    if kind in ("function_call", "custom_tool_call", "local_shell_call"):
        return {"role": "assistant", "content": "", "tool_calls": [_called(kind, row, unread)], **cut}
    if kind in ("function_call_output", "custom_tool_call_output", "local_shell_call_output"):
        return {"role": "tool", "content": row.get("output"), "tool_call_id": row.get("call_id")}
    if kind in ("reasoning", "ghost_snapshot"):  # the other is Codex's own, of the files
        ignored[f"{kind} items"] += 1
        return None
    if isinstance(item, InputError):
        return item
    what = f"of type {kind!r}" if kind is not None else "without type and role" if row else f"that is {item!r}"
    hint = "message, function_call, function_call_output and reasoning are read"
    return BrokenMessage(f"holds an item {what}", turn=str(kind).endswith("_call"), hint=hint)


def _called(kind: str, row: dict[str, Any], unread: dict[str, Any]) -> Any:
    call_id, arguments = row.get("call_id"), row.get("arguments")
    if kind == "custom_tool_call":  # a tool that takes free text
        arguments = {"input": row["input"]} if row.get("input") is not None else None
    if kind == "local_shell_call":
        return call_of("local_shell", row.get("action"), call_id or row.get("id"), unread)
    return call_of(row.get("name"), arguments, call_id, unread)
