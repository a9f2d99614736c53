"""A real PgBouncer in transaction mode: `make test-pooler`. Without FARM_TEST_POOLER none of this is collected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from farm.store.database import Store
from testkit.postgres import postgres_database as new_postgres_database
from testkit.private_server import Missing
from tests.services.servers.pgbouncer import pgbouncer, through

if not os.environ.get("FARM_TEST_POOLER"):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def pooler(postgres_url: str) -> Iterator[Path]:
    try:
        with pgbouncer(postgres_url) as folder:
            yield folder
    except Missing as missing:
        pytest.fail(str(missing), pytrace=False)


@pytest.fixture
def pooled_url(postgres_url: str, migrated_postgres: str, pooler: Path) -> Iterator[str]:
    """The URL of this test's own database, with the farm's tables, through the PgBouncer."""
    with new_postgres_database(postgres_url, migrated_postgres) as url:
        yield through(pooler, url)


@pytest.fixture
def postgres_store(pooled_url: str) -> Iterator[Store]:
    store = Store(pooled_url)
    yield store
    store.close()


@pytest.fixture
def store(postgres_store: Store) -> Store:
    """For the tests of the store's promises, which run here, too."""
    return postgres_store
