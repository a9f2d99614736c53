"""Move a process into a running sandbox: namespaces, user, limits. Standard library only.

Does the work of `nsenter`, `setpriv` and `ulimit` with one fork of a small process instead of three programs. The
process can also go on in Python instead of executing a program.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import signal
import socket
import sys

from workers.sandboxes.isolation import kernel_limits, linux, seccomp
from workers.sandboxes.isolation.owners import credentials, user_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Literal, TypedDict

    class JoinTarget(TypedDict):
        """A sandbox to join, with the user and the limits to apply; plain JSON.

        `pid`, `started`: the sandbox's first process. `limits`: values by resource name, such as `RLIMIT_CPU`. `cpus`:
        initial CPU affinity, empty for all. `users`: a filter variant of `seccomp`, empty for a sandbox with one user.
        `identity`: uid and gid of the program in a sandbox with users, None for root.
        """

        pid: int
        started: int
        user: Sequence[int] | None
        network: bool
        users: Literal["", "kept", "shown"]
        limits: Mapping[str, int]
        cgroup: str
        identity: Sequence[int] | None
        cpus: Sequence[int]


ALL = linux.NEWUSER | linux.NEWNS | linux.NEWPID | linux.NEWIPC | linux.NEWUTS | linux.NEWCGROUP | linux.NEWNET
PROCESSES = linux.NEWUSER | linux.NEWPID
FILES = linux.NEWUSER | linux.NEWNS
_ALL_DESCRIPTORS = (1 << 31) - 1


class SandboxGone(Exception):
    """The sandbox has ended."""


def started_at(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot. Pid and start time together are unique."""
    return int(linux.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])


def become(uid: int, gid: int, kept: int | None = None) -> None:
    """Switch to an ordinary user with at most one capability, `kept`. Root must do this before it joins a sandbox."""
    linux.set_ids(uid, gid, kept)
    linux.let_others_look_in(True)


def join(target: JoinTarget, namespaces: int = ALL) -> None:
    """Move this process, which must be single-threaded, into the sandbox. NEWPID applies to its children only.

    Raises SandboxGone if the sandbox has ended.
    """
    try:
        first = os.pidfd_open(target["pid"])
        # checked after pidfd_open: from here on the descriptor cannot refer to a later process with the same pid
        if started_at(target["pid"]) != target["started"]:
            raise SandboxGone
        if target["cgroup"] and namespaces & linux.NEWPID:
            enter_cgroup(target["cgroup"])
        if target["user"]:
            become(*target["user"])
        # a sandbox with host networking has no network namespace of its own, and joining the host's is not permitted
        linux.setns(first, namespaces & ~linux.NEWNET if target["network"] else namespaces)
        linux.become_root_inside()
    except (ProcessLookupError, FileNotFoundError) as error:
        raise SandboxGone from error
    os.close(first)


def enter_cgroup(group: str) -> None:
    """Move this process, and its future children, into a control group."""
    linux.write_text(f"{group}/cgroup.procs", "0")


def be_killed_first() -> None:
    """Raise this process's OOM score, so that the kernel kills it before the farm's own processes."""
    # a container runtime can hide the file
    with contextlib.suppress(OSError):
        linux.write_text("/proc/self/oom_score_adj", "500")


def limit(limits: Mapping[str, int]) -> None:
    """Set rlimits for this process and its children. Existing hard limits are never raised."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bounds = [value] if hard == resource.RLIM_INFINITY else [value, hard]
        # SIGXCPU is sent at the soft limit, SIGKILL one second later at the hard limit
        least = min([value + 1, *bounds[1:]]) if name == "RLIMIT_CPU" else min(bounds)
        resource.setrlimit(number, (min(bounds), least))


def confine(target: JoinTarget) -> None:
    """Apply rlimits, capabilities (from the next exec on) and the seccomp filter to the joined process."""
    first = credentials.of_user(*(target["identity"] or (0, 0)))
    view = user_view.start_view(first) if target["users"] else None
    limit({**target["limits"], **kernel_limits.shares()})
    if target["cpus"]:
        # a CPU can be taken offline or out of the cpuset
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, target["cpus"])
    linux.drop_capabilities()
    linux.no_new_privileges()
    if view is None:
        seccomp.filter_calls()
    else:
        credentials.begin_as(first)
        listener = seccomp.filter_calls_with_users(target["users"])
        socket.send_fds(view, [b"!"], [listener])
        os.close(listener)
        view.close()


def default_signals() -> None:
    """Reset the signals that Python, or a shell for its background jobs, sets to be ignored."""
    ignored = (
        signal.SIGPIPE,
        signal.SIGXFSZ,
        signal.SIGCHLD,
        signal.SIGINT,
        signal.SIGQUIT,
        signal.SIGTERM,
        signal.SIGHUP,
    )
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)


def stay_as_first() -> None:
    """Run as the first process of a sandbox that has no bash. Does not return; exits when standard input is closed."""
    # the kernel reaps orphans
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"up\n")
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    while os.read(0, 1):
        pass
    os._exit(0)


def renumber(descriptors: Mapping[int, int]) -> None:
    """Renumber descriptors (values) to their keys and close all others."""
    above = max(descriptors) + 1
    # copied above the targets first, so that no target overwrites a source
    moved = {}
    for number, descriptor in descriptors.items():
        moved[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    start = 0
    for end in (*sorted(descriptors), _ALL_DESCRIPTORS):
        # closerange(0, 0) would close everything: its upper bound wraps around
        if start < end:
            os.closerange(start, end)
        start = end + 1


def run_program(argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool) -> None:
    """Execute a program. If that fails, exit with the code and the message that a shell would use."""
    os.setsid()
    if terminal:
        linux.take_terminal(0)
    code = 126
    try:
        os.chdir(cwd)
        code = 127
        os.execvpe(argv[0], list(argv), env)
    except (OSError, ValueError) as error:
        name = cwd if code == 126 else argv[0]
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, PermissionError):
            code = 126
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {name}: {reason}\n".encode(errors="surrogateescape"))
    sys.exit(code)
