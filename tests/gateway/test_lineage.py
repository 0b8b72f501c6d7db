"""Which call a prompt continues, and that nothing sampled is tokenised again."""

from dataclasses import replace

import pytest
from gateway_world import SEARCH, renderer, spelled, tokenizer, user
from hypothesis import given, settings
from hypothesis import strategies as st
from random_sessions import sequence_of

from turntree.core.completion import Completion
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.gateway.calls import Call, Lineage, digest_of

SYSTEM = Message("system", "You are brief.")


class Agent:
    """The calls of one session; `says` samples an answer and keeps it."""

    def __init__(self, thoughts="fork"):
        self.lineage, self.calls = Lineage(renderer(), thoughts), []

    def says(self, messages, answer, *, tools=(), ids=None, finish="stop") -> Call:
        kept = self.lineage.place(messages, tools, f"c{len(self.calls)}", len(self.calls))
        ids = spelled(answer.content) if ids is None else ids
        ids = ids if finish == "stop" else ids[:-1]
        nothing = (0.0,) * len(ids)
        kept.completion = Completion(token_ids=ids, logprobs=nothing, entropies=nothing, finish=finish)
        kept.answer = answer
        self.lineage.add(kept)
        self.calls.append(kept)
        return kept


def said(text, **more) -> Message:
    return Message("assistant", text, **more)


def test_a_prompt_that_continues_a_call_is_its_ids_its_sampled_ids_and_the_new_messages():
    agent = Agent()
    first = agent.says([SYSTEM, user("one")], said("eleven"))
    second = agent.says([SYSTEM, user("one"), said("eleven"), user("two")], said("twelve"))
    assert (second.base, second.cause) == (first, "continue")
    assert second.prompt_ids[: len(sequence_of(first))] == sequence_of(first)
    assert second.prompt_ids != renderer().prompt(second.messages)  # which spells nothing
    assert second.added_ids == renderer().extend([SYSTEM, user("one"), said("eleven")], [user("two")])


def test_an_answer_that_was_cut_is_closed_before_the_next_message():
    agent = Agent()
    first = agent.says([user("one")], said("eleven", cut=True), finish="length")
    second = agent.says([user("one"), said("eleven"), user("two")], said("x"))
    assert second.prompt_ids[len(sequence_of(first))] in renderer().stop_ids


def test_tool_calls_come_back_with_their_arguments_in_another_order_and_white_space_around_the_answer():
    agent = Agent()
    call = ToolCall("search", {"a": 1, "b": 2}, id="call_1")
    agent.says([user("one")], said(" looking ", tool_calls=(call,)), tools=(SEARCH,))
    back = said("looking", tool_calls=(replace(call, arguments={"b": 2, "a": 1}),))
    again = agent.says([user("one"), back, Message("tool", "x", tool_call_id="call_1")], said("y"), tools=(SEARCH,))
    assert again.cause == "continue"


def a_dialogue(agent, turns=4):
    messages = [SYSTEM, user("task")]
    for i in range(turns):
        answer = said(f"step {i}", reasoning=f"thought {i}")
        agent.says(messages, answer)
        messages = [*messages, answer, user(f"result {i}")]
    return messages


REWRITES = {
    "retry": (lambda m: m[:-2], 3),
    "compaction": (lambda m: [m[0], user("task and summary"), *m[-3:]], None),
    "edited": (lambda m: [*m[:3], user("another result"), *m[4:]], 0),
    "dropped_reasoning": (lambda m: [replace(each, reasoning="") for each in m], None),
    "continue": (lambda m: [*m[:3], user("another result")], 0),
    "start": (lambda m: [SYSTEM, user("a question of a sub-agent")], None),
}


@pytest.mark.parametrize("cause", REWRITES)
def test_a_prompt_that_rewrites_an_earlier_one_is_a_fork_with_its_cause(cause):
    agent = Agent()
    rewritten, follows = REWRITES[cause]
    messages = rewritten(a_dialogue(agent))
    call = agent.says(messages, said("z"))
    assert call.cause == cause
    assert call.base is (None if follows is None else agent.calls[follows])
    assert [m.content for m in call.messages] == [m.content for m in messages]


