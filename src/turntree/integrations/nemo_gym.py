"""NeMo Gym: pivot rows as its single-step servers read them, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from turntree.core.messages import Message, ToolCall
from turntree.integrations.rows import columns
from turntree.observe.jsonl import write_lines
from turntree.stages.export import Bundle, ExportedPivot

AGENT = "single_step_tool_use_with_argument_comparison_agent"
BATCH = "function_call_batch"  # the type of several calls at once


def export_nemo_gym(bundle: Bundle, out: Path, *, agent: str = AGENT) -> dict[str, Any]:
    """Write `pivots.jsonl`. The reward is NVIDIA's comparison, which our verifier `nemo` reproduces; `pass_rate` is
    that of the verifier of the profile.

    Args:
        agent: The agent of NeMo Gym whose resources server judges.
    """
    write_lines(out / "pivots.jsonl", (_row(pivot, agent) for pivot in bundle.pivots))
    notes: list[str] = []
    if bundle.verifier.name != "nemo":
        notes.append(f"NeMo Gym judges with the server of {agent!r}; pass_rate is under {bundle.profiled!r}")
    if several := sum(len(pivot.state.demonstration.tool_calls) > 1 for pivot in bundle.pivots):
        notes.append(f"{several} pivots make several calls at once ({BATCH}), which NeMo Gym 0.4.0 and older refuse")
    return {"files": ["pivots.jsonl"], "notes": notes}


def _row(pivot: ExportedPivot, agent: str) -> dict[str, Any]:
    request: dict[str, Any] = {"input": [item for message in pivot.state.history for item in _items(message)]}
    if pivot.state.tools:
        request |= {"tools": [_tool(tool) for tool in pivot.state.tools], "parallel_tool_calls": True}
    told = columns(pivot)
    return {
        "responses_create_params": request,
        "expected_action": _expected(pivot.state.demonstration),
        "trajectory_id": told.pop("trace_id"),
        "instance_id": pivot.group,  # so that pivots of one task stay in one split
        "pass_rate": told.pop("pass_rate"),
        "meta_info": told,
        "agent_ref": {"type": "responses_api_agents", "name": agent},
    }


def _items(message: Message) -> list[dict[str, Any]]:
    """A chat message as Responses items."""
    if message.role == "tool":
        return [{"type": "function_call_output", "call_id": message.tool_call_id or "", "output": message.content}]
    said = [{"type": "message", "role": message.role, "content": message.content}]
    thought = [{"type": "summary_text", "text": message.reasoning}]
    reasoning = [{"type": "reasoning", "id": "", "summary": thought}] if message.reasoning else []
    calls = [{**_call(call), "call_id": call.id or ""} for call in message.tool_calls]
    return [*reasoning, *(said if message.content or not calls else []), *calls]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "function_call", "name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}


def _expected(message: Message) -> dict[str, Any]:
    calls = [_call(call) for call in message.tool_calls]
    if not calls:
        return {"type": "message", "content": message.content}
    return calls[0] if len(calls) == 1 else {"type": BATCH, "calls": calls}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = tool["function"]
    return {
        "type": "function",
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters") or {"type": "object", "properties": {}},
        "strict": function.get("strict", False),
    }
