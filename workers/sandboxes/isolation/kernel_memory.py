"""Measure kernel memory of a sandbox that belongs to no process: socket buffers and System V objects.

A child opens a netlink socket and the /proc/sysvipc files inside the sandbox's namespaces; reading them takes a few
system calls, independent of the number of processes. Sockets are listed by sock_diag(7), which includes sockets that
are closed everywhere but still in transit in a message. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterator

from workers.sandboxes.isolation import linux, namespaces

_PAGE = os.sysconf("SC_PAGE_SIZE")
_SYSV = ("shm", "msg", "sem")
_REMOVE = 0
"""IPC_RMID."""
_SEMAPHORE = 64
_SOCKET = 1024
"""Bytes for each socket, without its buffers."""
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
    # request, size of the answer, offset of its inode, attribute with the memory counters
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
    """Return the bytes that one sandbox can hold in TCP buffers: a sixteenth of the node's `tcp_mem` pressure limit.

    Above that limit the kernel also slows down the node's connections to engines, broker and store.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        pages = int(linux.read_text("/proc/sys/net/ipv4/tcp_mem").split()[1])
        return max(_TCP_LEAST, pages * _PAGE // _TCP_SHARE)
    return _TCP_USUAL


class KernelMemory:
    """The kernel memory of one sandbox. Raises OSError or SandboxGone if its namespaces cannot be entered."""

    def __init__(self, target: namespaces.JoinTarget) -> None:
        network = f"/proc/{target['pid']}/ns/net"
        self.shares_network = os.readlink(network) == os.readlink("/proc/self/ns/net")
        """True if `sockets` lists those of the whole node."""
        descriptors = _opened_inside({**target, "network": self.shares_network})
        self._files = dict(zip(_SYSV, descriptors, strict=False))
        self._netlink = socket.socket(fileno=descriptors[-1])
        self._netlink.settimeout(_ANSWER_S)
        self.tcp = 0
        """Bytes of the TCP sockets, as of the last call of `sockets`."""

    def close(self) -> None:
        self._netlink.close()
        for descriptor in self._files.values():
            os.close(descriptor)

    def shared(self) -> int:
        """Return the bytes of System V shared memory, attached or not."""
        return sum(int(row["rss"]) + int(row["swap"]) for row in self._rows("shm"))

    def messages(self) -> int:
        """Return the bytes of queued System V messages and of semaphores."""
        waiting = sum(int(row["cbytes"]) for row in self._rows("msg"))
        return waiting + _SEMAPHORE * sum(int(row["nsems"]) for row in self._rows("sem"))

    def _rows(self, name: str) -> Iterator[dict[str, str]]:
        with open(os.dup(self._files[name])) as file:
            file.seek(0)
            head = file.readline().split()
            for line in file:
                yield dict(zip(head, line.split(), strict=False))

    def sockets(self) -> dict[int, int]:
        """Return the bytes of each socket by inode. Sockets of no process share the inode 0."""
        n_by_inode: dict[int, int] = {}
        self.tcp = 0
        for request, size, inode_at, attribute in _REQUESTS:
            # this kernel can lack one of the protocols
            with contextlib.suppress(OSError):
                for answer in self._answers(request):
                    (inode,) = struct.unpack_from("=I", answer, inode_at)
                    # inode 0 for the sockets of no process
                    n_bytes = _SOCKET + _held(answer[size:], attribute)
                    n_by_inode[inode] = n_by_inode.get(inode, 0) + n_bytes
                    self.tcp += n_bytes if request in _TCP_REQUESTS else 0
        return n_by_inode

    def _answers(self, request: bytes) -> Iterator[bytes]:
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


def _held(attributes: bytes, kind_of_memory: int) -> int:
    at = 0
    while at + 4 <= len(attributes):
        length, kind = struct.unpack_from("=HH", attributes, at)
        if kind == kind_of_memory:
            received, _, sent, _, forward, queued, options, backlog = struct.unpack_from("=8I", attributes, at + 4)
            return int(received + max(sent, queued) + forward + options + backlog)
        at += (max(length, 4) + 3) & ~3
    return 0


def _opened_inside(target: namespaces.JoinTarget) -> list[int]:
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
        raise OSError("the namespaces of the sandbox cannot be entered")
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    return descriptors


def remove_system_v_objects() -> None:
    """Remove all System V objects of the current ipc namespace, as its root. Unattached ones are freed at once."""
    libc = ctypes.CDLL(None)
    for name, remove in (("shm", libc.shmctl), ("msg", libc.msgctl), ("sem", libc.semctl)):
        with open(f"/proc/sysvipc/{name}") as file:
            for line in file.readlines()[1:]:
                number = int(line.split()[1])
                # semctl takes the semaphore number before the command
                remove(number, *((0, _REMOVE) if name == "sem" else (_REMOVE, None)))
