"""Private servers: each runs in its own session, ends with the test process, and stops at the end of the block."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testkit.deadline import Deadline

ORDINARY_USER = "nobody"
_START_S = 180.0
_STOP_S = 20.0
_MEMORY = Path("/dev/shm")
_MEMORY_MB = 2048
"""The minimum of free space for `in_memory`: a server of all of a worker's tests takes a tenth of it."""


class Missing(Exception):
    """The machine lacks a requirement of a service; the message says what, and how to get it."""


@contextmanager
def private_folder(user: str | None = None, *, in_memory: bool = False) -> Iterator[Path]:
    """Yield a new folder with a path short enough for a Unix socket, removed at the end; `user` owns it.

    `in_memory`, if there is space, is for many short-lived small files: for a minute after each deletion, a disk's file
    system takes longer to allocate a new file.
    """
    folder = Path(tempfile.mkdtemp(prefix="farm-test-", dir=_MEMORY if in_memory and _is_roomy(_MEMORY) else "/tmp"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_roomy(folder: Path) -> bool:
    """Return whether a file system in memory has space, and allows programs to run."""
    try:
        status = os.statvfs(folder)
    except OSError:
        return False
    free_mb = status.f_bavail * status.f_frsize >> 20
    return free_mb >= _MEMORY_MB and not status.f_flag & os.ST_NOEXEC and os.access(folder, os.W_OK)


@contextmanager
def running(
    command: Sequence[str | Path],
    ready: Callable[[], bool],
    log: Path,
    *,
    stop: signal.Signals = signal.SIGTERM,
    user: str | None = None,
    start_s: float = _START_S,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the block ends. Yields once `ready()`; raises RuntimeError with its log if that never happens.

    The kernel sends `stop` when the thread that started it ends: not even kill -9 of the tests leaves it behind.
    """
    guarded = ["setpriv", "--pdeathsig", stop.name.removeprefix("SIG"), "--", *map(str, command)]
    with log.open("wb") as output:
        # in its own session, so that Ctrl-C at the terminal does not reach it before the fixtures are done
        process = subprocess.Popen(
            guarded, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, user=user, cwd="/"
        )
    try:
        _wait(process, ready, log, start_s)
        yield process
    finally:
        process.send_signal(stop)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Callable[[], bool], log: Path, start_s: float) -> None:
    deadline = Deadline(start_s)
    while not ready():
        if process.poll() is not None or deadline.passed():
            raise RuntimeError(f"{process.args!r} did not start:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.02)
