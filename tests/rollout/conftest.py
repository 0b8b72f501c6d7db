"""One Ray cluster of two nodes for all tests here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Any]:
    """A head and a node with one CPU each; this process is connected to it."""
    # Ray's niceness of 15 leaves its workers nothing beside the other half of the suite
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_worker_niceness="0")
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    here = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**here, "include_dashboard": False})
    cluster.add_node(**here)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
    yield cluster
    ray.shutdown()
    cluster.shutdown()
