"""Moving a process into a running sandbox: its namespaces, its user, its limits; standard library only.

`nsenter`, `setpriv` and `ulimit` do the same as three programs in a row. Here it is one fork of a small process that is
there already, and what it becomes need not be a program: it can be Python that goes on inside.
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
        """The sandbox to join: its first process, and the user and limits inside; plain JSON.

        `limits` are pairs of a resource's name, such as `RLIMIT_CPU`, and its value; `cpus` are those that its
        processes start on, empty for all. `users`: see `seccomp`; empty if only the kernel's one user exists.
        `identity` are the user and group that the program is begun as where there are users; None for root.
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
    """There is no such sandbox any more."""


def started_at(pid: int) -> int:
    """Return the start time of a process, in clock ticks since boot: with the pid, a name that is never reused."""
    return int(linux.read_text(f"/proc/{pid}/stat").rpartition(")")[2].split()[19])


def become(uid: int, gid: int, kept: int | None = None) -> None:
    """From here on an ordinary user, with one capability `kept` at most: root of the host is no root of a sandbox."""
    linux.set_ids(uid, gid, kept)
    linux.let_others_look_in(True)


def join(target: JoinTarget, namespaces: int = ALL) -> None:
    """Move this process, which must have one thread, into the sandbox. With NEWPID only its children are moved.

    Raises SandboxGone if the sandbox has ended.
    """
    try:
        first = os.pidfd_open(target["pid"])
        # only now, as from here on the descriptor and the pid are of the same process
        if started_at(target["pid"]) != target["started"]:
            raise SandboxGone
        if target["cgroup"] and namespaces & linux.NEWPID:
            enter_cgroup(target["cgroup"])
        if target["user"]:
            become(*target["user"])
        # a sandbox that shares the node's network is in the node's namespace, which this process may not join
        linux.setns(first, namespaces & ~linux.NEWNET if target["network"] else namespaces)
        linux.become_root_inside()
    except (ProcessLookupError, FileNotFoundError) as error:
        raise SandboxGone from error
    os.close(first)


def enter_cgroup(group: str) -> None:
    """Move this process into a control group; what it forks is there, too."""
    linux.write_text(f"{group}/cgroup.procs", "0")


def be_killed_first() -> None:
    """Have the kernel kill this process before the farm's own when the node's or the sandbox's memory runs out."""
    # a runtime may have hidden it
    with contextlib.suppress(OSError):
        linux.write_text("/proc/self/oom_score_adj", "500")


def limit(limits: Mapping[str, int]) -> None:
    """Limit what this process and its children may use; never to more than now."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bounds = [value] if hard == resource.RLIM_INFINITY else [value, hard]
        # at the soft limit of CPU time comes a signal of its own, a second later SIGKILL
        least = min([value + 1, *bounds[1:]]) if name == "RLIMIT_CPU" else min(bounds)
        resource.setrlimit(number, (min(bounds), least))


def confine(target: JoinTarget) -> None:
    """In a process that has joined: the limits and rights that its program has, from its exec on."""
    first = credentials.of_user(*(target["identity"] or (0, 0)))
    view = user_view.start_view(first) if target["users"] else None
    limit({**target["limits"], **kernel_limits.shares()})
    if target["cpus"]:
        # one may have been taken away since
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
    """As a program expects them; Python ignores some, and a shell two for what it starts in the background."""
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
    """Be the first process of a sandbox without programs, as bash is of others; ends with its standard input."""
    # whoever ends is reaped by the kernel
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b"up\n")
    os.dup2(os.open("/dev/null", os.O_RDWR), 2)
    while os.read(0, 1):
        pass
    os._exit(0)


def place(descriptors: Mapping[int, int]) -> None:
    """Give descriptors (values) the numbers they are to have (keys), and close all others."""
    above = max(descriptors) + 1
    # first out of each other's way
    moved = {}
    for number, descriptor in descriptors.items():
        moved[number] = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above)
    for number, descriptor in moved.items():
        os.dup2(descriptor, number)
    start = 0
    for end in (*sorted(descriptors), _ALL_DESCRIPTORS):
        # an empty range is not what closerange takes it for
        if start < end:
            os.closerange(start, end)
        start = end + 1


def run_program(argv: Sequence[str], env: Mapping[str, str], cwd: str, terminal: bool) -> None:
    """Become a program. Ends the process if that cannot be, with the code and the words of a shell."""
    os.setsid()
    if terminal:
        linux.take_terminal(0)
    code = 126
    try:
        os.chdir(cwd)
        code = 127
        os.execvpe(argv[0], list(argv), env)  # noqa: S606 - no shell is wanted
    except (OSError, ValueError) as error:
        name = cwd if code == 126 else argv[0]
        reason = error.strerror if isinstance(error, OSError) else str(error)
        if isinstance(error, PermissionError):
            code = 126
        with contextlib.suppress(OSError):
            os.write(2, f"sandbox: {name}: {reason}\n".encode(errors="surrogateescape"))
    sys.exit(code)
