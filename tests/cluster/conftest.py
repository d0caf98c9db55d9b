"""A real Ray, which is started once for all tests here that need one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.child_start import platform_pretence

ROOT = Path(__file__).parents[2]
TRIES = 5  # Ray gives up on itself if its processes take more than 15 s to start, as on a busy machine


@pytest.fixture(scope="package")
def address() -> Iterator[str]:
    """A Ray of two nodes with one processor each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("PYTHONPATH", str(ROOT))
        cluster = start_cluster()
        yield cluster.address
        cluster.shutdown()


def start_cluster() -> Any:
    if os.environ.get(platform_pretence.VARIABLE):
        pytest.skip("Ray for Linux needs /proc")
    from ray.cluster_utils import Cluster

    problems = []
    for _ in range(TRIES):
        cluster = Cluster()
        try:
            for _ in range(2):
                cluster.add_node(num_cpus=1, object_store_memory=100_000_000, include_dashboard=False)
            return cluster
        except Exception as error:
            problems.append(str(error))
            with suppress(Exception):
                cluster.shutdown()
    pytest.fail(f"Ray does not start here: {problems}")
