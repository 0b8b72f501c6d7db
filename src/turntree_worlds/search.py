"""Full-text search over a local corpus: SQLite's FTS5, ranked by BM25; one file, read-only once it is built."""

from __future__ import annotations

import contextlib
import hashlib
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from turntree.core.errors import InputError
from turntree.run.jsonl import replacing
from turntree_worlds.documents import Document

SCHEMA = "turntree/search-index/1"
_TOKENS = "porter unicode61 remove_diacritics 2"
_MAX_TERMS = 64
_SNIPPET_TOKENS = 64  # the most that FTS5 gives
_QUERY = """
    SELECT id, title, text, snippet(documents, 2, '', '', '…', {tokens})
    FROM documents WHERE documents MATCH ? ORDER BY bm25(documents, 0.0, 2.0, 1.0), rowid LIMIT ?
"""


_PAGE = "SELECT id, title, text, '' FROM documents WHERE documents MATCH ? ORDER BY rowid"


@dataclass(frozen=True)
class Found:
    """A document and the stretch of it that fits the query best."""

    id: str
    title: str
    text: str
    snippet: str


class SearchBackend(Protocol):
    """What the tools `search`, `open` and `find` ask. Any number of threads may ask at once; `hash` names what the
    answers depend on."""

    hash: str

    def search(self, query: str, count: int = 5) -> Sequence[Found]: ...

    def page(self, title: str) -> Found | None: ...


def build_index(documents: Iterable[Document], out: Path) -> dict[str, str | int]:
    """Write the index of `documents`; it takes its name only when it is whole. Returns its description.

    Raises `InputError` when an id occurs twice or there is no document at all.
    """
    with replacing(out) as raw:
        try:
            with contextlib.closing(sqlite3.connect(raw.name)) as connection:
                return _fill(connection, documents)
        finally:
            Path(f"{raw.name}-journal").unlink(missing_ok=True)


def _fill(connection: sqlite3.Connection, documents: Iterable[Document]) -> dict[str, str | int]:
    connection.execute(f"CREATE VIRTUAL TABLE documents USING fts5(id UNINDEXED, title, text, tokenize='{_TOKENS}')")
    connection.execute("CREATE TABLE description (key TEXT PRIMARY KEY, value)")
    digest, seen = hashlib.blake2b(digest_size=8), set[str]()
    for document in documents:
        if document.id in seen:
            raise InputError(f"two documents have the id {document.id!r}", field="id", hint="make ids unique")
        seen.add(document.id)
        row = (document.id, document.title, document.text)
        for part in row:
            digest.update(f"{len(part)}:{part}".encode("utf-8", "surrogatepass"))
        connection.execute("INSERT INTO documents VALUES (?, ?, ?)", row)
    if not seen:
        raise InputError("there is no document to index", hint="name a file or folder that holds some")
    connection.execute("INSERT INTO documents(documents) VALUES ('optimize')")
    described: dict[str, str | int] = {"schema": SCHEMA, "hash": digest.hexdigest(), "documents": len(seen)}
    connection.executemany("INSERT INTO description VALUES (?, ?)", described.items())
    connection.commit()
    connection.execute("VACUUM")
    return described


class SearchIndex(contextlib.AbstractContextManager["SearchIndex"]):
    """An index that `build_index` made, opened read-only; any number of threads may search it."""

    def __init__(self, path: Path) -> None:
        """Raises `InputError` for a file that is not an index, or is one of another version."""
        if not path.is_file():
            raise InputError("no such file", path=path, hint="make it with 'turntree index build'")
        self._uri = f"file:{quote(str(path.resolve()))}?mode=ro&immutable=1"
        self._local = threading.local()
        self._connections: list[sqlite3.Connection] = []
        self._path = path
        try:
            described = dict(self._rows("SELECT key, value FROM description"))
        except InputError:
            self.close()
            raise
        found, digest, documents = (described.get(key) for key in ("schema", "hash", "documents"))
        if found != SCHEMA or not isinstance(digest, str) or not isinstance(documents, int):
            self.close()
            raise InputError(f"is {found!r}, not {SCHEMA!r}", path=path, hint="build it again")
        self.hash, self.documents = digest, documents

    def __exit__(self, *_: object) -> None:
        self.close()

    def search(self, query: str, count: int = 5) -> list[Found]:
        """The `count` best documents for any words of `query`; only its words count, not the operators of FTS5.
        Equal scores stand in the order of the corpus."""
        expression = match_expression(query)
        if not expression:
            return []
        rows = self._rows(_QUERY.format(tokens=_SNIPPET_TOKENS), (expression, count))
        return [self._found(row) for row in rows]

    def page(self, title: str) -> Found | None:
        """The first document of this title, whose case does not matter."""
        words = match_expression(title).replace(" OR ", " AND ")
        rows = map(self._found, self._rows(_PAGE, (f"title : ({words})",)) if words else ())
        return next((found for found in rows if found.title.casefold() == title.strip().casefold()), None)

    def close(self) -> None:
        """No thread may be searching."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()

    def _found(self, row: tuple[Any, ...]) -> Found:
        if not all(isinstance(text, str) for text in row):
            raise self._damaged("a document is not text")
        return Found(*row)

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> Iterator[Any]:
        """Raises `InputError` where SQLite finds the file damaged, at whatever page."""
        try:
            yield from self._connection().execute(query, values)
        except (sqlite3.Error, ValueError, MemoryError) as error:  # a text of it may not be UTF-8
            raise self._damaged(error) from error

    def _damaged(self, why: object) -> InputError:
        hint = "make it with 'turntree index build'"
        return InputError(f"is not a search index, or is damaged ({why})", path=self._path, hint=hint)

    def _connection(self) -> sqlite3.Connection:
        """One for each thread."""
        found: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = sqlite3.connect(self._uri, uri=True, check_same_thread=False)
            self._connections.append(found)
        return found


def match_expression(query: str) -> str:
    """The words of `query`, each once and each quoted, any of which may match: no punctuation, operator or column name
    of FTS5's language survives.

    >>> match_expression('NEAR("who", title: it) AND it*')
    '"near" OR "who" OR "title" OR "it" OR "and"'
    """
    words = dict.fromkeys(re.findall(r"[^\W_]+", query.lower()))
    return " OR ".join(f'"{word}"' for word in list(words)[:_MAX_TERMS])
