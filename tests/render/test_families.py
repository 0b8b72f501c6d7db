"""Renderers of model families keep the laws of every renderer, and a family is chosen by how it writes."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)

import chat_templates
from chat_templates import chatml
from family_tokenizers import TOKENS, with_tokens_of
from tiny_models import CHAT_TEMPLATE, tiny_tokenizer
from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import ConfigError, InputError
from turntree.core.messages import Message, ToolCall
from turntree.core.protocols import TurnState
from turntree.render import choice
from turntree.render.choice import Choice, choose, renderer_of
from turntree.render.examine import LOOK, LOOPS, TURNS, examine
from turntree.render.families import FamilyRenderer, family
from turntree.render.probes import ASK, CALL, RESULT, SAY
from turntree.render.template import ChatRenderer
from turntree.rollout.local import Limits, that_fit
from turntree.traces.schema import Trace
from turntree.train.sft import examples

NAMES = [name for name in TOKENS if name not in ("lfm2", "gpt-oss")]  # gpt-oss: needs its own vocabulary (real ones)
ONE_CALL = {"text and a call", "calls side by side", "loop side by side"}  # what Llama 3 has no form for
REFUSED = {"llama-3": ONE_CALL}


@functools.cache
def tokenizer_of(name: str) -> Any:
    return with_tokens_of(name)


@functools.cache
def renderer_for(name: str) -> FamilyRenderer:
    return family(tokenizer_of(name), name)


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def decode(name: str, ids: Any) -> str:
    return tokenizer_of(name).decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_turns_and_loops_work_or_are_refused_by_name(name: str) -> None:
    findings = examine(renderer_for(name), tokenizer_of(name))
    assert [found.case for found in findings] == [*TURNS, *LOOPS]
    assert {found.case for found in findings if not found.works} == REFUSED.get(name, set())


words = st.text("abc dé\n'\"\\{}é", min_size=1, max_size=10).map(str.strip).filter(bool)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.sampled_from([0.5, -2.25]) | words,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    max_leaves=4,
)
arguments = st.dictionaries(st.sampled_from(["at", "so", "many"]), values, max_size=3)
thoughts = st.just("") | words
turns = st.builds(lambda text, why: replace(SAY, content=text, reasoning=why), words, thoughts) | st.builds(
    lambda given, why: Message("assistant", "", (ToolCall("look", given, "call00001"),), reasoning=why),
    arguments,
    thoughts,
)
contract = settings(max_examples=30, deadline=None)


def declared(turn: Message) -> list[dict[str, Any]]:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    given = {key: {"type": kinds.get(type(v), "null")} for call in turn.tool_calls for key, v in call.arguments.items()}
    return [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": given}}}]


@contract
@given(turn=turns, number=st.integers(0, len(NAMES) - 1))
def test_what_is_read_in_a_completion_is_what_was_said_or_it_is_refused(turn: Message, number: int) -> None:
    renderer = renderer_for(NAMES[number])
    try:
        ids = renderer.completion(turn)
    except InputError:
        assume(False)
    assert ids[-1] in renderer.stop_ids and renderer.stop_ids.isdisjoint(ids[:-1])
    read = renderer.parse(ids, declared(turn))
    assert [(c.name, json.dumps(c.arguments, sort_keys=True)) for c in read.tool_calls] == [
        (c.name, json.dumps(c.arguments, sort_keys=True)) for c in turn.tool_calls
    ]
    assert read.content.strip() == turn.content
    assert read.reasoning.strip() in ((turn.reasoning,) if renderer.thinks else ("", turn.reasoning))


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    messages = [ASK]
    for turn in draw(st.lists(turns, min_size=1, max_size=4)):
        answer = replace(RESULT, content=draw(words)) if turn.tool_calls else replace(ASK, content=draw(words))
        messages += [turn, answer]
    return messages


@contract
@given(messages=conversations(), number=st.integers(0, len(NAMES) - 1))
def test_turn_by_turn_a_conversation_has_the_tokens_of_the_whole(messages: list[Message], number: int) -> None:
    renderer = renderer_for(NAMES[number])
    try:
        whole = renderer.prompt(messages, [LOOK])
    except InputError:
        assume(False)
    ids = renderer.prompt(messages[:1], [LOOK])
    for place in range(1, len(messages), 2):
        ids += renderer.completion(messages[place])
        ids += renderer.extend(messages[: place + 1], messages[place + 1 : place + 2], [LOOK])
    assert ids == whole
    assert ids == family(tokenizer_of(NAMES[number]), NAMES[number]).prompt(messages, [LOOK]), "nothing is remembered"


def test_the_loss_covers_what_the_policy_said_and_nothing_else(name: str) -> None:
    renderer = renderer_for(name)
    messages = LOOPS["loop with reasoning"]
    (row,) = examples(Trace(id="t", messages=tuple(messages), tools=(LOOK,)), renderer)
    learned = [id for id, counts in zip(row.token_ids, row.loss_mask, strict=True) if counts]
    assert learned == [id for m in messages if m.role == "assistant" for id in renderer.completion(m)]


@pytest.mark.parametrize("name", ["qwen3", "glm-4.5", "deepseek-v3", "gemma4", "kimi-k2", "nemotron-3"])
def test_an_odd_spelling_of_a_turn_is_read_and_followed_alike(name: str) -> None:
    renderer, tokenizer = renderer_for(name), tokenizer_of(name)
    usual = renderer.completion(SAY)
    spans = [(i, j) for i in range(len(usual)) for j in range(i, len(usual) + 1)]
    begin, end = next((i, j) for i, j in spans if decode(name, usual[i:j]) == SAY.content)
    odd = (*usual[:begin], *(id for letter in SAY.content for id in tokenizer.encode(letter)), *usual[end:])
    assert odd != usual
    assert renderer.parse(odd) == renderer.parse(usual)
    assert renderer.extend([ASK, renderer.parse(odd)], [ASK]) == renderer.extend([ASK, SAY], [ASK])


def test_thoughts_stay_in_the_context_after_a_new_question() -> None:
    """Stock Qwen3 drops them in its own template; sampled tokens are never rewritten, so the policy sees them."""
    renderer = renderer_for("qwen3")
    thought = replace(SAY, reasoning="Left or right?")
    prompt = decode("qwen3", renderer.prompt([ASK, thought, ASK]))
    assert "<think>\nLeft or right?\n</think>\n\nGo left.<|im_end|>\n<|im_start|>user\n" in prompt
    assert "Left or right?" not in renderer.written([ASK, thought, ASK])


def test_a_turn_cut_inside_of_a_thought_is_closed_there() -> None:
    cut = Message("assistant", "", reasoning="Left or", cut=True)
    closed = decode("qwen3", renderer_for("qwen3").extend([ASK, cut], [ASK], stopped=False))
    assert closed.startswith("</think><|im_end|>\n<|im_start|>user\n")
    spoken = decode("qwen3", renderer_for("qwen3").extend([ASK, replace(SAY, cut=True)], [ASK], stopped=False))
    assert spoken.startswith("<|im_end|>\n<|im_start|>user\n")


def test_odd_arguments_of_a_sampled_call_are_answered_like_any(name: str) -> None:
    """Arguments that no demonstration could hold in this form, for a parser would not find them again."""
    odd = replace(
        CALL, tool_calls=(replace(CALL.tool_calls[0], arguments={"at": " </parameter></arg_value><|im_end|>"}),)
    )
    renderer = renderer_for(name)
    assert renderer.extend([ASK, odd], [RESULT]) == renderer.extend([ASK, CALL], [RESULT])


def test_a_broken_call_is_text_as_a_whole_and_not_half_of_the_calls() -> None:
    tokenizer = tokenizer_of("qwen3")
    said = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": </tool_call><|im_end|>'
    read = renderer_for("qwen3").parse(tokenizer.encode(said))
    assert read == Message("assistant", said.removesuffix("<|im_end|>"))


def test_a_broken_call_leaves_the_thought_before_it_a_thought() -> None:
    """It became content, where verifiers and environments look for the action."""
    said = "<think>\nSay 4?\n</think>\n\n<tool_call>\n{broken\n</tool_call>"
    read = renderer_for("qwen3").parse(tokenizer_of("qwen3").encode(f"{said}<|im_end|>"))
    assert read == Message("assistant", "<tool_call>\n{broken\n</tool_call>", reasoning="Say 4?")


def test_a_call_nested_too_deeply_to_be_read_from_a_log_is_text() -> None:
    said = f'<tool_call>\n{{"name": "look", "arguments": {{"at": {"[" * 99}{"]" * 99}}}}}\n</tool_call>'
    read = renderer_for("qwen3").parse(tokenizer_of("qwen3").encode(f"{said}<|im_end|>"))
    assert (read.content, read.tool_calls) == (said, ())


@pytest.mark.parametrize("given", ["glm-4.5", "glm-5", "deepseek-v4"])
def test_a_call_inside_of_a_thought_that_ends_is_not_made(given: str) -> None:
    renderer, tokenizer = renderer_for(given), tokenizer_of(given)
    call = decode(given, renderer.completion(CALL)[:-1]).rpartition("</think>")[2].strip()
    opened = "" if decode(given, renderer.prompt([ASK])).endswith("<think>") else "<think>"
    read = renderer.parse(tokenizer.encode(f"{opened}Hm: {call} no.</think>Go left.", add_special_tokens=False))
    assert (read.content.strip(), read.tool_calls) == ("Go left.", ())
    assert read.reasoning == f"Hm: {call} no."
    both = renderer.parse(tokenizer.encode(f"{opened}Hm: {call} no.</think>{call}", add_special_tokens=False))
    assert [one.name for one in both.tool_calls] == ["look"]


def test_a_call_inside_of_a_thought_is_not_made(name: str) -> None:
    """The package ends an open thought at a call, so that what a policy only thought of was executed."""
    if name == "inkling":  # whose calls are messages of their own: the next one ends a thought
        pytest.skip("a thought cannot hold a call")
    renderer, thinking = renderer_for(name), replace(SAY, reasoning="Hm, left.")
    call = decode(name, renderer.completion(CALL)[:-1]).partition("</think>")
    opening = decode(name, renderer.completion(thinking)).partition("Hm, left.")
    opened = opening[0] if opening[1] else "" if decode(name, renderer.prompt([ASK])).endswith("<think>") else "<think>"
    read = renderer.parse(tokenizer_of(name).encode(f"{opened}Hm: {call[2] or call[0]}", add_special_tokens=False))
    assert (read.content, read.tool_calls) == ("", ())
    assert read.reasoning.startswith("Hm: ") and "look" in read.reasoning


def test_the_schema_decides_whether_true_is_a_text() -> None:
    """Qwen3.5 writes arguments without quotes."""
    renderer = renderer_for("qwen3.5")
    for kind, value in (("string", "true"), ("boolean", True)):
        turn = replace(CALL, tool_calls=(ToolCall("look", {"at": value}),))
        (call,) = renderer.parse(renderer.completion(turn), declared(turn)).tool_calls
        assert call.arguments["at"] is value or call.arguments["at"] == "true", kind


def test_a_schema_may_allow_anything() -> None:
    """`true` is a schema; tools written in Go have it where any value is allowed."""
    properties = {"at": True, "on": {"type": "boolean"}}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": properties}}}
    said = "</think>\n\n<tool_call>\n<function=look>\n<parameter=at>\nmap\n</parameter>\n"
    said += "<parameter=on>\nTrue\n</parameter>\n</function>\n</tool_call><|im_end|>"
    (call,) = renderer_for("qwen3.5").parse(tokenizer_of("qwen3.5").encode(said), [tool]).tool_calls
    assert call.arguments == {"at": "map", "on": True}


OPTIONAL = (
    {"type": ["string", "null"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"enum": ["map", None]},
    {},
)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5", "minimax-m2", "nemotron-3"])
def test_a_text_is_read_where_the_schema_says_that_it_may_be_left_out(name: str) -> None:
    """`["string", "null"]` is how strict schemas write optional arguments."""
    turn = replace(CALL, tool_calls=(ToolCall("look", {"at": "map"}),))
    for schema in OPTIONAL:
        tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": schema}}}}
        (call,) = renderer_for(name).parse(renderer_for(name).completion(turn), [tool]).tool_calls
        assert call.arguments == {"at": "map"}, schema


@pytest.mark.parametrize("schema", [{"anyOf": [{"type": "boolean"}, {"type": "null"}]}, {"enum": [True, None]}])
@pytest.mark.parametrize("value", [True, None])
def test_a_constant_is_read_where_the_schema_says_so_in_any_way(schema: dict[str, Any], value: bool | None) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": schema}}}}
    turn = replace(CALL, tool_calls=(ToolCall("look", {"at": value}),))
    renderer = renderer_for("qwen3.5")
    (call,) = renderer.parse(renderer.completion(turn), [tool]).tool_calls
    assert call.arguments["at"] is value


def test_a_demonstration_that_is_read_otherwise_is_no_state_to_profile() -> None:
    """A text `null` where null may stand, too: every rollout would be worth 0."""
    schema = {"type": ["string", "null"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"at": schema}}}}
    states = [
        TurnState("t", turn, (ASK,), replace(CALL, tool_calls=(ToolCall("look", {"at": at}),)), (tool,))
        for turn, at in enumerate(("map", "null"))
    ]
    fitting, skipped = that_fit(states, renderer_for("qwen3.5"), Limits(completion=100, context=9999, path=9999))
    assert [place for place, _ in fitting] == [0]
    assert [reason.partition(":")[0] for reason in skipped.elements()] == ["renderer_error"]


def test_a_family_without_a_place_for_tools_has_them_in_the_system_message() -> None:
    prompt = decode("deepseek-v3", renderer_for("deepseek-v3").prompt([ASK], [LOOK]))
    assert '"name": "look"' in prompt.split("<｜User｜>")[0]


# choosing


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, **options: Any) -> Any:
    """A tokenizer whose chat template writes exactly as a family does."""
    renderer = family(with_tokens_of(name), name, **options)
    tokenizer = with_tokens_of(name)
    tokenizer.chat_template = "{{ messages }}"
    monkeypatch.setattr(choice, "written", lambda _, messages, tools=(): renderer.written(messages, tools))
    return tokenizer


@pytest.mark.parametrize("given", ["qwen3", "qwen3.5", "qwen3.6", "glm-4.5", "nemotron-3", "deepseek-r1", "gemma4"])
def test_the_family_that_writes_as_the_folder_does_is_chosen(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(pretend(monkeypatch, given))
    assert found.name == f"family:{given}"
    assert "look as the folder's template writes them" in found.why


def test_whether_the_template_opens_a_thought_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    found = choose(pretend(monkeypatch, "qwen3.5", enable_thinking=False))
    assert found.options == {"enable_thinking": False}


def test_a_template_of_ones_own_is_not_taken_for_a_family() -> None:
    """The name of a tokenizer and its special tokens may be Qwen's: the template decides."""
    tokenizer = with_tokens_of("qwen3", tiny_tokenizer(chatml()))
    tokenizer.name_or_path = "Qwen/Qwen3-8B"
    found = choose(tokenizer)
    assert found.name == "template"
    assert "writes otherwise: " in found.why
    assert isinstance(renderer_of(tokenizer), ChatRenderer)


