"""The servers of other tests exist, are real and private, and are gone afterwards."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from celery import Celery
from sqlalchemy import create_engine, text

from testkit.private_server import running
from tests.services.farms import until
from tests.services.servers.redis import redis_client

ROOT = Path(__file__).parents[2]


def test_redis_answers_and_keeps_nothing_on_disk(redis_url: str) -> None:
    with redis_client(redis_url) as client:
        assert client.ping()
        assert client.config_get("save") == {"save": ""}
        assert client.config_get("appendonly") == {"appendonly": "no"}


def test_celery_talks_to_redis(broker_url: str) -> None:
    with Celery("test", broker=broker_url) as app:
        app.send_task("nothing", queue="somewhere")
    with redis_client(broker_url) as client:
        assert client.llen("somewhere") == 1


def test_broker_starts_empty(broker_url: str) -> None:
    with redis_client(broker_url) as client:
        assert client.dbsize() == 0


def test_both_databases_answer_and_start_empty(store_url: str) -> None:
    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE found (here INTEGER)"))
        assert connection.execute(text("SELECT count(*) FROM found")).scalar_one() == 0
    engine.dispose()


def test_postgres_url_points_to_postgres(postgres_database: str) -> None:
    engine = create_engine(postgres_database)
    with engine.connect() as connection:
        assert str(connection.execute(text("SELECT version()")).scalar_one()).startswith("PostgreSQL")
    engine.dispose()


def test_apptainer_shows_its_version(apptainer: Path) -> None:
    shown = subprocess.run([apptainer, "--version"], capture_output=True, text=True, check=True).stdout
    assert "version" in shown


def test_failed_server_start_shows_its_log(tmp_path: Path) -> None:
    server = running(["sh", "-c", "echo no room; exit 3"], lambda: False, tmp_path / "log")
    with pytest.raises(RuntimeError, match="no room"), server:
        pytest.fail("it did not start")


@pytest.mark.parametrize("kind", ["redis", "postgres"])
def test_server_ends_with_a_killed_test_process(kind: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(f"{kind}_url")  # skips or fails where there is none
    module = "testkit.postgres" if kind == "postgres" else f"tests.services.servers.{kind}"
    starts = f"from {module} import *\nwith {kind}_server() as url: print(url, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", starts], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as tests:
        assert tests.stdout is not None
        url = tests.stdout.readline().strip()
        folder = _folder(url)
        assert _processes_of(folder)
        tests.send_signal(signal.SIGKILL)
    try:
        until(lambda: not _processes_of(folder), lambda: f"none runs any more: {_processes_of(folder)}")
    finally:
        shutil.rmtree(folder)


def _folder(url: str) -> Path:
    match = re.search(r"/(tmp|dev/shm)/farm-test-\w+", url)
    assert match is not None, f"no server came up: {url!r}"
    return Path(match[0])


def _processes_of(folder: Path) -> list[str]:
    """Return the command lines that name the folder."""
    result = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if str(folder) in command:
                result.append(command)
    return result
