"""Real tokenizers and chat templates: what works and what is refused, as docs/results/renderers.md has it.

`make test-renderers` fetches them (tests/fetch_tokenizers.py), names their folder in TURNTREE_TOKENIZERS and writes the
table anew. Without that folder nothing here can run.
"""

from __future__ import annotations

import contextlib
import functools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from family_tokenizers import with_tokens_of
from turntree.core.errors import InputError
from turntree.core.protocols import Renderer
from turntree.render.choice import Choice, choose, written
from turntree.render.examine import LOOK, LOOP, LOOPS, TALK, TURNS, Finding, examine
from turntree.render.families import FAMILIES
from turntree.render.probes import ASK, SAY
from turntree.traces.schema import Trace
from turntree.train.sft import examples

if not os.environ.get("TURNTREE_TOKENIZERS"):
    pytest.skip("needs real tokenizers: make test-renderers", allow_module_level=True)
pytest.importorskip("renderers", reason="needs the extra turntree[renderers]", exc_type=ImportError)

FOLDER = Path(os.environ["TURNTREE_TOKENIZERS"])
TABLE = Path(__file__).parents[2] / "docs" / "results" / "renderers.md"


@dataclass(frozen=True)
class Row:
    """`vocabulary`: a fetched tokenizer, its own unless `tokens` of a family were added. `template`: None is that of
    the tokenizer, a name a file of the package trl (`begun`: its generation prompt begins a thought), and `family:NAME`
    none at all: the family is named by hand."""

    model: str
    vocabulary: str
    template: str | None = None
    tokens: str | None = None


NAMED = [  # in the issue that asked for this table
    Row("Qwen3.5, thinking", "qwen3_6", "qwen3_5_think"),
    Row("Qwen3.5, not thinking", "qwen3_6", "qwen3_5_nothink"),
    Row("Qwen3.6", "qwen3_6", "qwen3_6"),
    Row("GLM-4-MoE", "qwen3", "glm4moe", "glm-4.5"),
    Row("gpt-oss", "gptoss", "gptoss"),
    Row("LFM2", "qwen3", "lfm2_v2", "lfm2"),
    Row("DeepSeek-V3", "deepseek_v3"),
    Row("Nemotron-3 Nano", "qwen3", "nemotron_3_nano", "nemotron-3"),
    Row("Qwen3", "qwen3"),
    Row("Qwen3-Thinking-2507", "qwen3", "qwen3 begun"),
]
OTHERS = [
    Row("Qwen3, patched for training", "qwen3", "qwen3_training"),
    Row("Qwen3-Instruct-2507", "qwen3", "qwen3_instruct_2507"),
    Row("Qwen3-VL", "qwen3", "qwen3_vl", "qwen3-vl"),
    Row("Qwen2.5", "qwen3", "qwen2_5"),
    Row("Qwen3.8", "qwen3_6", "qwen3_8"),
    Row("LFM2, first template", "qwen3", "lfm2", "lfm2"),
    Row("LFM2.5", "qwen3", "lfm2_2_5_v2", "lfm2"),
    Row("DeepSeek-R1", "deepseek_v3", "deepseekv3"),
    Row("DeepSeek-V4", "deepseek_v3", "family:deepseek-v4", "deepseek-v4"),
    Row("Nemotron-3 Ultra", "qwen3", "nemotron_3_ultra", "nemotron-3"),
    Row("Nemotron-3.5", "qwen3", "nemotron_3_5_lightning", "nemotron-3"),
    Row("gpt-oss without a template", "gptoss"),
    Row("Llama 3.1", "llama3_1", "llama3_1"),
    Row("Llama 3.2", "llama3_1", "llama3_2", "llama-3"),
    Row("Gemma 3", "gemma3"),
    Row("Gemma 4", "gemma3", "gemma4_v5", "gemma4"),
    Row("GLM-5", "qwen3", "family:glm-5", "glm-5"),
    Row("Kimi K2", "qwen3", "family:kimi-k2", "kimi-k2"),
    Row("Kimi K2.5", "qwen3", "family:kimi-k2.5", "kimi-k2.5"),
    Row("MiniMax-M2", "qwen3", "family:minimax-m2", "minimax-m2"),
    Row("Laguna XS.2", "qwen3", "family:laguna-xs.2", "laguna-xs.2"),
    Row("Inkling", "qwen3", "family:inkling", "inkling"),
]
ROWS = [*NAMED, *OTHERS]
# What the form of a family has no way to say: a gpt-oss turn ends with its first call, and a Llama 3 turn is one call.
REFUSED = {
    "gpt-oss": {"calls side by side", "loop side by side"},
    "gpt-oss without a template": {"calls side by side", "loop side by side"},
    "Llama 3.1": {"text and a call", "calls side by side", "loop side by side"},
    "Llama 3.2": {"text and a call", "calls side by side", "loop side by side"},
}