def test_without_a_template_the_model_type_decides(tmp_path: Path) -> None:
    tokenizer = with_tokens_of("qwen3")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    assert choose(tokenizer, tmp_path).name == "family:qwen3"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert choose(tokenizer, tmp_path).why.endswith("name one")


def test_an_adapters_base_has_the_model_type(tmp_path: Path) -> None:
    base, adapter = tmp_path / "base@1", tmp_path / "adapter"
    for folder, file, held in (
        (base, "config.json", '{"model_type": "qwen3"}'),
        (adapter, "adapter_config.json", json.dumps({"base_model_name_or_path": str(base)})),
    ):
        folder.mkdir()
        (folder / file).write_text(held)
    assert choose(with_tokens_of("qwen3"), adapter).name == "family:qwen3"
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/has-this"}')
    assert choose(with_tokens_of("qwen3"), adapter).why.endswith("name one")


def test_several_templates_are_not_none() -> None:
    """A folder with one for talks and one for tools (Hermes 3) was served in the form of a family that it is not of."""
    tokenizer = with_tokens_of("llama-3", chat_templates.tokenizer_of(chatml()))
    tokenizer.chat_template = {"default": CHAT_TEMPLATE, "tool_use": chatml()}
    found = choose(tokenizer)
    assert (found.name, found.why[:8]) == ("template", "the near")


