"""Answers of a given form: JSON of a schema, or a call of one of some tools, as a grammar for the package llguidance.

The form in which a policy calls is read off what its renderer writes for a call. It must be JSON of the name and the
arguments; other forms (Python, XML) are refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from turntree.core.errors import InputError
from turntree.core.foreign import package

_CALL = re.compile(r'(.*?)\{\s*"name":\s*"look",\s*"(arguments|parameters)":\s*\{[^{}]*\}\s*\}(.*)', re.DOTALL)
_ANY: dict[str, Any] = {"type": "object"}
# a policy that has lost its way could go on with white space without end
_SPACES = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,20}"}}


class Constraint:
    """One answer under a grammar (part of a `core.completion.Guide`); `grammar` is what a vLLM server is told."""

    def __init__(self, matcher: Any, stop_ids: Collection[int], grammar: Mapping[str, Any]) -> None:
        self._matcher, self._stops, self.grammar = matcher, frozenset(stop_ids), grammar
        end = bytearray(max(self._stops) // 8 + 1)
        for token in self._stops:
            end[token // 8] |= 1 << token % 8
        self._end = bytes(end)

    def restart(self) -> None:
        """The answer is sampled once more."""
        self._matcher.reset()

    def allowed(self) -> bytes:
        """The stop tokens alone once the form is complete, and where nothing else fits."""
        if self._matcher.is_stopped() or self._matcher.is_error():
            return self._end
        mask: bytes = self._matcher.compute_bitmask()
        return mask if any(mask) else self._end

    def take(self, token: int) -> None:
        """Raises `InputError` for a token that the grammar forbids."""
        if token in self._stops and self._matcher.is_accepting():
            return
        if self._matcher.is_stopped() or not self._matcher.consume_token(token):
            raise InputError(f"token {token} does not fit the form that was asked for", field="grammar")


class Grammars:
    """The grammars of one policy. `call_text` is what it writes for `probes.CALL`, `thought` what opens and closes a
    thought, which may stand before the answer (empty: none may)."""

    def __init__(self, tokenizer: Any, stop_ids: Collection[int], call_text: str, thought: tuple[str, str]) -> None:
        self._tokenizer, self._stops, self._thought = tokenizer, frozenset(stop_ids), thought
        text = call_text.partition(thought[1])[2].lstrip("\n") if thought[1] and thought[1] in call_text else call_text
        self._call = _CALL.fullmatch(text)
        self._words: Any = None

    def constraint(self, schema: dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> Constraint:
        """An answer that is JSON of the schema, or a call of one of the tools, whichever are given. Raises `InputError`
        where the package is missing, and for what has no grammar."""
        llguidance = package("llguidance", "grammar", "grammar")
        if self._words is None:
            self._words = llguidance.LLTokenizer(_plain_tokenizer(self._tokenizer), eos_token=sorted(self._stops))
        lark, form = self._written(schema, tools)
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        failed, said = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self._words)
        if failed:
            problem = f"has no grammar ({' '.join(said).splitlines()[0][:200]})"
            raise InputError(problem, field="grammar", hint="simplify the schema")
        return Constraint(llguidance.LLMatcher(self._words, grammar), self._stops, form)

    def _written(self, schema: dict[str, Any] | None, tools: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
        """The grammar in llguidance's dialect of Lark, and as vLLM's structural tag."""
        rules, tags, choices = list[str](), list[dict[str, Any]](), list[str]()
        if schema is not None:
            choices.append("answer")
            rules.append(f"answer: %json {json.dumps({**schema, **_SPACES})}")
            tags.append({"type": "json_schema", "json_schema": schema})
        for i, tool in enumerate(tools):
            if self._call is None:
                problem = "the policy writes calls in a form for which there is no grammar"
                raise InputError(problem, field="grammar", hint="leave the choice of tools to the policy")
            begin, key, end = self._call.groups()
            function: Any = tool["function"]
            parts = {"name": {"const": function["name"]}, key: function.get("parameters") or _ANY}
            call = {"type": "object", "properties": parts, "required": ["name", key], "additionalProperties": False}
            choices.append(f"call{i}")
            rules.append(f"call{i}: {self._literal(begin)} json{i} {self._literal(end)}")
            rules.append(f"json{i}: %json {json.dumps({**call, **_SPACES})}")
            tags.append(
                {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": call}, "end": end}
            )
        opened, closed = self._thought
        thought = ""
        if closed:
            rules.append(f"thought: {self._literal(opened)} /(?s:.*)/ {self._literal(closed)} /\\n*/")
            thought = "thought? " if opened else "thought "  # the prompt may have opened one
        start = f"start: {thought}({' | '.join(choices)})"
        form = tags[0] if len(tags) == 1 else {"type": "or", "elements": tags}
        told = {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}
        return "\n".join([start, *rules]), told

    def _literal(self, text: str) -> str:
        """A text in a grammar, its special tokens by their ids."""
        special = {token.content: id for id, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        found = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
        parts = re.split(f"({found})", text)
        return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p) or '""'


def _plain_tokenizer(tokenizer: Any) -> str:
    """A fast tokenizer as JSON, without padding and truncation. Raises `InputError` for a slow one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        hint = "use a folder with a tokenizer.json"
        raise InputError("the policy's tokenizer is not one of the package `tokenizers`", field="grammar", hint=hint)
    return json.dumps({**json.loads(backend.to_str()), "padding": None, "truncation": None})
