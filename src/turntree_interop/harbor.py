"""Harbor and Terminal-Bench.

| format | the row, or the file |
|---|---|
| `atif` | one document, `schema_version` "ATIF-1.x", `steps` of `source` system, user and agent |
| `terminus` | `conversations` of `{role, content}` whose assistant answers with JSON `commands` (Terminus 1 and 2) |

Every non-error tool call is a candidate; of a terminal agent, every bash action (PivotRL, appendix A.2).
"""

from __future__ import annotations

from collections import Counter
from typing import Any, cast

from turntree.core.messages import joined_text
from turntree.traces.formats.row import (
    FAILED,
    SKIP,
    BrokenMessage,
    ChatRow,
    RowRefused,
    acts_in,
    answers,
    call_of,
    chat_tools,
    count_unknown,
    each_object,
    first_object,
    list_of,
    object_of,
    outcome,
    reasoning_in,
    text_of,
    told_by,
    words,
)
from turntree_interop.sharegpt import turns_of

_ATIF_KEYS = words(
    "schema_version session_id trajectory_id agent steps notes final_metrics extra continued_trajectory_ref "
    "subagent_trajectories reward"
)
_STEP_KEYS = words(
    "step_id timestamp source model_name reasoning_effort message reasoning_content tool_calls observation metrics "
    "extra is_copied_context llm_call_count"
)
COPIED, NO_MODEL, SUBAGENT = "copied_context", "no_model_call", "in_subagent_trajectory"
_TERMINALS = ("terminus", "mini-swe", "terminal")


def _is_atif(row: dict[str, Any]) -> str:
    version = str(row.get("schema_version", ""))
    return "" if version.startswith("ATIF") and "steps" in row else "no 'schema_version' ATIF beside 'steps'"


@told_by(_is_atif)
def read_atif(row: dict[str, Any]) -> ChatRow:
    """A trajectory in the Agent Trajectory Interchange Format, 1.0 to 1.7. Its outcome lies in another file.

    Steps that were copied from an earlier trajectory, or made without a model, are history. Sub-agents are left out and
    counted: their prompts do not tell the task, so their groups would not be that of the run.
    """
    version = str(row.get("schema_version", ""))
    if not version.startswith("ATIF-v1."):
        hint = "versions 1.x are read"
        raise RowRefused("malformed_field", f"is {version!r}", field="schema_version", hint=hint)
    agent = object_of(row, "agent")
    name = str(agent.get("name", ""))
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("trajectory_id", "session_id")),
        success=outcome(row | {"reward": row.get("reward")}, {}),
        meta={"agent": name},
        rule="bash" if name.startswith(_TERMINALS) else "tool_calls",
    )
    chat.tools = chat_tools(list_of(agent, "tool_definitions", "a list of tool declarations"), chat.ignored)
    count_unknown(row, _ATIF_KEYS, "", chat.ignored)
    chat.ignored += Counter({"continued_trajectory_ref": 1} if row.get("continued_trajectory_ref") is not None else {})
    _count_subagents(row, chat)
    chat.messages = each_object(list_of(row, "steps", "a list of steps"), lambda step: _step(step, chat))
    return chat


def _count_subagents(row: dict[str, Any], chat: ChatRow) -> None:
    """Count the trajectories of sub-agents, those of their own sub-agents too, and the agent's turns in them."""
    for one in list_of(row, "subagent_trajectories", "a list of trajectories"):
        if not isinstance(one, dict):
            problem = f"holds {type(one).__name__}, not an object"
            raise RowRefused("malformed_field", problem, field="subagent_trajectories")
        inner = cast("dict[str, Any]", one)
        chat.ignored["subagent_trajectories[]"] += 1
        steps = list_of(inner, "steps", "a list of steps")
        turns = sum(isinstance(step, dict) and step.get("source") == "agent" for step in steps)
        chat.left_out += Counter({SUBAGENT: turns})
        _count_subagents(inner, chat)


def _not_its_own(step: dict[str, Any]) -> dict[str, str]:
    """The mark of an agent's step that the policy did not sample at this place."""
    if step.get("is_copied_context"):
        return {SKIP: COPIED}
    return {SKIP: NO_MODEL} if step.get("llm_call_count") == 0 else {}


