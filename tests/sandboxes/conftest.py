"""One sandbox for the whole session; tests are skipped where this machine offers none."""

import pytest
from hostile import CONFIG

from turntree.core.errors import InputError
from turntree_worlds.sandboxes.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox():
    """Only a machine without the means is excused; a sandbox that is there and leaks is a failure."""
    try:
        opened = Sandbox(CONFIG)
    except InputError as error:
        if "not contained" in str(error):
            raise
        pytest.skip(f"no sandbox here: {error}")
    with opened as sandbox:
        yield sandbox
