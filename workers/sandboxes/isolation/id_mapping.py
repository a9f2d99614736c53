"""Give a sandbox a host uid of its own, by id-mapped mounts. Standard library only.

The kernel counts descriptors in flight and pipe pages for a user, across namespaces. So the single user inside a
sandbox must be a separate user outside. One id, not a range of 65536, because each id of a range would have its own
limits.

On disk everything still belongs to the sandbox user; only the mounts use the own id. There are two nested user
namespaces. The outer one maps the sandbox user to the own id; image, layers and the writable layer are mounted with
that mapping. The inner one has only uid 0. The sandbox user owns the outer one, because it created it, so the monitor,
the watcher and joining processes need no additional rights.

Only root of the host can set this up. What the kernel counts for the owner of a namespace (inotify, pending signals,
message queues) is still shared between sandboxes; `kernel_limits.py` divides it.
"""

from __future__ import annotations

import contextlib
import os
import socket

from workers.sandboxes.isolation import linux, namespaces
from workers.sandboxes.isolation.parent_death_pipe import wait_for

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from workers.sandboxes.lifecycle.start import MonitorPlan

MAPPED = "mapped"
"""Folder inside the sandbox's state folder where that state folder is mounted with the own id."""
_LEAST = (5, 19)
"""First Linux version whose overlayfs accepts id-mapped layers."""


def map_owners(process: int, own_id: int, user: Sequence[int], folders: Sequence[str]) -> list[int]:
    """As root, write the id maps of a process's user namespace and create id-mapped mounts of `folders`.

    The first folder is writable, the others are read-only. Returns detached mounts. Raises OSError.
    """
    uid, gid = user
    # files created by root, such as sockets, need a mapped owner to be writable; it must not be root, because the
    # sandbox user can become any id of the namespace that it owns
    for name, text in (("uid_map", f"{uid} {own_id} 1\n0 {uid} 1"), ("gid_map", f"{gid} {gid} 1\n0 {own_id} 1")):
        linux.write_text(f"/proc/{process}/{name}", text)
    namespace = os.open(f"/proc/{process}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    mounts: list[int] = []
    try:
        for folder in folders:
            mounts.append(linux.id_mapped(folder, namespace, read_only=bool(mounts)))
    except OSError:
        close(mounts)
        raise
    finally:
        os.close(namespace)
    return mounts


def close(mounts: Sequence[int]) -> None:
    for mounted in mounts:
        os.close(mounted)


def take_id(plan: MonitorPlan, to_monitor: socket.socket) -> list[int]:
    """In the builder, as the sandbox user: create the outer user namespace and switch to its user. Raises OSError.

    Returns detached mounts of the state folder and the layers, or an empty list if the sandbox gets no id of its own.
    """
    if not plan["own_id"] or not plan["user"]:
        return []
    linux.unshare(linux.NEWUSER)
    to_monitor.send(b"map")
    _, mounts, _, _ = socket.recv_fds(to_monitor, 16, 1 + len(plan["lower"]))
    if not mounts:
        raise OSError("the sandbox's user id could not be mapped")
    # as they are numbered inside the namespace
    uid, gid = plan["user"]
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    linux.let_others_look_in(True)
    return mounts


def give_id(plan: MonitorPlan, builder: int, channel: socket.socket, requester: int) -> None:
    """In the monitor, as root: map the builder's namespace and send the mounts. Raises OSError."""
    wait_for(channel.fileno(), requester)
    if channel.recv(16) and plan["user"]:
        mounts = map_owners(builder, plan["own_id"], plan["user"], [os.getcwd(), *plan["lower"]])
        socket.send_fds(channel, [b"!"], mounts)
        close(mounts)


def attach(mounts: Sequence[int], bound: Sequence[str]) -> None:
    """Attach the mounts of the state folder and the layers; bind the folders `bound` of the state folder."""
    if not mounts:
        return
    for mounted, target in zip(
        mounts, (MAPPED, *(f"stage/{number}" for number in range(len(mounts) - 1))), strict=True
    ):
        linux.attach(mounted, target)
    for name in bound:
        linux.mount(f"{MAPPED}/{name}", name, flags=linux.MS_BIND)
    close(mounts)


def refusal(folder: str, own_id: int, user: Sequence[int]) -> str:
    """Return why id-mapped mounts do not work for root on this kernel or file system, or an empty text if they do."""
    release = os.uname().release.partition("-")[0].split(".")
    # a version can end in a sign, as in "5.19+"
    if tuple(int("".join(filter(str.isdigit, word))) for word in release[:2]) < _LEAST:
        return f"overlayfs accepts no id-mapped layers before Linux {_LEAST[0]}.{_LEAST[1]}"
    ours, theirs = socket.socketpair()
    child = os.fork()
    if child == 0:
        ours.close()
        with contextlib.suppress(OSError):
            namespaces.become(*user)
            linux.unshare(linux.NEWUSER)
            theirs.send(b"!")
            theirs.recv(1)
        os._exit(0)
    theirs.close()
    with ours:
        if not ours.recv(1):
            return "the sandbox user can make no user namespace"
        try:
            close(map_owners(child, own_id, user, [folder]))
        except OSError as error:
            return str(error)
    return ""
