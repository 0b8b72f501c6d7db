"""Odd MCP servers, for test_mcp: "silent" answers nothing, "endless" always has one more page, "mortal" ends at a call
of `crash`, after a line in the file that is named behind it."""

import itertools
import json
import sys

PAGES = itertools.count()


def answer(method: str) -> dict[str, object]:
    if method == "initialize":
        told = {"name": "odd", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": told}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": "alive"}]}
    if sys.argv[1] == "mortal":
        return {"tools": [{"name": name, "inputSchema": {"type": "object"}} for name in ("crash", "look")]}
    number = next(PAGES)
    tool = {"name": f"tool{number}", "inputSchema": {"type": "object"}}
    return {"tools": [tool], "nextCursor": str(number)}


for line in sys.stdin:
    asked = json.loads(line)
    if sys.argv[1] == "silent" or "id" not in asked:
        continue
    reply = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] == "tools/call" and asked["params"]["name"] == "crash":
        with open(sys.argv[2], "a") as file:
            file.write("called\n")
        sys.exit(1)
    if asked["method"] in ("initialize", "tools/list", "tools/call"):
        reply["result"] = answer(asked["method"])
    else:
        reply["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(reply), flush=True)
