"""Responses rollouts, pivot rows and tau trajectories become the same traces as chat rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trace_fixtures import adds_up

from chat_import import import_chat
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.traces.candidates import candidates
from turntree.traces.chat import ImportReport
from turntree.traces.schema import Trace

TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}


def imported(tmp_path: Path, value: Any, name: str = "rows.jsonl", **options: Any) -> tuple[list[Trace], ImportReport]:
    path = tmp_path / name
    path.write_text(json.dumps(value))
    return import_chat([path], **options)


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def called(arguments: str = '{"at": "desk"}', call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call", "name": "look", "arguments": arguments, "call_id": call_id}


def result(call_id: str = "c") -> dict[str, Any]:
    return {"type": "function_call_output", "output": "a pen", "call_id": call_id}


class TestResponses:
    def test_input_and_output_are_one_episode(self, tmp_path: Path) -> None:
        row = {
            "responses_create_params": {"instructions": "rules", "input": "find it", "tools": [TOOL]},
            "response": {
                "output": [{"type": "reasoning", "summary": []}, said("hm"), called(), result(), said("found")]
            },
            "reward": 1.0,
            "_ng_task_index": 0,
            "whatever": "a rollout holds",
        }
        [trace], report = imported(tmp_path, row)
        assert trace.messages == (
            Message("system", "rules"),
            Message("user", "find it"),
            Message("assistant", "hm", (ToolCall("look", {"at": "desk"}, "c"),)),
            Message("tool", "a pen", (), "c"),
            Message("assistant", "found"),
        )
        assert trace.tools == ({"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},)
        assert (trace.success, trace.group, trace.meta["reward"]) == (True, "0", 1.0)
        IGNORED = {"reasoning items": 1, "unknown key whatever": 1}
        assert (report.turns_kept, report.merged_messages, report.ignored) == (2, 1, IGNORED)

    def test_rollouts_of_one_task_share_a_group_though_each_has_a_trajectory_of_its_own(self, tmp_path: Path) -> None:
        told: list[dict[str, Any]] = [{"trajectory_id": "r1"}, {"trajectory_id": "r2"}, {"source_trajectory_uid": "r3"}]
        rows = [
            {"responses_create_params": {"input": "go"}, "response": {"output": [said(f"{i}")]}, **one}
            for i, one in enumerate(told)
        ]
        traces, _ = imported(tmp_path, [row | {"instance_id": "bug-1"} for row in rows], "rows.json")
        assert [trace.group for trace in traces] == ["bug-1"] * 3
        traces, _ = imported(tmp_path, rows, "rows.json")
        assert [trace.group for trace in traces] == ["r1", "r2", "r3"]

    def test_parallel_calls_are_one_turn(self, tmp_path: Path) -> None:
        output = [called(call_id="1"), called(call_id="2"), result("2"), result("1"), said("x")]
        row = {"responses_create_params": {"input": "go"}, "response": {"output": output}}
        [trace], _ = imported(tmp_path, row)
        assert [len(state.demonstration.tool_calls) for state in candidates(trace)] == [2, 0]

    @pytest.mark.parametrize(
        ("expected", "demonstration"),
        [
            (called(), Message("assistant", "", (ToolCall("look", {"at": "desk"}, "c"),))),
            ({"type": "message", "content": "done"}, Message("assistant", "done")),
            (
                {"type": "function_call_batch", "ordered": True, "calls": [called(call_id="1"), called(call_id="2")]},
                Message("assistant", "", tuple(ToolCall("look", {"at": "desk"}, i) for i in "12")),
            ),
        ],
    )
    def test_a_pivot_row_demonstrates_its_expected_action_only(
        self, tmp_path: Path, expected: dict[str, Any], demonstration: Message
    ) -> None:
        history = [{"role": "user", "content": "go"}, called(call_id="0"), result("0")]
        row = {
            "responses_create_params": {"input": history},
            "expected_action": expected,
            "response": {"output": [said("what a policy sampled")]},
            "reward": 0.0,
        }
        [trace], report = imported(tmp_path, row)
        [state] = candidates(trace)
        assert (state.turn, state.demonstration) == (1, demonstration)
        assert trace.success is None
        assert report.dropped_turns == {"history_of_a_pivot_row": 1}

    def test_a_pivot_row_that_lost_its_action_has_no_candidate(self, tmp_path: Path) -> None:
        history = [{"role": "user", "content": "go"}, called(call_id="0"), result("0")]
        row = {"responses_create_params": {"input": history}, "expected_action": called("{oops")}
        traces, report = imported(tmp_path, row, on_error="drop")
        assert traces == []
        assert report.dropped_turns == {"history_of_a_pivot_row": 1, "arguments_not_json": 1}
        assert adds_up(report)

    def test_a_terminus_row_demonstrates_its_expected_answer(self, tmp_path: Path) -> None:
        row = {
            "responses_create_params": {"input": "fix it"},
            "expected_answer": '{"commands": []}',
            "metadata": {"harness": "terminus_2"},
            "uuid": "u1",
        }
        [trace], _ = imported(tmp_path, row)
        assert (trace.id, trace.messages[-1].content) == ("u1", '{"commands": []}')

    def test_calls_that_repeat_the_text_of_a_terminus_turn_are_not_what_its_policy_said(self, tmp_path: Path) -> None:
        """It said JSON, and one screen answers all its keystrokes."""
        spoken = '{"commands": [{"keystrokes": "ls\\n"}, {"keystrokes": "pwd\\n"}]}'
        keys = [{**called(call_id=f"{i}"), "name": "bash_command", "arguments": '{"keystrokes": "x"}'} for i in "12"]
        output = [said(spoken), *keys, result("1"), said('{"commands": []}'), result("9"), said(spoken)]
        row = {"responses_create_params": {"input": "go"}, "response": {"output": output}}
        [trace], report = imported(tmp_path, row)
        assert [message.role for message in trace.messages] == ["user", "assistant"] * 3
        assert [state.demonstration for state in candidates(trace)] == [Message("assistant", spoken)] * 2
        assert report.ignored == {"calls that repeat the turn's text": 2}
        row["responses_create_params"]["tools"] = [
            {"type": "function", "name": "bash_command", "parameters": {"type": "object"}}
        ]
        [trace], report = imported(tmp_path, row)
        assert len(trace.messages[1].tool_calls) == 2, "a tool that was declared is called"

    def test_a_turn_that_the_token_limit_cut_is_history_and_no_demonstration(self, tmp_path: Path) -> None:
        cut = {**said("I loo"), "status": "incomplete"}
        output = [{**called(), "status": "completed"}, result(), cut, called(), result(), said("found")]
        row = {"responses_create_params": {"input": "go"}, "response": {"output": output}}
        [trace], report = imported(tmp_path, row)
        assert [state.turn for state in candidates(trace)] == [0, 2] and len(trace.turn_positions) == 3
        assert report.dropped_turns == {"marked_not_trained": 1}

    def test_an_unknown_item_is_refused(self, tmp_path: Path) -> None:
        row = {"responses_create_params": {"input": [{"type": "computer_call"}]}}
        with pytest.raises(InputError, match="holds an item of type 'computer_call'"):
            imported(tmp_path, row)

    def test_arguments_that_are_not_json_are_named(self, tmp_path: Path) -> None:
        row = {"responses_create_params": {"input": "go"}, "response": {"output": [called("{oops")]}}
        with pytest.raises(InputError, match=r"rows.jsonl:1: field 'messages\[1\].tool_calls.arguments'"):
            imported(tmp_path, row)


class TestSweAgent:
    def trajectory(self, issue: str, **mark: Any) -> dict[str, Any]:
        history = [
            {"role": "system", "content": "rules", "agent": "main"},
            {"role": "user", "content": "the demonstration", "agent": "main", **mark},
            {"role": "user", "content": issue, "agent": "main"},
            {"role": "assistant", "content": "```\nls\n```", "action": "ls", "agent": "main"},
        ]
        return {"history": history, "info": {"exit_status": f"of {issue}"}}

    @pytest.mark.parametrize("mark", [{"is_demo": True}, {"message_type": "demonstration"}])
    def test_tasks_with_one_demonstration_in_their_prompts_are_groups_of_their_own(
        self, tmp_path: Path, mark: dict[str, Any]
    ) -> None:
        rows = [self.trajectory(issue, **mark) for issue in ("one", "two", "one")]
        rows[2]["history"][0]["content"] = "other rules"
        one, two, again = (trace.group for trace in imported(tmp_path, rows, "rows.json")[0])
        assert one == again != two


class TestAtif:
    def step(self, number: int, source: str = "agent", **more: Any) -> dict[str, Any]:
        result = {"source_call_id": f"c{number}", "content": "ok"}
        call = {"tool_call_id": f"c{number}", "function_name": "bash", "arguments": {"command": "ls"}}
        acts = {"tool_calls": [call], "observation": {"results": [result]}} if source == "agent" else {}
        return {"step_id": number, "source": source, "message": f"step {number}", **acts, **more}

    def trajectory(self, *steps: dict[str, Any], **more: Any) -> dict[str, Any]:
        first = self.step(1, "user", llm_call_count=0)
        return {
            "schema_version": "ATIF-v1.7",
            "session_id": "s",
            "agent": {"name": "x"},
            "steps": [first, *steps],
        } | more

    def test_steps_that_the_policy_did_not_say_there_are_history_and_counted(self, tmp_path: Path) -> None:
        copied, dispatched = self.step(2, is_copied_context=True), self.step(3, llm_call_count=0)
        said = [self.step(4, llm_call_count=1, is_copied_context=False), self.step(5)]
        [trace], report = imported(tmp_path, self.trajectory(copied, dispatched, *said), "t.json")
        assert [state.demonstration.content for state in candidates(trace)] == ["step 4", "step 5"]
        assert len(trace.turn_positions) == 4
        assert report.dropped_turns == {"copied_context": 1, "no_model_call": 1} and adds_up(report)

    def test_what_sub_agents_said_is_left_out_and_counted(self, tmp_path: Path) -> None:
        deeper = self.trajectory(self.step(2), session_id="s3")
        helper = self.trajectory(self.step(2), self.step(3), session_id="s2", subagent_trajectories=[deeper])
        more = {"subagent_trajectories": [helper], "continued_trajectory_ref": "next.json"}
        [trace], report = imported(tmp_path, self.trajectory(self.step(2), **more), "t.json")
        assert (trace.id, report.turns_kept, report.turns_read) == ("s", 1, 4)
        assert report.dropped_turns == {"in_subagent_trajectory": 3} and adds_up(report)
        assert report.ignored == {"subagent_trajectories[]": 2, "continued_trajectory_ref": 1}

    def test_a_sub_agent_that_is_no_object_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match="'subagent_trajectories': holds str, not an object"):
            imported(tmp_path, self.trajectory(self.step(2), subagent_trajectories=["s2"]), "t.json")


class TestTau:
    def simulation(self, *messages: dict[str, Any]) -> dict[str, Any]:
        return {"id": "s1", "task_id": "4", "trial": 0, "messages": list(messages), "reward_info": {"reward": 1.0}}

    MESSAGES = (
        {"role": "assistant", "content": "Hi! How can I help?", "tool_calls": None, "turn_idx": 0},
        {"role": "user", "content": "a pen", "tool_calls": [{"name": "check", "arguments": {}, "requestor": "user"}]},
        {"role": "tool", "id": "u", "content": "user sees", "requestor": "user"},
        {"role": "user", "content": None, "tool_calls": [{"name": "check", "arguments": {}, "requestor": "user"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "name": "look", "arguments": {"at": "desk"}}],
        },
        {"role": "tool", "id": "c", "content": "a pen", "requestor": "assistant"},
    )

    def test_a_document_becomes_one_trace_a_simulation(self, tmp_path: Path) -> None:
        info = {"environment_info": {"domain_name": "shop", "policy": "be kind", "tool_defs": [TOOL]}}
        document = {"info": info, "tasks": [], "simulations": [self.simulation(*self.MESSAGES)]}
        [trace], report = imported(tmp_path, document, "results.json")
        assert [message.role for message in trace.messages] == ["system", "assistant", "user", "assistant", "tool"]
        assert trace.messages[0].content.endswith("</instructions>\n<policy>\nbe kind\n</policy>")
        assert trace.messages[3].tool_calls == (ToolCall("look", {"at": "desk"}, "c"),)
        assert trace.messages[4].tool_call_id == "c"
        assert (trace.id, trace.domain, trace.group, trace.success) == ("s1", "shop", "4", True)
        assert trace.meta["source"] == {"file": "results.json", "index": "simulations[0]"}
        assert report.dropped_turns == {"canned_opening": 1}
        assert report.ignored == {
            "messages[].tool_calls of the simulated user": 2,
            "messages[] of tools used by the simulated user": 1,
        }

    def test_a_simulation_file_of_its_own_is_recognised(self, tmp_path: Path) -> None:
        [trace], report = imported(tmp_path, self.simulation(*self.MESSAGES), "sim.json")
        assert report.formats == {"tau2": 1}
        assert trace.messages[0].role == "assistant"

    def test_a_problem_in_a_document_is_named_by_its_index(self, tmp_path: Path) -> None:
        document = {"simulations": [self.simulation(*self.MESSAGES), self.simulation()]}
        with pytest.raises(
            InputError, match=r"results.json: field 'simulations\[1\].messages': hold no assistant turn"
        ):
            imported(tmp_path, document, "results.json")

    def test_a_taubench_run_keeps_task_and_trial(self, tmp_path: Path) -> None:
        traj = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
        [trace], _ = imported(
            tmp_path, [{"task_id": 3, "trial": 1, "reward": 0.0, "info": {}, "traj": traj}], "runs.json"
        )
        assert (trace.group, trace.success, trace.meta["trial"]) == ("3", False, 1)
