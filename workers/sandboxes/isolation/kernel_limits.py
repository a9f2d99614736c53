"""Kernel limits on resources that are counted for a namespace or a user. Standard library only.

Every such resource gets a limit for each sandbox before the policy runs in it:

* Counted for the owner of the namespace, who is one user for all sandboxes of a node: each sandbox gets an eighth of
  the inotify instances and watches and of the pending signals, and a quarter of the message queues.
* Counted for the user of the process (descriptors in flight, pipe pages): no limit exists. Only a uid of its own
  separates one sandbox from the others. Root can assign one on most file systems since Linux 5.19 (`id_mapping.py`);
  an ordinary user cannot. Without it the farm's own tools still work, but one sandbox can cause ETOOMANYREFS, or small
  pipes, in the others.
* Counted for the ipc namespace: before about Linux 6.9 only root of the host can limit it. There, only the watcher's
  measurements apply.

/proc/sys is read-only inside: root of a sandbox owns its ipc namespace and could raise these limits.
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
"""For POSIX message queues, because the default limit allows only nine."""
_SEMAPHORES = "32000 32000 500 1000"
"""SEMMSL, SEMMNS, SEMOPM, SEMMNI: limits semaphores to 2 MB instead of 65 GB."""
_QUEUES = 500
"""Number of System V message queues, 16 KB each."""


def of_the_user() -> dict[str, int]:
    """Return the limits of a new user namespace by name. Must be read before the namespace is created."""
    limits = {}
    for name in _OF_A_USER:
        with contextlib.suppress(OSError):
            limits[name] = max(1, int(linux.read_text(f"{_SETTINGS}/user/{name}")) // _SHARE)
    return limits


def limit_user_namespace(limits: dict[str, int]) -> None:
    """Set these limits in the current user namespace, also for its root. Raises OSError."""
    # nested user namespaces would give all capabilities back
    for name, value in {**limits, "max_user_namespaces": 0}.items():
        linux.write_text(f"{_SETTINGS}/user/{name}", str(value))


def limit_ipc_namespace(memory_mb: int) -> None:
    """Limit System V objects to half of the sandbox's memory. Must run as root of the ipc namespace."""
    page = os.sysconf("SC_PAGE_SIZE")
    values = {"shmall": (memory_mb << 20) // 2 // page, "sem": _SEMAPHORES, "msgmni": _QUEUES}
    for name, value in values.items():
        # not writable on an older kernel, where the watcher measures instead
        with contextlib.suppress(OSError):
            linux.write_text(f"{_SETTINGS}/kernel/{name}", str(value))


def limit_ipc_of(first: int, memory_mb: int) -> None:
    """Join the user and ipc namespaces of the process `first` and limit them. Raises OSError."""
    linux.setns(os.pidfd_open(first), linux.NEWUSER | linux.NEWIPC)
    linux.become_root_inside()
    limit_ipc_namespace(memory_mb)


def shares() -> dict[str, int]:
    """Return the sandbox's share of the rlimits that the kernel counts for the user, by name."""
    parts = {"RLIMIT_SIGPENDING": _SHARE, "RLIMIT_MSGQUEUE": _QUEUE_SHARE}
    hard_limits = {name: resource.getrlimit(getattr(resource, name))[1] for name in parts}
    return {name: hard // parts[name] for name, hard in hard_limits.items() if hard != resource.RLIM_INFINITY}
