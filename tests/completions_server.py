"""A completions server of the standard library, for tests: what it answers comes from a function of the request.

>>> from completions_server import serve
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# the body of a response, an HTTP status, both, or what is done with the connection
Act = Callable[[BaseHTTPRequestHandler], None]
Answer = Callable[[dict[str, Any]], dict[str, Any] | int | tuple[int, dict[str, Any]] | Act]


@dataclass
class Server:
    """`asked` are the bodies of all requests; `busiest` is how many were open at once."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    busiest: int = 0


class Http(ThreadingHTTPServer):
    request_queue_size = 128  # the default of 5 turns connections away that come at once

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up is no error of the server: nothing on standard error, which tests read."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextlib.contextmanager
def serve(answer: Answer) -> Iterator[Server]:
    lock, now = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            sent = self.rfile.read(size := int(self.headers["Content-Length"]))
            if len(sent) < size:  # the client has gone
                return
            request = json.loads(sent)
            with lock:
                server.asked.append({"path": self.path, **request})
                now[0] += 1
                server.busiest = max(server.busiest, now[0])
            found = answer(request)
            with lock:
                now[0] -= 1
            if callable(found):
                return found(self)
            refused = {"error": {"message": "refused"}}
            both = (200, found) if isinstance(found, dict) else (found, refused) if isinstance(found, int) else found
            status, value = both
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            return None

    http = Http(("127.0.0.1", 0), Handler)
    server = Server(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def sends(body: bytes, status: int = 200, *, length: int | None = None, hang_up: bool = False, **headers: str) -> Act:
    """These very bytes, `length` bytes promised."""

    def act(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"content-length": str(len(body) if length is None else length), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)
        handler.close_connection = hang_up

    return act


def completion(
    text: str, logprobs: dict[str, Any] | None = None, reason: str = "stop", **choice: Any
) -> dict[str, Any]:
    """The body of an answer with one choice."""
    only = {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": reason, **choice}
    return {"id": "1", "object": "text_completion", "created": 0, "model": "m", "choices": [only]}
