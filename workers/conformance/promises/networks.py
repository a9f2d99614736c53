"""Promises about the network, which is off, and about Unix sockets, which connect inside and outside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from workers.conformance.trial import PromiseTrial, program, promise, same
from workers.plugins.interfaces import Sandbox

_ANSWER = b"from the node\n"


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(_ANSWER)
    with contextlib.suppress(OSError):
        await writer.drain()
    writer.close()


@asynccontextmanager
async def _tcp_server() -> AsyncIterator[int]:
    """Run a server of the node on 127.0.0.1 while the block runs; yields its port."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def _unix_server(listener: socket.socket) -> AsyncIterator[None]:
    server = await asyncio.start_unix_server(_answer, sock=listener)
    async with server:
        yield


def _bound(path: Path) -> socket.socket:
    """Return a Unix socket at a path of any length, to which every process that reaches the path may connect."""
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # the kernel accepts at most 107 bytes
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o777)
    return listener


async def _read(trial: PromiseTrial, family: str, *address: str, on: Sandbox | None = None) -> str:
    """Return what a program inside reads from a server, or `refused` and a newline if it cannot connect."""
    return await trial.python(program("read_from_server"), family, *address, on=on)


@promise("python3")
async def there_is_no_network(trial: PromiseTrial) -> None:
    """Unless the spec requests it there is no network: no interface but `lo`, and every address is unreachable."""
    same((await trial.sh("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '")), "lo\n", "the interfaces")
    async with _tcp_server() as port:
        same(await _read(trial, "AF_INET", "127.0.0.1", str(port)), "refused\n", "a server of the node")
    same(await _read(trial, "AF_INET", "192.0.2.1", "80"), "refused\n", "an address outside")
    same(await trial.sh("tail -n +2 /proc/net/route | wc -l"), "0\n", "the number of routes")


@promise("python3")
async def rare_socket_families_are_refused(trial: PromiseTrial) -> None:
    """Sockets are Unix, TCP, UDP, ICMP or routes: none reaches a hypervisor (vsock), a device, or a rare protocol."""
    same(await trial.python(program("make_sockets")), "", "sockets that were made")
    one = await trial.start(network=True)
    same(await trial.python(program("make_sockets"), on=one), "", "sockets that were made with the network on")


@promise("python3")
async def loopback_works(trial: PromiseTrial) -> None:
    """Programs inside reach each other on 127.0.0.1 and ::1 or `localhost`, even with the network off."""
    code = """
import socket
for host in ("127.0.0.1", "localhost"):
    server = socket.create_server((host, 0))
    socket.create_connection(server.getsockname(), 5)
print("reached")
"""
    same(await trial.python(code), "reached\n", "what a program says that reaches itself")


@promise("python3")
async def the_network_can_be_requested(trial: PromiseTrial) -> None:
    """With `network` in its spec a sandbox reaches all that the node reaches, and shares nothing else with it."""
    one = await trial.start(network=True)
    async with _tcp_server() as port:
        same(await _read(trial, "AF_INET", "127.0.0.1", str(port), on=one), _ANSWER.decode(), "the server's answer")
    assert len((await trial.sh("cd /proc; echo [0-9]*", one)).split()) < 50, "it sees the processes of the node"


@promise("python3")
async def sandboxes_cannot_connect_to_each_other(trial: PromiseTrial) -> None:
    """A server in one sandbox cannot be reached from another, neither by address nor by an abstract Unix socket."""
    one = await trial.start()
    await one.write_file("server.py", program("serve_two_sockets").encode())
    port = (
        await trial.sh(
            f"python3 server.py promise-{trial.mark} > port 2>&1 & until [ -s port ]; do sleep 0.05; done; cat port",
            one,
        )
    ).strip()
    same(await _read(trial, "AF_INET", "127.0.0.1", port), "refused\n", "the server of another sandbox")
    name = f"@promise-{trial.mark}"
    same(await _read(trial, "AF_UNIX", name), "refused\n", "the abstract socket of another sandbox")


@promise("python3")
async def abstract_sockets_of_the_node_are_unreachable(trial: PromiseTrial) -> None:
    """An abstract Unix socket of the node, such as that of a desktop or daemon, cannot be connected to."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0promise-{trial.mark}")
    async with _unix_server(listener):
        same(await _read(trial, "AF_UNIX", f"@promise-{trial.mark}"), "refused\n", "the socket of the node")
        same(
            (await trial.bash("grep -f - /proc/net/unix", stdin=trial.mark.encode())).stdout, b"", "sockets of the node"
        )


@promise("python3")
async def worker_socket_is_reachable(trial: PromiseTrial) -> None:
    """A server that listens in the sandbox's `socket_folder` is reached inside at /run/farm, with the network off."""
    one = await trial.start()
    async with _unix_server(_bound(one.socket_folder / "worker")):
        same(await _read(trial, "AF_UNIX", "/run/farm/worker", on=one), _ANSWER.decode(), "the answer inside")
        two = await trial.start()
        same(await _read(trial, "AF_UNIX", "/run/farm/worker", on=two), "refused\n", "the answer in another")


@promise("python3")
async def socket_inside_is_reachable(trial: PromiseTrial) -> None:
    """A server inside that listens in /run/farm is reached from the node in the sandbox's `socket_folder`."""
    one = await trial.start()
    code = """
import socket
server = socket.socket(socket.AF_UNIX); server.bind("/run/farm/inside"); server.listen(); print("up", flush=True)
while True:
    peer, _ = server.accept(); peer.sendall(b"from inside"); peer.close()
"""
    await one.write_file("server.py", code.encode())
    await trial.sh("python3 server.py > up 2>&1 & until [ -s up ]; do sleep 0.05; done", one)
    same(await asyncio.to_thread(_ask_socket, one, "inside"), b"from inside", "the answer")


def _ask_socket(sandbox: Sandbox, name: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as peer:
        folder = os.open(sandbox.socket_folder, os.O_PATH | os.O_DIRECTORY)
        try:
            peer.settimeout(10)
            peer.connect(f"/proc/self/fd/{folder}/{name}")
            return peer.recv(100)
        finally:
            os.close(folder)


@promise()
async def the_socket_folder_is_private(trial: PromiseTrial) -> None:
    """The `socket_folder` is a folder of mode 0700 on the node, one for each sandbox, and is removed with it."""
    one, two = await trial.start(), await trial.start()
    assert one.socket_folder != two.socket_folder, "two sandboxes have the same"
    for sandbox in (one, two):
        status = sandbox.socket_folder.lstat()
        assert stat.S_ISDIR(status.st_mode), f"{sandbox.socket_folder} is no folder"
        same(oct(stat.S_IMODE(status.st_mode)), oct(0o700), "its mode")
    await trial.sh(f"echo x > /run/farm/p{trial.mark}; ls /run/farm", one)
    assert (one.socket_folder / f"p{trial.mark}").exists(), "what is made in /run/farm is not in the socket folder"
    await one.stop()
    assert not one.socket_folder.exists(), f"{one.socket_folder} is still there after stop"
