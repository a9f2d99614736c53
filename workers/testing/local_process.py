"""Processes of a local sandbox, started by this process, with the same messages as from the fork server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workers.sandboxes.processes.fork_client import ForkReplies

_RUN = 'cd -- "$0" || exit 126; exec -- "$@"'
_HIGH = 300
_SIGNALS = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP)


def started(
    argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], cwd: str, terminal: bool
) -> ForkReplies:
    """Start a program in its own session; send its pid, with a pidfd, then its exit code.

    `fds` maps the program's descriptors to ours, which may be closed on return; with `terminal`, descriptor 0 is its
    controlling terminal.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    shell = ["bash", "--norc", "--noprofile", "-c", _RUN, cwd, *argv]
    try:
        pid = _spawn(shell, env, fds, terminal)
    except (OSError, ValueError) as error:
        # The message of a shell.
        if 2 in fds:
            os.write(fds[2], f"{argv[0][:100]}: {error}\n".encode(errors="surrogateescape"))
        pid = _spawn(["bash", "-c", "exit 126"], env, {}, False)
    threading.Thread(target=_watch, args=(pid, os.pidfd_open(pid), theirs), daemon=True).start()
    return ForkReplies(ours)


def _spawn(argv: Sequence[str], env: Mapping[str, str], fds: Mapping[int, int], terminal: bool) -> int:
    actions: list[tuple[Any, ...]] = []
    with contextlib.ExitStack() as moved:
        for number, descriptor in fds.items():
            # First move them out of each other's way.
            high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH)
            moved.callback(os.close, high)
            actions.append((os.POSIX_SPAWN_DUP2, high, number))
        actions += [(os.POSIX_SPAWN_OPEN, n, os.devnull, os.O_RDWR, 0) for n in (0, 1, 2) if n not in fds]
        actions += [(os.POSIX_SPAWN_CLOSE, n) for n in _inherited() if n > 2 and n not in fds]
        if terminal:
            # The first terminal that a session leader opens becomes its controlling terminal.
            actions.append((os.POSIX_SPAWN_OPEN, 0, os.ttyname(fds[0]), os.O_RDWR, 0))
        return os.posix_spawnp(argv[0], list(argv), env, file_actions=actions, setsid=True, setsigdef=_SIGNALS)


def _inherited() -> Iterator[int]:
    """Yield the inheritable descriptors that this process was started with."""
    for entry in list(Path("/proc/self/fd").iterdir()):
        # The descriptor of the listing itself is closed by now.
        with contextlib.suppress(OSError):
            if os.get_inheritable(int(entry.name)):
                yield int(entry.name)


def _watch(pid: int, pidfd: int, answer: socket.socket) -> None:
    """In a thread: report a child's pid, wait for it, report its end. The reader may have closed."""
    with answer, contextlib.suppress(OSError):
        try:
            socket.send_fds(answer, [json.dumps({"pid": pid}).encode()], [pidfd])
        finally:
            os.close(pidfd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer.send(json.dumps({"code": code}).encode())
