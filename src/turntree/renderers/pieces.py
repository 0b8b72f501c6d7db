"""The tokens of a text that stands after another one."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from turntree.core.errors import InputError
from turntree.core.messages import whole_characters
from turntree.renderers.probes import SAY

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = tuple[int, ...]

_APART = "\x01"  # no vocabulary joins it with anything
_SPACES = ("▁", "Ġ")  # how SentencePiece and byte-level vocabularies write a space


class Pieces:
    """Encodes and decodes segments of a conversation.

    Many tokenizers (of SentencePiece's kind) write a space before any text. A segment that is encoded alone gets one in
    front that the whole conversation does not have there. `spaced`: this is such a tokenizer. It encodes a segment with
    what stands before it, whose tokens are cut off.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        first = tokenizer.convert_ids_to_tokens(list(self._whole(SAY.content)))[:1]
        self.spaced = bool(first) and str(first[0]).startswith(_SPACES)
        self._held: dict[str, Ids] = {}

    def encode(self, text: str, after: str = "") -> Ids:
        """Raises `InputError` where the tokens of what stands before the text are not the same without it."""
        if not self.spaced or not after:
            return self._whole(text)
        for before in (after, _APART):
            held, ids = self._before(before), self._whole(before + text)
            if ids[: len(held)] == held:
                return ids[len(held) :]
        raise InputError(
            f"the tokenizer cannot go on with {text[:40]!r}: it tokenises what stands before it differently",
            field="tokenizer",
            hint="use a tokenizer with bytes as tokens (byte_fallback)",
        )

    def decode(self, ids: Ids, after: str = "", lead: str = "") -> str:
        """Without the space that some tokenizers write after every special token, as it is seen in a text that begins
        with `lead`."""
        if not self.spaced or not after:
            return self._text(ids)
        space, said, _ = self._after(self.encode(lead + SAY.content, after), after).partition(lead + SAY.content)
        return self._after(ids, after).removeprefix(space if said else "")

    def _after(self, ids: Ids, after: str) -> str:
        held = self._before(after)
        before, text = self._text(held), self._text((*held, *ids))
        return text.removeprefix(before) if text.startswith(before) else self._text(ids)

    def _before(self, text: str) -> Ids:
        if text not in self._held:
            self._held[text] = self._whole(text)
        return self._held[text]

    def _whole(self, text: str) -> Ids:
        return tuple(self._tokenizer.encode(whole_characters(text), add_special_tokens=False))

    def _text(self, ids: Ids) -> str:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return cast(str, text)
