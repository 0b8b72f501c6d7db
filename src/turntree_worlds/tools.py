"""The tools that come with turntree: `search` over a local index, `python` in the sandbox."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from turntree.env.tools.tool import ToolOutput, ToolSpec
from turntree_worlds.sandboxes.limits import Execution
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.search import SearchIndex


def _one_string(name: str, description: str) -> dict[str, Any]:
    parameters = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": parameters, "required": [name], "additionalProperties": False}


class SearchTool:
    """The best documents for a query, numbered, each with its title and at most `passage_chars` characters of it."""

    pure = True

    def __init__(self, index: SearchIndex, *, count: int = 5, passage_chars: int = 1000) -> None:
        self.spec = ToolSpec(
            "search", "Search the documents for words of a query.", _one_string("query", "What to look for.")
        )
        self.version = f"{index.hash} {count} {passage_chars}"
        self._index, self._count, self._passage_chars = index, count, passage_chars

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        found = self._index.search(arguments["query"], self._count)
        shown = [
            f"[{rank}] {document.title}\n"
            + (document.text if len(document.text) <= self._passage_chars else document.snippet[: self._passage_chars])
            for rank, document in enumerate(found, start=1)
        ]
        return ToolOutput("\n\n".join(shown) or "no document holds any of these words")


class SandboxTool:
    """`python` (the last line, if an expression, is shown as its value); every call starts afresh. Answers are not
    kept: an error may come from a limit, or from the state of the machine."""

    pure = False

    def __init__(self, sandbox: Sandbox) -> None:
        parameters = _one_string("code", "The program.")
        self.spec = ToolSpec("python", "Run a Python program. Every call starts afresh.", parameters)
        self.version = repr(sorted(dataclasses.asdict(sandbox.config).items()))
        self._sandbox = sandbox

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        execution = self._sandbox.run(arguments["code"], language="python")
        return ToolOutput(described(execution, self._sandbox.config.limits.seconds))


def described(execution: Execution, limit: float) -> str:
    """An execution as a policy reads it."""
    parts = [execution.stdout.rstrip("\n"), execution.value or "", execution.stderr.rstrip("\n")]
    if execution.truncated:
        parts.append("[output cut]")
    if execution.timed_out:
        parts.append(f"[stopped after {limit:g} s]")
    elif execution.exit_code is None:
        parts.append("[stopped: too much output]")
    elif execution.failed and not execution.stderr:
        parts.append(f"[exit code {execution.exit_code}]")
    return "\n".join(part for part in parts if part) or "[no output]"
