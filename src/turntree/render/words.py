"""The tokenizer of a renderer, as segments of a conversation need it.

Words of users, tools and system messages stay words: what spells a control token in them is encoded as text. A chat
template gets only text, and so does a renderer of a family, so `Words.hide` puts a mark into such a text, which no
other text can hold: half a surrogate pair. `Words.encode` encodes what stands before and after a mark by itself, so no
control token comes of it.

Many tokenizers (of SentencePiece's kind) write a space before any text. A segment that is encoded alone gets one in
front that the whole conversation does not have there. `Words.spaced`: this is such a tokenizer. It encodes a segment
with what stands before it, whose tokens are cut off.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from turntree.core.errors import InputError
from turntree.core.messages import whole_characters
from turntree.render.probes import SAY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
Ids = tuple[int, ...]

_MARK = "\udc00"
_SPELLED = re.compile(r"<[|｜].+[|｜]>")
_APART = "\x01"  # no vocabulary joins it with anything
_SPACES = ("▁", "Ġ")  # how SentencePiece and byte-level vocabularies write a space


class Words:
    """A tokenizer that keeps words apart from control tokens; all else of it is that of `tokenizer`.

    Control tokens are the special ones, those spelled <|...|>, and added ones that stand in `form` (or begin what ends
    there): texts of the model's own form. Other added tokens are words (Gemma has <table>).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: str) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.added_tokens_decoder
        self.control = {id: token.content for id, token in added.items() if _controls(token, form)}
        longest = sorted(self.control.values(), key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest)) or "(?!)")
        first = tokenizer.convert_ids_to_tokens(list(self._plain(SAY.content)))[:1]
        self.spaced = bool(first) and str(first[0]).startswith(_SPACES)
        self._before = functools.cache(self._plain)  # of what segments stand behind, over and over

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError  # so the package `renderers` does without offsets, and calls `encode`

    def hide(self, value: T) -> T:
        """A text, or those of a message or a declaration, with a mark in all that spells a control token."""
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

    def encode(self, text: str, after: str = "", **_: Any) -> list[int]:
        """Raises `InputError` where the tokens of what stands before the text are not the same without it."""
        first, *rest = text.split(_MARK)
        ids = self._behind(first, after) if self.spaced and after else self._plain(first)
        for part in rest:
            ids += self._behind(part, _APART) if self.spaced else self._plain(part)
        return list(ids)

    def decode(self, ids: Sequence[int], after: str = "", lead: str = "", **_: Any) -> str:
        """Without the space that some tokenizers write after every special token, as it is seen in a text that begins
        with `lead`."""
        if not self.spaced or not after:
            return self._text(ids)
        space, said, _rest = self._after(self.encode(lead + SAY.content, after), after).partition(lead + SAY.content)
        return self._after(ids, after).removeprefix(space if said else "")

    def decode_hidden(self, ids: Sequence[int]) -> str:
        """The text of tokens, with a mark in what spells a control token and is none."""
        runs = itertools.groupby(ids, self.control.__contains__)
        texts = ((control, self._text(list(run))) for control, run in runs)
        return "".join(text if control else self.hide(text) for control, text in texts)

    def _behind(self, text: str, after: str) -> Ids:
        for before in (after, _APART):
            held, ids = self._before(before), self._plain(before + text)
            if ids[: len(held)] == held:
                return ids[len(held) :]
        raise InputError(
            f"the tokenizer cannot go on with {text[:40]!r}: it tokenises what stands before it differently",
            field="tokenizer",
            hint="use a tokenizer with bytes as tokens (byte_fallback)",
        )

    def _after(self, ids: Sequence[int], after: str) -> str:
        held = self._before(after)
        before, text = self._text(held), self._text((*held, *ids))
        return text.removeprefix(before) if text.startswith(before) else self._text(ids)

    def _plain(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(whole_characters(text), add_special_tokens=False))

    def _text(self, ids: Sequence[int]) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)


def shown(text: str) -> str:
    """A text without its marks."""
    return text.replace(_MARK, "")


def _controls(token: Any, form: str) -> bool:
    text = token.content
    spelled = token.special or text in form or text.replace("/", "", 1) in form or _SPELLED.fullmatch(text) is not None
    return spelled and len(text) > 1  # a mark goes into it
