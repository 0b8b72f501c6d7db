"""Thoughts of earlier turns as the model's own template has them: the prompt of a history is then that template's own
rendering of it, turn by turn and as a whole, in sampling and for a trace."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)

from chat_templates import chatml
from family_tokenizers import with_tokens_of
from tiny_models import tiny_tokenizer
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.render.examine import LOOK
from turntree.render.families import FamilyRenderer, family
from turntree.render.probes import ASK, CALL, RESULT, SAY
from turntree.render.template import ChatRenderer
from turntree.render.thoughts import Thoughts, TurnByTurn
from turntree.rollout.local import Limits, that_fit
from turntree.stages.policy import identity_of
from turntree.traces.schema import Trace
from turntree.train.sft import examples

DROPPING = ["qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "glm-5", "gemma4", "minimax-m2", "nemotron-3"]  # at a question
NAMES = [*DROPPING, "deepseek-r1", "qwen3.8", "glm-5.3", "laguna-s-2.1", "deepseek-v3", "qwen3-vl"]
FORGETFUL = chatml(  # a template of one's own that drops thoughts as Qwen3 does
    "((('<think>\n' + message.reasoning_content + '\n</think>\n\n') if message.reasoning_content is defined and "
    "(messages[loop.index0 + 1 :] | selectattr('role', 'equalto', 'user') | list == []) else '') + message.content)"
)


@functools.cache
def renderer_for(name: str, thoughts: Thoughts = "model") -> FamilyRenderer:
    return family(with_tokens_of(name), name, thoughts=thoughts)


@functools.cache
def forgetful(thoughts: Thoughts = "model") -> ChatRenderer:
    return ChatRenderer(with_tokens_of("qwen3", tiny_tokenizer(FORGETFUL)), thoughts=thoughts)


def made(name: str, thoughts: Thoughts = "model") -> TurnByTurn:
    return forgetful(thoughts) if name == "a template" else renderer_for(name, thoughts)


words = st.text("abc dé'", min_size=1, max_size=8).map(str.strip).filter(bool)
thoughts_said = st.just("") | words


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Questions, tool loops of one or two calls a turn, and questions after them; thoughts in some turns."""
    messages = [Message("system", "Be brief."), ASK] if draw(st.booleans()) else [ASK]
    for count in draw(st.lists(st.sampled_from([0, 0, 1, 1, 2]), min_size=1, max_size=5)):
        calls = tuple(ToolCall("look", {"at": draw(words)}, f"call{len(messages)}{i:04}") for i in range(count))
        text = draw(words) if not count else ""
        messages.append(Message("assistant", text, calls, reasoning=draw(thoughts_said)))
        for call in calls:
            messages.append(replace(RESULT, content=draw(words), tool_call_id=call.id))
        if not calls:
            messages.append(replace(ASK, content=draw(words)))
    return messages


def turn_by_turn(renderer: TurnByTurn, messages: list[Message]) -> list[tuple[int, ...]]:
    """The prompts that sampling these messages sees."""
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    prompts = [renderer.prompt(messages[: turns[0]], [LOOK])]
    for place, end in zip(turns, [*turns[1:], len(messages)], strict=True):
        said, new = messages[: place + 1], messages[place + 1 : end]
        ids = prompts[-1] + renderer.completion(messages[place])
        rewritten = renderer.rewritten(said, new, [LOOK])
        prompts.append(ids + renderer.extend(said, new, [LOOK]) if rewritten is None else rewritten)
    return prompts


@pytest.mark.parametrize("name", [*NAMES, "a template"])
@settings(max_examples=12, deadline=None)
@given(messages=conversations())
def test_every_prompt_of_sampling_is_the_models_own_rendering_and_that_of_a_trace(
    name: str, messages: list[Message]
) -> None:
    renderer = made(name)
    try:
        prompts = turn_by_turn(renderer, messages)
    except InputError:
        assume(False)
    ends = [place for place, message in enumerate(messages) if message.role == "assistant"]
    for end, prompt in zip([*ends, len(messages)], prompts, strict=True):
        assert prompt == renderer.prompt(messages[:end], [LOOK]), "what a trace's state is"
        assert prompt == renderer.whole(messages[:end], [LOOK]), "what the model is served with"


