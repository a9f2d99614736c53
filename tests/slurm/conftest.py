"""A Slurm for the tests in this folder: `make test-slurm`. Without FARM_TEST_SLURM none of them is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from testkit.private_server import Missing
from tests.services.servers.slurm_cluster import SlurmCluster, slurm_cluster

if not os.environ.get("FARM_TEST_SLURM"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    try:
        with slurm_cluster() as started:
            yield started
    except Missing as missing:
        pytest.fail(str(missing), pytrace=False)
