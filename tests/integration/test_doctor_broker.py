"""A Redis without access control is reported as such."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from farm.cli.doctor import examine_farm
from farm.cli.readiness import CheckResult
from farm.embedded.own_redis import redis_server
from farm.settings import Settings
from tests.services.farms import until
from tests.services.servers.broker import free_ports


@contextmanager
def listening(*options: str) -> Iterator[int]:
    [port] = free_ports(1)
    command = [redis_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", "", *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            yield port
        finally:
            server.kill()


def broker(url: str, tmp_path: Path) -> CheckResult:
    options = Settings(home=tmp_path, broker_url=url)
    return next(each for each in examine_farm(options, options.database_url, url) if each.what == "redis")


@pytest.mark.parametrize(("options", "login", "ok"), [((), "", False), (("--requirepass", "abc"), ":abc@", True)])
def test_redis_without_a_password_is_reported(options: tuple[str, ...], login: str, ok: bool, tmp_path: Path) -> None:
    with listening(*options) as port:
        url = f"redis://{login}127.0.0.1:{port}/0"
        until(lambda: broker(url, tmp_path).detail.startswith("answers"), "it answers")
        check_result = broker(url, tmp_path)
        assert (check_result.ok, check_result.needed) == (ok, ok)
        assert ("requires no password" in check_result.detail) is not ok
        assert "abc" not in check_result.detail + check_result.remedy
