"""Shared fixtures: where the real data lie, and one thread for tiny models."""

import os
from collections.abc import Iterator
from pathlib import Path

# Before torch is imported anywhere: two OpenMP threads on a tiny model can be a hundred times slower than one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


def shared_data_path() -> Path:
    return Path(os.environ.get("TURNTREE_SHARED_DATA", REPOSITORY.parent / "shared" / "data"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data; the test is skipped where a checkout has none."""
    path = shared_data_path()
    if not path.is_dir():
        pytest.skip(f"real data not found at {path}; set TURNTREE_SHARED_DATA")
    return path


@pytest.fixture(autouse=True, scope="module")
def a_module_ends_in_the_folder_that_the_suite_began_in(pytestconfig: pytest.Config) -> Iterator[None]:
    """Else later tests find files of the module beside them: one failed only behind a certain other suite."""
    yield
    assert Path.cwd() == pytestconfig.invocation_params.dir
