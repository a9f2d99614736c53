# ruff: noqa: PTH109
"""A user id of its own for a sandbox, by id-mapped mounts; standard library only.

The kernel counts descriptors in flight and pages of pipes for a user, whatever namespaces that user's processes are in:
so the one user that a sandbox has inside must be a user of its own outside. One id and not a range of 65536: what is
limited for a user would otherwise be had 65536 times.

The rule: on disk, everything belongs to the sandbox user, as without this; the id is in the mounts alone. Two user
namespaces make it, one in the other. The outer maps the sandbox user to the own id, and the image, the layers and the
writable layer are mounted as it maps them; the inner has uid 0 and no other. As the sandbox user made, and so owns, the
outer one, the monitor, the watcher and what joins need no other rights over the sandbox than before.

Only root of the host can make it so, as an ordinary user has no right to map the owners of a file system. What the
kernel counts for the owner of a namespace (inotify, waiting signals, message queues) is still shared: each gets a part.
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
"""The folder, in that of a sandbox, on which it has that folder as its own user's."""
_LEAST = (5, 19)
"""The Linux since which overlayfs takes id-mapped layers."""


def map_owners(process: int, own_id: int, user: Sequence[int], folders: Sequence[str]) -> list[int]:
    """As root, map the user namespace that a process has made, and what lies in folders; the first can be written to.

    Returns the mounts of the folders, attached nowhere yet. Raises OSError.
    """
    uid, gid = user
    # what root has made, such as a socket, needs some owner that there is, or it could not be written to; not root, as
    # the sandbox user may take on whatever is in the namespace that it owns
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
    """In the builder, as the sandbox user: make the outer namespace, and be its user. OSError.

    Returns the mounts of its folder and of its layers; none if the sandbox is to have no id of its own.
    """
    if not plan["own_id"] or not plan["user"]:
        return []
    linux.unshare(linux.NEWUSER)
    to_monitor.send(b"map")
    _, mounts, _, _ = socket.recv_fds(to_monitor, 16, 1 + len(plan["lower"]))
    if not mounts:
        raise OSError("its user id could not be mapped")
    # by the names that they have in there
    uid, gid = plan["user"]
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    linux.let_others_look_in(True)
    return mounts


def give_id(plan: MonitorPlan, builder: int, channel: socket.socket, wanted: int) -> None:
    """In the monitor, as root: map what the builder has made, and send it its mounts. Raises OSError."""
    wait_for(channel.fileno(), wanted)
    if channel.recv(16) and plan["user"]:
        mounts = map_owners(builder, plan["own_id"], plan["user"], [os.getcwd(), *plan["lower"]])
        socket.send_fds(channel, [b"!"], mounts)
        close(mounts)


def attach(mounts: Sequence[int], also: Sequence[str]) -> None:
    """Attach the mounts where the sandbox is made: its folder and its layers; `also` are folders of the first."""
    if not mounts:
        return
    for mounted, target in zip(
        mounts, (MAPPED, *(f"stage/{number}" for number in range(len(mounts) - 1))), strict=True
    ):
        linux.attach(mounted, target)
    for name in also:
        linux.mount(f"{MAPPED}/{name}", name, flags=linux.MS_BIND)
    close(mounts)


def refusal(folder: str, own_id: int, user: Sequence[int]) -> str:
    """Return why this kernel, or the file system of a folder, has no id-mapped mounts for root; empty if it has."""
    release = os.uname().release.partition("-")[0].split(".")
    # some have a sign at the end
    if tuple(int("".join(filter(str.isdigit, word))) for word in release[:2]) < _LEAST:
        return f"overlayfs takes no id-mapped layers before Linux {_LEAST[0]}.{_LEAST[1]}"
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
