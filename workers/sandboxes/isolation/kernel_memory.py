# ruff: noqa: PTH115, PTH123
"""Memory that the kernel holds for a sandbox and that is no process's: socket buffers, System V objects.

It is read in the sandbox's own namespaces, by a socket and a file that a child opened there: a few system calls,
however many processes there are. Sockets are found by the kernel's own list (sock_diag(7)), so those on their way in
messages between others count, too, even if closed. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct

from workers.sandboxes.isolation import linux, namespaces

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SYSV = ("shm", "msg", "sem")
_REMOVE = 0
"""IPC_RMID."""
_SEMAPHORE = 64
_SOCKET = 1024
"""Bytes that each of them takes, without what it holds."""
_TCP_SHARE, _TCP_LEAST, _TCP_USUAL = 16, 16 << 20, 64 << 20
_ANSWER_S = 0.5
_CHUNK = 1 << 16

# linux/netlink.h, linux/sock_diag.h, unix_diag.h, inet_diag.h, netlink_diag.h
_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST_DUMP = 4, 20, 0x301
_ERROR, _DONE = 2, 3
_ALL_STATES = 0xFFFFFFFF
_UNIX_REQUEST = struct.pack("=BBHIII8x", 1, 0, 0, _ALL_STATES, 0, 0x20)
_NETLINK_REQUEST = struct.pack("=BBHII8x", 16, 0xFF, 0, 0, 1)
_REQUESTS = (
    # the request, its answer's size and where the inode is in it, and the attribute with its memory
    (_UNIX_REQUEST, 16, 4, 5),
    (_NETLINK_REQUEST, 28, 16, 0),
    *(
        (struct.pack("=BBBxI48x", family, protocol, 1 << 6, _ALL_STATES), 72, 68, 7)
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP, socket.IPPROTO_RAW)
    ),
)
_TCP_REQUESTS = [request for request, *_ in _REQUESTS if request[1] == socket.IPPROTO_TCP]


def most_tcp() -> int:
    """Return the bytes that one sandbox may hold in TCP queues: a share of what all TCP of the node may have.

    Beyond that amount the kernel slows down the connections of engines, broker and store on the node, too.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(linux.read_text("/proc/sys/net/ipv4/tcp_mem").split()[1])
        return max(_TCP_LEAST, pages * _PAGE // _TCP_SHARE)
    return _TCP_USUAL


class KernelMemory:
    """The kernel memory of one sandbox. Raises OSError or Gone if it cannot be looked into."""

    def __init__(self, target: namespaces.JoinTarget) -> None:
        network = f"/proc/{target['pid']}/ns/net"
        self.shares_network = os.readlink(network) == os.readlink("/proc/self/ns/net")
        """True if the sockets that are listed are those of the whole node."""
        descriptors = _opened_inside({**target, "network": self.shares_network})
        self._files = dict(zip(_SYSV, descriptors, strict=False))
        self._netlink = socket.socket(fileno=descriptors[-1])
        self._netlink.settimeout(_ANSWER_S)
        self.tcp = 0
        """Bytes that TCP sockets held at the last call of `sockets`."""

    def close(self) -> None:
        self._netlink.close()
        for descriptor in self._files.values():
            os.close(descriptor)

    def shared(self) -> int:
        """Bytes of System V shared memory, attached or not."""
        return sum(int(row["rss"]) + int(row["swap"]) for row in self._rows("shm"))

    def messages(self) -> int:
        """Bytes of System V messages that wait, and of semaphores."""
        waiting = sum(int(row["cbytes"]) for row in self._rows("msg"))
        return waiting + _SEMAPHORE * sum(int(row["nsems"]) for row in self._rows("sem"))

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        with open(os.dup(self._files[name])) as file:
            file.seek(0)
            head = file.readline().split()
            for line in file:
                yield dict(zip(head, line.split(), strict=False))

    def sockets(self) -> dict[int, int]:
        """By inode, the bytes that each socket holds."""
        result: dict[int, int] = {}
        self.tcp = 0
        for request, size, inode_at, attribute in _REQUESTS:
            # one of these may not be in this kernel
            with contextlib.suppress(OSError):
                for answer in self._asked(request):
                    (inode,) = struct.unpack_from("=I", answer, inode_at)
                    # those of no process have no number
                    n_bytes = _SOCKET + _held(answer[size:], attribute)
                    result[inode] = result.get(inode, 0) + n_bytes
                    self.tcp += n_bytes if request in _TCP_REQUESTS else 0
        return result

    def _asked(self, request: bytes) -> Iterator[bytes]:
        self._netlink.send(struct.pack("=IHHII", 16 + len(request), _BY_FAMILY, _REQUEST_DUMP, 1, 0) + request)
        while True:
            data = self._netlink.recv(_CHUNK)
            at = 0
            while at < len(data):
                length, kind = struct.unpack_from("=IH", data, at)
                if kind in (_ERROR, _DONE):
                    return
                yield data[at + 16 : at + length]
                at += (length + 3) & ~3


def _held(attributes: bytes, wanted: int) -> int:
    """Bytes in the queues of a socket, by its attributes (SK_MEMINFO_*)."""
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if kind == wanted:
            received, _, sent, _, forward, queued, options, backlog = struct.unpack_from("=8I", attributes, at + 4)
            return int(received + max(sent, queued) + forward + options + backlog)
        at += (max(length, 4) + 3) & ~3
    return 0


def _opened_inside(target: namespaces.JoinTarget) -> list[int]:
    """Descriptors of the lists of System V objects, and of a socket that lists sockets, opened by a child inside."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(OSError, namespaces.SandboxGone):
                namespaces.join(target, linux.NEWUSER | linux.NEWIPC | linux.NEWNET)
                files = [os.open(f"/proc/sysvipc/{name}", os.O_RDONLY) for name in _SYSV]
                diagnosis = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG)
                socket.send_fds(theirs, [b"!"], [*files, diagnosis.fileno()])
            os._exit(0)
        theirs.close()
        _, descriptors, _, _ = socket.recv_fds(ours, 1, len(_SYSV) + 1)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
    if len(descriptors) != len(_SYSV) + 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise OSError("the sandbox's namespaces cannot be entered")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors


def remove_system_v_objects() -> None:
    """Of the ipc namespace of this process, which must be its root: what is not attached is gone at once."""
    libc = ctypes.CDLL(None)
    for name, remove in (("shm", libc.shmctl), ("msg", libc.msgctl), ("sem", libc.semctl)):
        with open(f"/proc/sysvipc/{name}") as file:
            for line in file.readlines()[1:]:
                number = int(line.split()[1])
                # semctl has another argument before the command
                remove(number, *((0, _REMOVE) if name == "sem" else (_REMOVE, None)))
