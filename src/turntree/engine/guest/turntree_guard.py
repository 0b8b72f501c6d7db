"""The key of a vLLM server, asked for at every path: vLLM's own guards /v1, and not the paths that replace weights.

vLLM imports this (`--middleware`) in an environment that holds no turntree: standard library only.
"""

from __future__ import annotations

import hmac
import json
import os
from typing import Any


class Guard:
    """ASGI middleware: a request without `Authorization: Bearer $VLLM_API_KEY` does not reach the application."""

    def __init__(self, app: Any) -> None:
        self._app, self._wanted = app, f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._wanted):
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        told = {"message": "this server needs its key", "type": "authentication_error", "param": None}
        body = json.dumps({"error": {**told, "code": "invalid_api_key"}}).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        return await send({"type": "http.response.body", "body": body})
