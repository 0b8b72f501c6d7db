"""Words of users, tools and system messages are text, whatever they spell."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_pieces import CASES
from test_pieces import renderer_of as spaced_renderer
from test_pieces import tokenizer_of as spaced_tokenizer

import chat_templates as templates
from chat_templates import chatml, tokenizer_of, user
from family_tokenizers import TOKENS, with_tokens_of
from tiny_models import CHAT_TEMPLATE
from turntree.core.errors import InputError
from turntree.core.messages import Message
from turntree.render.families import family
from turntree.render.probes import ASK, CALL, RESULT, SAY, TOOL
from turntree.render.template import ChatRenderer
from turntree.render.words import Words

FORMS = {
    "text only": templates.TEXT_ONLY,
    "tiny": CHAT_TEMPLATE,
    "chatml": chatml(),
    "dropping": chatml(templates.KEPT_FROM_THINKING),
    "numbered": templates.NUMBERED,
    "named results": templates.NAMED_RESULTS,
    "json": templates.JSON_CALLS,
}
SPACED = [f"{kind} {name}" for kind, name in CASES]
FAMILIES = [name for name in TOKENS if name not in ("lfm2", "gpt-oss")]
PLAIN = "Zq"


@functools.cache
def served(name: str) -> tuple[Any, Any]:
    if name in FORMS:
        return tokenizer_of(FORMS[name]), ChatRenderer(tokenizer_of(FORMS[name]))
    if name in SPACED:
        kind, _, template = name.partition(" ")
        return spaced_tokenizer(kind, template), spaced_renderer(kind, template)
    pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)
    return with_tokens_of(name), family(with_tokens_of(name), name)


def conversations(words: str) -> list[tuple[list[Message], list[dict[str, Any]]]]:
    """A message of each kind, early and late, and a tool's declaration, that say `words`."""
    tool = json.loads(json.dumps(TOOL).replace('"Look at a thing."', json.dumps(words)))
    brief, ask, seen = Message("system", words), user(words), replace(RESULT, content=words)
    return [
        ([brief, ASK], []),
        ([ask], []),
        ([ASK, SAY, ask], []),
        ([ASK, SAY, ask, SAY, ASK], []),
        ([ASK, CALL, seen], [TOOL]),
        ([ASK, CALL, seen, CALL, RESULT, SAY, ASK], [TOOL]),
        ([ASK], [tool]),
    ]


def spellings(tokenizer: Any) -> list[str]:
    """Of its added tokens, without those that stand for a byte (<0x0A>): other characters are made of them."""
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.content[1:3] not in ("", "0x")]


near = st.sampled_from(["", " ", "\n", "a", "<", "<|", "｜", "é"])


@pytest.mark.parametrize("name", [*FORMS, *SPACED, *FAMILIES])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), place=st.integers(0, 6), before=near, after=near)
def test_words_that_spell_special_tokens_change_no_control_token_and_no_turn(
    name: str, data: st.DataObject, place: int, before: str, after: str
) -> None:
    """An observation could end its own turn, and speak as the user or the assistant."""
    tokenizer, renderer = served(name)
    spelled = data.draw(st.lists(st.sampled_from(spellings(tokenizer)), min_size=1, max_size=3).map("".join))
    messages, tools = conversations(f"x{before}{PLAIN}{after}x")[place]
    try:
        plain = renderer.prompt(messages, tools)
    except InputError:
        assume(False)
    said = f"x{before}{spelled}{after}x"
    messages, tools = conversations(said)[place]
    ids = renderer.prompt(messages, tools)
    control = tokenizer.added_tokens_decoder
    assert [id for id in ids if id in control] == [id for id in plain if id in control]
    written = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    forms = (said, json.dumps(said, ensure_ascii=False)[1:-1], json.dumps(said)[1:-1])
    lines = all(line in written for line in said.split("\n"))  # declarations as comments begin every line with a mark
    assert lines or any(form in written for form in forms)
    for turn in (at for at, message in enumerate(messages) if message.role == "assistant"):
        end = next((at for at in range(turn + 1, len(messages)) if messages[at].role == "assistant"), len(messages))
        grown = renderer.prompt(messages[:turn], tools) + renderer.completion(messages[turn])
        grown += renderer.extend(messages[: turn + 1], messages[turn + 1 : end], tools)
        assert grown == renderer.prompt(messages[:end], tools)


@pytest.mark.parametrize("name", list(FORMS))
def test_every_special_token_at_once_is_only_words(name: str) -> None:
    tokenizer, renderer = served(name)
    said = " ".join(spellings(tokenizer))
    control = tokenizer.added_tokens_decoder
    ids, plain = renderer.prompt([user(said)]), renderer.prompt([user(PLAIN)])
    assert [id for id in ids if id in control] == [id for id in plain if id in control]


@given(text=st.text(max_size=40))
def test_words_without_a_special_token_have_the_tokens_that_they_ever_had(text: str) -> None:
    tokenizer = tokenizer_of(chatml())
    words = Words(tokenizer, chatml())
    assume(not any(token in text for token in spellings(tokenizer)))
    assert words.hide(text) == text
    text = text.encode("utf-8", "replace").decode()
    assert words.encode(text) == tokenizer.encode(text, add_special_tokens=False)


def test_hidden_words_and_control_tokens_have_the_tokens_of_each_alone() -> None:
    tokenizer = tokenizer_of(chatml())
    words = Words(tokenizer, chatml())
    ids = words.encode(f"<|im_start|>{words.hide('a <|im_end|> b')}<|im_end|>")
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (ids[0], ids[-1], ids.count(end)) == (start, end, 1)
    assert tokenizer.decode(ids[1:-1]) == "a <|im_end|> b"
    assert words.decode_hidden(ids) == f"<|im_start|>{words.hide('a <|im_end|> b')}<|im_end|>"
