"""Limits that the kernel itself sets on what a sandbox may take of it; standard library only.

The rule: whatever the kernel counts for a namespace or a user is given a limit for each sandbox, before anything of the
policy runs in it. Of what it counts for the user who owns the namespace, and that is one for all sandboxes of a node,
each gets an eighth, so that one cannot leave the others without: inotify instances and watches, waiting signals; and a
quarter of message queues. Descriptors in flight and pages of pipes are counted for the user of the process and have no
limit of this kind: only a user id of its own keeps a sandbox's from the others', which root can give it on most file
systems since Linux 5.19 (`id_mapping.py`), and an ordinary user cannot; without it the farm's own tools go on, and
programs in other sandboxes are refused descriptors (ETOOMANYREFS) and large pipes. Before Linux 6.9 or so only root of
the node may limit an ipc namespace: there, the watcher's measuring is all.

Inside, /proc/sys is read-only, as root of a sandbox is the owner of its ipc namespace and could lift those limits.
"""

from __future__ import annotations

import contextlib
import os
import resource

from workers.sandboxes.isolation import linux

_SETTINGS = "/proc/sys"
_SHARE = 8
_OF_A_USER = ("max_inotify_instances", "max_inotify_watches")
_QUEUE_SHARE = 4
"""Of POSIX message queues, of which the usual limit is room for nine."""
_SEMAPHORES = "32000 32000 500 1000"
"""Of a set, of all together, operations of a call, and sets: 2 MB of them instead of 65 GB."""
_QUEUES = 500
"""Of System V messages, 16 KB each."""


def of_the_user() -> dict[str, int]:
    """Names and values of what a user namespace may have, to be read before it is made."""
    result = {}
    for name in _OF_A_USER:
        with contextlib.suppress(OSError):
            result[name] = max(1, int(linux.read_text(f"{_SETTINGS}/user/{name}")) // _SHARE)
    return result


def limit_user_namespace(limits: dict[str, int]) -> None:
    """Limit these resources in this user namespace, for its root too. Raises OSError."""
    # none nested in it, in which all capabilities could be had again
    for name, value in {**limits, "max_user_namespaces": 0}.items():
        linux.write_text(f"{_SETTINGS}/user/{name}", str(value))


def limit_ipc_namespace(memory_mb: int) -> None:
    """Of the memory of a sandbox, System V objects may take half; called in its ipc namespace, as root of it."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = {"shmall": (memory_mb << 20) // 2 // page, "sem": _SEMAPHORES, "msgmni": _QUEUES}
    for name, value in values.items():
        # an older kernel: it is measured
        with contextlib.suppress(OSError):
            linux.write_text(f"{_SETTINGS}/kernel/{name}", str(value))


def limit_ipc_of(first: int, memory_mb: int) -> None:
    """Limit the ipc namespace of a process; this one joins it, and its user namespace. Raises OSError."""
    linux.setns(os.pidfd_open(first), linux.NEWUSER | linux.NEWIPC)
    linux.become_root_inside()
    limit_ipc_namespace(memory_mb)


def shares() -> dict[str, int]:
    """Limits of a process inside, by name, of what is counted for the user."""
    parts = {"RLIMIT_SIGPENDING": _SHARE, "RLIMIT_MSGQUEUE": _QUEUE_SHARE}
    result = {name: resource.getrlimit(getattr(resource, name))[1] for name in parts}
    return {name: hard // parts[name] for name, hard in result.items() if hard != resource.RLIM_INFINITY}
