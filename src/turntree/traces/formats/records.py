"""Episode records that evaluations write, with the dialogue inside.

| format | the row |
|---|---|
| `verifiers` | `prompt` and `completion` of chat messages, with `reward`: verifiers' results and prime-rl's rollouts |
| `agentbench` | a line of `runs.jsonl`: `output` with `history` of `{role: user or agent, content}` |
| `intercode` | `query` and `turn_history` of `actions`, `observations`, `rewards`, `valid_action` |

Candidates by the paper's rule (appendix A.2): every assistant turn of a record of verifiers, every bash action of the
two others (their other environments: every turn).
"""

from __future__ import annotations

import json
import re
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.observe.jsonl import parse_json
from turntree.traces.formats.row import (
    ACT,
    FAILED,
    BrokenMessage,
    ChatRow,
    RowRefused,
    chat_tools,
    count_unknown,
    first_object,
    list_of,
    needs,
    object_of,
    outcome,
    text_of,
    told_by,
    words,
)
from turntree.traces.schema import MESSAGE_KEYS

# verifiers, prime-rl

_RECORD_KEYS = words(
    "example_id id prompt completion answer info task reward advantage metrics tool_defs tools error error_chain "
    "long_error_chain timing is_completed is_truncated stop_condition token_usage generation_ms scoring_ms total_ms "
    "trajectory trajectory_id env_name sampling_args temperature rollout_index group_id problem_id step"
)


def _is_record(row: dict[str, Any]) -> str:
    if "completion" not in row or "prompt" not in row:
        return "no 'prompt' beside 'completion'"
    known = isinstance(row["completion"], str) or bool(first_object(row["completion"]))
    return "" if known and "messages" not in row else "'completion' has no messages"


@told_by(_is_record)
def read_record(row: dict[str, Any]) -> ChatRow:
    """A rollout of the verifiers library. One that failed with an error is not a demonstration and is left out."""
    meta = {key: row[key] for key in ("task", "env_name", "answer", "stop_condition") if row.get(key)}
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("trajectory_id",)),
        group=text_of(row, ("example_id", "problem_id", "id")),
        domain=text_of(row, ("env_name",)) or "",
        success=outcome({"reward": row.get("reward")}, meta),
        meta=meta,
    )
    key = "tool_defs" if row.get("tool_defs") is not None else "tools"
    chat.tools = chat_tools(list_of(row, key, "a list of tool declarations"), chat.ignored)
    metrics = object_of(row, "metrics")
    count_unknown(row, _RECORD_KEYS | set(metrics), "", chat.ignored)
    for part, role in (("prompt", "user"), ("completion", "assistant")):
        value = row.get(part)
        said = _parsed(row, part) if not isinstance(value, str) or value.lstrip().startswith("[{") else [
            {"role": role, "content": value}
        ]  # fmt: skip
        for raw in said:
            message = raw
            if isinstance(raw, dict):
                count_unknown(raw, {*MESSAGE_KEYS, "reasoning_content", "type"}, f"{part}[].", chat.ignored)
                message = {key: value for key, value in raw.items() if key in MESSAGE_KEYS and key != "cut"}
                if isinstance(message.get("tool_calls"), list):
                    message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
            chat.messages.append(message)
    if row.get("error"):
        chat.left_out["rollout_failed"] += sum(_is_turn(message) for message in chat.messages)
        chat.messages = [message for message in chat.messages if not _is_turn(message)]
    if row.get("is_truncated") and chat.messages and _is_turn(chat.messages[-1]):
        chat.messages[-1] = cast("dict[str, Any]", chat.messages[-1]) | {"weight": 0}  # the token limit ended it
    return chat


def _parsed(row: dict[str, Any], part: str) -> list[Any]:
    return list_of(row, part, "text or a list of chat messages")


def _call(call: Any) -> Any:
    """Some versions write each call as JSON text."""
    if isinstance(call, str):
        try:
            return parse_json(call)
        except InputError:
            return {"function": {"name": "unreadable", "arguments": call}}
    return call


