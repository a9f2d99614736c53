"""The connection of a node to its head: its settings stay the same, and lead to the current head."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from farm.launch.shared_address import SharedAddress, first_address, read_address, write_address
from tests.services.farms import until
from workers.node.followed_head import WayToHead

ADDRESS = SharedAddress(
    farm_id="ab12",
    store_url="postgresql+psycopg://farm:p%40ss@10.0.0.1:5432/postgres",
    broker_url="redis://:p@127.0.0.1:1/0",
    api_key="key",
    secret_key="secret",
    password="p",
    own=("store", "broker"),
    head="first",
)


class _Answering:
    """A server that sends one word."""

    def __init__(self, word: bytes) -> None:
        self._word = word
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://:p@127.0.0.1:{self._socket.getsockname()[1]}/0"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if connection.recv(10):
                connection.sendall(self._word)


def test_address_is_read_as_written_and_garbage_is_none(tmp_path: Path) -> None:
    assert read_address(tmp_path) is None
    write_address(tmp_path, ADDRESS)
    assert read_address(tmp_path) == ADDRESS
    for rubbish in ("", "[]", '{"store_url": "sqlite:////of/an/embedded/farm"}', '{"farm_id": 3}'):
        (tmp_path / "address.json").write_text(rubbish)
        assert read_address(tmp_path) is None


def test_password_stays_the_same_if_the_address_changes(tmp_path: Path) -> None:
    first = first_address(tmp_path / "shared")
    file = tmp_path / "shared" / "address.json"
    for content in (None, "", '{"store_url": "sqlite:////of/an/embedded/farm", "broker_url": ""}'):
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_text(content)
        again = first_address(tmp_path / "shared")
        assert (again.password, again.farm_id) == (first.password, first.farm_id)
    assert first_address(tmp_path / "other").password != first.password


def test_connections_go_to_the_current_head(tmp_path: Path) -> None:
    one, two = _Answering(b"one"), _Answering(b"two")
    first = replace(ADDRESS, broker_url=one.url)
    write_address(tmp_path, first)
    way = WayToHead(tmp_path, first)
    chosen = way.node_settings()
    port = int(chosen["broker_url"].rpartition(":")[2].partition("/")[0])
    service = Path(way.service_variables()["PGSERVICEFILE"])
    assert chosen["store_url"] == "postgresql+psycopg:///?service=farm-ab12"
    assert service.read_text().split() == [
        *("[farm-ab12]", "host=10.0.0.1", "port=5432", "user=farm", "password=p@ss", "dbname=postgres")
    ]
    way.follow()

    def answer() -> bytes:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            try:
                connection.sendall(b"?")
                return connection.recv(10)
            except OSError:
                return b""

    until(lambda: answer() == b"one", "it is forwarded")
    with socket.create_connection(("127.0.0.1", port)) as held:
        held.sendall(b"?")
        assert held.recv(10) == b"one"
        moved = replace(first, store_url="postgresql+psycopg://farm:q@10.0.0.22:5433/postgres", broker_url=two.url)
        write_address(tmp_path, replace(moved, head=""))
        write_address(tmp_path, replace(moved, head="second"))
        until(lambda: answer() == b"two", "the next goes to the other")
        held.settimeout(60)
        with suppress(ConnectionResetError):
            assert held.recv(10) == b"", "connections to the first head are closed"
    assert "host=10.0.0.22" in service.read_text()
    assert "password=p@ss" not in service.read_text()


def test_servers_of_the_site_are_used_unchanged(tmp_path: Path) -> None:
    way = WayToHead(tmp_path, replace(ADDRESS, own=()))
    chosen = way.node_settings()
    assert (chosen["store_url"], chosen["broker_url"]) == (ADDRESS.store_url, ADDRESS.broker_url)
    assert not way.service_variables()
    assert (chosen["api_key"], chosen["secret_key"]) == ("key", "secret")
