"""tau-bench and tau2-bench trajectories.

tau-bench: a list of runs `{task_id, trial, reward, traj}` with chat messages in `traj`. Its few-shot files hold
dialogues as text, `{messages_display}`, in which the calls are lost. tau2: a document `{info, tasks, simulations}`, or
a folder with `results.json` and one file a simulation. Each simulation has `messages` with flat tool calls. Tool calls
of the simulated user are not part of the agent's conversation; they are left out and counted. tau2 files hold no system
prompt: it is put together from the domain policy as the benchmark's own agent does.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    ChatRow,
    chat_tools,
    count_unknown,
    each_object,
    list_of,
    object_of,
    outcome,
    text_of,
    told_by,
    words,
)

Prompt = Literal["agent", "policy"]
# The prompt of tau2's `llm_agent` (sierra-research/tau2-bench, MIT): what the recorded agent was told.
_AGENT_PROMPT = """<instructions>
You are a customer service agent that helps the user according to the <policy> provided below.
In each turn you can either:
- Send a message to the user.
- Make a tool call.
You cannot do both at the same time.

Try to be helpful and always follow the policy. Always make sure you generate valid JSON only.
</instructions>
<policy>
{policy}
</policy>"""
_SPEAKER = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
_RUN_KEYS = words("task_id trial reward info traj")
_SIMULATION_KEYS = words(
    "id task_id trial messages reward_info environment_info termination_reason timestamp start_time end_time duration "
    "agent_cost user_cost seed mode info ticks policy"
)
_MESSAGE_KEYS = words(
    "role content tool_calls id requestor error turn_idx timestamp cost usage raw_data tool_messages is_audio "
    "audio_format audio_path audio_content generation_time_seconds"
)


def _why_not(row: dict[str, Any]) -> str:
    if isinstance(row.get("traj"), list) or isinstance(row.get("messages_display"), str):
        return ""
    return "" if "messages" in row and "reward_info" in row else "neither 'traj' nor 'messages' beside 'reward_info'"


@told_by(_why_not)
def read_tau_row(row: dict[str, Any], *, system_prompt: Prompt = "agent") -> ChatRow:
    """A run of tau-bench or a simulation of tau2, with the `environment_info` of its document where that has one.

    Args:
        system_prompt: That of tau2's agent, or the "policy" alone.
    """
    if "messages_display" in row:
        return _read_display(row)
    return _read_run(row) if "traj" in row else _read_simulation(row, object_of(row, "environment_info"), system_prompt)


def _read_run(row: dict[str, Any]) -> ChatRow:
    meta: dict[str, Any] = {key: row[key] for key in ("task_id", "trial") if key in row}
    messages = list_of(row, "traj", "a list of chat messages")
    chat = ChatRow(messages=messages, group=text_of(row, ("task_id",)), success=outcome(row, meta), meta=meta)
    count_unknown(row, _RUN_KEYS, "", chat.ignored)
    return chat


def _read_display(row: dict[str, Any]) -> ChatRow:
    """The trace ends before the first turn whose call was not recorded ("assistant: None"), because later histories
    would be wrong."""
    chat = ChatRow(messages=[], meta={"trajectory": "text"})
    _, *spoken = _SPEAKER.split(str(row["messages_display"]))
    lost = False
    for role, content in zip(spoken[::2], spoken[1::2], strict=True):
        message = {"role": role, "content": content.removesuffix("\n")}
        lost = lost or (role == "assistant" and message["content"] == "None")
        chat.messages.append(message | ({SKIP: "call_not_recorded"} if lost and role == "assistant" else {}))
    return chat


def _read_simulation(row: dict[str, Any], info: dict[str, Any], system_prompt: Prompt) -> ChatRow:
    meta: dict[str, Any] = {k: row[k] for k in ("task_id", "trial", "termination_reason") if row.get(k) is not None}
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("id",)),
        group=text_of(row, ("task_id",)),
        domain=text_of(info, ("domain_name",)) or "",
        success=outcome({"reward": object_of(row, "reward_info").get("reward")}, meta),
        meta=meta,
    )
    chat.tools = chat_tools(list_of(info, "tool_defs", "a list of tool declarations"), chat.ignored)
    messages = list_of(row, "messages", "a list of tau2 messages")
    chat.messages = each_object(messages, lambda raw: _messages(raw, chat))
    policy = info.get("policy") or row.get("policy")
    if policy and not any(isinstance(m, dict) and m.get("role") == "system" for m in chat.messages):
        plain = system_prompt == "policy" or info.get("agent", "llm_agent") != "llm_agent"
        content = policy if plain else _AGENT_PROMPT.format(policy=policy)
        chat.messages.insert(0, {"role": "system", "content": content})
    count_unknown(row, _SIMULATION_KEYS, "", chat.ignored)
    return chat


def _messages(row: dict[str, Any], chat: ChatRow) -> list[Any]:
    """One message, none for what the simulated user did alone, several for the results of parallel calls."""
    count_unknown(row, _MESSAGE_KEYS, "messages[].", chat.ignored)
    message: dict[str, Any] = {"role": row.get("role"), "content": row.get("content")}
    if isinstance(row.get("tool_messages"), list):
        return each_object(row["tool_messages"], lambda one: _messages(one, chat))
    if row.get("role") == "tool":
        if row.get("requestor") == "user":
            chat.ignored["messages[] of tools used by the simulated user"] += 1
            return []
        failed = {FAILED: row["error"]} if row.get("error") is not None else {}
        return [{**message, "tool_call_id": row.get("id"), **failed}]
    if row.get("role") == "user" and row.get("tool_calls"):
        chat.ignored["messages[].tool_calls of the simulated user"] += 1
        return [message] if row.get("content") else []
    if row.get("tool_calls"):
        message["tool_calls"] = row["tool_calls"]
        if isinstance(row["tool_calls"], list):
            message["tool_calls"] = [_call(call) for call in row["tool_calls"]]
    return [message]


def _call(call: Any) -> Any:
    """A flat call, without the mark that the agent made it."""
    its_own = isinstance(call, dict) and call.get("requestor") == "assistant"
    return {key: call[key] for key in call if key != "requestor"} if its_own else call
