"""One small file of every trace format, written by us after its documented schema, and what an import must count.

Every fixture holds an unknown key, an error where the format can tell one, and turns that are no candidates.
"""

# ruff: noqa: E501  (rows are easier to read than lines)
from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}
UNKNOWN = {"surprise": 1}


@dataclass(frozen=True)
class Fixture:
    """`turns` of the agent stand in the file (counted by hand); `kept` of them are candidates."""

    name: str
    text: str
    turns: int
    kept: int
    dropped: dict[str, int]
    traces: int = 1
    success: tuple[bool | None, ...] = (True,)
    unknown: str = "unknown key surprise"
    options: dict[str, Any] = field(default_factory=dict)


def adds_up(report: Any) -> bool:
    """The laws of `ImportReport`."""
    traces = report.traces_kept + report.dropped_traces.total()
    return traces == report.traces_read and report.turns_kept + report.dropped_turns.total() == report.turns_read


def lines(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def function(name: str, arguments: Any, call_id: str | None = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


BASH = '{"command": "ls"}'
OLD = {
    "functions": [{"name": "bash", "parameters": SCHEMA}],
    "messages": json.dumps(
        [
            said("user", "look"),
            said("assistant", None, function_call={"name": "bash", "arguments": BASH}),
            said("function", "a.txt", name="bash"),
            said("assistant", "There is a.txt."),
        ]
    ),
    "reward": 1.0,
    **UNKNOWN,
}
PARAMS = {"input": [], "metadata": {"problem_statement": "fix the bug", "instance_id": "x-1"}, "tools": []}
GYM = {
    "responses_create_params": PARAMS,
    "instance_config": {"agent_kwargs": {"system_prompt": "You repair code."}},
    "response": {
        "output": [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "name": "bash", "arguments": BASH, "call_id": "c1"},
            {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
            {"type": "reasoning", "summary": []},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
        ]
    },
    "reward": 1.0,
    **UNKNOWN,
}
TAU2 = {
    "info": {
        "agent_info": {"implementation": "llm_agent"},
        "environment_info": {"domain_name": "shop", "policy": "Be kind.", "tool_defs": None},
    },
    "tasks": [{"id": "4"}],
    "simulations": [
        {
            "id": "s1",
            "task_id": "4",
            "trial": 0,
            "reward_info": {"reward": 1.0},
            **UNKNOWN,
            "messages": [
                said("assistant", "Hi! How can I help you today?", turn_idx=0),
                said("user", "cancel it", turn_idx=1),
                said("assistant", None, tool_calls=[{"id": "c1", "name": "cancel", "arguments": {"order": 7}}]),
                {
                    "id": "c1",
                    "role": "tool",
                    "content": "Error: no such order",
                    "requestor": "assistant",
                    "error": True,
                },
                said("user", None, tool_calls=[{"id": "u1", "name": "check", "arguments": {}, "requestor": "user"}]),
                {"id": "u1", "role": "tool", "content": "phone is off", "requestor": "user"},
                said("assistant", "There is no such order."),
            ],
        }
    ],
}
TAU1 = [
    {
        "task_id": 3,
        "trial": 1,
        "reward": 0.0,
        "info": {},
        **UNKNOWN,
        "traj": [said("system", "policy"), said("user", "hi"), said("assistant", "hello"), said("user", "###STOP###")],
    }
]
TRAJ = {
    "environment": "swe_main",
    "history": [
        said("system", "You are an engineer.", agent="main", message_type="system_prompt"),
        said("user", "a demonstration", agent="main", is_demo=True),
        said("assistant", "shown", agent="main", is_demo=True, action="ls", message_type="action"),
        said("user", "the issue", agent="main", message_type="observation"),
        said("assistant", "I search.", agent="main", thought="I search.", action="find x", message_type="action",
             tool_calls=[function("find_file", '{"file_name": "x"}')]),
        said("tool", "found", agent="main", message_type="observation", tool_call_ids=["c1"]),
        said("assistant", "I think.", agent="main", action="", message_type="action"),
        said("user", "go on", agent="main", message_type="observation"),
        said("assistant", "```\nsubmit\n```", agent="main", action="submit", message_type="action"),
    ],
    "info": {"exit_status": "submitted"},
    "resolved": True,
    **UNKNOWN,
}  # fmt: skip
NEBIUS = {
    "instance_id": "i-1",
    "target": False,
    "exit_status": "submitted",
    **UNKNOWN,
    "trajectory": [
        {"role": "system", "system_prompt": "You are an engineer.", "text": None, "mask": False},
        {"role": "user", "text": "the issue", "system_prompt": None},
        {"role": "ai", "text": "Look.\n```\nls\n```", "system_prompt": None},
        {"role": "user", "text": "a.py", "system_prompt": None},
    ],
}
OPENHANDS = {
    "trajectory_id": "t1",
    "instance_id": "i-1",
    "repo": "o/r",
    "resolved": 1,
    "exit_status": "submit",
    "model_patch": "diff",
    "tools": [TOOL],
    **UNKNOWN,
    "trajectory": [
        said("system", "You are OpenHands."),
        said("user", [{"type": "text", "text": "the issue"}]),
        said("assistant", "first", tool_calls=[function("bash", {"command": "ls"}), function("bash", BASH, "c2")]),
        said("tool", "a.py", tool_call_id="c1", name="bash"),
        said("tool", "a.py", tool_call_id="c2", name="bash"),
        said("assistant", "wrong", tool_calls=[function("bash", BASH, "c3")]),
        said("tool", "ERROR: bash: no such file", tool_call_id="c3", name="bash"),
        said("assistant", "All done."),
    ],
}
SWE_GYM = {
    "instance_id": "i-2",
    "run_id": "r",
    "resolved": True,
    "test_result": {},
    "tools": None,
    **UNKNOWN,
    "messages": [
        said("system", "You are OpenHands."),
        said("user", "the issue"),
        said("assistant", "", tool_calls=[function("execute_bash", BASH)]),
        said("tool", "OBSERVATION:\na.py", tool_call_id="c1", name="execute_bash"),
        said("assistant", "Done."),
    ],
}


SDK = {
    "instance_id": "i-3",
    "test_result": {"report": {"resolved": True}},
    **UNKNOWN,
    "history": [
        {"id": "0", "source": "agent", "kind": "SystemPromptEvent", "system_prompt": {"text": "You help."}, "tools": []},
        {"id": "1", "source": "user", "kind": "MessageEvent", "llm_message": said("user", [{"type": "text", "text": "go"}])},
        {"id": "2", "source": "agent", "kind": "ActionEvent", "thought": [{"type": "text", "text": "I look."}],
         "action": {"kind": "TerminalAction", "command": "ls"}, "tool_name": "terminal", "tool_call_id": "c1",
         "tool_call": {"id": "c1", "name": "terminal", "arguments": BASH}, "llm_response_id": "r1"},
        {"id": "3", "source": "environment", "kind": "ObservationEvent", "tool_name": "terminal", "tool_call_id": "c1",
         "action_id": "2", "observation": {"kind": "TerminalObservation", "content": [{"type": "text", "text": "a"}]}},
        {"id": "4", "source": "agent", "kind": "ActionEvent", "thought": [], "action": None, "tool_name": "edit",
         "tool_call_id": "c2", "tool_call": {"id": "c2", "name": "edit", "arguments": "{}"}, "llm_response_id": "r2"},
        {"id": "5", "source": "agent", "kind": "AgentErrorEvent", "tool_name": "edit", "tool_call_id": "c2", "error": "bad"},
        {"id": "6", "source": "environment", "kind": "ConversationStateUpdateEvent"},
    ],
}  # fmt: skip
ATIF = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s1",
    "agent": {"name": "terminus-2", "version": "2.0"},
    "reward": 1.0,
    **UNKNOWN,
    "steps": [
        {"step_id": 1, "source": "user", "message": "do it"},
        {"step_id": 2, "source": "agent", "message": "look", "reasoning_content": "hm", "metrics": {},
         "tool_calls": [{"tool_call_id": "a", "function_name": "bash_command", "arguments": {"keystrokes": "ls\n"}},
                        {"tool_call_id": "b", "function_name": "bash_command", "arguments": {"keystrokes": "pwd\n"}}],
         "observation": {"results": [{"content": "one screen for both"}]}},
        {"step_id": 3, "source": "agent", "message": "finish",
         "tool_calls": [{"tool_call_id": "d", "function_name": "mark_task_complete", "arguments": {}}],
         "observation": {"results": [{"source_call_id": "d", "content": "sure?"}]}},
        {"step_id": 4, "source": "agent", "message": '{"commands": [{"keystrokes": "ls\\n"}], "task_complete": false}',
         "observation": {"results": [{"content": "a.py"}]}},
    ],
}  # fmt: skip


def line(kind: str, **payload: Any) -> dict[str, Any]:
    return {"timestamp": "2026-01-01T00:00:00Z", "type": kind, "payload": payload}


def text_item(role: str, text: str) -> dict[str, Any]:
    return line("response_item", type="message", role=role, content=[{"type": "input_text", "text": text}])


CODEX = [
    line("session_meta", id="s1", cwd="/w", cli_version="0.60", base_instructions={"text": "You are Codex."}),
    text_item("user", "fix it"),
    line("turn_context", cwd="/w", model="m"),
    line("event_msg", type="user_message", message="fix it"),
    line("response_item", type="reasoning", summary=[]),
    line("response_item", type="function_call", name="exec_command", arguments='{"cmd": "ls"}', call_id="c1"),
    line("response_item", type="function_call_output", call_id="c1", output="a.py"),
    line(
        "response_item",
        type="custom_tool_call",
        name="apply_patch",
        input="*** Begin",
        call_id="c2",
        status="completed",
    ),
    line("response_item", type="custom_tool_call_output", call_id="c2", output={"content": "failed", "success": False}),
    text_item("assistant", "Done."),
    line("compacted", message="", replacement_history=[text_item("user", "What was done: all of it.")["payload"]]),
    text_item("user", "and the tests?") | UNKNOWN,
    line("response_item", type="local_shell_call", action={"type": "exec", "command": ["ls"]}, call_id="c3"),
    line("response_item", type="function_call_output", call_id="c3", output="ok"),
]


def claude(kind: str, uuid: str, parent: str | None, content: Any, **more: Any) -> dict[str, Any]:
    message = {"role": kind, "content": content} | ({"id": more.pop("response")} if "response" in more else {})
    return {"type": kind, "uuid": uuid, "parentUuid": parent, "sessionId": "s1", "isSidechain": False, "message": message,
            "timestamp": "2026-01-01T00:00:00Z", **more}  # fmt: skip


def use(call_id: str, name: str = "Bash") -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": {"command": "ls"}}


def used(call_id: str, error: bool = False) -> dict[str, Any]:
    return {
        "type": "tool_result",
        "tool_use_id": call_id,
        "content": [{"type": "text", "text": "a"}],
        "is_error": error,
    }


CLAUDE = [
    {"type": "summary", "summary": "a session", "leafUuid": "z"},
    claude("user", "1", None, "fix it"),
    claude("assistant", "2", "1", [{"type": "thinking", "thinking": "hm"}], response="m1"),
    claude("assistant", "3", "2", [{"type": "text", "text": "I look."}], response="m1"),
    claude("assistant", "4", "3", [use("a")], response="m1"),
    claude("user", "5", "4", [used("a")]),
    claude("assistant", "6", "4", [use("b")], response="m1"),
    claude("user", "7", "6", [used("b")], **UNKNOWN),
    claude("assistant", "8", "7", [use("d")], response="m2"),
    claude("user", "9", "8", [used("d", error=True)]),
    claude("assistant", "10", "9", [{"type": "text", "text": "That was wrong."}], response="m3"),
    claude("user", "11", "9", "no, do it so"),
    claude("assistant", "12", "11", [use("e", "Task")], response="m4"),
    claude("user", "s1", None, "you are a helper", isSidechain=True),
    claude("assistant", "s2", "s1", [use("f")], isSidechain=True, response="m5"),
    claude("user", "s3", "s2", [used("f")], isSidechain=True),
    claude("user", "13", "12", [used("e")]),
    claude("assistant", "14", "13", [{"type": "text", "text": "Done."}], response="m6"),
]
INSPECT = {
    "id": 7, "epoch": 1, "input": "Find x.", "target": "x", "output": {}, "scores": {"match": {"value": "C"}}, **UNKNOWN,
    "messages": [
        {"role": "user", "content": "Find x.", "source": "input"},
        {
            "role": "assistant", "model": "m",
            "content": [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "Looking."}],
            "tool_calls": [{"id": "a", "function": "search", "arguments": {"q": "x"}, "type": "function"}],
        },
        {"role": "tool", "content": "x is here", "tool_call_id": "a", "function": "search"},
        {
            "role": "assistant", "content": "",
            "tool_calls": [{"id": "b", "function": "search", "arguments": {"q": "y"}, "type": "function"}],
        },
        {"role": "tool", "content": "", "tool_call_id": "b", "error": {"type": "timeout", "message": "late"}},
        {"role": "assistant", "content": "x"},
    ],
}  # fmt: skip
OPENCODE = {
    "info": {"id": "ses_1", "title": "t", "version": "1.0"},
    **UNKNOWN,
    "messages": [
        {"info": {"id": "1", "role": "user"}, "parts": [{"type": "text", "text": "fix it"}]},
        {
            "info": {"id": "2", "role": "assistant"},
            "parts": [
                {"type": "step-start"},
                {"type": "text", "text": "I look."},
                {"type": "tool", "callID": "a", "tool": "bash",
                 "state": {"status": "completed", "input": {"command": "ls"}, "output": "a.py"}},
                {"type": "tool", "callID": "b", "tool": "read",
                 "state": {"status": "error", "input": {"filePath": "b"}, "error": "no such file"}},
                {"type": "step-finish", "reason": "tool-calls"},
                {"type": "step-start"},
                {"type": "tool", "callID": "d", "tool": "edit",
                 "state": {"status": "completed", "input": {"filePath": "a.py"}, "output": ""}},
                {"type": "step-start"},
                {"type": "text", "text": "Done."},
            ],
        },
    ],
}  # fmt: skip
TERMINUS = {
    "agent": "terminus-2",
    "task": "t-1",
    "trial_name": "t-1__x",
    "result": "1.0",
    "reward": 1.0,
    **UNKNOWN,
    "conversations": [
        said("user", "You are an AI assistant ... Task: find it. Screen: $"),
        said("assistant", '<think>hm</think>{"analysis": "a", "plan": "p", "commands": [{"keystrokes": "ls\\n"}]}'),
        said("user", "a.py\n$"),
        said("assistant", "no JSON at all"),
        said("user", "Previous response had parsing errors:\nERROR: ..."),
        said("assistant", '{"analysis": "a", "plan": "p", "commands": [], "task_complete": true}'),
    ],
}
SHAREGPT = {
    "id": "g1",
    "system": "You have tools.",
    "tools": json.dumps([TOOL]),
    **UNKNOWN,
    "conversations": [
        {"from": "human", "value": "look"},
        {"from": "gpt", "value": '<think>hm</think><tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'},
        {"from": "tool", "value": "<tool_response>\na.py\n</tool_response>"},
        {"from": "function_call", "value": '{"name": "bash", "arguments": {"command": "pwd"}}'},
        {"from": "observation", "value": "/"},
        {"from": "gpt", "value": "It is in /.", "weight": 0},
    ],
}  # fmt: skip
REACT = """
########################################
BEGIN TRIAL 1
------------- BEGIN CORRECT AGENTS -------------

Question: Who wrote it?
Thought 1: I need to search it.
Action 1: Search[It]
Observation 1: It is a novel
of 1986.
Thought 2: By Stephen King.
Action 2: Finish[Stephen King]
Observation 2: Answer is CORRECT
Correct answer: Stephen King
------------- BEGIN HALTED AGENTS --------------

Question: Who was it?
Thought 1: I look it up.
Action 1: Lookup[was]
Observation 1: No Results
Correct answer: nobody
"""
RECORD = {
    "example_id": 5,
    "prompt": [said("system", "Answer."), said("user", "2+2?")],
    "completion": [
        said("assistant", "", tool_calls=[json.dumps(function("calculate", '{"x": "2+2"}'))]),
        said("tool", "4", tool_call_id="c1"),
        said("assistant", "4"),
    ],
    "answer": "4",
    "reward": 1.0,
    "metrics": {"exact": 1.0},
    "exact": 1.0,
    "tool_defs": None,
    "error": None,
    **UNKNOWN,
}
FAILED = RECORD | {"error": {"error": "Timeout"}, "reward": 0.0, "example_id": 6}
AGENTBENCH = {
    "index": 7,
    "error": None,
    "info": None,
    "time": {"timestamp": 1},
    **UNKNOWN,
    "output": {
        "index": 7,
        "status": "completed",
        "result": {"result": True},
        "history": [
            {"role": "user", "content": "How many files?"},
            {"role": "agent", "content": "Think: count.\n\nAct: bash\n\n```bash\nls | wc -l\n```"},
            {"role": "user", "content": "The output of the OS:\n\n7"},
            {"role": "agent", "content": "Think: done.\n\nAct: answer(7)"},
        ],
    },
}
INTERCODE = {
    "0": {
        "environment": "ic_bash",
        "dataset": "fs_1",
        "task_id": 0,
        "query": "count the files",
        "turn_history": {
            "actions": ["ls", "ls | wc -l"],
            "observations": ["a\n", "1\n"],
            "rewards": [0.2, 1.0],
            "valid_action": [True, True],
        },
        "summary": {"max_reward": 1.0},
        **UNKNOWN,
    },
    "1": {
        "environment": "ic_bash",
        "dataset": "fs_1",
        "task_id": 1,
        "query": "remove them",
        "turn_history": {"actions": ["rm *"], "observations": [""], "rewards": [0.5], "valid_action": [True]},
        "summary": {"max_reward": 0.5},
    },
}