def _step(step: dict[str, Any], chat: ChatRow) -> list[Any]:
    count_unknown(step, _STEP_KEYS, "steps[].", chat.ignored)
    source, content = step.get("source"), joined_text(step.get("message"), chat.ignored)
    results = list_of(object_of(step, "observation"), "results", "a list of results")
    if any(isinstance(one, dict) and one.get("subagent_trajectory_ref") is not None for one in results):
        chat.ignored["results[].subagent_trajectory_ref"] += 1
    if source in ("system", "user"):
        screens = [{"role": "user", "content": one.get("content")} for one in results if isinstance(one, dict)]
        return [{"role": source, "content": content}, *screens]
    if source != "agent":
        return [BrokenMessage(f"holds a step of source {source!r}", field="steps", hint="system, user or agent")]
    calls = list_of(step, "tool_calls", "a list of tool calls")
    message: dict[str, Any] = {"role": "assistant", "content": content, **_not_its_own(step)}
    message |= reasoning_in(step, chat.ignored)
    if not calls:  # raw content: the action is in the text, and the screen is what the user shows
        message |= acts_in(content)
        return [
            message,
            *({"role": "user", "content": r.get("content")} for r in results if isinstance(r, dict)),
        ]
    if not all(isinstance(call, dict) for call in calls):
        return [BrokenMessage("holds a call that is not an object", turn=True, field="tool_calls")]
    message["tool_calls"] = [_atif_call(call, chat) for call in calls]
    return [message, *_atif_answers(calls, results)]


def _atif_call(call: dict[str, Any], chat: ChatRow) -> dict[str, Any]:
    known = ("tool_call_id", "function_name", "arguments", "extra")
    unread = count_unknown(call, known, "steps[].tool_calls[].", chat.ignored)
    return call_of(call.get("function_name"), call.get("arguments"), call.get("tool_call_id"), unread)


def _atif_answers(calls: list[Any], results: list[Any]) -> list[Any]:
    """The results by their calls; a screen of no call answers all that are left."""
    left = [call.get("tool_call_id") for call in calls]
    messages: list[Any] = []
    for result in results:
        source = result.get("source_call_id") if isinstance(result, dict) else None
        if not isinstance(result, dict):
            messages.append(result)
        elif source is not None or not left:
            left = [one for one in left if one != source]
            messages.append({"role": "tool", "content": result.get("content"), "tool_call_id": source})
        else:
            messages += answers(left, result.get("content"))
            left = []
    return messages


_TERMINUS_KEYS = words(
    "conversations agent model model_provider date task episode run_id trial_name result reward resolved success id "
    "task_id instruction verifier_output"
)
_REFUSED = ("previous response had parsing errors", "error:", "warnings:")


def _is_terminus(row: dict[str, Any]) -> str:
    first = first_object(turns_of(row))
    return "" if "role" in first and "content" in first else "no 'conversations' of {role, content}"


@told_by(_is_terminus)
def read_terminus(row: dict[str, Any]) -> ChatRow:
    """A Terminus trajectory, whose prompts are messages of the user and whose actions are JSON texts."""
    meta = {key: row[key] for key in ("task", "episode", "run_id", "agent", "model") if row.get(key) is not None}
    chat = ChatRow(
        messages=[],
        id=text_of(row, ("id", "trial_name")),
        group=text_of(row, ("task_id", "task")),
        domain="terminal",
        success=outcome(row, meta),
        meta=meta,
        rule="bash",
    )
    if chat.id and row.get("episode") is not None:  # the same trial is written once an episode, each with its prefix
        chat.id = f"{chat.id}/{row['episode']}"
    count_unknown(row, _TERMINUS_KEYS, "", chat.ignored)
    items = list_of(row, "conversations", "a list of {role, content}")
    chat.messages = each_object(items, lambda said: [_terminus(said, chat.ignored)])
    return chat


def _terminus(said: dict[str, Any], ignored: Counter[str]) -> dict[str, Any]:
    count_unknown(said, ("role", "content"), "conversations[].", ignored)
    role, content = said.get("role"), said.get("content")
    marks: dict[str, Any] = acts_in(content) if role == "assistant" else {}
    if role == "user":
        marks = {FAILED: str(content).lstrip().lower().startswith(_REFUSED)}
    return {"role": role, "content": content, **marks}
