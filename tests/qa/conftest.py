"""A small generated world, its index, and its tools with a real sandbox."""

from collections.abc import Iterator

import pytest

from turntree.core.errors import InputError
from turntree.env.tools.runtime import ToolRuntime
from turntree_worlds.qa.build import QaWorld, QaWorldConfig, open_tools
from turntree_worlds.sandboxes.limits import SandboxConfig
from turntree_worlds.search import SearchIndex
from turntree_worlds.tools import SearchTool


@pytest.fixture(scope="session")
def world() -> QaWorld:
    return QaWorld(QaWorldConfig(seed=5))


@pytest.fixture(scope="session")
def index(world: QaWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SearchIndex]:
    with world.build_index(tmp_path_factory.mktemp("qa") / "index.db") as index:
        yield index


@pytest.fixture(scope="session")
def tools(index: SearchIndex) -> Iterator[ToolRuntime]:
    try:
        opened = open_tools(index, sandbox=SandboxConfig(boxes=1))
        with opened as runtime:
            yield runtime
    except InputError as error:
        pytest.skip(f"no sandbox here: {error}")


@pytest.fixture(scope="session")
def searching(index: SearchIndex) -> ToolRuntime:
    """Search alone, for tests that need no sandbox."""
    return ToolRuntime([SearchTool(index, count=3)])