@pytest.mark.parametrize("name", [*DROPPING, "a template"])
def test_a_question_drops_the_thoughts_before_it_and_a_result_does_not(name: str) -> None:
    renderer = made(name)
    call, say = replace(CALL, reasoning="First thought."), replace(SAY, reasoning="Second thought.")
    assert renderer.rewritten([ASK, call], [RESULT], [LOOK]) is None
    assert renderer.rewritten([ASK, call, RESULT, call], [RESULT], [LOOK]) is None
    assert renderer.rewritten([ASK, call, RESULT, say], [ASK], [LOOK]) is not None
    after = renderer.written([ASK, call, RESULT, say, ASK, call, RESULT], [LOOK])
    assert "Second" not in after and after.count("First thought.") == 1, "that of the running loop"
    with pytest.raises(InputError, match="the context is rewritten here"):
        renderer.extend([ASK, say], [ASK])
    kept = made(name, "keep")
    assert kept.rewritten([ASK, call, RESULT, say], [ASK], [LOOK]) is None
    assert kept.extend([ASK, say], [ASK])


def test_a_model_that_drops_every_thought_drops_it_at_a_result_too() -> None:
    assert renderer_for("deepseek-r1").rewritten([ASK, replace(CALL, reasoning="Hm.")], [RESULT], [LOOK]) is not None


def test_a_model_that_keeps_thoughts_is_never_rewritten() -> None:
    never = [name for name in NAMES if not renderer_for(name).rewrites]
    assert never == ["qwen3.8", "glm-5.3", "laguna-s-2.1", "deepseek-v3", "qwen3-vl"]
    assert not renderer_for("qwen3", "keep").rewrites and forgetful().rewrites and not forgetful("keep").rewrites


def test_a_state_of_a_trace_is_profiled_in_the_context_of_sampling() -> None:
    renderer, thought = renderer_for("qwen3"), replace(SAY, reasoning="Left or right?")
    state = TurnState("t", 1, (ASK, thought, ASK), SAY)
    (((_, fitting),), _) = that_fit([state], renderer, Limits(64, context=4096, path=4096))
    assert fitting.prompt_ids == renderer.whole([ASK, thought, ASK])
    assert len(fitting.prompt_ids) < len(renderer_for("qwen3", "keep").prompt([ASK, thought, ASK]))


def test_fine_tuning_learns_every_turn_once_in_the_context_in_which_it_would_be_sampled() -> None:
    renderer, thought = renderer_for("qwen3"), replace(SAY, reasoning="Left or right?")
    call = replace(CALL, reasoning="A map.")
    messages = (ASK, call, RESULT, thought, ASK, thought, ASK, SAY)
    rows = examples(Trace(id="t", messages=messages, tools=(LOOK,)), renderer)
    learned = [[id for id, counts in zip(row.token_ids, row.loss_mask, strict=True) if counts] for row in rows]
    said = renderer.completion
    assert learned == [[*said(call), *said(thought)], [*said(thought)], [*said(SAY)]]
    assert rows[1].token_ids == (*renderer.whole(messages[:5], [LOOK]), *said(thought))
    (whole,) = examples(Trace(id="t", messages=messages, tools=(LOOK,)), renderer_for("qwen3", "keep"))
    assert sum(whole.loss_mask) == sum(map(len, learned))


def test_the_setting_is_an_option_of_every_renderer_and_part_of_the_policys_identity() -> None:
    tokenizer = with_tokens_of("qwen3", tiny_tokenizer(FORGETFUL))
    identities = set[str]()
    for setting in ("keep", "model"):
        part = Part("auto", {"thoughts": setting})
        renderer = parts.build("renderers", part, tokenizer=tokenizer, folder=None)
        assert renderer.rewrites == (setting == "model")
        identities.add(identity_of("weights", tokenizer, renderer, part)["renderer"])
    assert len(identities) == 2
    named: Any = parts.build("renderers", Part("family:qwen3", {"thoughts": "model"}), tokenizer=tokenizer)
    assert named.rewrites and named.described.endswith("thoughts model")
    with pytest.raises(ConfigError, match="thoughts"):
        parts.build("renderers", Part("auto", {"thoughts": "drop"}), tokenizer=tokenizer, folder=None)
