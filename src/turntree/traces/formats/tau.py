"""tau-bench and tau2-bench trajectories.

tau-bench: a list of runs `{task_id, trial, reward, traj}` with chat messages in `traj`. tau2: a document
`{info, tasks, simulations}`; each simulation has `messages` with flat tool calls. What the simulated user did with
tools of its own is not part of the agent's conversation and is left out, counted. tau2 files hold no system prompt:
the domain policy takes its place, as plain text, without the wrapper that the benchmark's agent adds.
"""

from __future__ import annotations

from typing import Any, cast

from turntree.traces.formats.row import ChatRow, RowRefused, chat_tools, list_of, outcome, text_of


def read_tau_row(row: dict[str, Any]) -> ChatRow:
    """A run of tau-bench or a simulation of tau2, with the `environment_info` of its document where that has one."""
    return read_taubench_run(row) if "traj" in row else read_simulation(row, row.get("environment_info"))


def read_taubench_run(row: dict[str, Any]) -> ChatRow:
    meta: dict[str, Any] = {key: row[key] for key in ("task_id", "trial") if key in row}
    return ChatRow(
        messages=list_of(row, "traj", "a list of chat messages"),
        group=text_of(row, ("task_id",)),
        success=outcome(row, meta),
        meta=meta,
    )


def read_simulation(row: dict[str, Any], info: dict[str, Any] | None = None) -> ChatRow:
    """One tau2 simulation; `info` is the `environment_info` of its document, where there is one."""
    info = info or {}
    meta: dict[str, Any] = {k: row[k] for k in ("task_id", "trial", "termination_reason") if row.get(k) is not None}
    reward = row.get("reward_info") or {}
    if not isinstance(reward, dict):
        raise RowRefused("malformed_field", "is not an object", field="reward_info")
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("id",)),
        group=text_of(row, ("task_id",)),
        domain=text_of(info, ("domain_name",)) or "",
        success=outcome({"reward": cast("dict[str, Any]", reward).get("reward")}, meta),
        meta=meta,
    )
    chat.tools = chat_tools(list_of(info, "tool_defs", "a list of tool declarations"), chat.ignored)
    messages = list_of(row, "messages", "a list of tau2 messages")
    chat.messages = [message for raw in messages if (message := _message(raw, chat)) is not None]
    policy = info.get("policy")
    if policy and not any(m.get("role") == "system" for m in chat.messages):
        chat.messages.insert(0, {"role": "system", "content": policy})
    return chat


def _message(raw: Any, chat: ChatRow) -> dict[str, Any] | None:
    if not isinstance(raw, dict):
        raise RowRefused("malformed_field", "holds an item that is not an object", field="messages")
    row = cast("dict[str, Any]", raw)
    message: dict[str, Any] = {"role": row.get("role"), "content": row.get("content")}
    if row.get("role") == "tool":
        if row.get("requestor") == "user":
            chat.ignored["messages[] of tools used by the simulated user"] += 1
            return None
        return {**message, "tool_call_id": row.get("id")}
    if row.get("role") == "user" and row.get("tool_calls"):
        chat.ignored["messages[].tool_calls of the simulated user"] += 1
        return message if row.get("content") else None
    if row.get("tool_calls"):
        message["tool_calls"] = row["tool_calls"]
    return message