def test_embedded_policies_keep_their_template() -> None:
    found = choose(tiny_tokenizer())
    assert found == Choice("template", "no family of the package `renderers` has these special tokens")


def test_unknown_families_options_and_foreign_tokenizers_end_in_one_line() -> None:
    with pytest.raises(ConfigError, match=r"'family' names no model family; family:NAME with one of"):
        parts.build("renderers", Part("family"), tokenizer=tiny_tokenizer(), folder=None)
    with pytest.raises(ConfigError, match=r"'qwen9' is not a model family.*family:NAME with one of qwen3, "):
        family(tokenizer_of("qwen3"), "qwen9")
    with pytest.raises(ConfigError, match=r"renderer.loud.*qwen3 has no option 'loud'; the family has enable_thinking"):
        family(tokenizer_of("qwen3"), "qwen3", loud=True)
    with pytest.raises(InputError, match=r"the tokenizer cannot be that of glm-5 .*not found in tokenizer vocabulary"):
        family(tokenizer_of("qwen3"), "glm-5")


def test_kimis_results_without_an_id_answer_the_calls_in_their_order() -> None:
    calls = Message("assistant", "", tuple(ToolCall("look", {"at": at}) for at in ("map", "sky")))
    said = [ASK, calls, Message("tool", "A map."), Message("tool", "A sky.")]
    text = decode("kimi-k2", renderer_for("kimi-k2").prompt(said, [LOOK]))
    assert "functions.look:0\nA map." in text and "functions.look:1\nA sky." in text


