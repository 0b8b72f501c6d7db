"""MCP servers that never come to an end, for test_mcp: "silent" answers nothing, "endless" always has one more page."""

import itertools
import json
import sys

PAGES = itertools.count()


def answer(method: str) -> dict[str, object]:
    if method == "initialize":
        told = {"name": "odd", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": told}
    number = next(PAGES)
    tool = {"name": f"tool{number}", "inputSchema": {"type": "object"}}
    return {"tools": [tool], "nextCursor": str(number)}


for line in sys.stdin:
    asked = json.loads(line)
    if sys.argv[1] == "silent" or "id" not in asked:
        continue
    reply = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] in ("initialize", "tools/list"):
        reply["result"] = answer(asked["method"])
    else:
        reply["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(reply), flush=True)