def asked(*texts: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]


def smolagents_call(name: str, arguments: dict[str, Any]) -> tuple[str, str]:
    call = {"id": f"c{name}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return "tool-call", f"Calling tools:\n{[call]}"


# of a run with smolagents 1.26
ASKED = [("system", "Solve the task with calls."), ("user", "New task:\nHow is the weather in Paris?")]
NOWHERE = "Error executing tool 'weather' with arguments {'city': 'Nowhere'}: ValueError: no such city\nPlease try again or use another tool"
FIRST = [("assistant", "I look."), smolagents_call("weather", {"city": "Nowhere"}),
         ("tool-response", f"Call id: cweather\nError:\n{NOWHERE}\nNow let's retry: take care not to repeat previous errors!\n")]  # fmt: skip
SECOND = [
    ("assistant", "I look."),
    smolagents_call("weather", {"city": "Paris"}),
    ("tool-response", "Observation:\nsunny in Paris"),
]
SMOLAGENTS = {
    "output": "sunny",
    "state": "success",
    "steps": [
        {"task": "How is the weather in Paris?"},
        {
            "step_number": 1,
            "model_input_messages": asked(*ASKED),
            "error": {"type": "AgentToolExecutionError", "message": NOWHERE},
            "model_output_message": {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "function": {"arguments": {"city": "Nowhere"}, "name": "weather", "description": None},
                        "id": "cweather",
                        "type": "function",
                    }
                ],
            },
            "model_output": "I look.",
            "code_action": None,
            "observations": None,
            "action_output": None,
            "is_final_answer": False,
        },
        {
            "step_number": 2,
            "model_input_messages": asked(*ASKED, *FIRST),
            "error": None,
            "model_output_message": {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "function": {"arguments": {"city": "Paris"}, "name": "weather", "description": None},
                        "id": "cweather",
                        "type": "function",
                    }
                ],
            },
            "model_output": "I look.",
            "code_action": None,
            "observations": "sunny in Paris",
            "action_output": None,
            "is_final_answer": False,
        },
        {
            "step_number": 3,
            "model_input_messages": asked(*ASKED, *FIRST, *SECOND),
            "error": None,
            "model_output_message": {
                "role": "assistant",
                "content": "I look.",
                "tool_calls": [
                    {
                        "function": {"arguments": {"answer": "sunny"}, "name": "final_answer", "description": None},
                        "id": "cfinal_answer",
                        "type": "function",
                    }
                ],
            },
            "model_output": "I look.",
            "code_action": None,
            "observations": "sunny",
            "action_output": None,
            "is_final_answer": True,
        },
    ],
} | UNKNOWN

