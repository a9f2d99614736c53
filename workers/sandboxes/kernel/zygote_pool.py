"""The zygotes of this worker process, one for each interpreter and program: see `zygote.py`."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from workers.sandboxes.isolation.fork_requests import send
from workers.sandboxes.kernel.python_runtime import BOOTSTRAP
from workers.sandboxes.processes.fork_client import ForkServerProcess
from workers.sandboxes.processes.process_tree import MARK, new_tag
from workers.sandboxes.sandbox_user import sandbox_user

MAX_ZYGOTES = 4
"""Maximum number of zygotes. One that is in use is never closed for another."""

_END_S = 1.0
_MAX_OUTPUT = 100_000


@dataclass(frozen=True, slots=True)
class ZygoteKind:
    """The program of the kernels' folder that a zygote has prepared, and its Python. Paths are those of the node."""

    python: str
    flags: tuple[str, ...]
    kernels: str
    module: str
    folders: tuple[str, ...]
    """The folders that this Python reads."""
    user: str
    """The name of the user that sandboxes run as when the farm is started by root."""


class Zygote(ForkServerProcess):
    """One zygote process."""

    def __init__(self, kind: ZygoteKind) -> None:
        self.n_kernels = 0
        self._output = os.fdopen(os.memfd_create("output"), "rb", 0)
        job = {
            "user": sandbox_user(kind.user),
            "folders": kind.folders,
            "argv": [kind.python, *kind.flags, "-c", BOOTSTRAP.format(module="zygote"), kind.kernels, kind.module],
            "env": {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/nonexistent", MARK: new_tag()},
        }
        super().__init__("workers.sandboxes.kernel.zygote_start", os.defpath, subprocess.PIPE, self._output)
        self.control.setblocking(False)
        assert self.process.stdin
        # if it has ended already, the first request notices
        with contextlib.suppress(BrokenPipeError), self.process.stdin as pipe:
            pipe.write(json.dumps(job).encode())

    def alive(self) -> bool:
        return self.process.poll() is None

    def fork(self, job: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Request a kernel. `descriptors` are the socket for its answers, and its output. Raises OSError."""
        send(self.control, job, descriptors)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep it from being closed to make room for another while the block runs."""
        self.n_kernels += 1
        try:
            yield
        finally:
            self.n_kernels -= 1

    def end(self) -> str:
        """Return how a zygote that does not answer ended, and its last output. Blocks for a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        if self.process.returncode is None:
            return "it runs, and does not answer"
        output = b""
        # closed meanwhile, to be replaced
        with contextlib.suppress(ValueError):
            self._output.seek(0)
            output = self._output.read(_MAX_OUTPUT)
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        return ": ".join([f"it ended with status {self.process.returncode}", *last])

    def close(self) -> None:
        """End it; its kernels continue. Blocks for a moment."""
        super().close()
        self._output.close()


class ZygotePool:
    """The most recently used zygotes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygotes: OrderedDict[ZygoteKind, Zygote] = OrderedDict()

    def get(self, kind: ZygoteKind) -> Zygote:
        """Return the zygote of a kind, starting one if none is alive. Blocks for milliseconds."""
        with self._lock:
            zygote = self._zygotes.pop(kind, None)
            if zygote is not None and not zygote.alive():
                zygote.close()
                zygote = None
            self._zygotes[kind] = zygote = zygote or Zygote(kind)
            for idle in [key for key, other in self._zygotes.items() if not other.n_kernels and key != kind]:
                if len(self._zygotes) <= MAX_ZYGOTES:
                    break
                self._zygotes.pop(idle).close()
            return zygote

    def living(self) -> list[Zygote]:
        """Return the zygotes that have not ended."""
        with self._lock:
            return [zygote for zygote in self._zygotes.values() if zygote.alive()]


@cache
def zygote_pool() -> ZygotePool:
    """Return this process's zygotes."""
    return ZygotePool()
