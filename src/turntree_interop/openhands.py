"""OpenHands.

| format | the row, or the file |
|---|---|
| `openhands` | `trajectory` of chat messages, with `tools`, `resolved`, `exit_status` |
| `openhands_events` | `history` of the agent SDK's events (`kind`) in an evaluation's row, or a file of them |

Every non-error tool call is a candidate (PivotRL, appendix A.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from turntree.core.messages import joined_text
from turntree.traces.formats.row import (
    FAILED,
    RESPONSE,
    SAID_BEFORE,
    BrokenMessage,
    ChatRow,
    call_of,
    chat_tools,
    count_unknown,
    each_object,
    failed_exit,
    first_object,
    list_of,
    needs,
    object_of,
    one_turn_a_response,
    part_of,
    reasoning_in,
    role_of,
    text_of,
    told_by,
    words,
)
from turntree_interop.sweagent import chat_row


@told_by(lambda row: needs(row, trajectory=("role", "content")))
def read_openhands(row: dict[str, Any]) -> ChatRow:
    """OpenHands trajectories in chat form."""
    return chat_row(row, "trajectory")


_SDK_KEYS = words(
    "id timestamp source kind llm_message activated_skills activated_microagents extended_content sender thought "
    "reasoning_content thinking_blocks responses_reasoning_item action tool_name tool_call_id tool_call "
    "llm_response_id security_risk summary critic_result observation action_id rejection_reason rejection_source error "
    "system_prompt tools dynamic_context llm_metrics"
)
_SDK_CALL_KEYS = words("id type name arguments function origin responses_item_id")
_OPENHANDS_ROW_KEYS = words(
    "instance_id test_result instruction metadata history metrics error instance attempt resolved reward id "
    "status_code conversation_stats events runtime_runs"
)


def _is_event(event: dict[str, Any]) -> str:
    if "kind" in event and str(event["kind"]).endswith(("Event", "Observation", "Condensation")):
        return ""
    return "no event with 'kind'"


def _is_history(row: dict[str, Any]) -> str:
    history = row.get("history")
    return _is_event(first_object(history)) if isinstance(history, list) else "no 'history' of events"


@told_by(_is_history, session=_is_event)
def read_openhands_events(row: dict[str, Any]) -> Iterator[ChatRow]:
    """The events of one conversation with the agent SDK, one trace for each context: a `Condensation` leaves events out
    of what the model is sent, and tells it a summary in their place."""
    report = object_of(object_of(row, "test_result"), "report") or row
    ended = {"resolved": report.get("resolved"), "reward": row.get("reward")}
    chat = ChatRow.of(row, _OPENHANDS_ROW_KEYS, group="instance_id", meta="instance_id", told=ended)
    chat.domain, chat.rule = "software engineering", "tool_calls"
    events = list_of(row, "events" if "events" in row else "history", "a list of events")
    told = [(one, each_object([one], lambda event: _sdk_event(event, chat))) for one in events]
    if any(map(_condenses, events)):
        chat.group = chat.group or text_of(first_object(events), ("id",))  # that of all contexts
    view: list[tuple[str, Any]] = []  # what the model is sent: ids of events, and messages
    instruction = row.get("instruction")
    if isinstance(instruction, str) and not any(role_of(one) == "user" for _, said in told for one in said):
        view.append(("", {"role": "user", "content": instruction}))
    for event, said in told:
        if not _condenses(event):
            view += [(str(part_of({"": event}, "").get("id")), message) for message in said]
            continue
        yield replace(chat, messages=one_turn_a_response([message for _, message in view]))
        chat = chat.compacted()
        forgotten = set(map(str, list_of(event, "forgotten_event_ids", "a list of ids")))
        view = [(name, _once(message)) for name, message in view if name not in forgotten]
        if isinstance(event.get("summary"), str):
            view.insert(event.get("summary_offset") or 0, ("", {"role": "user", "content": event["summary"]}))
    yield replace(chat, messages=one_turn_a_response([message for _, message in view]))


def _condenses(event: Any) -> bool:
    return isinstance(event, dict) and cast("dict[str, Any]", event).get("kind") == "Condensation"


def _once(message: Any) -> Any:
    """A turn that stays in a later context is a candidate where it was said."""
    return message | SAID_BEFORE if role_of(message) == "assistant" else message


def _sdk_event(event: dict[str, Any], chat: ChatRow) -> list[Any]:
    if _condenses(event):
        return []
    if "kind" not in event:
        hint = "events of version 0 are no longer read: use its chat form (`openhands`)"
        return [BrokenMessage("is an event without a kind", turn=event.get("source") == "agent", hint=hint)]
    unread = count_unknown(event, _SDK_KEYS, "events[].", chat.ignored)
    kind, call_id = str(event["kind"]), event.get("tool_call_id")
    if kind == "SystemPromptEvent":
        tools = list_of(event, "tools", "a list of tool declarations")
        specs = [tool.get("tool_spec", tool) if isinstance(tool, dict) else tool for tool in tools]
        known = [spec for spec in specs if isinstance(spec, dict) and "function" in spec]
        chat.tools = chat_tools(known, chat.ignored)
        chat.ignored += Counter({"events[].tools[] without 'function'": len(specs) - len(known)})
        return [{"role": "system", "content": _blocks(chat, event.get("system_prompt"), event.get("dynamic_context"))}]
    if kind == "MessageEvent":
        said = object_of(event, "llm_message")
        role = said.get("role") or ("assistant" if event.get("source") == "agent" else "user")
        content = _blocks(chat, said.get("content"), event.get("extended_content"))
        return [{"role": role, "content": content, **reasoning_in(said, chat.ignored)}]
    if kind == "ActionEvent":
        call = part_of(event, "tool_call")
        unread |= count_unknown(call, _SDK_CALL_KEYS, "events[].tool_call.", chat.ignored)
        if function := part_of(call, "function"):
            unread |= count_unknown(function, ("name", "arguments"), "events[].tool_call.function.", chat.ignored)
        function = function or call
        arguments = function.get("arguments")
        if arguments is None and isinstance(event.get("action"), dict):
            arguments = {key: value for key, value in event["action"].items() if key != "kind" and value is not None}
        name = event.get("tool_name") or function.get("name")
        content = joined_text(event.get("thought") or "", chat.ignored)
        turn = {"role": "assistant", "content": content, "tool_calls": [call_of(name, arguments, call_id, unread)]}
        return [turn | {RESPONSE: event.get("llm_response_id")} | reasoning_in(event, chat.ignored)]
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        seen = part_of(event, "observation")
        content = next((seen[k] for k in ("content", "output") if seen.get(k) is not None), None)
        content = event.get("error") if content is None else content
        if content is None and event.get("rejection_reason"):
            content = f"Action rejected: {event['rejection_reason']}"
        content = _blocks(chat, content, event["extended_content"]) if event.get("extended_content") else content
        failed = kind != "ObservationEvent" or bool(seen.get("is_error") or seen.get("error") or failed_exit(seen))
        return [{"role": "tool", "content": content, "tool_call_id": call_id, FAILED: failed}]
    chat.ignored[f"events[] of kind {kind}"] += 1
    return []


def _blocks(chat: ChatRow, said: Any, more: Any) -> Any:
    """A message's content, and what the agent's context adds to it (skills, the repository): the model is sent both."""
    texts = [joined_text([one] if isinstance(one, dict) else one, chat.ignored) for one in (said, more)]
    odd = next((text for text in texts if not isinstance(text, str | None)), None)  # refused later
    return "\n".join(filter(None, texts)) if odd is None else odd