@pytest.mark.parametrize("name", ["qwen3-vl", "minimax-m2"])
def test_a_message_that_the_family_leaves_out_is_refused(name: str) -> None:
    brief = [Message("system", "Be brief."), Message("system", "Be kind.")]
    with pytest.raises(InputError, match="leaves out message 1"):
        renderer_for(name).prompt([*brief, ASK])


def test_white_space_after_a_turn_is_that_of_the_family() -> None:
    renderer = renderer_for("laguna-xs.2")
    prompt = renderer.prompt([ASK, SAY, ASK])
    assert decode("laguna-xs.2", prompt) == renderer.written([ASK, SAY, ASK])


@pytest.mark.parametrize("given", ["qwen3", "glm-4.5", "deepseek-v3"])
def test_what_is_said_behind_a_call_is_kept_and_a_call_that_was_not_opened_makes_the_turn_text(given: str) -> None:
    """The package drops both."""
    renderer, tokenizer = renderer_for(given), tokenizer_of(given)
    call = decode(given, [id for id in renderer.completion(CALL) if id not in renderer.stop_ids])
    read = renderer.parse(tokenizer.encode(f"{call}\nThen I go.", add_special_tokens=False))
    assert read.content.endswith("Then I go.") and [one.name for one in read.tool_calls] == ["look"]
    end = renderer._call_end
    assert end and call.rstrip().endswith(end)
    broken = renderer.parse(tokenizer.encode(f"{call}\n{{...}}\n{end}", add_special_tokens=False))
    assert broken.tool_calls == () and end in broken.content


def test_a_call_of_a_later_thought_is_not_made() -> None:
    renderer, tokenizer = renderer_for("qwen3"), tokenizer_of("qwen3")
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    read = renderer.parse(tokenizer.encode(f"First. <think>Or {call}</think> Go.<|im_end|>"))
    assert read.tool_calls == ()
