"""The connections that a farm has and needs, and how versions of its nodes are distinguished."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from sqlalchemy import text
from sqlalchemy.engine import make_url

from farm.cli import doctor
from farm.cli.readiness import CheckResult
from farm.records.node import Node
from farm.store import nodes
from farm.store.database import Store
from farm.store.nodes import NODE_CONNECTIONS, Capacity, capacity


def finding(store: Store, what: str) -> CheckResult:
    check = {"nodes": doctor._nodes, "connections": doctor._connections}[what]
    return check(store.url)


def announce(store: Store, *infos: dict[str, Any]) -> None:
    for n, info in enumerate(infos):
        node = Node(f"n{n}", 8, 4, 4, 4, ["noop"], info)
        store.write(lambda c, node=node: nodes.announce(c, node))  # type: ignore[misc]


def test_too_few_connections_are_reported(postgres_store: Store) -> None:
    announce(postgres_store, {}, {})
    result = postgres_store.read(capacity)
    assert result is not None
    assert (result.n_nodes, result.suffices) == (2, True)
    assert finding(postgres_store, "connections").ok
    announce(postgres_store, *[{}] * 22)
    reported = finding(postgres_store, "connections")
    assert not reported.ok
    assert f"{22 * NODE_CONNECTIONS + 15} needed by 22 nodes" in reported.detail
    assert "max_connections" in reported.remedy
    assert Capacity(20, 97).suffices != Capacity(21, 97).suffices


def test_sqlite_has_no_connection_limit(sqlite_store: Store) -> None:
    assert sqlite_store.read(capacity) is None
    assert finding(sqlite_store, "connections").ok


@pytest.mark.parametrize(
    ("versions", "mixed"),
    [
        ([("1.0", "0007"), ("1.0", "0007")], False),
        ([("1.0", "0007"), ("1.1", "0007")], True),
        ([("1.0", "0007"), ("1.0", "0008")], True),
        ([("1.0", "0007"), ("", "")], False),
    ],
)
def test_nodes_of_different_versions_are_reported(store: Store, versions: list[tuple[str, str]], mixed: bool) -> None:
    announce(store, *({"version": code, "schema": schema} for code, schema in versions))
    reported = finding(store, "nodes")
    assert ("different versions" in reported.detail) == mixed
    assert reported.ok != mixed


@pytest.mark.parametrize("n_connections", [1, 2])
def test_process_opens_no_more_connections_than_its_limit(postgres_store: Store, n_connections: int) -> None:
    named = make_url(postgres_store.url).update_query_dict({"application_name": "counted"})
    store = Store(named.render_as_string(hide_password=False), n_connections=n_connections)
    mine = text("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'counted'")
    start = threading.Barrier(8)

    def ask(number: int) -> int:
        start.wait()
        most = 0
        for _ in range(5):
            most = max(most, store.read(lambda c: c.execute(mine).scalar_one()))
            store.write(lambda c: c.execute(text("SELECT 1")) and None, urgent=bool(number % 2))
        return most

    with ThreadPoolExecutor(8) as threads:
        assert max(threads.map(ask, range(8))) <= n_connections
    store.close()
