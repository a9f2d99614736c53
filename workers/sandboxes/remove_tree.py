"""Deletion of a sandbox's folder from outside its namespaces."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end

_TRIES = 20
_POLL_S = 0.05
_KILL_S = 1.0
_SILENT: list[tuple[Any, ...]] = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in range(3)]


def remove(state: Path, patience_s: float = math.inf) -> bool:
    """Delete the folder of an ended sandbox; harmless if it is gone. Returns whether it is gone now. Blocks.

    After `patience_s` the rest of the folder stays, because it is large or its file system does not respond.

    Uses `rm`, because a sandbox can leave folders nested deeper than Python's own delete can follow; as root of a user
    namespace, because some folders, such as overlayfs's, are closed even to their owner; and repeatedly, because a
    process that is being killed can write until it has ended.
    """
    argv = [] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user"]
    argv += ["rm", "-rf", "--one-file-system", "--", str(state)]
    deadline = time.monotonic() + patience_s
    for _ in range(_TRIES):
        if not os.path.lexists(state):
            return True
        try:
            with _started(argv) as child:
                _wait(child, deadline)
        except OSError:
            # the node has no free processes either; what a failed start leaves is simple enough for Python
            shutil.rmtree(state, ignore_errors=True)
        if time.monotonic() > deadline:
            break
        if os.path.lexists(state):
            time.sleep(_POLL_S)
    return not os.path.lexists(state)


@contextlib.contextmanager
def _started(argv: list[str]) -> Iterator[int]:
    """Start a program and yield its pid. If this process is killed, a stopped program continues.

    subprocess.run would need descriptors, and a start may have failed for lack of them. Raises OSError if no process
    can be created.
    """
    actions, ends = list(_SILENT), list[int]()
    with contextlib.suppress(OSError):
        ends += os.pipe()
        # the child will be in this process's group
        continue_at_the_end(ends[0], os.getpgrp())
        actions.append((os.POSIX_SPAWN_DUP2, ends[0], len(_SILENT)))
    try:
        yield os.posix_spawnp(argv[0], argv, os.environ, file_actions=actions)
    finally:
        # the read end first: then no reader is notified when the write end is closed
        for end in ends:
            os.close(end)


def _wait(child: int, deadline: float) -> None:
    """Wait for a process. Kill it after the deadline, and abandon it if it is in an uninterruptible sleep then."""
    if deadline < math.inf:
        descriptor = os.pidfd_open(child)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        ended = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        if not ended:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            ended = poll.poll(_KILL_S * 1000)
        os.close(descriptor)
        if not ended:
            return
    os.waitpid(child, 0)
