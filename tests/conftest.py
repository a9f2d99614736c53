"""Fixtures that all tests may ask for: real servers, each private to this run, and what decides when one is missing."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from farm.store import migrations
from farm.store.engine import Store
from tests.services.apptainer import apptainer_program, unpacked_binaries
from tests.services.postgres import postgres_database as new_postgres_database
from tests.services.postgres import postgres_server
from tests.services.process import Missing
from tests.services.redis import redis_client, redis_server

_ORDER = ("unit", "contract", "integration", "acceptance")
_APART = tuple(
    f"tests/acceptance/test_{name}.py::" for name in ("chaos", "demo", "drain", "killed_nodes", "hangs", "cancel")
)
"""Tests of these files share nothing and play whole farms for many seconds each; the longest come first."""

_BY_PARAMETER = "tests/acceptance/test_broker_faults.py::"
"""Its tests share a farm for each kind of broker."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cheap tests first, so that a broken function is not first seen as a broken farm."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> tuple[int, int]:
    """Within a suite whole files come before what is given out test by test: it evens out when the workers end."""
    suite = Path(item.path).relative_to(Path(__file__).parent).parts[0]
    apart = next((at for at, file in enumerate(_APART) if item.nodeid.startswith(file)), -1)
    return _ORDER.index(suite) if suite in _ORDER else 0, apart


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker a file of tests at a time, as its tests share what is dear to make, in our order."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_APART):
            return nodeid
        file, _, name = nodeid.partition("::")
        return file + name[name.rfind("[") :] if nodeid.startswith(_BY_PARAMETER) else file

    def _reschedule(self, node: Any) -> None:
        """A worker has one test ahead of it, no more: what waits for one worker is taken by no other that is idle."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    """The slow ones come last, one at a time: sorted by their number they would keep one worker long after the rest."""
    config.option.loadscopereorder = False
    return SideBySide(config, log)


def absent(reason: str) -> None:
    """End the test because its service is missing: a laptop skips, CI fails."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have every service: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The broker URL of this run's Redis (`redis+socket://…`), for Celery and for `farm.signals`."""
    try:
        with redis_server() as url:
            yield url
    except Missing as missing:
        absent(str(missing))


@pytest.fixture
def broker_url(redis_url: str) -> str:
    """The same Redis, emptied for this test."""
    with redis_client(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The SQLAlchemy URL of this run's Postgres; tests want `postgres_database`."""
    try:
        with postgres_server() as url:
            yield url
    except Missing as missing:
        absent(str(missing))


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """The URL of a database of this test's own, empty."""
    with new_postgres_database(postgres_url) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """The URL of a SQLite file of this test's own, not made yet."""
    return f"sqlite:///{tmp_path / 'farm.db'}"


@pytest.fixture(params=["sqlite_url", "postgres_database"], ids=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each kind of database in turn, empty."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite file with the farm's tables, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "farm.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_url: str) -> Iterator[str]:
    """The URL of a database with the farm's tables, to be copied."""
    with new_postgres_database(postgres_url) as url:
        _migrate(url)
        yield url


def _migrate(url: str) -> None:
    store = Store(url)
    try:
        migrations.migrate(store)
    finally:
        store.close()


@pytest.fixture
def sqlite_store(migrated_sqlite: Path, tmp_path: Path) -> Iterator[Store]:
    """A SQLite file of this test's own, with the farm's tables."""
    path = tmp_path / "farm.db"
    shutil.copy(migrated_sqlite, path)
    yield from _opened(f"sqlite:///{path}")


@pytest.fixture
def postgres_store(postgres_url: str, migrated_postgres: str) -> Iterator[Store]:
    """A Postgres database of this test's own, with the farm's tables."""
    with new_postgres_database(postgres_url, migrated_postgres) as url:
        yield from _opened(url)


def _opened(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


@pytest.fixture(params=["sqlite_store", "postgres_store"], ids=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    """Each kind of database in turn, with the farm's tables."""
    found: Store = request.getfixturevalue(request.param)
    return found


@pytest.fixture(scope="session")
def apptainer() -> Iterator[Path]:
    """The Apptainer or Singularity to use, with its helpers on PATH; the machine's own comes first."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ.get('PATH', '')}{os.pathsep}{unpacked_binaries()}")
        try:
            yield apptainer_program(os.environ["PATH"])
        except Missing as missing:
            absent(str(missing))
