"""One sandbox of each kind for the whole session; tests are skipped where this machine offers none."""

import pytest
from hostile import CONFIG

from turntree.core.errors import InputError
from turntree.sandboxes.enclosures import Bubblewrap, Landlock
from turntree.sandboxes.sandbox import Sandbox


@pytest.fixture(scope="session", params=[Bubblewrap, Landlock], ids=["bubblewrap", "landlock"])
def sandbox(request):
    try:
        opened = Sandbox(CONFIG, enclosure=request.param())
    except InputError as error:
        pytest.skip(f"no such sandbox here: {error}")
    yield opened
    opened.close()


@pytest.fixture(scope="session")
def shell_sandbox():
    try:
        opened = Sandbox(CONFIG, enclosure=Bubblewrap())
    except InputError as error:
        pytest.skip(f"no such sandbox here: {error}")
    yield opened
    opened.close()
