"""A small clean process that has an interpreter ready, and forks for each kernel one that moves into its sandbox.

A fresh IPython takes 130 ms and 17 MB, a fork of a ready one 10 ms and 5 MB. What is forked becomes the policy's, with
all its memory: so this process is made by an exec of its own (`clean_start.py`), knows no secret, and has no descriptor
but its socket. Standard library only, and what the interpreter needs.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import sys

from workers.sandboxes import cells, joining, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

MARK = "SANDBOX_COMMAND"
"""The variable that tells what a kernel started; the zygote is given one of the same length, to be written over."""
_MAX_DESCRIPTORS = 3


class Zygote:
    """Forks kernels, for as long as the worker's end of its socket is open; then it ends those that are left."""

    def __init__(self, control: socket.socket, program: Any) -> None:
        self._control = control
        self._program = program
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        # where it lies in the memory that /proc/PID/environ shows, and that a fork takes along
        self._mark = libc.getenv(MARK.encode())
        self._prepared = program.prepare()

    def serve(self) -> None:
        linux.adopt_orphans()
        linux.let_others_look_in(False)
        # else what was forked twice would wait for its end as a child of the host's first process
        signal.signal(signal.SIGCHLD, _reap)
        gc.collect()
        gc.disable()
        gc.freeze()
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._control, 16, _MAX_DESCRIPTORS)
            if not message:
                break
            if os.fork() == 0:
                self._fork(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
        for pid in _children():
            os.kill(pid, signal.SIGKILL)

    def _fork(self, descriptors: Sequence[int]) -> NoReturn:
        """In a child: join the sandbox, and fork once more, as only a child is in the other process namespace."""
        try:
            # stopped, it would be left by a zygote that is killed, which nothing could tell it of
            linux.die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            request, connection, output = descriptors
            with os.fdopen(request, "rb") as file:
                file.seek(0)
                job = json.load(file)
            joining.join(job["target"])
            if os.fork() == 0:
                self._move_in(job, connection, output)
        except joining.Gone:
            _tell(connection, {"gone": True})
        except BaseException as error:
            _tell(connection, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(0)

    def _move_in(self, job: dict[str, Any], connection: int, output: int) -> NoReturn:
        """In the sandbox: become what a kernel that was started there would be, and serve."""
        try:
            self._settle(job, connection, output)
            self._program.serve(socket.socket(fileno=cells.CONNECTION), self._prepared)
        finally:
            os._exit(0)

    def _settle(self, job: dict[str, Any], connection: int, output: int) -> None:
        os.setsid()
        os.umask(0o022)
        # ours is /dev/null; the policy may have put something else there
        joining.place({0: 0, 1: output, 2: output, cells.CONNECTION: connection})
        joining.confine(job["target"])
        linux.keep_bounded_capabilities()
        # the policy may have removed it
        with contextlib.suppress(OSError):
            os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        mark = job["env"][MARK].encode()
        ctypes.memmove(self._mark, mark, len(mark))
        _tell(cells.CONNECTION, {"pid": os.getpid()}, os.pidfd_open(os.getpid()))
        gc.enable()
        # until here nobody inside could look into this process
        linux.let_others_look_in(True)
        # its own files in /proc were out of its own reach, too
        joining.be_killed_first()


def _tell(connection: int, head: dict[str, Any], descriptor: int | None = None) -> None:
    """The first frame of a connection, with a descriptor; nobody may be listening any more."""
    given = [] if descriptor is None else [descriptor]
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as answer:
        answer.sendmsg([cells.packed(head)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", given))])
    for number in given:
        os.close(number)


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:  # noqa: PTH123
        return [int(word) for word in file.read().split()]


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """`FOLDER PROGRAM CONTROL`: where the kernels' files are, what they run, and the descriptor of our socket."""
    folder, name, control = sys.argv[1:]
    program = importlib.import_module(f"workers.sandboxes.{name}")
    cells.leave_only(folder, program.PACKAGES)
    Zygote(socket.socket(fileno=int(control)), program).serve()
