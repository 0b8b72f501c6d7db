"""The tools that come with turntree: `search` over a local index, `open` and `find` on its pages, `python` in the
sandbox."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from turntree.env.tools.tool import ToolOutput, ToolSpec
from turntree_worlds.sandboxes.limits import Execution
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.search import SearchBackend

_QUOTED = 100  # characters of a policy's own text in an error


def _one_string(name: str, description: str) -> dict[str, Any]:
    parameters = {name: {"type": "string", "description": description}}
    return {"type": "object", "properties": parameters, "required": [name], "additionalProperties": False}


class SearchTool:
    """The best documents for a query, numbered, each with its title and at most `passage_chars` characters of it."""

    pure = True

    def __init__(self, index: SearchBackend, *, count: int = 5, passage_chars: int = 1000) -> None:
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


class OpenTool:
    """A document by its title, in parts of `part_chars` characters."""

    pure = True

    def __init__(self, index: SearchBackend, *, part_chars: int = 2000) -> None:
        parameters = _one_string("title", "The title of the page, as the search shows it.")
        parameters["properties"]["part"] = {
            "type": "integer",
            "description": "Which part of a long page; 1 is the first.",
        }
        self.spec = ToolSpec("open", "Open a page.", parameters)
        self.version = f"{index.hash} {part_chars}"
        self._index, self._part_chars = index, part_chars

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        page, part = self._index.page(arguments["title"]), arguments.get("part", 1)
        if page is None:
            return ToolOutput(_no_page(arguments["title"]))
        parts = max(1, -(-len(page.text) // self._part_chars))
        if not 1 <= part <= parts:
            return ToolOutput(f"error: {page.title!r} has parts 1 to {parts}")
        start = (part - 1) * self._part_chars
        shown = f"{page.title}\n{page.text[start : start + self._part_chars]}"
        return ToolOutput(f"{shown}\n[part {part} of {parts}]" if parts > 1 else shown)


class FindTool:
    """Where a text occurs on a page: at most `count` places, each with its surroundings."""

    pure = True

    def __init__(self, index: SearchBackend, *, count: int = 5, around: int = 100) -> None:
        parameters = _one_string("title", "The title of the page.")
        parameters["properties"]["text"] = {"type": "string", "description": "What to look for; case does not matter."}
        parameters["required"].append("text")
        self.spec = ToolSpec("find", "Find a text on a page.", parameters)
        self.version = f"{index.hash} {count} {around}"
        self._index, self._count, self._around = index, count, around

    def call(self, arguments: Mapping[str, Any], seconds: float) -> ToolOutput:
        page, wanted = self._index.page(arguments["title"]), arguments["text"]
        if page is None:
            return ToolOutput(_no_page(arguments["title"]))
        places = re.finditer(re.escape(wanted), page.text, re.IGNORECASE) if wanted else ()
        shown = [
            f"[{number}] {page.text[max(0, place.start() - self._around) : place.end() + self._around]}"
            for number, place in enumerate(itertools.islice(places, self._count), start=1)
        ]
        return ToolOutput("\n".join(shown) or f"{page.title!r} does not hold {_quoted(wanted)}")


def _no_page(title: str) -> str:
    return f"error: there is no page {_quoted(title)}; search for it"


def _quoted(text: str) -> str:
    """What the policy wrote, without letting it fill its own context."""
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "…")


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