def tokenizer_of(row: Row) -> Any:
    folder = FOLDER / row.vocabulary
    folder = folder / "package" / "models" if (folder / "package").exists() else folder
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if row.tokens is not None:
        tokenizer = with_tokens_of(row.tokens, tokenizer)
    if row.template is not None and not row.template.startswith("family:"):
        name, begun, _ = row.template.partition(" begun")
        text = (FOLDER / "trl" / "trl" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
        if begun:
            head, opening, _ = text.rpartition("{{- '<|im_start|>assistant\\n' }}")
            assert opening
            text = head + "{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"
        tokenizer.chat_template = text
    elif row.template is not None:
        tokenizer.chat_template = None
    return tokenizer


@functools.cache
def served(row: Row) -> tuple[Any, Choice, Renderer]:
    tokenizer = tokenizer_of(row)
    named = row.template is not None and row.template.startswith("family:")
    found = Choice(str(row.template), "named") if named else choose(tokenizer)
    return tokenizer, found, found.build(tokenizer)


@functools.cache
def findings(row: Row) -> dict[str, Finding]:
    tokenizer, _, renderer = served(row)
    return {found.case: found for found in examine(renderer, tokenizer)}


@pytest.mark.parametrize("row", NAMED, ids=lambda row: row.model)
def test_the_named_families_speak_call_think_and_play_three_turns(row: Row) -> None:
    works = {case for case, found in findings(row).items() if found.works}
    assert works == {*TURNS, *LOOPS} - REFUSED.get(row.model, set())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_a_talk_works_and_what_does_not_has_a_reason(row: Row) -> None:
    assert findings(row)[TALK].works
    for found in findings(row).values():
        assert found.works or len(found.said) > 20


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_what_any_renderer_takes_with_the_templates_own_prompts_the_default_takes(row: Row) -> None:
    """Qwen3-Thinking-2507 was refused by the template's renderer, the default, and taken by others."""
    tokenizer, _, _ = served(row)
    refused = {case for case, found in findings(row).items() if not found.works}
    if not tokenizer.chat_template or not refused:
        return
    marked = [name for name, of in FAMILIES.items() if all(mark in tokenizer.get_vocab() for mark in of.marks)]
    for name in ("template", *(f"family:{name}" for name in marked)):
        with contextlib.suppress(InputError):
            other: Any = Choice(name, "").build(tokenizer)
            if all(other.written(messages) == written(tokenizer, messages) for messages in ([ASK], [ASK, SAY, ASK])):
                assert not refused & {found.case for found in examine(other, tokenizer) if found.works}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_the_loss_covers_what_the_policy_said_and_nothing_else(row: Row) -> None:
    _, _, renderer = served(row)
    name = LOOP if findings(row)[LOOP].works else TALK
    messages = LOOPS[name]
    tools = () if name == TALK else (LOOK,)
    (learned,) = examples(Trace(id="t", messages=tuple(messages), tools=tools), renderer)
    said = [id for m in messages if m.role == "assistant" for id in renderer.completion(m)]
    assert [id for id, counts in zip(learned.token_ids, learned.loss_mask, strict=True) if counts] == said


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model)
def test_sampled_tokens_are_never_tokenised_again(row: Row) -> None:
    """Another spelling of a turn, letter by letter, is read and followed like the usual one."""
    tokenizer, _, renderer = served(row)
    text = "Go left, then right and straight on"
    turn = replace(SAY, content=text)
    usual = renderer.completion(turn)
    spelled = [id for letter in text for id in tokenizer.encode(letter, add_special_tokens=False)]
    spans = ((i, j) for i in range(len(usual)) for j in range(i, len(usual)))
    found = [(i, j) for i, j in spans if tokenizer.decode(usual[i:j], clean_up_tokenization_spaces=False) == text]
    assert found, tokenizer.decode(usual)
    odd = (*usual[: found[0][0]], *spelled, *usual[found[0][1] :])
    assert odd != usual and renderer.parse(odd) == renderer.parse(usual)
    assert renderer.extend([ASK, renderer.parse(odd)], [ASK]) == renderer.extend([ASK, turn], [ASK])


