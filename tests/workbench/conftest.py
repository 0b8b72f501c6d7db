"""One sandbox for the whole session; tests are skipped where this machine has none for shell commands."""

import pytest

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.sandbox import Sandbox
from turntree_worlds.workbench.entry import Software, Terminal


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
    return lambda split, number: Terminal()._played(Terminal().task(split, number, sandbox), sandbox)


@pytest.fixture(scope="session")
def swe(sandbox):
    return lambda split, number: Software()._played(Software().task(split, number, sandbox), sandbox)
