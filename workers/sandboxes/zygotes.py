"""The zygotes of this worker process, one for each interpreter and program: see `kernel_zygote.py`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from workers.sandboxes.closure import BOOTSTRAP
from workers.sandboxes.lifeline import continue_at_the_end
from workers.sandboxes.marked import MARK, new_mark
from workers.sandboxes.owner import sandbox_user

MAX_ZYGOTES = 4
"""So many are kept; one that has kernels is never given up."""

_PROJECT = str(Path(__file__).parents[2])
_LAUNCHER = "import sys; sys.path.append(sys.argv[1]); from workers.sandboxes.clean_start import main; main()"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a zygote has ready: a program of the kernels' folder, and the Python it runs on. Paths are the node's."""

    python: str
    flags: tuple[str, ...]
    kernels: str
    module: str
    folders: tuple[str, ...]
    """What that Python reads."""


class Zygote:
    """One zygote process. It ends when this process does, whose end of the socket it watches."""

    def __init__(self, kind: Kind) -> None:
        self.n_kernels = 0
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        program = BOOTSTRAP.format(module="kernel_zygote")
        job = {
            "user": sandbox_user(),
            "folders": kind.folders,
            "argv": [kind.python, *kind.flags, "-c", program, kind.kernels, kind.module, str(theirs.fileno())],
            "env": {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": "/nonexistent", MARK: new_mark()},
        }
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCHER, _PROJECT],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            continue_at_the_end(theirs.fileno(), self._process.pid)
        assert self._process.stdin
        # if it is dead already, the first request will find that
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(json.dumps(job).encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, job: dict[str, Any], descriptors: Sequence[int]) -> None:
        """Ask for a kernel; `descriptors` are the socket that it answers on, and its output. Raises OSError."""
        memory = os.memfd_create("job")
        try:
            os.write(memory, json.dumps(job).encode(errors="surrogateescape"))
            socket.send_fds(self._control, [b"job"], [memory, *descriptors])
        finally:
            os.close(memory)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While it is, it is not given up to make room for another."""
        self.n_kernels += 1
        try:
            yield
        finally:
            self.n_kernels -= 1

    def close(self) -> None:
        """End it; kernels that it has stay. Blocks for a moment."""
        self._control.close()
        self._process.kill()
        self._process.wait()


class Zygotes:
    """Those that were used last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[Kind, Zygote] = OrderedDict()

    def get(self, kind: Kind) -> Zygote:
        """The zygote of a kind, started if there is none that lives. Blocks for milliseconds."""
        with self._lock:
            zygote = self._found.pop(kind, None)
            if zygote is not None and not zygote.alive():
                zygote.close()
                zygote = None
            self._found[kind] = zygote = zygote or Zygote(kind)
            for idle in [key for key, other in self._found.items() if not other.n_kernels and key != kind]:
                if len(self._found) <= MAX_ZYGOTES:
                    break
                self._found.pop(idle).close()
            return zygote

    def living(self) -> list[Zygote]:
        """Those that have not ended."""
        with self._lock:
            return [zygote for zygote in self._found.values() if zygote.alive()]


@cache
def zygotes() -> Zygotes:
    """This process's zygotes."""
    return Zygotes()
