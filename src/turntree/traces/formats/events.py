"""Trajectories written as events or steps, each of which is an action, its result, or a message.

| format | the row, or the file |
|---|---|
| `openhands_events` | `history` of events in a row of an evaluation's output, or a file that is a list of them: of version 0 (`action` and `observation` with `args`), or of the agent SDK (`kind`) |
| `atif` | one document, `schema_version` "ATIF-1.x", `steps` of `source` system, user and agent |
| `opencode` | what `opencode export` prints: `info`, and `messages` of `{info, parts}` |

Every non-error tool call is a candidate; in ATIF of a terminal agent, every bash action (PivotRL, appendix A.2).
"""  # noqa: E501

from __future__ import annotations

import json
from collections import Counter
from typing import Any, cast

from turntree.core.errors import InputError
from turntree.core.messages import joined_text
from turntree.observe.jsonl import parse_object
from turntree.traces.formats.row import (
    ACT,
    FAILED,
    RESPONSE,
    SKIP,
    BrokenMessage,
    ChatRow,
    RowRefused,
    call_of,
    chat_tools,
    count_unknown,
    each_object,
    failed_exit,
    first_object,
    list_of,
    object_of,
    one_turn_a_response,
    outcome,
    part_of,
    reasoning_in,
    text_of,
    told_by,
    words,
)
from turntree.traces.formats.swe import answers

# OpenHands

_V0_SILENT = words("recall change_agent_state agent_state_changed null system initialize condensation")
_V0_KEYS = words(
    "id timestamp source message cause action args observation content extras success tool_call_metadata timeout "
    "llm_metrics log status error error_code hidden security_risk"
)
_V0_HARNESS = words(  # what the harness adds to the arguments of an action
    "thought blocking hidden is_input is_static confirmation_state include_extra kernel_init_code impl_source "
    "security_risk"
)
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
    known = ("action" in event or "observation" in event) and "source" in event and ("id" in event or "args" in event)
    return "" if known else "no event with 'kind', or with 'source' and 'action' or 'observation'"


def _is_history(row: dict[str, Any]) -> str:
    history = row.get("history")
    if not isinstance(history, list):
        return "no 'history' of events"
    first = cast("list[Any]", history)[0] if history else None
    pair = cast("list[Any]", first)[0] if isinstance(first, list) and first else first
    return _is_event(cast("dict[str, Any]", pair)) if isinstance(pair, dict) else "'history' holds no events"


@told_by(_is_history, session=_is_event)
def read_openhands_events(row: dict[str, Any]) -> ChatRow:
    """The events of one conversation, of either version."""
    meta = {key: row[key] for key in ("instance_id",) if row.get(key) is not None}
    report = object_of(object_of(row, "test_result"), "report") or row
    chat = ChatRow(
        messages=[],
        group=text_of(row, ("instance_id",)),
        success=outcome({key: report.get(key) for key in ("resolved",)} | {"reward": row.get("reward")}, meta),
        domain="software engineering",
        meta=meta,
        rule="tool_calls",
    )
    count_unknown(row, _OPENHANDS_ROW_KEYS, "", chat.ignored)
    events = list_of(row, "events" if "events" in row else "history", "a list of events")
    if any(isinstance(event, list) for event in events):  # old evaluations wrote pairs of action and observation
        events = [one for event in events for one in (event if isinstance(event, list) else [event])]
    said = each_object(events, lambda event: (_sdk_event if "kind" in event else _v0_event)(event, chat))
    chat.messages = one_turn_a_response(said)
    instruction = row.get("instruction")
    if isinstance(instruction, str) and not any(isinstance(m, dict) and m.get("role") == "user" for m in chat.messages):
        chat.messages.insert(0, {"role": "user", "content": instruction})
    return chat


def _v0_event(event: dict[str, Any], chat: ChatRow) -> list[Any]:
    unread = count_unknown(event, _V0_KEYS, "events[].", chat.ignored)
    args = part_of(event, "args")
    action, observation = event.get("action"), event.get("observation")
    for key, value in (("action", action), ("observation", observation)):
        if not isinstance(value, str | None):
            return [BrokenMessage(f"is {type(value).__name__}, not text", turn=key == "action", field=f"events.{key}")]
    told: Any = event.get("tool_call_metadata")
    call_id = part_of(event, "tool_call_metadata").get("tool_call_id")
    if action == "system":
        chat.tools = chat_tools(list_of(args, "tools", "a list of tool declarations"), chat.ignored)
        return [{"role": "system", "content": args.get("content")}]
    if action == "message":
        role = "user" if event.get("source") == "user" else "assistant"
        return [{"role": role, "content": args.get("content") or event.get("message")}]
    if action is not None and action not in _V0_SILENT and event.get("source") != "environment":
        if event.get("source") == "user":
            chat.ignored[f"events[] of action {action!r} by the user"] += 1
            return []
        call = _v0_call(str(action), args, told, unread)
        response = part_of(told, "model_response").get("id")
        turn = {"role": "assistant", "content": args.get("thought") or "", "tool_calls": [call]}
        return [turn | {RESPONSE: response}]
    if observation is not None and observation not in _V0_SILENT:
        exited = failed_exit(event.get("extras"))  # without success, but with -1, a command is still running
        ended = event.get("success") is False if exited is None else exited
        failed = observation == "error" or event.get("error") is True or ended
        content = event.get("content") or event.get("message")
        return [{"role": "tool", "content": content, "tool_call_id": call_id, FAILED: failed}]
    chat.ignored[f"events[] of {action or observation or 'no'} kind"] += 1
    return []


