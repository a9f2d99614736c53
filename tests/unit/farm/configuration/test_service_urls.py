"""Addresses with unencoded characters, in every setting that is an address: one line, without parts of a password."""

from __future__ import annotations

import itertools
from urllib.parse import quote

import pytest

from farm.client.connect import connect
from farm.configuration.service_urls import url_fault
from farm.errors import InvalidRequest
from farm.settings import settings

MARKS = "@#/?%[]\\ "
PLACES = ("{}s3cret", "s3{}cret", "s3cret{}", "1{}2", "{}")
HOSTS = {"redis": "127.0.0.1:6379/0", "amqp": "host:5672/vhost", "postgresql+psycopg": "db.lab.org:5432/farm"}
UNENCODED = "is not encoded: write @ as %40"


@pytest.mark.parametrize("scheme", HOSTS)
def test_unencoded_characters_are_reported_without_the_password(scheme: str) -> None:
    for mark, place, user in itertools.product(MARKS, PLACES, ("", "user", "us.er-1")):
        password = place.format(mark)
        url = f"{scheme}://{user}:{password}@{HOSTS[scheme]}"
        fault = url_fault(url)
        assert UNENCODED in fault, url
        assert "s3cret" not in fault
        assert url_fault(f"{scheme}://{user}:{quote(password, safe='')}@{HOSTS[scheme]}") == ""


@pytest.mark.parametrize(
    "url",
    [
        "",
        "redis://host",
        "redis://:p%40ss@host:6379/0",
        "redis://:a:b@host/0",
        "redis://:pässwörd@host/0",
        "rediss://u:p@[::1]:6379/1?ssl_cert_reqs=none",
        "redis://:p@one:1/0;redis://:p@two:2/0",
        "redis+socket:///run/a b#%/redis.sock?virtual_host=1",
        "amqp://guest:guest@host//",
        "amqp://guest:guest@host/%2Fv",
        "sqlite:////srv/100%/a#b/farm.db",
        "postgresql:///farm?host=/run/postgresql&user=me@lab",
        "postgresql://u@host/db?options=-c%20jit%3Doff",
        "http://127.0.0.1:8000/v1",
        "https://hooks.lab.org/a#b",
        "searxng:http://127.0.0.1:8080",
        "tavily",
    ],
)
def test_valid_addresses_have_no_fault(url: str) -> None:
    assert url_fault(url) == ""


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://host:port/0", "port is no number"),
        ("redis://host:0/0", "port is no number"),
        ("redis://host:70000/0", "port is no number"),
        ("redis:///0", "names no host"),
        ("redis://host/zero", "number of a database"),
        ("redis://host/0/1", "number of a database"),
        ("redis://:p;ss@host/0", UNENCODED),
        ("amqp://u:p@host/a#b", "write %23"),
        ("postgresql://host/db?user=a@b", UNENCODED),
        ("redis://:p\n@host/0", UNENCODED),
    ],
)
def test_invalid_addresses_have_a_fault(url: str, reason: str) -> None:
    assert reason in url_fault(url)


@pytest.mark.parametrize("name", ["STORE_URL", "BROKER_URL", "POLICY_URL", "SEARCH", "WEBHOOK_URL", "OTEL_ENDPOINT"])
def test_every_address_setting_is_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"FARM_{name}", "http://user:s3cr#t@host:80")
    settings.cache_clear()
    try:
        with pytest.raises(InvalidRequest, match=f"^FARM_{name}: a character of its user or its password") as caught:
            settings()
    finally:
        settings.cache_clear()
    assert "s3cr" not in str(caught.value)


def test_address_that_is_passed_is_checked() -> None:
    with pytest.raises(InvalidRequest, match=f"^url: .*{UNENCODED}") as caught:
        connect("postgresql://user:s3cr#t@host/farm")
    assert "s3cr" not in str(caught.value)
