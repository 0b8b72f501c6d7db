"""Trajectories of SWE-agent and of data sets in its forms: chat messages under other names.

Every non-error tool call is a candidate (PivotRL, appendix A.2). In text-only trajectories the action is part of the
message, and the observation a message of the user.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Any

from turntree.core.messages import as_object, joined_text
from turntree.run.identity import fingerprint
from turntree.traces.formats.row import (
    ACT,
    ANOTHER_PROMPT,
    SKIP,
    BrokenMessage,
    ChatRow,
    answers,
    count_unknown,
    each_object,
    list_of,
    misfit,
    of_today,
    part_of,
    reasoning_in,
    role_of,
    told_by,
    words,
)

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
    told = (("history", "agent"), ("history", "message_type"), ("trajectory", "text"), ("trajectory", "system_prompt"))
    known = any(not misfit(row, **{key: ("role", name)}) for key, name in told)
    return "" if known else "neither 'history' of messages with 'agent' nor 'trajectory' of messages with 'text'"


@told_by(_is_traj)
def read_traj(row: dict[str, Any]) -> ChatRow:
    """A SWE-agent trajectory. Demonstrations that stood in its prompt stay in the history and are no candidates."""
    told = {"resolved": row.get("target"), "exit_status": part_of(row, "info").get("exit_status")}
    chat = chat_row(told | row | _asked(row), "history" if "history" in row else "trajectory", _TRAJ_KEYS)
    if chat.group is None:  # the issue: variants of one task differ in their system prompts, not in demonstrations
        task = next((one for one in chat.messages if role_of(one) == "user" and SKIP not in one), None)
        chat.group = fingerprint(task.get("content")) if task else None
    return chat


def _asked(row: dict[str, Any]) -> dict[str, Any]:
    """The history with a mark on each turn whose `query` tells another one: a processor elided old observations, or an
    answer was asked for again with what was wrong with it."""

    def told(messages: list[Any]) -> list[Any]:
        return [(role_of(one), joined_text(as_object(one).get("content"), Counter())) for one in messages]

    asked: dict[int, Any] = {}  # by the number of messages before the turn
    for query in (as_object(one).get("query") for one in list_of(row, "trajectory", "a list of steps")):
        if isinstance(query, list) and query:
            asked[len(query) - 2 * (as_object(query[-1]).get("message_type") == "user")] = told(query)
    seen = told(history := list_of(row, "history", "a list of messages") if asked else [])
    other = {n for n, one in enumerate(history) if role_of(one) == "assistant" and asked.get(n) != seen[:n]}
    marked = [one | {SKIP: ANOTHER_PROMPT} if n in other else one for n, one in enumerate(history)]
    return {"history": marked} if asked else {}


def _is_swe_gym(row: dict[str, Any]) -> str:
    known = isinstance(row.get("messages"), list | str) and "instance_id" in row and any(key in row for key in _PATCHES)
    return "" if known else f"no 'messages' and 'instance_id' beside one of {', '.join(_PATCHES)}"


@told_by(_is_swe_gym)
def read_swe_gym(row: dict[str, Any]) -> ChatRow:
    """SWE-Gym's and SWE-smith's rows: chat messages, and what the tests said of the patch."""
    return chat_row(row, "messages")


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
    count_unknown(row, _KNOWN | {SKIP}, "messages[].", ignored)
    role = _ROLES.get(str(row.get("role")), row.get("role"))
    content = row.get("content") if row.get("content") is not None else row.get("text")
    if role == "system" and not content:
        content = row.get("system_prompt")
    message: dict[str, Any] = {"role": role, "content": joined_text(content, ignored)}
    message |= {SKIP: row[SKIP]} if SKIP in row else {}
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
        message[SKIP] = "demonstration_in_prompt"
    return [message]
