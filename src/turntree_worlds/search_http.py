"""Search over HTTP: a retrieval server in the form of Search-R1's, which verl serves too, and a reader of web pages."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from typing import Any

from turntree.core.config import is_url
from turntree.core.errors import InputError
from turntree_worlds.search import Found

_SECONDS = 60.0
_MOST_BYTES = 5_000_000  # of a page
_UNREAD = frozenset({"script", "style", "noscript", "template", "head"})
_BLOCKS = frozenset({"p", "br", "div", "li", "tr", "section", "article", "h1", "h2", "h3", "h4", "h5", "h6"})


class RetrievalServer:
    """`POST url` with {queries, topk, return_scores} answers {"result": [[{"document": {...}, "score": ...}, ...]]}.

    A document has `contents` (its title, a line break, its text) or `title` and `text`, and may have an `id` and a
    `url`. What a server does not answer raises `InputError` (an `OSError` where it cannot be reached); the runtime of
    tools tries again and then censors the rollout. `page` opens a document by its title, or, at a `url` that a search
    of this process has shown, the page itself: a policy reaches no other address.
    """

    def __init__(self, url: str) -> None:
        self.url = self.hash = url
        self._shown: set[str] = set()

    def search(self, query: str, count: int = 5) -> list[Found]:
        asked = {"queries": [query], "topk": count, "return_scores": True}
        request = urllib.request.Request(self.url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            read: Any = json.load(answer)
        result = read.get("result") if isinstance(read, dict) else None
        if not isinstance(result, list) or len(result) != 1 or not isinstance(result[0], list):
            raise InputError("did not answer {'result': [[...]]}", path=self.url, field="index")
        found = [self._found(item) for item in result[0][:count]]
        self._shown.update(each.id for each in found)
        return found

    def page(self, title: str) -> Found | None:
        if title in self._shown and is_url(title):
            text = read_page(title)
            return Found(title, title, text, text)
        wanted = title.strip().casefold()
        return next((found for found in self.search(title, 10) if found.title.casefold() == wanted), None)

    def _found(self, item: Any) -> Found:
        document: Any = item.get("document", item) if isinstance(item, dict) else None
        if not isinstance(document, Mapping):
            raise InputError("answered a document that is no object", path=self.url, field="index")
        title, _, text = str(document.get("contents", "")).partition("\n")
        title, text = str(document.get("title") or title).strip('" '), str(document.get("text") or text)
        place = str(document.get("url") or document.get("id") or title)
        shown = f"{text}\n({place})" if document.get("url") else text
        return Found(place, title, shown, shown)


def read_page(url: str) -> str:
    """The words of a web page. Raises `OSError` where it is not there."""
    with urllib.request.urlopen(url, timeout=_SECONDS) as answer:
        charset = answer.headers.get_content_charset() or "utf-8"
        page = _Words()
        page.feed(answer.read(_MOST_BYTES).decode(charset, "replace"))
    lines = (" ".join(line.split()) for line in "".join(page.words).split("\n"))
    return "\n".join(line for line in lines if line)


class _Words(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self._unread: list[str] = []

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag in _UNREAD:
            self._unread.append(tag)
        elif tag in _BLOCKS:
            self.words.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if self._unread and tag == self._unread[-1]:
            self._unread.pop()

    def handle_data(self, data: str) -> None:
        if not self._unread:
            self.words.append(data)