def test_the_same_messages_under_other_tools_are_a_fork():
    agent = Agent()
    agent.says([user("one")], said("eleven"), tools=(SEARCH,))
    assert agent.says([user("one")], said("eleven")).cause == "tools"
    assert agent.says([user("one"), said("eleven"), user("two")], said("x"), tools=()).cause == "continue"


def test_thoughts_that_an_agent_drops_can_stay_in_the_context():
    agent = Agent(thoughts="keep")
    messages = [replace(each, reasoning="") for each in a_dialogue(agent)]
    call = agent.says(messages, said("z"))
    assert (call.cause, call.base) == ("continue", agent.calls[-2])


def test_an_answer_that_survives_a_compaction_keeps_the_ids_it_was_sampled_with():
    agent = Agent()
    messages = a_dialogue(agent)
    call = agent.says([user("summary"), *messages[-2:]], said("z"))
    kept, ids = spelled("step 3"), call.prompt_ids
    assert any(ids[i : i + len(kept)] == kept for i in range(len(ids)))


def test_a_session_needs_room_for_its_tokens_once():
    agent = Agent()
    messages = [user("x" * 400)]
    for i in range(40):
        call = agent.says(messages, said(f"step {i}"))
        messages = [*messages, call.answer, user(f"result {i}")]
    held = sum(len(call.added_ids) + len(call.completion.token_ids) for call in agent.calls)
    assert held == len(sequence_of(agent.calls[-1]))
    assert sum(len(call.added) for call in agent.calls) == 40


@pytest.mark.parametrize("messages", [(), (user("one"), said("eleven"))])
def test_a_prompt_without_anything_to_answer_is_refused(messages):
    with pytest.raises(InputError, match="messages"):
        Agent().says(messages, said("x"))


MOVES = st.lists(
    st.tuples(st.sampled_from(["go on", "retry", "back", "compact", "edit", "fresh"]), st.integers(0, 9)), max_size=12
)


@settings(max_examples=60, deadline=None)
@given(MOVES, st.booleans())
def test_whatever_an_agent_does_its_prompts_are_what_it_said_and_share_what_they_follow(moves, canonical):
    """Law: a prompt begins with the ids of the call that it follows; its messages are the agent's; and where answers
    are tokenised as the template would, the prompt is the template's rendering."""
    agent, dialogue = Agent(), [SYSTEM, user("task")]
    for move, number in moves:
        answers = [i for i, message in enumerate(dialogue) if message.role == "assistant"]
        if move == "back" and answers:
            dialogue = dialogue[: answers[number % len(answers)]]
        elif move == "compact" and answers:
            dialogue = [SYSTEM, user("summary"), *dialogue[answers[-1] :]]
        elif move == "edit":
            place = 1 + number % (len(dialogue) - 1)
            dialogue = [*dialogue[:place], replace(dialogue[place], content=f"edited {number}"), *dialogue[place + 1 :]]
        elif move == "fresh":
            dialogue = [user(f"question {number % 3}")]
        answer = said(f"answer {number % 4}")
        call = agent.says(dialogue, answer, ids=renderer().completion(answer) if canonical else None)
        assert list(call.messages) == dialogue
        if call.base is not None:
            assert call.prompt_ids[: call.base_tokens] == sequence_of(call.base)[: call.base_tokens]
        if canonical:
            assert call.prompt_ids == renderer().prompt(dialogue)
        text = tokenizer().decode(call.prompt_ids)
        assert text == tokenizer().decode(renderer().prompt(dialogue))
        if move != "retry":
            dialogue = [*dialogue, answer, user(f"result {number}")]


@pytest.mark.parametrize(("sampled", "sent"), [({"n": 1.0}, {"n": 1}), ({"a": [{"n": -2.0}]}, {"a": [{"n": -2}]})])
def test_a_whole_number_that_javascript_sends_back_is_the_same(sampled, sent):
    said = [Message("assistant", tool_calls=(ToolCall("f", arguments),)) for arguments in (sampled, sent, {"n": 1.5})]
    same, back, other = (digest_of(message, thoughts=True) for message in said)
    assert same == back != other
