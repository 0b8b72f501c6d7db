"""What every renderer promises: turn by turn, a conversation has the tokens that it has as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import chat_templates as templates
from chat_templates import LOOK, said, system, tokenizer_of, user, whole
from doors.parts_of_ones_own import MODULES
from tiny_models import CHAT_TEMPLATE
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import Renderer
from turntree.render.template import ChatRenderer

OWN: dict[str, Any] = {}
exec(MODULES["door_words"], OWN)


@dataclass(frozen=True)
class Case:
    """A renderer, and the chat template that writes what it writes."""

    template: str
    make: Callable[..., Renderer] = ChatRenderer

    def build(self) -> Renderer:
        return self.make(tokenizer_of(self.template))


CASES = {
    "plain": Case(CHAT_TEMPLATE),
    "chatml": Case(templates.chatml()),
    "numbered": Case(templates.NUMBERED),
    "named results": Case(templates.NAMED_RESULTS),
    "json calls": Case(templates.JSON_CALLS),
    "of one's own": Case(CHAT_TEMPLATE, OWN["Marked"]),
}


@functools.cache
def renderer_of(case: Case) -> Renderer:
    return case.build()


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture
def renderer(case: Case) -> Renderer:
    return renderer_of(case)


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|{"), min_size=1, max_size=12)
words = text.map(str.strip).filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(text, inner, max_size=2),
    max_leaves=4,
)
calls = st.builds(ToolCall, words, st.dictionaries(text, values, max_size=2))
spoken = st.builds(said, text)
calling = st.builds(lambda call: said("", call), calls)
rounds = st.one_of(
    st.tuples(spoken, st.builds(user, text)).map(list),
    st.tuples(calling, st.builds(templates.result, text)).map(list),
    st.tuples(spoken).map(list),
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """A task, then rounds of any sort; sometimes a system message before, sometimes two results in a row."""
    messages = [draw(st.builds(system, text))] if draw(st.booleans()) else []
    messages += [draw(st.builds(user, text))]
    for part in draw(st.lists(rounds, min_size=1, max_size=4)):
        messages += part
        if part[-1].role == "tool" and draw(st.booleans()):
            messages.append(draw(st.builds(templates.result, text)))
    return messages


tools = st.sampled_from([(), (LOOK,)])
contract = settings(max_examples=40, deadline=None)


def turns(messages: list[Message]) -> list[int]:
    return [index for index, message in enumerate(messages) if message.role == "assistant"]


def renders_tools(template: str) -> bool:
    return "tools" in template


@contract
@given(messages=conversations(), tools=tools)
def test_a_turn_and_what_follows_it_extend_the_prompt(messages: list[Message], tools: tuple[dict, ...]) -> None:
    for case in CASES.values():
        renderer = renderer_of(case)
        given = tools if renders_tools(case.template) else ()
        for turn in turns(messages):
            before = renderer.prompt(messages[:turn], given)
            turn_ids = renderer.completion(messages[turn])
            after = renderer.extend(messages[: turn + 1], messages[turn + 1 : turn + 2], given)
            assert before + turn_ids + after == renderer.prompt(messages[: turn + 2], given)


@contract
@given(messages=conversations(), tools=tools)
def test_the_tokens_spell_what_the_template_writes(messages: list[Message], tools: tuple[dict, ...]) -> None:
    for case in CASES.values():
        given = tools if renders_tools(case.template) else ()
        tokenizer = tokenizer_of(case.template)
        ids = renderer_of(case).prompt(messages, given)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == whole(tokenizer, messages, list(given))


@contract
@given(messages=conversations())
def test_any_cut_of_a_conversation_extends_to_the_whole(messages: list[Message]) -> None:
    """Not one message at a time only: an extension may hold later turns, too."""
    for case in CASES.values():
        renderer = renderer_of(case)
        for turn in turns(messages):
            start = renderer.prompt(messages[:turn]) + renderer.completion(messages[turn])
            assert start + renderer.extend(messages[: turn + 1], messages[turn + 1 :]) == renderer.prompt(messages)


@contract
@given(messages=conversations())
def test_what_was_rendered_before_changes_nothing(messages: list[Message]) -> None:
    for case in CASES.values():
        assert case.build().prompt(messages) == renderer_of(case).prompt(messages)


@contract
@given(message=spoken | calling)
def test_parsing_a_completion_gives_the_message_back(message: Message) -> None:
    for case in CASES.values():
        renderer = renderer_of(case)
        assert renderer.parse(renderer.completion(message)) == message


@contract
@given(message=spoken | calling)
def test_a_completion_ends_with_its_only_stop_token(message: Message) -> None:
    for case in CASES.values():
        renderer = renderer_of(case)
        *ids, last = renderer.completion(message)
        assert last in renderer.stop_ids
        assert renderer.stop_ids.isdisjoint(ids)


def test_a_turn_that_was_cut_is_closed_first(renderer: Renderer) -> None:
    history = [user("Which way?"), said("Go left.")]
    stopped = renderer.extend(history, [user("Done.")])
    stop = renderer.completion(history[-1])[-1]
    assert renderer.extend(history, [user("Done.")], stopped=False) == (stop, *stopped)


def test_a_call_that_was_cut_is_closed_as_calls_are(renderer: Renderer) -> None:
    history = [user("Which way?"), said("", ToolCall("look", {"at": "map"}))]
    stopped = renderer.extend(history, [templates.result("A map.")])
    stop = renderer.completion(history[-1])[-1]
    assert renderer.extend(history, [templates.result("A map.")], stopped=False) == (stop, *stopped)


def test_an_odd_spelling_of_a_turn_is_followed_by_the_same_tokens(renderer: Renderer, case: Case) -> None:
    """What follows depends on what was said, not on how it was tokenised: sampled tokens are never tokenised again."""
    history = [user("Which way?"), said("Go left.")]
    usual = renderer.completion(history[-1])
    odd = (*(id for letter in "Go left." for id in tokenizer_of(case.template).encode(letter)), usual[-1])
    assert odd != usual
    assert renderer.parse(odd) == renderer.parse(usual) == history[-1]
    assert renderer.extend([history[0], renderer.parse(odd)], [user("Done.")]) == renderer.extend(
        history, [user("Done.")]
    )


@pytest.mark.parametrize(
    "garbage",
    ["", "<tool_call>", "<tool_call>{</tool_call>", "</tool_call><tool_call>", '{"name": "look"', "[" * 5000, "\ufffd"],
)
def test_any_tokens_parse(renderer: Renderer, garbage: str, case: Case) -> None:
    ids = tokenizer_of(case.template).encode(garbage)
    for sampled in (ids, [*ids, min(renderer.stop_ids)]):
        assert renderer.parse(sampled) == Message("assistant", garbage)


@contract
@given(ids=st.lists(st.integers(0, 383), max_size=20))
def test_random_tokens_parse(ids: list[int]) -> None:
    for case in CASES.values():
        assert renderer_of(case).parse(ids).role == "assistant"


@pytest.mark.parametrize("call", ["prompt", "completion", "extend"])
def test_what_nobody_could_have_sampled_is_refused(renderer: Renderer, call: str) -> None:
    actions: dict[str, Callable[[], object]] = {
        "prompt": lambda: renderer.prompt([said("I begin.")]),
        "completion": lambda: renderer.completion(user("I am not the policy.")),
        "extend": lambda: renderer.extend([user("Which way?")], [user("Hello?")]),
    }
    with pytest.raises(InputError, match=r"assistant|completion"):
        actions[call]()