def test_the_table_is_written() -> None:
    reasons: list[str] = []

    def cell(found: Finding) -> str:
        if not found.said:
            return "works"
        if found.works and found.said.startswith("left out"):
            return "left out"
        if found.works and found.said.startswith("thoughts stay"):
            return "thoughts stay"
        if found.said not in reasons:
            reasons.append(found.said)
        return f"{'works' if found.works else 'refused'} [{reasons.index(found.said) + 1}]"

    cases = [*TURNS, *LOOPS]
    lines = ["| model | renderer | works, but for |", "|---|---|---|"]
    for row in ROWS:
        _, found, _ = served(row)
        options = "".join(f", {key}={value}" for key, value in found.options.items())
        by_hand = ", named by hand" if found.why == "named" else ""
        others: dict[str, list[str]] = {}
        for case in cases:
            others.setdefault(cell(findings(row)[case]), []).append(case)
        others.pop("works", None)
        differs = "; ".join(f"{', '.join(names)}: {mark}" for mark, names in others.items())
        lines.append(f"| {row.model}{' *' if row.tokens else ''} | `{found.name}`{options}{by_hand} | {differs} |")
    numbered = [f"{number}. `{reason.replace('`', '')}`" for number, reason in enumerate(reasons, 1)]
    TABLE.write_text(HEAD + "\n".join([*lines, "", "## Reasons", "", *numbered, ""]), encoding="utf-8")
    assert len(ROWS) >= 15


HEAD = """# Chat templates and renderers

**Which renderer serves which model, and what is refused?** Tool loops work for all but two, whose templates leave
calls out. Written by `make test-renderers` (`tests/render/test_real_tokenizers.py`), which fetches tokenizers and
templates: the model's own tokenizer, or another real one with the model's special tokens (*); its own template, or a
file of the package trl; a family named by hand was tried without a template. `turntree check model FOLDER` gives the
same findings for any model.

Cases: text, one call, text and a call, calls side by side, every JSON type, reasoning, reasoning and a call, a talk
of three turns, a loop of three turns, with reasoning, side by side, and a second question after a loop.

- *works*: the turn ends with its only stop token and is read as it was said; a loop has, turn by turn, the tokens
  that it has as a whole, and its text is what the folder's own template writes. *[n]*: but for the difference given
  below.
- *thoughts stay*: the template drops (or empties) thoughts of earlier turns, and here the policy goes on seeing them.
- *left out*: the form has no place for reasoning. *refused [n]*: for the reason below; a rollout that needs it is
  censored.
- DeepSeek-V3 and R1 have no place for tools: they are written into the system message. Nemotron-3.5 and
  Qwen3-Instruct are served by the family whose form theirs is.

"""