def _is_turn(message: Any) -> bool:
    return isinstance(message, dict) and cast("dict[str, Any]", message).get("role") == "assistant"


# AgentBench

_RUN_KEYS = words("index error info output time")
_ROLES = {"agent": "assistant"}
_BASH = re.compile(r"Act(?:ion)?:\s*bash\b|```(?:bash|sh)\b", re.IGNORECASE)


def _is_agentbench(row: dict[str, Any]) -> str:
    problem = needs(row, output=dict)
    return problem or needs(row["output"], history=list)


@told_by(_is_agentbench)
def read_agentbench(row: dict[str, Any]) -> ChatRow:
    """A sample of an AgentBench run."""
    output = object_of(row, "output")
    result: Any = output.get("result")
    won = cast("dict[str, Any]", result).get("result") if isinstance(result, dict) else result
    meta = {"status": output["status"]} if output.get("status") is not None else {}
    chat = ChatRow(
        messages=[],
        group=text_of(row, ("index",)),
        success=won if isinstance(won, bool) else None,
        meta=meta,
    )
    count_unknown(row, _RUN_KEYS, "", chat.ignored)
    for raw in list_of(output, "history", "a list of {role, content}"):
        if not isinstance(raw, dict):
            chat.messages.append(raw)
            continue
        said = cast("dict[str, Any]", raw)
        count_unknown(said, ("role", "content"), "output.history[].", chat.ignored)
        role = _ROLES.get(str(said.get("role")), said.get("role"))
        message = {"role": role, "content": said.get("content")}
        if role == "assistant":
            message[ACT] = "bash" if _BASH.search(str(said.get("content"))) else ""
        chat.messages.append(message)
    if any(isinstance(message, dict) and message.get(ACT) for message in chat.messages):
        chat.rule, chat.domain = "bash", "terminal"
    return chat


# InterCode

_INTERCODE_KEYS = words("environment dataset task_id query turn_history summary info hardness")


def _is_intercode(row: dict[str, Any]) -> str:
    return needs(row, query=str, turn_history=dict)


@told_by(_is_intercode)
def read_intercode(row: dict[str, Any]) -> ChatRow:
    """An episode of InterCode: the query, then each action with what it printed. Its system prompt is not recorded."""
    turns = object_of(row, "turn_history")
    columns = {
        key: list_of(turns, key, "a list, one item a turn")
        for key in ("actions", "observations", "rewards", "valid_action")
    }
    best = object_of(row, "summary").get("max_reward")
    meta = {key: row[key] for key in ("task_id", "dataset", "environment") if row.get(key) is not None}
    shell = "bash" in str(row.get("environment", "bash"))
    chat = ChatRow(
        messages=[{"role": "user", "content": row.get("query")}],
        group=f"{row.get('dataset', '')}#{text_of(row, ('task_id',)) or row.get('query')}",
        domain="terminal" if shell else "",
        success=outcome({"reward": best}, meta),
        meta=meta,
        rule="bash" if shell else "turns",
    )
    count_unknown(row, _INTERCODE_KEYS, "", chat.ignored)
    actions, seen, valid = columns["actions"], columns["observations"], columns["valid_action"]
    if len(seen) > len(actions):
        problem = f"holds {len(seen)} observations of {len(actions)} actions"
        raise RowRefused("malformed_field", problem, field="turn_history", hint="write one observation an action")
    for i, action in enumerate(actions):
        if not isinstance(action, str):
            chat.messages.append(BrokenMessage(f"is {type(action).__name__}, not text", turn=True, field="actions"))
            continue
        failed = i < len(valid) and valid[i] is False
        chat.messages.append({"role": "assistant", "content": action, ACT: "bash" if shell else "tool"})
        if i < len(seen):
            shown = seen[i] if isinstance(seen[i], str | None) else json.dumps(seen[i])
            chat.messages.append({"role": "user", "content": shown, FAILED: failed})
    return chat
