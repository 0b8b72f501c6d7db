"""One sandbox for the whole session; tests are skipped where this machine has none for shell commands."""

import pytest

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.entry import Terminal
from turntree_worlds.workbench.families import generated


@pytest.fixture(scope="session")
def sandbox():
    try:
        opened = Sandbox(Terminal().sandbox)
    except InputError as error:
        pytest.skip(f"no sandbox here: {error}")
    with opened:
        yield opened


@pytest.fixture(scope="session")
def terminal(sandbox):
    return lambda split, number: Terminal()._played(generated(split, number), sandbox)
