"""Traces with tools, and pivots of them: parallel calls, an answer of one tool that others lack, a plain message."""

from __future__ import annotations

from pathlib import Path

from turntree.core.config import Part, to_mapping, to_value
from turntree.core.messages import Message, ToolCall
from turntree.pivots.select import SelectConfig
from turntree.run.artifacts import PIVOTS
from turntree.run.files import file_hash
from turntree.stages.verifier import open_verifier
from turntree.traces.schema import Trace, write_traces

TOOLS = tuple(
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
    for name, properties in (
        ("find_order", {"order_id": {"type": "string"}}),
        ("refund", {"order_id": {"type": "string"}, "amount": {"type": "number"}, "lines": {"type": "array"}}),
    )
)
FIND = Message("assistant", "", (ToolCall("find_order", {"order_id": "W1"}, "c1"),))
BOTH = Message(
    "assistant",
    "Both then.",
    (ToolCall("refund", {"order_id": "W1", "amount": 2.5, "lines": [1]}, "c2"), ToolCall("refund", {"order_id": "W2"})),
)
CONVERSATION = (
    Message("system", "You are a clerk."),
    Message("user", "Refund W1 and W2."),
    FIND,
    Message("tool", '{"sum": 2.5}', tool_call_id="c1", name="find_order"),
    BOTH,
)


def write_pivots(folder: Path, traces: list[Trace] | None = None, verifier: str = "recommended") -> Path:
    """A pivots file with every turn of the traces (default: the conversation above, whose turns are a single call,
    then two calls at once with text)."""
    made = Trace(id="t", messages=CONVERSATION, tools=TOOLS, split="train", success=True)
    traces = [made] if traces is None else traces
    path = folder / "traces.jsonl"
    write_traces(path, traces)
    rows = [
        {"trace_id": trace.id, "turn": turn, "kind": "find", "role": "pivot", "reward_mean": 0.25, "reward_var": 0.1875}
        for trace in traces
        for turn in range(len(trace.turn_positions))
    ]
    rule = verifier  # of a module of one's own, which is not imported here
    if ":" not in verifier:
        with open_verifier(Part(verifier)) as opened:
            rule = opened.name
    header = {
        "config": to_mapping(SelectConfig()),
        **{"policy_hash": "01", "tokenizer_hash": "23", "template_hash": "45", "renderer": "template"},
        **{"verifier": rule, "verifier_source": to_value(Part(verifier)), "traces": str(path), "split": "train"},
        **{"traces_hash": file_hash(path), "sampling": {"max_tokens": 32}, "cut": 0},
        "summary": {"selected": len(rows)},
    }
    PIVOTS.write(folder / "pivots.jsonl", header, rows)
    return folder / "pivots.jsonl"
