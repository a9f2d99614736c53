"""Servers that permanently refuse an address: one line at the start, at once, without any part of a password."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

import psycopg
import pytest
import redis

from farm.cli.doctor import examine_farm
from farm.client.connect import connect
from farm.embedded.own_redis import redis_server
from farm.errors import FarmError, InvalidRequest, StoreUnavailable
from farm.scheduler.broker import check_broker
from farm.settings import Settings
from farm.store import migrations
from farm.store.database import Store
from testkit.postgres import restartable_postgres
from testkit.private_server import Missing
from tests.conftest import absent
from tests.services.farms import until
from tests.services.preloaded import completed
from tests.services.servers.broker import free_ports
from tests.services.servers.rabbitmq import rabbitmq_broker

PASSWORD = "s3cr%40t%23w%2Ford"
"""s3cr@t#w/ord, as written in an address."""
AT_ONCE_S = 20.0
"""Less than the wait for an outage."""
LOGIN = "refuses the user or the password"


@pytest.fixture(scope="module")
def redis_port() -> Iterator[int]:
    [port] = free_ports(1)
    command = [
        redis_server(),
        "--port",
        str(port),
        "--bind",
        "127.0.0.1",
        "--save",
        "",
        "--requirepass",
        "s3cr@t#w/ord",
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        client = redis.Redis(port=port, password="s3cr@t#w/ord")
        until(lambda: answers(client), "Redis answers")
        client.acl_setuser("reader", enabled=True, passwords=["+p"], commands=["+auth", "+select"], keys=["x"])
        client.close()
        yield port
        server.kill()


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


REDIS = [
    ("redis://:wrong@127.0.0.1:{port}/0", LOGIN),
    ("redis://127.0.0.1:{port}/0", LOGIN),
    ("redis://nobody:s3cret@127.0.0.1:{port}/0", LOGIN),
    (f"redis://:{PASSWORD}@127.0.0.1:{{port}}/99", "no database with that number"),
    ("redis://reader:p@127.0.0.1:{port}/0", "too few rights"),
]


@pytest.mark.parametrize(("url", "reason"), REDIS, ids=[reason[-20:] for _, reason in REDIS])
def test_redis_refusal_is_reported_by_check_and_doctor(redis_port: int, url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_broker(url.format(port=redis_port))
    options = Settings(broker_url=url.format(port=redis_port))
    [checked] = [each for each in examine_farm(options, "sqlite:////none", options.broker_url) if each.what == "redis"]
    assert not checked.ok
    assert reason in checked.detail


@pytest.mark.parametrize(
    ("options", "url", "reason"),
    [
        (["--cluster-enabled", "yes"], "redis://127.0.0.1:{port}/1", "a Redis cluster"),
        (["--sentinel"], "redis://127.0.0.1:{port}/1", "perhaps a Sentinel"),
    ],
)
def test_redis_cluster_and_sentinel_are_refused(options: list[str], url: str, reason: str, tmp_path: Path) -> None:
    [port] = free_ports(1)
    config = tmp_path / "redis.conf"
    config.write_text(f'port {port}\nbind 127.0.0.1\ndir "{tmp_path}"\n')
    with subprocess.Popen([redis_server(), str(config), *options], stdout=subprocess.DEVNULL) as server:
        try:
            until(lambda: answers(redis.Redis(port=port)), "it answers")
            with pytest.raises(InvalidRequest, match=reason):
                check_broker(url.format(port=port))
        finally:
            server.kill()


def test_server_of_another_protocol_is_named() -> None:
    class Page(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.request.recv(1000)
            self.request.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        with pytest.raises(InvalidRequest, match="not Redis"):
            check_broker(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(InvalidRequest, match="not a Postgres"):
            connect(f"postgresql://127.0.0.1:{port}/farm")
        server.shutdown()


def test_accepted_or_unreachable_redis_is_no_refusal(redis_port: int) -> None:
    check_broker(f"redis://:{PASSWORD}@127.0.0.1:{redis_port}/0")
    [closed] = free_ports(1)
    check_broker(f"redis://:{PASSWORD}@127.0.0.1:{closed}/0")


@pytest.mark.parametrize("part", ["node", "api", "up", "flower"])
@pytest.mark.parametrize("password", ["wrong-w0rd", "s3cr@t#w/ord"])
def test_process_with_a_refused_broker_exits_with_one_line(
    redis_port: int, tmp_path: Path, part: str, password: str
) -> None:
    store = Store(f"sqlite:///{tmp_path / 'farm.db'}")
    migrations.migrate(store)
    store.close()
    env = {
        **os.environ,
        "FARM_HOME": str(tmp_path),
        "FARM_STORE_URL": store.url,
        "FARM_BROKER_URL": f"redis://:{password}@127.0.0.1:{redis_port}/0",
    }
    more = ["--port", "0"] if part == "api" else []
    ended = completed("farm.cli.main", [part, *more], env, 120)
    lines = [line for line in ended.stderr.splitlines() if line.startswith("Error: ")]
    assert ended.returncode == 1, ended.stderr
    assert len(lines) == 1, ended.stderr
    assert (LOGIN if password == "wrong-w0rd" else "is not encoded: write @ as %40") in lines[0]
    for piece in ("wrong-w0rd", "s3cr", "t#w", "w/ord"):
        assert piece not in ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def rabbitmq_port() -> Iterator[int]:
    try:
        with rabbitmq_broker() as broker:
            assert isinstance(broker.server, int)
            yield broker.server
    except Missing as missing:
        absent(str(missing))


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://guest:wrong@127.0.0.1:{port}//", LOGIN),
        ("amqp://nobody:guest@127.0.0.1:{port}//", LOGIN),
        ("amqp://guest:guest@127.0.0.1:{port}/missing", "virtual host"),
    ],
)
def test_rabbitmq_refusal_is_reported(rabbitmq_port: int, url: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        check_broker(url.format(port=rabbitmq_port))
    check_broker(f"amqp://guest:guest@127.0.0.1:{rabbitmq_port}//")
    [closed] = free_ports(1)
    check_broker(f"amqp://guest:guest@127.0.0.1:{closed}//")


HBA = """
local all farm trust
local all banned reject
local closed known scram-sha-256
local all known scram-sha-256
local all stranger scram-sha-256
"""


@pytest.fixture(scope="module")
def postgres_folder() -> Iterator[str]:
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        hba = Path(folder, "hba.conf")
        hba.write_text(HBA)
        try:
            with restartable_postgres(hba_file=str(hba)) as server:
                place = server.url.split("?host=", 1)[1]
                with psycopg.connect(host=place, user="farm", dbname="postgres", autocommit=True) as connection:
                    for order in (
                        "CREATE USER known PASSWORD 's3cr@t#w/ord'",
                        "CREATE USER banned",
                        "CREATE USER elsewhere",
                        "CREATE DATABASE closed",
                        "REVOKE CONNECT ON DATABASE closed FROM PUBLIC",
                        "CREATE DATABASE open OWNER known",
                    ):
                        connection.execute(order.encode())
                yield place
        except Missing as missing:
            absent(str(missing))


POSTGRES = [
    ("known:wrong@/open", "user or password"),
    ("known@/open", "user or password"),
    ("stranger:x@/open", "user or password"),
    ("farm@/missing", "no such database"),
    (f"known:{PASSWORD}@/missing", "no such database"),
    ("banned@/open", "pg_hba.conf"),
    ("elsewhere@/open", "pg_hba.conf"),
    (f"known:{PASSWORD}@/closed", "no right to connect"),
]


@pytest.mark.parametrize(("login", "reason"), POSTGRES, ids=[login.partition("@")[0] + "@" for login, _ in POSTGRES])
def test_postgres_refusal_is_reported_at_once_without_the_password(
    postgres_folder: str, login: str, reason: str
) -> None:
    url = f"postgresql+psycopg://{login}?host={postgres_folder}"
    for attempt in (lambda: connect(url), lambda: migrations.migrate(Store(url))):
        began = time.monotonic()
        with pytest.raises(InvalidRequest, match=reason) as caught:
            attempt()
        assert time.monotonic() - began < AT_ONCE_S
        assert "s3cr" not in str(caught.value)
        assert "\n" not in str(caught.value)


def test_accepted_or_unreachable_postgres_is_no_refusal(postgres_folder: str, tmp_path: Path) -> None:
    store = Store(f"postgresql+psycopg://known:{PASSWORD}@/open?host={postgres_folder}")
    migrations.migrate(store)
    store.close()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        Store(f"postgresql+psycopg://known:{PASSWORD}@/open?host={tmp_path}", patience_s=0.1).read(lambda _: None)


@pytest.mark.parametrize("part", [("node",), ("api", "--port", "0"), ("ls",), ("migrate",), ("backup", "farm.backup")])
def test_process_with_a_refused_database_exits_with_one_line(
    postgres_folder: str, tmp_path: Path, part: tuple[str, ...]
) -> None:
    env = {
        **os.environ,
        "FARM_HOME": str(tmp_path),
        "FARM_STORE_URL": f"postgresql+psycopg://known:n0-such@/open?host={postgres_folder}",
        "FARM_BROKER_URL": f"redis+socket://{tmp_path}/none.sock",
    }
    ended = completed("farm.cli.main", part, env, 180)
    lines = (ended.stdout + ended.stderr).splitlines()
    reason = [line for line in lines if "the database refuses the connection" in line]
    assert ended.returncode == 1, ended.stderr
    assert reason, ended.stdout + ended.stderr
    assert len(reason) == 1
    assert "n0-such" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_login_refused_after_the_first_connection_is_retried(postgres_folder: str) -> None:
    """A password that is changed while a farm runs ends nothing: only a first connection is permanently refused."""
    store = Store(f"postgresql+psycopg://known:{PASSWORD}@/open?host={postgres_folder}", patience_s=0.5)
    orders = ("ALTER USER known PASSWORD 'new'", "ALTER USER known PASSWORD 's3cr@t#w/ord'")
    with psycopg.connect(host=postgres_folder, user="farm", dbname="postgres", autocommit=True) as connection:
        try:
            store.read(lambda _: None)
            connection.execute(orders[0].encode())
            store.engine.dispose()
            with pytest.raises(FarmError) as caught:
                store.read(lambda _: None)
            assert isinstance(caught.value, StoreUnavailable)
        finally:
            connection.execute(orders[1].encode())
            store.close()
