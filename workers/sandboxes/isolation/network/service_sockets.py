"""List, open and connect sockets inside a sandbox, and pass them out. Standard library only.

An address is `["tcp", HOST, PORT]`, `["tcp6", HOST, PORT]` or `["unix", PATH]`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat

from workers.sandboxes.isolation import linux, memfd, namespaces
from workers.sandboxes.isolation.owners.credentials import address_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    Address = Sequence[Any]

FOLDERS = ("/run/", "/var/run/", "/tmp/", "/var/tmp/", "/var/lib/", "/srv/")
"""Folders in which Unix sockets of services are listed."""
_OURS = "/run/farm/"
_WITH_USER = 4
"""Length of a Unix address with the uid and gid of the connecting user."""
_CONNECT_S = 10.0
_BACKLOG = 64
_LISTENING = "0A"
_ACCEPTS, _STREAM = "00010000", "0001"
_FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}


def listening(target: namespaces.JoinTarget) -> list[Address]:
    """Return the addresses at which processes of a sandbox listen. Moves this process to its network.

    Raises SandboxGone, OSError.
    """
    namespaces.join(target, linux.NEWUSER | linux.NEWNET)
    sockets = [*_of_tcp("tcp"), *_of_tcp("tcp6"), *_of_paths()]
    if target["network"]:
        # the network is the whole node's: keep the sockets of the sandbox's own processes
        proc = os.open(f"/proc/{target['pid']}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        pids = [name for name in os.listdir(proc) if name.isdigit()]
        own = set[int]().union(*memfd.sockets(proc, pids).values())
        sockets = [(inode, address) for inode, address in sockets if inode in own]
    return list({tuple(address): address for _, address in sockets}.values())


def _of_tcp(name: str) -> Iterator[tuple[int, Address]]:
    for fields in _rows(name):
        if fields[3] == _LISTENING:
            host, _, port = fields[1].partition(":")
            yield int(fields[9]), (name, _host(host), int(port, 16))


def _host(text: str) -> str:
    """Return an address of /proc/net, which has 32-bit words in the byte order of the machine."""
    words = bytes.fromhex(text)
    data = b"".join(words[at : at + 4][::-1] for at in range(0, len(words), 4))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _of_paths() -> Iterator[tuple[int, Address]]:
    for fields in _rows("unix", 7):
        if len(fields) == 8 and fields[3] == _ACCEPTS and fields[4] == _STREAM:
            path = fields[7]
            if path.startswith(FOLDERS) and not path.startswith(_OURS) and ".." not in path.split("/"):
                yield int(fields[6]), ("unix", path)


def _rows(name: str, max_splits: int = -1) -> Iterator[list[str]]:
    with contextlib.suppress(OSError):
        for line in linux.read_text(f"/proc/self/net/{name}").splitlines()[1:]:
            yield line.split(None, max_splits)


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address. Raises OSError, also if its path exists."""
    endpoint = socket.socket(_FAMILIES[address[0]], socket.SOCK_STREAM)
    try:
        if address[0] == "unix":
            os.makedirs(os.path.dirname(address[1]), exist_ok=True)
            endpoint.bind(address[1])
            os.chmod(address[1], 0o777)
        else:
            if address[0] == "tcp6":
                endpoint.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            endpoint.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            endpoint.bind((address[1], address[2]))
        endpoint.listen(_BACKLOG)
    except OSError:
        endpoint.close()
        raise
    return endpoint


def connect(address: Address) -> socket.socket:
    """Return a connected socket. A Unix address can have the connecting user's uid and gid. Raises OSError."""
    endpoint = socket.socket(_FAMILIES[address[0]], socket.SOCK_STREAM)
    endpoint.settimeout(_CONNECT_S)
    try:
        if address[0] == "unix" and not stat.S_ISSOCK(os.lstat(address[1]).st_mode):
            raise OSError(errno.ENOTSOCK, os.strerror(errno.ENOTSOCK))
        if len(address) == _WITH_USER:
            endpoint.bind(address_of(*address[2:]))
        endpoint.connect(address[1] if address[0] == "unix" else (address[1], address[2]))
    except OSError:
        endpoint.close()
        raise
    endpoint.settimeout(None)
    return endpoint


def join(target: namespaces.JoinTarget) -> None:
    """Move this process to a sandbox's mounts and network. Raises SandboxGone."""
    namespaces.join(target, linux.NEWUSER | linux.NEWNS | linux.NEWNET)
