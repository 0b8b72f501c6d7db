"""Words of users, tools and system messages stay words: what spells a control token in them is encoded as text.

A chat template gets only text, and so does a renderer of a family. `Words.hide` puts a mark into such a text, which no
other text can hold: half a surrogate pair. `Words.encode` takes it out again, and gives the tokens of everything else
as ever, but those of no control token there.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast

from turntree.core.errors import InputError
from turntree.core.messages import Message, whole_characters

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_MARK = "\udc00"
_SPELLED = re.compile(r"<[|｜].+[|｜]>")
# noncharacters, which are not for interchange: a text that holds one is refused where words are hidden in it
_DIGITS, _BEGIN, _END = [chr(0xFDD0 + digit) for digit in range(16)], "\ufdee", "\ufdef"
_RESERVED = re.compile("[\ufdd0-\ufdef]")


class Words:
    """A tokenizer that keeps words apart from control tokens; all else of it is that of `tokenizer`.

    Control tokens are the special ones, those spelled <|...|>, and added ones that stand in `form`: texts of the
    model's own form. Other added tokens are words (Gemma has <table>).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: str) -> None:
        self._tokenizer, self._form = tokenizer, ""
        self.learn(form)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError  # so the package `renderers` does without offsets, and calls `encode`

    def learn(self, form: str) -> None:
        """Add a text to the form."""
        self._form += form
        added = self._tokenizer.added_tokens_decoder
        self.control = {id: token.content for id, token in added.items() if self._controls(token)}
        longest = sorted(self.control.values(), key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest)) or "(?!)")

    def _controls(self, token: Any) -> bool:
        spelled = token.special or token.content in self._form or _SPELLED.fullmatch(token.content) is not None
        return spelled and len(token.content) > 1  # a mark goes into it

    def hide(self, value: T) -> T:
        """A text, or the texts of a declaration, with a mark in all that spells a control token."""
        found: Any = value
        if isinstance(found, dict):
            found = {self.hide(key): self.hide(item) for key, item in cast("dict[str, Any]", found).items()}
        elif isinstance(found, list | tuple):
            found = [self.hide(item) for item in cast("list[Any]", found)]
        elif isinstance(found, str) and self._found.search(found):
            found = whole_characters(found)
            while self._found.search(found):  # one that overlaps another is found the next time
                found = self._found.sub(lambda token: f"{token[0][0]}{_MARK}{token[0][1:]}", found)
        return cast("T", found)

    def hidden(self, messages: Sequence[Message]) -> list[Message]:
        """Messages with all words hidden that the policy did not say."""
        return [message if message.role == "assistant" else self._hidden(message) for message in messages]

    def _hidden(self, message: Message) -> Message:
        name, call = self.hide(message.name), self.hide(message.tool_call_id)
        return replace(message, content=self.hide(message.content), name=name, tool_call_id=call)

    def encode(self, text: str, **_: Any) -> list[int]:
        """Raises `InputError` where the tokenizer cannot encode hidden words as text."""
        if _MARK not in text:
            return self._tokenizer.encode(whole_characters(text), add_special_tokens=False)
        stood_in = self._found.sub(lambda token: _stand_in(token[0]), text)
        spelled = set[str](self._found.findall(shown(text)))
        if self._apart is None or _RESERVED.search(text):
            raise _cannot(min(spelled))
        tokenizer, own = self._apart
        found: list[int] = tokenizer.encode(whole_characters(shown(stood_in)), add_special_tokens=False).ids
        for id in found:  # a token that the vocabulary itself holds comes of its text all the same
            if id not in own and self.control.get(id) in spelled and id != self._tokenizer.unk_token_id:
                raise _cannot(self.control[id])
        return [own.get(id, id) for id in found]

    @cached_property
    def _apart(self) -> tuple[Tokenizer, dict[int, int]] | None:
        """The same tokenizer, which knows control tokens by their stand-ins only, and the ids that differ in it; None
        for one that is not of the library tokenizers."""
        from tokenizers import Tokenizer

        own: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(own, Tokenizer):
            return None
        told = json.loads(own.to_str())
        names = {token["id"]: token["content"] for token in told["added_tokens"]}
        names |= {id: _stand_in(token) for id, token in self.control.items()}
        for token in told["added_tokens"]:
            token["content"] = names[token["id"]]
        apart = Tokenizer.from_str(json.dumps(told | {"post_processor": None, "truncation": None, "padding": None}))
        return apart, {cast(int, apart.token_to_id(name)): id for id, name in names.items()}

    def decode_hidden(self, ids: Sequence[int]) -> str:
        """The text of tokens, with a mark in what spells a control token and is none."""
        runs = itertools.groupby(ids, self.control.__contains__)
        texts = ((control, self._decode(list(run))) for control, run in runs)
        return "".join(text if control else self.hide(text) for control, text in texts)

    def _decode(self, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)


def shown(text: str) -> str:
    """A text without its marks."""
    return text.replace(_MARK, "")


def _stand_in(token: str) -> str:
    """A text that stands for a control token: its bytes, spelled in characters that no text may hold."""
    return _BEGIN + "".join(_DIGITS[half] for byte in token.encode() for half in divmod(byte, 16)) + _END


def _cannot(token: str) -> InputError:
    return InputError(
        f"the tokenizer cannot encode {token!r} as text", field="content", hint="leave it out of the words"
    )
