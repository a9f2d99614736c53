"""Services of a sandbox are reached from another one at the same addresses, for as long as they are relayed."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from farm.errors import SandboxError
from farm.records.request import SandboxSpec
from tests.conftest import absent
from workers.plugins.registry import sandbox as provider
from workers.sandboxes.sandbox import NodeSandbox
from workers.sandboxes.service_relay import relayed, services

pytestmark = pytest.mark.timeout(600)
SERVE = """
import os, socket, sys, threading
def answer(connection):
    with connection:
        data = b""
        while piece := connection.recv(65536):
            data += piece
        connection.sendall(data.upper())
def serve(listener):
    while True:
        threading.Thread(target=answer, args=(listener.accept()[0],)).start()
os.makedirs("/run/app", exist_ok=True)
unix = socket.socket(socket.AF_UNIX)
unix.bind("/run/app/x.sock")
unix.listen()
hidden = socket.socket(socket.AF_UNIX)
hidden.bind("/opt/x.sock")
hidden.listen()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 8081))
listeners = [
    socket.create_server(("127.0.0.1", 8080)),
    socket.create_server(("::1", 8080), family=socket.AF_INET6),
    unix,
]
for each in listeners:
    threading.Thread(target=serve, args=(each,)).start()
print("up", flush=True)
"""
ASK = """
import socket, sys
size = int(sys.argv[1])
for address, family in ((("localhost", 8080), 2), (("::1", 8080), 10), ("/run/app/x.sock", 1)):
    s = socket.socket(family)
    s.settimeout(60)
    s.connect(address)
    s.sendall(b"a" * size)
    s.shutdown(socket.SHUT_WR)
    data = b""
    while piece := s.recv(65536):
        data += piece
    print(data == b"A" * size)
"""
FOUND = {("tcp", "127.0.0.1", 8080), ("tcp6", "::1", 8080), ("unix", "/run/app/x.sock")}


@asynccontextmanager
async def sandbox(kind: str, *, fake_root: bool | None = None) -> AsyncIterator[NodeSandbox]:
    started = await provider(kind).start(f"test-{uuid.uuid4().hex[:12]}", SandboxSpec(fake_root=fake_root))
    assert isinstance(started, NodeSandbox)
    try:
        yield started
    finally:
        await started.stop()


@asynccontextmanager
async def serving(kind: str) -> AsyncIterator[NodeSandbox]:
    async with sandbox(kind) as started:
        await started.write_file("/tmp/serve.py", SERVE.encode())
        command = "nohup python3 /tmp/serve.py > /tmp/up 2>&1 & until grep -q up /tmp/up; do sleep 0.1; done"
        assert (await started.exec(["bash", "-c", command], timeout_s=60)).code == 0
        yield started


async def request_services(other: NodeSandbox, size: int = 10) -> str:
    result = await other.exec(["python3", "-c", ASK, str(size)], timeout_s=120)
    return result.stdout.decode() or result.stderr.decode()


@pytest.fixture(params=["namespace", "singularity"])
def kind(request: pytest.FixtureRequest) -> str:
    if missing := provider(request.param).missing():
        absent(missing)
    return str(request.param)


def test_services_are_reached_only_while_they_are_relayed(kind: str) -> None:
    async def main() -> None:
        async with serving(kind) as first, sandbox(kind) as second:
            assert set(await services(first)) == FOUND
            assert await services(second) == []
            async with relayed(first, second) as found:
                assert set(found) == FOUND
                assert (await request_services(second)).split() == ["True"] * 3
                assert (await request_services(second, 5_000_000)).split() == ["True"] * 3
                several = await asyncio.gather(*(request_services(second, 1000) for _ in range(6)))
                assert all(each.split() == ["True"] * 3 for each in several)
            assert "refused" in await request_services(second)
            # there is nothing in the other direction
            assert await services(second) == []

    asyncio.run(main())


def test_occupied_address_is_not_relayed(kind: str) -> None:
    async def main() -> None:
        async with serving(kind) as first, serving(kind) as second, relayed(first, second) as found:
            assert found == []
            assert (await request_services(second)).split() == ["True"] * 3

    asyncio.run(main())


def test_connections_to_ended_services_are_refused(kind: str) -> None:
    async def main() -> None:
        async with serving(kind) as first, sandbox(kind) as second:
            async with relayed(first, second) as found:
                assert found
                await first.exec(["bash", "-c", "kill -9 -1"], timeout_s=20)
                assert "True" not in await request_services(second)
                await first.stop()
                assert "True" not in await request_services(second)
            with pytest.raises(SandboxError, match="gone"):
                await services(first)

    asyncio.run(main())


PEER = """
import os, socket, struct
listener = socket.socket(socket.AF_UNIX)
listener.bind("/run/peer.sock")
os.chmod("/run/peer.sock", 0o777)
listener.listen()
print("up", flush=True)
while True:
    connection = listener.accept()[0]
    _, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    connection.sendall(b"%d:%d" % (uid, gid))
    connection.close()
"""
CLIENT = """
import os, socket, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[2])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
s = socket.socket(socket.AF_UNIX)
s.connect("/run/peer.sock")
print(s.recv(99).decode())
"""


def test_relayed_server_sees_the_user_of_the_client(kind: str) -> None:
    async def peer_users() -> list[str]:
        async with sandbox(kind, fake_root=True) as first, sandbox(kind, fake_root=True) as other:
            await first.write_file("/tmp/serve.py", PEER.encode())
            command = "nohup python3 /tmp/serve.py > /tmp/up 2>&1 & until grep -q up /tmp/up; do sleep 0.1; done"
            await first.exec(["bash", "-c", command], timeout_s=60)
            await other.write_file("/tmp/ask.py", CLIENT.encode())
            async with relayed(first, other):
                users = ("1500 1600", "0 0", "0 7", "7 0")
                replies = [other.exec(["python3", "/tmp/ask.py", *each.split()], timeout_s=60) for each in users]
                done = await asyncio.gather(*replies)
                return [(each.stdout + each.stderr).decode().strip() for each in done]

    assert asyncio.run(peer_users()) == ["1500:1600", "0:0", "0:7", "7:0"]
