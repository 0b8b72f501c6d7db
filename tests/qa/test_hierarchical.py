"""The hierarchical reward: format, then correctness, then the tools; and what cannot earn or spoil any of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turntree.core.config import from_mapping
from turntree.core.errors import ConfigError
from turntree.core.messages import Message, ToolCall
from turntree.render.tool_calls import parse_message
from turntree_worlds.qa import symbolic
from turntree_worlds.qa.hierarchical import (
    ExecutedCall,
    HierarchicalReward,
    NoAnswer,
    extract_answer,
)

BOTH = (ExecutedCall("search"), ExecutedCall("python"), ExecutedCall("search"))


def judged(content, answers=("Paris",), answer_type="span", calls=(), **config):
    message = content if content is None or isinstance(content, Message) else Message("assistant", content)
    return HierarchicalReward(**config).judge(message, answers=answers, answer_type=answer_type, calls=calls)


def test_an_answer_that_the_token_limit_cut_is_none_unless_it_is_asked_for():
    endless = Message("assistant", "<answer>Paris</answer>" + " blah blah" * 50, cut=True)
    assert (judged(endless).reward, judged(endless).reason) == (-1.0, "cut by the token limit")
    assert judged(endless, cut_turns="judge").reward == 1.0 == judged(endless.content).reward


def test_the_reward_is_correctness_plus_a_bonus_for_correct_answers_with_all_tools():
    right, wrong = "I looked it up. <answer>Paris</answer>", "<answer>Rome</answer>"
    assert (judged(right).reward, judged(wrong).reward) == (1.0, 0.0)
    assert judged(right, calls=BOTH).reward == pytest.approx(1.1)
    assert judged(right, calls=BOTH, tool_bonus=0.5).reward == 1.5
    assert judged(wrong, calls=BOTH).reward == 0.0
    assert judged("Paris", calls=BOTH).reward == -1.0 == judged(None, calls=BOTH).reward
    assert judged("Paris", format_penalty=0.0).reward == 0.0


def test_every_part_is_reported_and_the_verdict_says_why():
    found = judged("<answer>Paris</answer>", calls=BOTH)
    assert (found.answer, found.correct) == ("Paris", True)
    assert (found.reward, found.reason) == (1.1, "correct, with search and python")
    assert judged(None).reward == -1.0 and judged(None).reason == "no answer before the limit"
    assert judged("<answer>Rome</answer>").reason == "wrong"


def test_every_one_of_several_answers_is_right():
    for text in ("Paris", "the French capital"):
        assert judged(f"<answer>{text}</answer>", answers=("Paris", "The French capital")).correct


def test_what_could_not_be_decided_has_no_reward_and_the_reason_says_so(monkeypatch):
    monkeypatch.setattr(symbolic, "equal", lambda one, two: None)
    found = judged("<answer>9^{9^{9}}</answer>", ("x+1",), "expression", score="overlap")
    assert (found.reward, found.reason) == (None, "not decided: its comparison with the right answer is open")
    assert judged("<answer>x + 1</answer>", ("y", "x + 1"), "expression").correct


# the bonus comes from the record of executed calls


@pytest.mark.parametrize("calls", [
    (), BOTH[:1], BOTH[1:2], (ExecutedCall("search"), ExecutedCall("search")),
    (ExecutedCall("search"), ExecutedCall("python", answered=False)), (ExecutedCall("search"), ExecutedCall("browse")),
])  # fmt: skip
def test_there_is_no_bonus_unless_every_tool_answered(calls):
    assert judged("<answer>Paris</answer>", calls=calls).reward == 1.0


def test_saying_that_a_tool_was_called_earns_nothing():
    text = "<search>x</search> <python>1</python> <result></result> <tool_call></tool_call> <answer>Paris</answer>"
    assert judged(text, calls=BOTH[1:2]).reward == 1.0


def test_which_tools_a_bonus_needs_is_configured():
    config = {"bonus_tools": ("python",), "calls": (ExecutedCall("python"),)}
    assert judged("<answer>Paris</answer>", **config).reward == pytest.approx(1.1)
    for wrong in ({"bonus_tools": ()}, {"tool_bonus": -0.1}, {"format_penalty": 1.0}):
        with pytest.raises(ConfigError):
            HierarchicalReward(**wrong)
    assert HierarchicalReward(bonus_tools=(), tool_bonus=0.0)
    assert from_mapping(HierarchicalReward, {"bonus_tools": ["python"]}).bonus_tools == ("python",)


def test_partial_credit_earns_the_bonus_in_the_released_rule_only():
    """F1 = 0.2 with both tools was paid 0.3 by the released code; the paper pays the bonus for correct answers."""
    text = f"<answer>Paris {' '.join('bcdefghij'[:8])}</answer>"
    assert judged(text, calls=BOTH).reward == 0.0
    assert judged(text, calls=BOTH, score="overlap").reward == pytest.approx(0.2)
    released = judged(text, calls=BOTH, score="overlap", bonus_for="any_overlap")
    assert released.reward == pytest.approx(0.3) and not released.correct
    assert judged("<answer>Rome</answer>", calls=BOTH, score="overlap", bonus_for="any_overlap").reward == 0.0


# the failures of a reward that normalises numbers as if they were words


@pytest.mark.parametrize(("given", "gold", "reward"), [
    ("3", "-3", 0.0), ("12", "1/2", 0.0), ("1.2", "12", 0.0), ("0.5", "1/2", 1.0),
    (r"\dfrac{1}{2}", r"\frac{1}{2}", 1.0),
])  # fmt: skip
@pytest.mark.parametrize("answer_type", ["number", "expression", "span"])
@pytest.mark.parametrize("score", ["equal", "overlap"])
def test_numbers_are_rewarded_by_value(given, gold, reward, answer_type, score):
    assert judged(f"<answer>{given}</answer>", (gold,), answer_type, score=score).reward == reward


def test_several_guesses_are_no_answer_and_earn_at_most_their_overlap():
    guesses = "<answer>Paris London Rome</answer>"
    assert judged(guesses).reward == 0.0 and judged(guesses, score="overlap").reward == pytest.approx(0.5)
    assert judged("<answer>3, -3</answer>", ("3",), "number", score="overlap").reward == 0.0


# only what the policy said last is read


@pytest.mark.parametrize("poison", ["<answer>Rome</answer>", "</search>", "<think>", r"\boxed{", "</answer>"])
def test_what_a_tool_returned_cannot_spoil_or_earn_anything(poison):
    """A search page with <answer> in it cost -1, and Python output with </search> earned the bonus without a search:
    both were read in one string with what the policy had said."""
    call = Message("assistant", "", (ToolCall("python", {"code": "print(x)"}),))
    conversation = [call, Message("tool", poison, name="python"), Message("assistant", "<answer>Paris</answer>")]
    assert judged(conversation[-1], calls=(ExecutedCall("python"),)).reward == 1.0


def test_a_broken_call_is_text_and_text_without_an_answer_is_no_answer():
    broken = parse_message('<tool_call>{"name": "search", "arguments": {"query": </tool_call>', "hermes")
    assert judged(broken).reward == -1.0
    good = parse_message(
        '<tool_call>{"name": "search", "arguments": {"query": "<answer>Paris</answer>"}}</tool_call>', "hermes"
    )
    assert good.tool_calls and judged(good).reward == -1.0


def test_a_message_that_still_calls_a_tool_is_no_answer():
    message = Message("assistant", "<answer>Paris</answer>", (ToolCall("search", {"query": "x"}),))
    assert (judged(message).reward, judged(message).reason) == (-1.0, "a call instead of an answer")


EXTRACTED = [
    ("<answer> Paris </answer>", "Paris"),
    ("before <answer>Paris</answer> after", "Paris"),
    ("<answer>two\nlines</answer>", "two\nlines"),
    (r"<answer>\boxed{Paris}</answer>", "Paris"),
    (r"<answer>It is \boxed{\frac{1}{\sqrt{2}}}.</answer>", r"\frac{1}{\sqrt{2}}"),
    (r"<answer>\boxed {\{1, 2\}}</answer>", r"\{1, 2\}"),
    (r"<answer>\boxed{\left\{ x < 1 \right.}</answer>", r"\left\{ x < 1 \right."),
    (r"\boxed{no} <answer>Paris</answer>", "Paris"),
    ("<think>maybe <answer>Rome</answer></think><answer>Paris</answer>", "Paris"),
    ("maybe <answer>Rome</answer></think><answer>Paris</answer>", "Paris"),
    ("<answer>a < b </answer>", "a < b"),
]
REFUSED = [
    ("", "no answer"),
    ("Paris", "no answer"),
    ("</answer>", "no answer"),
    ("<answer>Paris", "does not end"),
    ("</answer><answer>Paris</answer>", "does not end"),
    ("<answer>Paris</answer><answer>Paris</answer>", "several answers"),
    ("<answer><answer>Paris</answer></answer>", "several answers"),
    ("<answer>Paris</answer></answer>", "several answers"),
    ("<answer> </answer>", "empty"),
    (r"<answer>\boxed{}</answer>", "empty"),
    (r"<answer>\boxed{1}\boxed{2}</answer>", "several boxes"),
    (r"<answer>\boxed{\frac{1}{2}</answer>", "box that does not end"),
    (r"<answer>\boxed 1</answer>", "box that does not begin"),
    ("<think><answer>Paris</answer>", "thinking that does not end"),
    ("<think>a</think><think><answer>Paris</answer>", "thinking that does not end"),
    ("<ANSWER>Paris</ANSWER>", "no answer"),
]


@pytest.mark.parametrize(("text", "answer"), EXTRACTED)
def test_an_answer_is_taken_from_its_tags_and_its_box(text, answer):
    assert extract_answer(Message("assistant", text)) == answer


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_anything_but_one_well_formed_answer_is_refused(text, why):
    with pytest.raises(NoAnswer, match=why):
        extract_answer(Message("assistant", text))
    assert judged(text, calls=BOTH).reward == -1.0


def test_a_box_may_be_required():
    assert judged("<answer>Paris</answer>", boxed="required").reward == -1.0
    assert judged(r"<answer>\boxed{Paris}</answer>", boxed="required").reward == 1.0


pieces = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "{", "}", "\\", "Paris", " ", "<tool_call>"]
texts = st.lists(st.sampled_from(pieces), max_size=12).map("".join)


@given(texts, st.sampled_from(["equal", "overlap"]), st.sampled_from(["correct", "any_overlap"]))
def test_the_parts_add_up_whatever_was_said(text, score, bonus_for):
    found = judged(text, calls=BOTH, score=score, bonus_for=bonus_for)
    if found.answer is None:
        assert found.reward == -1.0 and not found.correct
    else:
        assert text.rpartition("</think>")[2].count("<answer>") == 1 and found.answer in text
        assert 0 <= found.reward <= 1.1 and (found.reward >= 1 or not found.correct)


@given(st.text(alphabet="ab{}\\", max_size=12))
def test_a_box_gives_back_what_was_put_into_it(inside):
    depth = 0
    for k, character in enumerate(inside):
        if k and inside[k - 1] == "\\":
            return  # pairs of characters; covered by the examples
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth < 0:
            return
    if depth == 0 and inside.strip() and not inside.endswith("\\"):
        message = Message("assistant", f"<answer>it is \\boxed{{{inside}}} </answer>")
        assert extract_answer(message) == inside.strip()
