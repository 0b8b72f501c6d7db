"""A question and what counts as its answer."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass

from turntree.core.errors import ConfigError
from turntree_worlds.qa.answers import AnswerType


@dataclass(frozen=True, kw_only=True)
class Question:
    """`answers` are all right, each by itself (of a list: one text with `;` between its items); `answer_type` says how
    they are compared (`answers`). `kind` groups questions in reports; `evidence` is what to look up one after another,
    where that is known."""

    id: str
    text: str
    answers: tuple[str, ...]
    answer_type: AnswerType = "span"
    kind: str = ""
    evidence: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.text.strip() or not any(answer.strip() for answer in self.answers):
            raise ConfigError("a question needs a text and at least one answer", field=self.id)

    @property
    def key(self) -> str:
        """Equal for texts that differ only in white space, case or the encoding of accents. Everywhere questions are
        compared by this key."""
        return unicodedata.normalize("NFC", " ".join(self.text.split()).casefold())
