"""The vocabulary file that gpt-oss's own encoder needs, written from the tokenizer."""

from __future__ import annotations

import base64
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turntree.render.words import Words

_FOLDER = "TIKTOKEN_ENCODINGS_BASE"  # where the encoder looks before it would download the file
_FILE = "o200k_base.tiktoken"
_RANKS = 199_998


@contextlib.contextmanager
def vocabulary(tokenizer: Words) -> Iterator[None]:
    """The encoder can be loaded inside the block without a download: base64 of the bytes of a token and its rank, one a
    line, in a temporary folder. The encoder checks a digest of the file, so that of another vocabulary is refused."""
    if os.environ.get(_FOLDER):
        yield
        return
    letters = _bytes_of_letters()
    tokens = {rank: token for token, rank in tokenizer.get_vocab().items()}
    lines = [f"{_base64(tokens.get(rank, ''), letters)} {rank}\n" for rank in range(_RANKS)]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, _FILE).write_text("".join(lines), encoding="ascii")
        os.environ[_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[_FOLDER]


def _base64(token: str, letters: dict[str, int]) -> str:
    return base64.b64encode(bytes(letters[letter] for letter in token if letter in letters)).decode("ascii")


def _bytes_of_letters() -> dict[str, int]:
    """Byte-level vocabularies spell the printable bytes as themselves and the others as letters from 256 on (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
