"""One sandbox of each kind for the whole session; tests are skipped where this machine offers none."""

import pytest
from hostile import CONFIG

from turntree.core.errors import InputError
from turntree.sandboxes.enclosures import Bubblewrap, Landlock
from turntree.sandboxes.sandbox import Sandbox


def opened(enclosure):
    """Only a machine without the means is excused; a sandbox that is there and leaks is a failure."""
    try:
        return Sandbox(CONFIG, enclosure=enclosure())
    except InputError as error:
        if "not contained" in str(error):
            raise
        pytest.skip(f"no such sandbox here: {error}")


@pytest.fixture(scope="session", params=[Bubblewrap, Landlock], ids=["bubblewrap", "landlock"])
def sandbox(request):
    with opened(request.param) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def shell_sandbox():
    with opened(Bubblewrap) as sandbox:
        yield sandbox
