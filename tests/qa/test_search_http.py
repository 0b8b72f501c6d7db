"""Search over HTTP: what a retrieval server answers is what the tools show, and a policy opens no other page."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from turntree.core import parts
from turntree.core.config import Part
from turntree.core.errors import InputError
from turntree.core.messages import Message, ToolCall
from turntree.env.tasks import open_tasks
from turntree_worlds.search_http import RetrievalServer, read_page
from turntree_worlds.tools import OpenTool, SearchTool

DOCUMENTS = [("Winnie", "Drawn by E. H. Shepard."), ("Pooh", "A bear.")]
PAGE = (
    "<html><head><title>x</title></head><body><h1>Bear</h1><script>no()</script><p>Likes &amp; eats  honey.</p></body>"
)


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            (query,), count = asked["queries"], asked["topk"]
            hits = [(t, c) for t, c in DOCUMENTS if query.lower() in f"{t} {c}".lower()][:count]
            rows: list[Any] = [{"document": {"id": t, "contents": f'"{t}"\n{c}'}, "score": 1.5} for t, c in hits]
            if query == "web":
                rows = [
                    {"document": {"title": "A page", "text": "Of a bear.", "url": f"http://{self.headers['Host']}/p"}}
                ]
            self._answer({"result": [rows]} if query != "broken" else {"error": "x"})

        def do_GET(self) -> None:
            self._answer(PAGE)

        def _answer(self, value: Any) -> None:
            body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}/retrieve"
    serving.shutdown()
    serving.server_close()


def test_the_tools_show_what_the_server_finds(server: str) -> None:
    tool = SearchTool(RetrievalServer(server), count=2)
    assert tool.call({"query": "winnie"}, 1.0).text == "[1] Winnie\nDrawn by E. H. Shepard."
    assert tool.call({"query": "nothing"}, 1.0).text == "no document holds any of these words"
    opened = OpenTool(RetrievalServer(server)).call({"title": "pooh"}, 1.0)
    assert opened.text == "Pooh\nA bear."


def test_a_page_is_read_where_a_search_has_shown_it_and_nowhere_else(server: str) -> None:
    searched, other = RetrievalServer(server), RetrievalServer(server)
    (found,) = searched.search("web")
    assert found.id in found.text, "the policy must see the address"
    page = searched.page(found.id)
    assert page is not None and page.text == "Bear\nLikes & eats honey." == read_page(found.id)
    assert other.page(found.id) is None


def test_an_answer_in_another_form_is_an_error_that_names_the_server(server: str) -> None:
    with pytest.raises(InputError, match="result") as refused:
        RetrievalServer(server).search("broken")
    assert refused.value.field == "index"


def test_questions_are_answered_over_a_server_that_is_named_in_place_of_an_index(server: str, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Who drew Winnie?", "answer": "E. H. Shepard"}) + "\n")
    part = parts.resolve("environments", Part("qa", {"questions": str(file), "index": server}))
    with open_tasks(part, {"train": 1}) as opened:
        (task,) = opened.of("train")
        task.reset()
        told = task.step(Message("assistant", "", (ToolCall("search", {"query": "winnie"}, "1"),)))
        assert "Shepard" in told.messages[0].content
        assert task.step(Message("assistant", "<answer>E. H. Shepard</answer>")).success