def _v0_call(action: str, args: dict[str, Any], told: Any, unread: dict[str, Any]) -> dict[str, Any]:
    """The call as the model made it, where the event still has it; else the action with its arguments."""
    call_id = part_of({"told": told}, "told").get("tool_call_id")
    try:
        message = told["model_response"]["choices"][0]["message"]
        for call in message["tool_calls"]:
            if call["id"] == call_id and call["function"].keys() > {"name"}:
                return call
    except (KeyError, TypeError, IndexError, AttributeError):
        pass
    name = told.get("function_name") if isinstance(told, dict) else None
    arguments = {key: value for key, value in args.items() if key not in _V0_HARNESS and value is not None}
    if args.get("is_input") is True:
        arguments["is_input"] = "true"  # as the tool declares it
    return call_of(name or action, arguments, call_id, unread)


def _sdk_event(event: dict[str, Any], chat: ChatRow) -> list[Any]:
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
        content = content if content is not None else event.get("error") or event.get("rejection_reason")
        failed = kind != "ObservationEvent" or bool(seen.get("is_error") or seen.get("error") or failed_exit(seen))
        return [{"role": "tool", "content": content, "tool_call_id": call_id, FAILED: failed}]
    chat.ignored[f"events[] of kind {kind}"] += 1
    return []


def _blocks(chat: ChatRow, said: Any, more: Any) -> Any:
    """A message's content, and what the agent's context adds to it (skills, the repository): the model is sent both."""
    texts = [joined_text([one] if isinstance(one, dict) else one, chat.ignored) for one in (said, more)]
    odd = next((text for text in texts if not isinstance(text, str | None)), None)  # refused later
    return "\n".join(filter(None, texts)) if odd is None else odd


# ATIF

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


def acts_in(content: Any) -> dict[str, Any]:
    """The mark of a Terminus turn, whose text is a JSON object with `commands`: it acts where there is a command."""
    text = str(content).rpartition("</think>")[2]
    start, end = text.find("{"), text.rfind("}")
    try:
        answer = parse_object(text[start : end + 1])
    except InputError:
        return {ACT: "bash" if "<keystrokes" in text else ""}
    return {ACT: "bash" if answer.get("commands") else ""}


# OpenCode

_PART_KEYS = words(
    "id sessionID messageID type text synthetic ignored time metadata callID tool state mime filename url source "
    "reason snapshot cost tokens hash files name attempt error prompt description agent auto overflow"
)
_STATE_KEYS = words("status input output title metadata time error attachments raw")


def _is_opencode(row: dict[str, Any]) -> str:
    first = first_object(row.get("messages"))
    return (
        "" if "info" in row and "info" in first and "parts" in first else "no 'info' beside messages of {info, parts}"
    )


@told_by(_is_opencode)
def read_opencode(row: dict[str, Any]) -> ChatRow:
    """An exported OpenCode session. It holds no system prompt and no tool schemas."""
    info = object_of(row, "info")
    chat = ChatRow(
        messages=[],
        id=text_of(info, ("id",)),
        group=text_of(info, ("parentID", "id")),
        domain="software engineering",
        meta={key: info[key] for key in ("title", "version") if info.get(key) is not None},
        rule="tool_calls",
    )
    count_unknown(row, ("info", "messages"), "", chat.ignored)
    for raw in list_of(row, "messages", "a list of {info, parts}"):
        if not isinstance(raw, dict) or not isinstance(raw.get("info"), dict) or not isinstance(raw.get("parts"), list):
            chat.messages.append(BrokenMessage("holds an item that is not {info, parts}", field="messages"))
            continue
        chat.messages += _opencode_message(raw["info"].get("role"), raw["parts"], chat)
    return chat


def _opencode_message(role: Any, parts: list[Any], chat: ChatRow) -> list[Any]:
    """A message; of the agent, one turn for each model call, which "step-start" begins, with the results behind it."""
    found: list[Any] = []
    turn: dict[str, Any] = {"role": role, "content": "", "tool_calls": []}
    results: list[dict[str, Any]] = []

    def close() -> None:
        if turn["content"] or turn["tool_calls"] or role != "assistant":
            found.extend([{k: v for k, v in turn.items() if v or k != "tool_calls"}, *results])
        turn.update(content="", tool_calls=[])
        results.clear()

    for part in parts:
        if not isinstance(part, dict):
            return [
                *found,
                BrokenMessage("has a part that is not an object", turn=role == "assistant", field="parts"),
            ]
        kind = part.get("type")
        unread = count_unknown(part, _PART_KEYS, "parts[].", chat.ignored)
        if kind == "text" and isinstance(part.get("text"), str):
            turn["content"] = "\n".join(text for text in (turn["content"], part["text"]) if text)
        elif kind == "tool":
            state = part_of(part, "state")
            unread |= count_unknown(state, _STATE_KEYS, "parts[].state.", chat.ignored)
            turn["tool_calls"].append(call_of(part.get("tool"), state.get("input"), part.get("callID"), unread))
            if state.get("status") in ("completed", "error"):
                failed = state["status"] == "error"
                output = state.get("error" if failed else "output")
                output = output if isinstance(output, str | None) else json.dumps(output)
                results.append({"role": "tool", "content": output, "tool_call_id": part.get("callID"), FAILED: failed})
        elif kind == "step-start":
            if role == "assistant":
                close()
        else:
            chat.ignored[f"parts[] of type {kind}"] += 1
    close()
    return found
