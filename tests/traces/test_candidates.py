"""Candidates: every assistant turn with the history before it, unless a named reason speaks against it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from trace_strategies import traces

from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.traces.candidates import candidates, skipped_turns
from turntree.traces.schema import Trace

SYSTEM, USER = Message("system", "rules"), Message("user", "do it")


def say(text: str) -> Message:
    return Message("assistant", text)


def call(*ids: str | None, name: str = "f") -> Message:
    return Message("assistant", "", tuple(ToolCall(name, {}, i) for i in ids))


def answer(call_id: str | None) -> Message:
    return Message("tool", "done", (), call_id)


def trace(*messages: Message, **fields: object) -> Trace:
    return Trace(id="t", messages=messages, **fields)  # type: ignore[arg-type]


class TestLaws:
    @settings(max_examples=50, deadline=None)
    @given(traces())
    def test_candidates_and_skipped_turns_are_all_assistant_turns(self, trace: Trace) -> None:
        found = [state.turn for state in candidates(trace)]
        assert sorted([*found, *skipped_turns(trace)]) == list(range(len(trace.turn_positions)))

    @settings(max_examples=50, deadline=None)
    @given(traces())
    def test_history_and_demonstration_are_a_prefix_of_the_trace(self, trace: Trace) -> None:
        for state in candidates(trace):
            prefix = (*state.history, state.demonstration)
            assert trace.messages[: len(prefix)] == prefix
            assert sum(message.role == "assistant" for message in state.history) == state.turn
            assert (state.trace_id, state.tools, state.environment) == (trace.id, trace.tools, trace.environment)


class TestTurns:
    def test_every_turn_of_a_tidy_trace_is_a_candidate(self) -> None:
        tidy = trace(SYSTEM, USER, call("1"), answer("1"), call("2", "3"), answer("3"), answer("2"), say("done"))
        assert [state.id for state in candidates(tidy)] == ["t#0", "t#1", "t#2"]
        assert skipped_turns(tidy) == {}

    def test_calls_without_ids_are_answered_in_number(self) -> None:
        assert skipped_turns(trace(USER, call(None, None), answer(None), answer(None), say("x"))) == {}
        assert skipped_turns(trace(USER, call(None, None), answer(None), say("x"))) == {0: "unanswered_call"}

    def test_an_episode_may_end_on_a_call(self) -> None:
        assert skipped_turns(trace(USER, call("1"))) == {}
        assert skipped_turns(trace(USER, call("1", "2"), answer("1"))) == {}

    @pytest.mark.parametrize(
        ("messages", "skipped"),
        [
            ((USER, say(" \n")), {0: "empty_turn"}),
            ((say("hello"), USER, say("yes")), {0: "no_prompt"}),
            ((SYSTEM, say("How can I help?"), USER, say("yes")), {0: "canned_opening"}),
            ((SYSTEM, say("a system prompt may hold the task")), {}),
            ((SYSTEM, call("1"), answer("1"), USER, say("yes")), {}),
            ((USER, call("1"), say("no answer came"), USER, say("x")), {0: "unanswered_call", 1: "after_assistant"}),
            ((USER, call("1", "2"), answer("1"), say("x")), {0: "unanswered_call"}),
            ((USER, call("1"), answer("2"), say("x")), {0: "unanswered_call"}),
            ((USER, call("1"), answer("1"), answer("1"), say("x")), {0: "result_without_call"}),
            ((USER, say("a text"), answer("1"), say("x")), {0: "result_without_call"}),
        ],
    )
    def test_a_turn_that_cannot_teach_is_skipped_for_one_reason(
        self, messages: tuple[Message, ...], skipped: dict[int, str]
    ) -> None:
        assert skipped_turns(trace(*messages)) == skipped

    def test_an_undeclared_tool_counts_only_where_tools_are_declared(self) -> None:
        declared = ({"type": "function", "function": {"name": "f"}},)
        messages = (USER, call("1", name="g"), answer("1"), call("2"))
        assert skipped_turns(trace(*messages, tools=declared)) == {0: "undeclared_tool"}
        assert skipped_turns(trace(*messages)) == {}


class TestMarks:
    def test_a_mark_comes_before_every_other_reason(self) -> None:
        marked = trace(USER, say(""), USER, say("x"), meta={"skip_turns": {"0": "mine", "1": "mine too"}})
        assert skipped_turns(marked) == {0: "mine", 1: "mine too"}
        assert candidates(marked) == []

    @pytest.mark.parametrize(
        "marks", [{"1": "no such turn"}, {"x": "why"}, {"0": ""}, {"0": None}, ["0"], {"-1": "why"}]
    )
    def test_marks_that_name_no_turn_or_no_reason_are_refused(self, marks: object) -> None:
        with pytest.raises(InputError, match="skip_turns"):
            skipped_turns(trace(USER, say("x"), meta={"skip_turns": marks}))


class TestLabels:
    """A policy's own path: the history is what was played, the demonstration what a teacher would have done."""

    def test_a_label_is_the_demonstration_and_the_history_keeps_what_was_played(self) -> None:
        own = trace(
            Message("user", "go"),
            say("wrong"),
            Message("user", "no"),
            say("again wrong"),
            labels={0: say("right"), 1: say("better")},
        )
        first, second = candidates(own)
        assert (first.demonstration.content, second.demonstration.content) == ("right", "better")
        assert [message.content for message in second.history] == ["go", "wrong", "no"]

    @given(traces())
    def test_labelled_unlabelled_and_skipped_turns_are_all_assistant_turns(self, found: Trace) -> None:
        turns = len(found.turn_positions)
        labels = {turn: say(f"label {turn}") for turn in range(0, turns, 2)}
        own = replace(found, labels=labels)
        skipped = skipped_turns(own)
        assert len(candidates(own)) + len(skipped) == turns
        assert {turn for turn in range(turns) if turn not in labels} <= set(skipped)

    @given(traces())
    def test_labels_survive_the_file(self, found: Trace) -> None:
        own = replace(found, labels={0: say("label")})
        assert Trace.from_json(json.loads(json.dumps(own.to_json()))) == own

    @pytest.mark.parametrize("labels", [{5: say("x")}, {0: Message("user", "x")}])
    def test_a_label_of_no_turn_or_of_another_role_is_refused(self, labels: dict[int, Message]) -> None:
        with pytest.raises(InputError, match="labels"):
            trace(Message("user", "go"), say("x"), labels=labels)
