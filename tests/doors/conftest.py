"""The command line of `tests/cli`, and a folder with modules of one's own in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import Turntree
from doors.parts_of_ones_own import MODULES


@pytest.fixture(scope="session")
def turntree() -> Turntree:
    return Turntree()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current folder while the module's tests run: a user's own, outside the package."""
    folder = tmp_path_factory.mktemp("mine")
    for name, text in MODULES.items():
        (folder / f"{name}.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        yield folder
    for name in MODULES:
        sys.modules.pop(name, None)
