"""What the episodes of questions need: a generated world with its index, and tools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from turntree.core.config import FIXED
from turntree.env.tools.runtime import ToolRuntime, ToolRuntimeConfig
from turntree_worlds.qa.generate import Posed, QuestionMix, Split, generate_questions
from turntree_worlds.qa.world import World, generate_world
from turntree_worlds.sandboxes.limits import SandboxConfig
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.search import SearchBackend, SearchIndex, build_index
from turntree_worlds.tools import FindTool, OpenTool, SandboxTool, SearchTool


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The size of a search result."""

    count: int = 3
    """Documents of a search."""
    passage_chars: int = field(default=1000, metadata=FIXED)
    """Most characters shown of each document; of a longer one the best-matching passage."""
    pages: bool = False
    """Give the tools `open` (a page by its title) and `find` (a text on a page) beside `search`."""


@dataclass(frozen=True, kw_only=True)
class QaWorldConfig:
    """The generated world and its questions."""

    seed: int = 0
    """Of the world."""
    mix: QuestionMix = field(default_factory=QuestionMix)


class QaWorld:
    """A generated world with its index, and its questions by split."""

    def __init__(self, config: QaWorldConfig | None = None) -> None:
        self.config = config or QaWorldConfig()
        self.world: World = generate_world(self.config.seed)

    def build_index(self, path: Path) -> SearchIndex:
        """Write the index of the world's documents to `path` and open it."""
        build_index(self.world.documents(), path)
        return SearchIndex(path)

    def questions(self, split: Split, count: int, offset: int = 0) -> tuple[Posed, ...]:
        return generate_questions(self.world, split, offset + count, self.config.mix)[offset:]


@contextlib.contextmanager
def open_tools(
    index: SearchBackend,
    *,
    search: SearchConfig | None = None,
    sandbox: SandboxConfig | None = None,
    runtime: ToolRuntimeConfig | None = None,
) -> Iterator[ToolRuntime]:
    """`search` over any index, `open` and `find` where `search.pages` says so, and `python` in the sandbox, which is
    closed at the end; the index stays open. Raises `InputError` on a machine without a sandbox."""
    search = search or SearchConfig()
    with Sandbox(sandbox) as box:
        searching = SearchTool(index, count=search.count, passage_chars=search.passage_chars)
        pages = [OpenTool(index), FindTool(index)] if search.pages else []
        yield ToolRuntime([searching, *pages, SandboxTool(box)], runtime)
