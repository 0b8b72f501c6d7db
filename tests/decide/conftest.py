from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from turntree.decide.gates.table import GroupTable

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "published_groups.py"


@pytest.fixture(scope="session")
def published(shared_data: Path) -> GroupTable:
    """The paper's groups, as the recipe reads them."""
    spec = importlib.util.spec_from_file_location("published_groups", RECIPE)
    assert spec is not None and spec.loader is not None
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    return recipe.read_features(shared_data / "selective_rollout" / "hybrid_gate_features.csv")
