"""A child process that ends with its parent, however that ends, and does not receive the parent's Ctrl-C."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_KILL_S = 5.0
# looked up at import: a forked child of a threaded process must not wait for a lock
_prctl = ctypes.CDLL(None).prctl


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this newly forked process a signal when its parent ends; exit if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:
        os._exit(1)


class ChildProcess:
    """A running command. It ends with the thread that started it, because the kernel watches that thread."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        pass_fds: Sequence[int] = (),
        on_parent_death: signal.Signals = signal.SIGKILL,
    ) -> None:
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(log.open("ab"))
            self.process = subprocess.Popen(
                list(argv),
                env=None if env is None else dict(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT if output is not None else None,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                preexec_fn=partial(die_with_parent, os.getpid(), on_parent_death),
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send(signal.SIGTERM)

    def send(self, number: int) -> None:
        """Send it a signal unless it has ended."""
        if self.running:
            self.process.send_signal(number)

    def end(self, grace_s: float) -> bool:
        """Wait for it to end; after `grace_s` kill its whole session. Returns whether it ended by itself."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            # a process that hangs in the kernel ends when that returns; do not wait for it
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILL_S)
            return False
        return True