# by the real packages (real_exports.py), and what they lack: an unknown key, and a call that failed
REAL = Path(__file__).with_name("real")
SMITH, [*_, SMITH_OPENAI], FUSE = (
    [json.loads(line) for line in (REAL / f"{name}.jsonl").read_text().splitlines()]
    for name in ("langsmith_graph", "langsmith_loop", "langfuse_loop")
)
SMITH.append({key: value for key, value in SMITH[2].items() if key != "outputs"} | {"error": "timeout"} | UNKNOWN)
FUSE.append({key: value for key, value in FUSE[0].items() if key != "output"} | {"level": "ERROR"} | UNKNOWN)

FIXTURES = {
    "chat": Fixture("old.jsonl", lines(OLD), 2, 2, {}, options={"unknown_keys": "keep"}),
    "responses": Fixture("gym.jsonl", lines(GYM), 2, 2, {}),
    "tau2": Fixture("results.json", json.dumps(TAU2, indent=1), 3, 2, {"canned_opening": 1}),
    "tau2 run": Fixture("runs.json", json.dumps(TAU1), 1, 1, {}, success=(False,)),
    "sweagent": Fixture(
        "x.traj", json.dumps(TRAJ, indent=1), 4, 2, {"demonstration_in_prompt": 1, "not_a_tool_call": 1}
    ),
    "sweagent row": Fixture("nebius.jsonl", lines(NEBIUS), 1, 1, {}, success=(False,)),
    "openhands": Fixture(
        "oh.jsonl", lines(OPENHANDS), 3, 1, {"error_tool_call": 1, "not_a_tool_call": 1}
    ),
    "swe_gym": Fixture("gym.jsonl", lines(SWE_GYM), 2, 1, {"not_a_tool_call": 1}),
    "openhands_events sdk": Fixture("output.jsonl", lines(SDK), 2, 1, {"error_tool_call": 1}),
    "atif": Fixture("trajectory.json", json.dumps(ATIF), 3, 2, {"not_a_bash_action": 1}),
    "opencode": Fixture(
        "export.json", json.dumps(OPENCODE, indent=2), 3, 1, {"error_tool_call": 1, "not_a_tool_call": 1}, success=(None,)
    ),
    "inspect": Fixture("sample.json", json.dumps(INSPECT), 3, 1, {"error_tool_call": 1, "not_a_tool_call": 1}),
    "smolagents": Fixture(
        "run.json", json.dumps(SMOLAGENTS), 6, 2, {"error_tool_call": 1, "said_in_another_conversation": 3}, traces=2,
        success=(None, None),
    ),
    "langsmith": Fixture("runs.jsonl", lines(*SMITH), 4, 3, {"failed_call": 1}, success=(None,)),
    "langfuse": Fixture("observations.jsonl", lines(*FUSE), 4, 3, {"failed_call": 1}, success=(None,)),
    "codex": Fixture(
        "rollout-1.jsonl", lines(*CODEX), 4, 2, {"error_tool_call": 1, "not_a_tool_call": 1}, traces=2,
        success=(None, None), unknown="unknown key lines[].surprise",
    ),
    "claude_code": Fixture(
        "s1.jsonl", lines(*CLAUDE), 6, 3, {"error_tool_call": 1, "abandoned_branch": 1, "not_a_tool_call": 1}, traces=2,
        success=(None, None), unknown="unknown key lines[].surprise",
    ),
    "terminus": Fixture("terminus.jsonl", lines(TERMINUS), 3, 1, {"not_a_bash_action": 2}),
    "sharegpt": Fixture("g.jsonl", lines(SHAREGPT), 3, 2, {"marked_not_trained": 1}, success=(None,)),
    "react": Fixture("trials.txt", REACT, 3, 2, {"not_a_search_step": 1}, traces=2, success=(True, False), unknown=""),
    "verifiers": Fixture(
        "results.jsonl", lines(RECORD, FAILED), 4, 2, {"rollout_failed": 2}, traces=1, success=(True,)
    ),
    "agentbench": Fixture("runs.jsonl", lines(AGENTBENCH), 2, 1, {"not_a_bash_action": 1}),
    "intercode": Fixture("ic.json", json.dumps(INTERCODE), 3, 3, {}, traces=2, success=(True, False)),
}  # fmt: skip
