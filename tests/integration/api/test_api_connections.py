"""Connections of the API: encrypted ones, and hundreds that are slow, huge, broken or half closed, during a batch."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import pytest

import farm
from farm.client.local import LocalFarm
from farm.errors import FarmUnreachable, InvalidRequest
from farm.notifications import Signals
from farm.settings import settings
from farm.store.database import Store
from tests.contract.store.test_store import announce, place, run_to_end
from tests.services.api import KEY, served, shown_key
from tests.services.farms import NOOP, until
from tests.services.preloaded import opened
from tests.services.servers.certificates import Certificates, certificates

HEAD = f"POST /v1/cancel HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\ncontent-type: application/json\r\n"
GET = f"GET /v1/nodes HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n\r\n".encode()
N_ROLLOUTS = 24
SHUT = [
    b"",
    b"G",
    b"GET / HTTP/1.1\r\nhost: a\r\nx: ",
    HEAD.encode() + b"content-length: 100\r\n\r\n{",
    HEAD.encode() + b"transfer-encoding: chunked\r\n\r\nffffff\r\n{",
    b"\0\1\2\3 rubbish\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET /v1/nodes HTTP/1.1\r\n\r\n",
    HEAD.encode() + b"content-length: -1\r\n\r\n",
    HEAD.encode() + b"content-length: 1\r\ncontent-length: 2\r\n\r\n{}",
    HEAD.encode() + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"y" * 1000) for n in range(200)) + b"\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64,
    GET * 50 + GET.replace(b"host: a", b"host: a\r\nconnection: close"),
]
"""Requests that are slow, broken, of another protocol, or many at once."""


@pytest.fixture(autouse=True)
def key() -> Iterator[None]:
    with shown_key():
        yield


def test_bad_connections_do_not_disturb_a_batch(sqlite_store: Store) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 100_000)
    with served(service, request_s=3.0) as url, farm.connect(url) as client, ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        batch_id = client.submit({"instances": [NOOP], "n_samples": N_ROLLOUTS})
        place(sqlite_store, batch_id)
        announce(sqlite_store)
        crowd: list[socket.socket] = []
        for n in range(300):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            crowd.append(connection)
            with contextlib.suppress(OSError):
                connection.sendall(SHUT[n % len(SHUT)])
                if n % 2:
                    # half closed: it sends no more, but still reads
                    connection.shutdown(socket.SHUT_WR)
        # their requests are complete, but nobody reads the replies
        for _ in range(20):
            deaf = stack.enter_context(socket.create_connection(("127.0.0.1", port), 60))
            deaf.sendall(GET * 20)
            crowd.append(deaf)
        huge = [threading.Thread(target=_send_huge, args=(port,)) for _ in range(4)]
        for thread in huge:
            thread.start()
        runner = threading.Thread(target=_run_all, args=(sqlite_store, batch_id))
        runner.start()
        received = []
        for rollout in client.stream(batch_id, timeout_s=300):
            client.acknowledge(rollout)
            received.append(rollout.rollout_id)
        assert sorted(received) == sorted(f"{batch_id}.0.{n}" for n in range(N_ROLLOUTS))
        assert client.status(batch_id).done
        for thread in (runner, *huge):
            thread.join(300)
        # the server has closed or answered each of them by itself
        for connection in crowd[:300]:
            connection.settimeout(120)
            with contextlib.suppress(ConnectionError):
                while connection.recv(65_536):
                    pass
        assert client.violations(batch_id) == []


def _run_all(store: Store, batch_id: str) -> None:
    for number in range(N_ROLLOUTS):
        run_to_end(store, f"{batch_id}.0.{number}", reward=1.0)


def _send_huge(port: int) -> None:
    """Send a body of 100 MB, as far as it is accepted."""
    piece = b"0" * 1_000_000
    with socket.create_connection(("127.0.0.1", port), 60) as connection, contextlib.suppress(OSError):
        connection.sendall(f"{HEAD}content-length: 100000000\r\n\r\n".encode())
        for _ in range(100):
            connection.sendall(piece)
        connection.recv(4096)


def test_unread_reply_is_aborted(sqlite_store: Store) -> None:
    service = LocalFarm(sqlite_store, Signals(""), 100_000)
    batch_id = service.submit({"instances": [NOOP | {"instance_id": "x" * 200}], "n_samples": 1000})
    path = f"GET /v1/batches/{batch_id}/rollouts HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {KEY}\r\n\r\n"
    with served(service, request_s=0.5) as url, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", int(url.rpartition(":")[2])))
        connection.sendall(path.encode() * 20)
        until(lambda: _is_reset(connection), "the connection is aborted")
        assert httpx2.get(f"{url}/healthz").is_success


def _is_reset(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0 or not _is_established(connection)


def _is_established(connection: socket.socket) -> bool:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == 1


def test_connections_over_the_limit_are_closed(sqlite_store: Store) -> None:
    with served(LocalFarm(sqlite_store, Signals(""), 1000), max_connections=8) as url, ExitStack() as stack:
        port = int(url.rpartition(":")[2])
        opened = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(12)]
        until(lambda: sum(map(_is_established, opened)) == 8, "as many as there may be are open")
        for connection in opened:
            connection.close()
        until(lambda: _answers(url), "there is room again")


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/healthz").is_success
    except httpx2.TransportError:
        return False


def test_slow_request_body_times_out(sqlite_store: Store) -> None:
    with (
        served(LocalFarm(sqlite_store, Signals(""), 1000), request_s=30.0, body_s=1.0) as url,
        socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 60) as connection,
    ):
        connection.sendall(f"{HEAD}content-length: 1000\r\n\r\n".encode())
        connection.settimeout(0.2)
        answer = b""
        while not answer:
            with contextlib.suppress(OSError):
                connection.sendall(b"0")
            with contextlib.suppress(TimeoutError):
                answer = connection.recv(4096)
        assert b"408" in answer.partition(b"\r\n")[0]
        assert b"not all of it came in 1 s" in answer + _rest(connection)


def _rest(connection: socket.socket) -> bytes:
    connection.settimeout(30)
    with contextlib.suppress(OSError):
        return b"".join(iter(lambda: connection.recv(4096), b""))
    return b""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


def test_api_is_served_over_tls_and_untrusted_certificates_are_refused(
    sqlite_store: Store, files: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--port", "0", "--url", sqlite_store.url]
    pair = ["--tls-cert", str(files.certificate), "--tls-key", str(files.key)]
    with _api(*words, *pair) as url:
        assert url.startswith("https://127.0.0.1:")
        monkeypatch.setenv("FARM_API_CA", str(files.authority))
        settings.cache_clear()
        with farm.connect(url) as client:
            batch_id = client.submit({"instances": [NOOP]})
            assert client.status(batch_id).n_rollouts == 1
        monkeypatch.delenv("FARM_API_CA")
        settings.cache_clear()
        with pytest.raises(FarmUnreachable, match="is not trusted: set FARM_API_CA"):
            farm.connect(url, first_s=60)
        stranger = certificates(files.authority.parent, "127.0.0.2")
        monkeypatch.setenv("FARM_API_CA", str(stranger.authority))
        settings.cache_clear()
        with pytest.raises(FarmUnreachable, match="is not trusted"):
            farm.connect(url, first_s=60)
        for nothing in (files.key, files.key.with_name("nowhere")):
            monkeypatch.setenv("FARM_API_CA", str(nothing))
            settings.cache_clear()
            with pytest.raises(InvalidRequest, match="FARM_API_CA"):
                farm.connect(url, first_s=60)
        monkeypatch.delenv("FARM_API_CA")
        settings.cache_clear()
        # as plain text, and with garbage as a handshake
        with pytest.raises(FarmUnreachable):
            farm.connect(url.replace("https", "http"), first_s=0.1)
        context = ssl.create_default_context(cafile=str(files.authority))
        assert httpx2.get(f"{url}/healthz", verify=context).is_success


def test_https_client_of_a_plain_api_gets_an_error(sqlite_store: Store) -> None:
    with (
        served(LocalFarm(sqlite_store, Signals(""), 10)) as url,
        pytest.raises(FarmUnreachable, match="does not support this TLS"),
    ):
        farm.connect(url.replace("http", "https"), first_s=60)


@contextlib.contextmanager
def _api(*words: str) -> Iterator[str]:
    process = opened("farm.cli.main", ["api", *words], os.environ | {"FARM_API_KEY": KEY})
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize(
    ("cert", "key_of", "complaint"),
    [
        ("certificate", "nowhere", "No such file"),
        ("key", "key", "not a certificate and its key"),
        ("certificate", "other", "not a certificate and its key"),
        ("certificate", "", "go together"),
    ],
)
def test_invalid_certificates_are_refused_before_the_api_listens(
    sqlite_store: Store, files: Certificates, cert: str, key_of: str, complaint: str
) -> None:
    from farm.cli.main import main
    from tests.services.commands import output_of

    other = certificates(files.key.parent, "127.0.0.3")
    keys = {"key": files.key, "other": other.key, "nowhere": files.key.with_name("nowhere")}
    words = ["--tls-cert", str(getattr(files, cert)), *(["--tls-key", str(keys[key_of])] if key_of else [])]
    code = 2 if complaint == "go together" else 1
    assert complaint in output_of(main, "api", "--port", "0", "--url", sqlite_store.url, *words, code=code)
