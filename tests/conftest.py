"""Fixtures for all tests: real servers, private to this run, and the policy for missing ones."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import httpcore2
import pytest
from hypothesis import HealthCheck
from hypothesis import settings as examples
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from farm.settings import settings
from farm.startup import frozen_imports
from farm.store import migrations
from farm.store.database import Store
from testkit.postgres import postgres_database as new_postgres_database
from testkit.postgres import postgres_server
from testkit.private_server import Missing
from testkit.scratch_folder import sandbox_config
from tests import rerun
from tests.forked_workers import fork_workers
from tests.services.apptainer import apptainer_program, unpacked_binaries
from tests.services.compiled_statements import share_compiled_statements
from tests.services.farms import home_of_tests
from tests.services.servers.redis import redis_client, redis_server
from tests.services.soak import SOAK_MINUTES
from workers.config import SandboxConfig
from workers.testing import plugin_path

_ORDER = ("unit", "contract", "integration", "acceptance")
_APART = tuple(
    f"tests/acceptance/{name}.py::"
    for name in ("faults/test_killed_nodes", "test_drain", "test_demo", "faults/test_chaos")
)
"""Tests of these files share nothing and run whole farms for many seconds each: they are distributed one by one."""

_LONGEST = (
    *(
        f"tests/acceptance/{name}.py::"
        for name in ("test_wheel", "faults/test_hangs", "faults/test_uninterruptible_sleep")
    ),
    *_APART,
    *(f"tests/acceptance/{name}.py::" for name in ("test_head", "test_weight_updates")),
    *(f"tests/acceptance/faults/{name}.py::" for name in ("test_store_faults", "test_broker_faults")),
)
"""These files take longest, the last of them most of all. At the end of a run each would keep one worker busy."""

_WAITING = tuple(
    f"tests/{suite}/{name}.py"
    for suite, names in {
        "unit": (
            *("farm/scheduler/test_broker", "workers/tools/test_search", "workers/policy/gateway/test_recent_answers"),
            *("farm/launch/test_head_claim", "farm/store/sql/test_connection_slots"),
            *("workers/policy/engines/test_chat_route", "workers/policy/engines/test_capabilities"),
            "workers/sandboxes/isolation/test_hang_guard",
        ),
        "contract": (
            *(f"protocols/{name}" for name in ("test_prorl_clients", "test_prorl", "test_nemo_gym")),
            *(f"store/{name}" for name in ("test_store_one_connection", "test_store_clock", "test_store_silence")),
            *(f"sandboxes/{name}" for name in ("test_uninterruptible_processes", "test_sandbox_terminal")),
        ),
        "integration": (
            *(f"engines/{name}" for name in ("test_weight_update", "test_routed_experts", "test_trainer_engines")),
            *("engines/test_pool_engines", "stores/test_store_outage", "web/test_views", "observing/test_webhooks"),
            *("sandboxes/test_warm_pool", "test_cancel"),
        ),
    }.items()
    for name in names
)
"""Tests of these files wait for most of their time: a third of the workers take them while the others compute."""

_TOGETHER = tuple(
    f"tests/integration/answers/test_{name}.py::" for name in ("answer", "answer_hacks", "example_answers")
)
"""Tests of these files share a grader, which takes three seconds of CPU to start: one worker gets them all."""

_BY_PARAMETER = "tests/acceptance/faults/test_broker_faults.py::"
"""Its tests share a farm for each kind of broker."""


def pytest_configure(config: pytest.Config) -> None:
    """Set up signals and environment as at a terminal, for this process and all that tests start, and our plug-ins.

    A shell makes its background processes ignore SIGINT, which would be inherited: nothing could be interrupted.
    Without the bytecode of the farm each of a thousand processes would compile all its imports.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # else NumPy starts a thread for each core in each process
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # the time that an example takes depends on the load of the machine
    examples.register_profile("farm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    examples.load_profile("farm")
    share_compiled_statements()
    # reading the system's certificates takes 15 ms for each HTTP client
    httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)
    plugin_path.install()
    opened = ExitStack()
    opened.enter_context(home_of_tests())
    config.add_cleanup(opened.close)
    if rerun.is_enabled(config):
        config.pluginmanager.register(rerun.Rerun())
    fork_workers(config, Path(os.environ["FARM_HOME"]), _ORDER)


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep the thousands of tests out of garbage collections: collections between them would double the time."""
    with frozen_imports():
        yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run cheap tests first, so that a broken function is not first seen as a broken farm."""
    left_out = [] if SOAK_MINUTES else [item for item in items if _is_soak_only(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_soak_only(item)]
    items.sort(key=_rank)


def _is_soak_only(item: pytest.Item) -> bool:
    return any(mark.kwargs.get("only") for mark in item.iter_markers("soak"))


def _rank(item: pytest.Item) -> tuple[int, int]:
    """Return a test's rank: within a suite the longest files come last."""
    length = next((at for at, file in enumerate(_LONGEST, 1) if item.nodeid.startswith(file)), 0)
    return _suite(item.nodeid), length


def _suite(nodeid: str) -> int:
    name = nodeid.split("/", 2)[1]
    return _ORDER.index(name) if name in _ORDER else 0


class SideBySide(LoadScopeScheduling):  # type: ignore[misc]
    """Gives each worker a file of tests at a time, as tests of a file share expensive fixtures.

    A third of the workers take files that wait, as long as there are any. The others take unit tests first; then every
    second one takes files from the end of our order, the others from its start: whole farms, which mostly wait, run
    next to tests that compute, and the rest at the end is short.
    """

    def _assign_work_unit(self, node: Any) -> None:
        worker = self.nodes.index(node)
        waiting = [file for file in _WAITING if file in self.workqueue]
        others = [file for file in self.workqueue if file not in waiting]
        if waiting and (worker < len(self.nodes) // 3 or not others):
            chosen = waiting[0]
        else:
            from_end = worker % 2 and _suite(others[0])
            chosen = others[-1 if from_end else 0]
        self.workqueue.move_to_end(chosen, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_APART):
            return nodeid
        if nodeid.startswith(_TOGETHER):
            return _TOGETHER[0]
        file, _, name = nodeid.partition("::")
        return file + name[name.rfind("[") :] if nodeid.startswith(_BY_PARAMETER) else file

    def _reschedule(self, node: Any) -> None:
        """Keep at most one test queued per worker: no idle worker can take what is queued for another."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SideBySide:
    """Schedule the slow tests last, one at a time: sorted by number they would keep one worker busy at the end."""
    config.option.loadscopereorder = False
    return SideBySide(config, log)


def absent(reason: str) -> NoReturn:
    """End the test because its service is missing: skipped on a laptop, failed in CI.

    If the user lacks a right, for root or for ids in /etc/subuid, nothing could be installed: that is a plain skip.
    """
    if os.environ.get("CI"):
        pytest.fail(f"CI must have every service: {reason}", pytrace=False)
    pytest.skip(reason)


@pytest.fixture(autouse=True)
def _read_settings_again() -> Iterator[None]:
    """Reread the settings for each test, as the variables of an earlier test are gone, even if it failed."""
    yield
    settings.cache_clear()


@pytest.fixture
def config() -> SandboxConfig:
    """Return the configuration of sandboxes by the settings before the test."""
    return sandbox_config()


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """Yield the broker URL of this run's Redis (`redis+socket://…`), for Celery and for `farm.notifications`."""
    try:
        with redis_server() as url:
            yield url
    except Missing as missing:
        absent(str(missing))


@pytest.fixture
def broker_url(redis_url: str) -> str:
    """Return the same Redis, emptied for this test."""
    with redis_client(redis_url) as client:
        client.flushall()
    return redis_url


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """Yield the SQLAlchemy URL of this run's Postgres; tests use `postgres_database`."""
    try:
        with postgres_server() as url:
            yield url
    except Missing as missing:
        absent(str(missing))


@pytest.fixture
def postgres_database(postgres_url: str) -> Iterator[str]:
    """Yield the URL of this test's own empty database."""
    with new_postgres_database(postgres_url) as url:
        yield url


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """Return the URL of this test's own SQLite file, not created yet."""
    return f"sqlite:///{tmp_path / 'farm.db'}"


@pytest.fixture(params=["sqlite_url", "postgres_database"], ids=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Return each kind of database in turn, empty."""
    return str(request.getfixturevalue(request.param))


@pytest.fixture(scope="session")
def migrated_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a SQLite file with the farm's tables, to be copied."""
    path = tmp_path_factory.mktemp("migrated") / "farm.db"
    _migrate(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="session")
def migrated_postgres(postgres_url: str) -> Iterator[str]:
    """Yield the URL of a database with the farm's tables, to be copied."""
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
    """Yield this test's own SQLite file, with the farm's tables."""
    path = tmp_path / "farm.db"
    shutil.copy(migrated_sqlite, path)
    yield from _opened(f"sqlite:///{path}")


@pytest.fixture
def postgres_store(postgres_url: str, migrated_postgres: str) -> Iterator[Store]:
    """Yield this test's own Postgres database, with the farm's tables."""
    with new_postgres_database(postgres_url, migrated_postgres) as url:
        yield from _opened(url)


def _opened(url: str) -> Iterator[Store]:
    store = Store(url)
    yield store
    store.close()


@pytest.fixture(params=["sqlite_store", "postgres_store"], ids=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest) -> Store:
    """Return each kind of database in turn, with the farm's tables."""
    result: Store = request.getfixturevalue(request.param)
    return result


@pytest.fixture(scope="session")
def apptainer() -> Iterator[Path]:
    """Yield the Apptainer or Singularity to use, with its helpers on PATH; the machine's own has priority."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{os.environ.get('PATH', '')}{os.pathsep}{unpacked_binaries()}")
        try:
            yield apptainer_program(os.environ["PATH"])
        except Missing as missing:
            absent(str(missing))
