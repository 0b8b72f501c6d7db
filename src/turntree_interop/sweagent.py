"""Trajectories of SWE-agent and of data sets in its forms: chat messages under other names.

| format | the row |
|---|---|
| `sweagent` | a `.traj` file: `history` of messages that also name their `agent`, `message_type`, `action`, |
| | `tool_call_ids`; or a row of a data set whose `trajectory` has roles system, user and ai with `text` |
| `swe_gym` | `messages` beside `test_result`, `run_id`, `model_patch`, `patch` or `traj_id` |

Every non-error tool call is a candidate (PivotRL, appendix A.2). In text-only trajectories the action is part of the
message, and the observation a message of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any, cast

from turntree.core.messages import joined_text
from turntree.run.identity import fingerprint
from turntree.traces.formats.row import (
    ACT,
    SKIP,
    BrokenMessage,
    ChatRow,
    answers,
    count_unknown,
    each_object,
    first_object,
    list_of,
    of_today,
    outcome,
    reasoning_in,
    told_by,
    words,
)

DEMONSTRATION = "demonstration_in_prompt"
_KNOWN = words(
    "role content name tool_calls tool_call_id tool_call_ids agent message_type thought action is_demo thinking_blocks "
    "reasoning_content cache_control tags text system_prompt mask cutoff_date"
)
_ROLES = {"ai": "assistant", "developer": "system"}
_TRAJ_KEYS = words(
    "environment history trajectory info replay_config instance_id model_name target exit_status generated_text "
    "eval_logs resolved reward"
)
_ROW_KEYS = words(
    "trajectory messages trajectory_id traj_id run_id instance_id repo tools model_patch patch exit_status resolved "
    "reward test_result gen_tests_correct pred_passes_gen_tests model name"
)
_PATCHES = ("test_result", "run_id", "model_patch", "patch", "traj_id")


def _is_traj(row: dict[str, Any]) -> str:
    if isinstance(row.get("history"), list):
        first = first_object(row["history"])
        known = "role" in first and ("agent" in first or "message_type" in first)
        return "" if known else "'history' has no messages with 'role' and 'agent'"
    first = first_object(row.get("trajectory"))
    if "role" in first and ("text" in first or "system_prompt" in first):
        return ""
    return "neither 'history' nor a 'trajectory' of messages with 'text'"


@told_by(_is_traj)
def read_traj(row: dict[str, Any]) -> ChatRow:
    """A SWE-agent trajectory. Demonstrations that stood in its prompt stay in the history and are no candidates."""
    key = "history" if "history" in row else "trajectory"
    chat = chat_row(row, key, _TRAJ_KEYS)
    info: Any = row.get("info")
    if isinstance(info, dict) and "exit_status" in info:
        chat.meta["exit_status"] = cast("dict[str, Any]", info)["exit_status"]
    if "resolved" not in row and row.get("target") is not None:
        chat.success = outcome({"resolved": row["target"]}, chat.meta)
    if chat.group is None:  # the issue: variants of one task differ in their system prompts
        asked = (m for m in chat.messages if isinstance(m, dict) and m.get("role") == "user")
        task = next((m for m in asked if SKIP not in m), None)  # a demonstration is the same for every task
        chat.group = fingerprint(task.get("content")) if task else None
    return chat


def _is_swe_gym(row: dict[str, Any]) -> str:
    known = isinstance(row.get("messages"), list | str) and "instance_id" in row and any(key in row for key in _PATCHES)
    return "" if known else f"no 'messages' and 'instance_id' beside one of {', '.join(_PATCHES)}"


@told_by(_is_swe_gym)
def read_swe_gym(row: dict[str, Any]) -> ChatRow:
    """SWE-Gym's and SWE-smith's rows: chat messages, and what the tests said of the patch."""
    chat = chat_row(row, "messages")
    for message in chat.messages:
        if isinstance(message, dict) and message.get("role") == "tool" and isinstance(message.get("content"), str):
            message["content"] = message["content"].removeprefix("OBSERVATION:\n")
    return chat


def chat_row(row: dict[str, Any], key: str, known: Collection[str] = _ROW_KEYS) -> ChatRow:
    """The chat whose messages are the list `key`."""
    meta = "instance_id repo exit_status"
    chat = ChatRow.of(row, known, id="trajectory_id traj_id", group="instance_id", meta=meta, told=row)
    chat.domain, chat.rule = "software engineering", "tool_calls"
    chat.declare(row)
    chat.messages = each_object(list_of(row, key, "a list of messages"), lambda raw: _messages(raw, chat.ignored))
    return chat


def _messages(row: dict[str, Any], ignored: Counter[str]) -> list[Any]:
    """One message in chat form; one for each call where one observation answers several."""
    if isinstance(row := of_today(row, ignored), BrokenMessage):
        return [row]
    count_unknown(row, _KNOWN, "messages[].", ignored)
    role = _ROLES.get(str(row.get("role")), row.get("role"))
    content = row.get("content") if row.get("content") is not None else row.get("text")
    if role == "system" and not content:
        content = row.get("system_prompt")
    message: dict[str, Any] = {"role": role, "content": joined_text(content, ignored)}
    if role == "tool":
        ids = row.get("tool_call_ids") or [row.get("tool_call_id")]
        return answers(ids if isinstance(ids, list) else [ids], message["content"])
    if row.get("name") is not None:  # which of several agents speaks
        message["name"] = row["name"]
    if role == "assistant":
        message |= reasoning_in(row, ignored)
        calls = row.get("tool_calls")
        if calls:
            message["tool_calls"] = calls
        else:
            acts = row["action"] if "action" in row else "```" in str(content) or "<function=" in str(content)
            message[ACT] = "bash" if acts else ""
    if row.get("is_demo") or row.get("message_type") == "demonstration":
        message[SKIP] = DEMONSTRATION
    return [message]
