"""Tokenizers that write a space before any text: a conversation in pieces has the tokens of the whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from chat_templates import said, user, whole
from tiny_models import SENTENCES, tiny_tokenizer
from turntree.core.errors import InputError
from turntree.render.examine import TALK, TURNS, examine
from turntree.render.template import ChatRenderer
from turntree.render.words import Words

ZEPHYR = (
    "{% for message in messages %}{{ '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# no generation prompt: what is said follows the question at once
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('odd') }}{% endif %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + eos_token}}{% endif %}{% endfor %}"
)
TEMPLATES = {"zephyr": ZEPHYR, "mistral": MISTRAL, "mistral v3": MISTRAL.replace("' [/INST]'", "'[/INST]'")}
CASES = [(kind, name) for kind in ("first", "always", "legacy") for name in TEMPLATES]
TEMPLATES["joined"] = ZEPHYR.replace("|>\n", "|> ")
ALPHABET = "▁abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?.,:{}[]\"'0123456789\n|<>/_"


@functools.cache
def tokenizer_of(kind: str, name: str) -> Any:
    """In the manner of Llama 2, Zephyr and Mistral. `kind` says where a space is put: before the first text, before
    each between special tokens, or the same by a normalizer, as converted tokenizers do."""
    special = ["[INST]", "[/INST]"] if name == "mistral v3" else []
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    put = pre_tokenizers.Metaspace(prepend_scheme="always" if kind == "always" else "first", split=False)
    tokenizer.pre_tokenizer = put
    joined = ["<|assistant|> Go left."] * 50 if name == "joined" else []
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *special],
        initial_alphabet=list(ALPHABET),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*SENTENCES, *["Which way? Go left. user assistant system"] * 20, *joined], trainer)
    if kind == "legacy":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.add_special_tokens({"additional_special_tokens": special})
    fast.chat_template = TEMPLATES[name]
    return fast


@functools.cache
def renderer_of(kind: str, name: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(kind, name))


words = st.text("aGhowé 日.", min_size=1, max_size=12).map(str.strip).filter(bool)


@settings(max_examples=30, deadline=None)
@given(texts=st.lists(words, min_size=3, max_size=3))
@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_pieces_have_the_tokens_of_the_templates_own_rendering(kind: str, name: str, texts: list[str]) -> None:
    tokenizer, renderer = tokenizer_of(kind, name), renderer_of(kind, name)
    messages = [user(texts[0]), said(texts[1]), user(texts[2])]
    own = tuple(tokenizer.encode(whole(tokenizer, messages), add_special_tokens=False))
    spoken = renderer.completion(messages[1])
    assert renderer.prompt(messages) == own
    assert renderer.prompt(messages[:1]) + spoken + renderer.extend(messages[:2], messages[2:]) == own
    assert renderer.parse(spoken) == messages[1]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_what_is_said_does_not_begin_with_a_stray_token(kind: str, name: str) -> None:
    """A turn that begins with what the tokenizer would join with the prompt's end has no tokens of the prompt."""
    renderer = renderer_of(kind, name)
    for text in ("Go left.", "  Go left.", "\n\nGo left.\n", "日本"):
        assert renderer.parse(renderer.completion(said(text))) == said(text)
    first = tokenizer_of(kind, name).convert_ids_to_tokens(renderer.completion(said("Go left."))[0])
    assert name != "zephyr" or not first.startswith("▁")


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_the_check_of_a_model_finds_nothing_to_remark(kind: str, name: str) -> None:
    """It used to say that thoughts stay, where a tokenizer's spaces differed."""
    found = {finding.case: finding for finding in examine(renderer_of(kind, name), tokenizer_of(kind, name))}
    assert (found[TALK].works, found[TALK].said) == (True, "")
    assert found[next(iter(TURNS))].works


def test_a_prompt_that_cannot_be_kept_apart_from_the_turn_is_refused() -> None:
    with pytest.raises(InputError, match=r"joins the end of a prompt and the start of a turn.*special token or a line"):
        renderer_of("first", "joined")


def test_byte_level_tokenizers_encode_pieces_alone() -> None:
    pieces = Words(tiny_tokenizer(), "")
    assert not pieces.spaced
    assert pieces.encode("Go left.", after="Which way?") == pieces.encode("Go left.")
