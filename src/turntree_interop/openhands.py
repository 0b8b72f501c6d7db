"""OpenHands: trajectories in chat form, and the events of its agent SDK (`kind`), in an evaluation's row or a file of
their own. Every non-error tool call is a candidate (PivotRL, appendix A.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from turntree.core.messages import as_object, joined_text
from turntree.traces.formats.row import (
    ANOTHER_PROMPT,
    FAILED,
    RESPONSE,
    UNSEEN,
    BrokenMessage,
    ChatRow,
    at_line,
    chat_tools,
    count_unknown,
    each_object,
    failed_exit,
    first_object,
    list_of,
    misfit,
    object_of,
    part_of,
    reasoning_in,
    role_of,
    said_before,
    text_of,
    told_by,
    words,
)
from turntree_interop.observed import calls_in, one_turn_a_response
from turntree_interop.sweagent import chat_row


@told_by(lambda row: misfit(row, trajectory=("role", "content")))
def read_openhands(row: dict[str, Any]) -> ChatRow:
    """OpenHands trajectories in chat form."""
    return chat_row(row, "trajectory")


_SDK_KEYS = words(
    "id timestamp source kind llm_message activated_skills activated_microagents extended_content sender thought "
    "reasoning_content thinking_blocks responses_reasoning_item action tool_name tool_call_id tool_call "
    "llm_response_id security_risk summary critic_result observation action_id rejection_reason rejection_source error "
    "system_prompt tools dynamic_context llm_metrics"
)
_LINES = (  # that a terminal writes below an output, of its metadata
    ("Current working directory:", "working_dir"), ("Python interpreter:", "py_interpreter_path"),
    ("Command finished with exit code", "exit_code"),
)  # fmt: skip
_SDK_CALL_KEYS = words("id type name arguments function origin responses_item_id")
_OPENHANDS_ROW_KEYS = words(
    "instance_id test_result instruction metadata history metrics error instance attempt resolved reward id "
    "status_code conversation_stats events runtime_runs"
)


def _is_event(event: dict[str, Any]) -> str:
    known = str(event.get("kind")).endswith(("Event", "Observation", "Condensation"))
    return "" if known else "no event with 'kind'"


@told_by(lambda row: _is_event(first_object(row.get("history"))), session=_is_event)
def read_openhands_events(row: dict[str, Any]) -> Iterator[ChatRow]:
    """The events of one conversation with the agent SDK, one trace for each context: a `Condensation` leaves events out
    of what the model is sent, and tells it a summary in their place."""
    report = object_of(object_of(row, "test_result"), "report") or row
    ended = {"resolved": report.get("resolved"), "reward": row.get("reward")}
    chat = ChatRow.of(row, _OPENHANDS_ROW_KEYS, group="instance_id", meta="instance_id", told=ended)
    chat.domain, chat.rule = "software engineering", "tool_calls"
    events = list_of(row, "events" if "events" in row else "history", "a list of events")
    told = [(one, each_object([one], lambda event: at_line(event, _sdk_event(event, chat)))) for one in events]
    if any(map(_condenses, events)):
        chat.group = chat.group or text_of(first_object(events), ("id",))  # that of all contexts
    view: list[tuple[str, Any]] = []  # what the model is sent: ids of events, and messages
    instruction = row.get("instruction")
    if isinstance(instruction, str) and not any(role_of(one) == "user" for _, said in told for one in said):
        view.append(("", {"role": "user", "content": instruction}))
    for event, said in told:
        if not _condenses(event):
            view += [(str(as_object(event).get("id")), message) for message in said]
            continue
        yield replace(chat, messages=one_turn_a_response([message for _, message in view]))
        chat = chat.compacted()
        forgotten = set(map(str, list_of(event, "forgotten_event_ids", "a list of ids")))
        view = [(name, said_before(message)) for name, message in view if name not in forgotten]
        if isinstance(event.get("summary"), str):
            view.insert(event.get("summary_offset") or 0, ("", {"role": "user", "content": event["summary"]}))
    yield replace(chat, messages=one_turn_a_response([message for _, message in view]))


def _condenses(event: Any) -> bool:
    return isinstance(event, dict) and cast("dict[str, Any]", event).get("kind") == "Condensation"


def _sdk_event(event: dict[str, Any], chat: ChatRow) -> list[Any]:
    if _condenses(event):
        return []
    if "kind" not in event:
        hint = "events of version 0 are no longer read: use its chat form (`openhands`)"
        return [BrokenMessage("is an event without a kind", turn=event.get("source") == "agent", hint=hint)]
    count_unknown(event, _SDK_KEYS, "events[].", chat.ignored)
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
        done = {key: value for key, value in part_of(event, "action").items() if key != "kind" and value is not None}
        call = {key: value for key, value in part_of(event, "tool_call").items() if value is not None}
        call = {"name": event.get("tool_name"), "arguments": done or None, **call, "id": call_id}
        turn = {"role": "assistant", "content": joined_text(event.get("thought") or "", chat.ignored)}
        turn["tool_calls"] = calls_in([call], _SDK_CALL_KEYS, "events[].tool_call.", chat.ignored)
        return [turn | {RESPONSE: event.get("llm_response_id")} | reasoning_in(event, chat.ignored)]
    if kind in ("ObservationEvent", "AgentErrorEvent", "UserRejectObservation"):
        seen = part_of(event, "observation")
        content = next((seen[k] for k in ("content", "output") if seen.get(k) is not None), event.get("error"))
        if content is None and event.get("rejection_reason"):
            content = f"Action rejected: {event['rejection_reason']}"
        content, unseen = _shown(seen, joined_text(content, chat.ignored))
        content = _blocks(chat, content, event["extended_content"]) if event.get("extended_content") else content
        failed = kind != "ObservationEvent" or bool(seen.get("is_error") or seen.get("error") or failed_exit(seen))
        return [{"role": "tool", "content": content, "tool_call_id": call_id, FAILED: failed, UNSEEN: unseen}]
    chat.ignored[f"events[] of kind {kind}"] += 1
    return []


def _shown(seen: dict[str, Any], text: Any) -> tuple[Any, Any]:
    """The text of an observation as the SDK words it for the model, and whether it shows an image too, or less text."""
    terminal, told = seen.get("kind") in ("TerminalObservation", "ExecuteBashObservation"), part_of(seen, "metadata")
    if not isinstance(text, str):
        return text, False
    if terminal:
        lines = (f"\n[{said} {told[key]}]" for said, key in _LINES if told.get(key) not in (None, "", -1))
        text = f"{told.get('prefix') or ''}{text}{told.get('suffix') or ''}{''.join(lines)}"
    other = len(text) > (30_000 if terminal else 50_000) or seen.get("kind") == "TaskObservation"  # clipped; more lines
    text = f"[An error occurred during execution.]\n{text}" if seen.get("is_error") else text
    return text, bool(seen.get("screenshot_data")) or (other and ANOTHER_PROMPT)


def _blocks(chat: ChatRow, said: Any, more: Any) -> Any:
    """A message's content, and what the agent's context adds to it (skills, the repository): the model is sent both."""
    texts = [joined_text([one] if isinstance(one, dict) else one, chat.ignored) for one in (said, more)]
    odd = next((text for text in texts if not isinstance(text, str | None)), None)  # refused later
    return "\n".join(filter(None, texts)) if odd is None else odd
