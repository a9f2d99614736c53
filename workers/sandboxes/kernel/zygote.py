"""A small clean process with a prepared interpreter. For each kernel, it forks a process that joins a sandbox.

A new IPython takes 130 ms and 17 MB, a fork of a prepared one 10 ms and 5 MB. The policy controls the forked process
with all its memory. So the zygote is started by its own exec (`zygote_start.py`), holds no secret, and has no
descriptor but its socket. Standard library only, plus the interpreter's needs.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys

from workers.sandboxes.isolation import fork_requests, linux, namespaces, seccomp
from workers.sandboxes.kernel import cell_protocol

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

MARK = "SANDBOX_COMMAND"
"""The variable that marks a kernel's descendants. The zygote has a value of the same length to overwrite."""


class ZygoteServer:
    """Forks kernels until the worker's end of its socket is closed; then kills the remaining ones."""

    def __init__(self, control: socket.socket, program: Any) -> None:
        self._control = control
        self._program = program
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_void_p
        # its address in the memory shown by /proc/PID/environ, which a fork inherits
        self._mark = libc.getenv(MARK.encode())
        self._prepared = program.prepare()

    def serve(self) -> None:
        fork_requests.ignore_sigterm()
        linux.become_subreaper()
        linux.let_others_look_in(False)
        # otherwise a process that was forked twice would wait for its end as a child of the host's first process
        signal.signal(signal.SIGCHLD, _reap)
        seccomp.prepare()
        gc.collect()
        gc.disable()
        gc.freeze()
        fork_requests.serve(self._control, lambda _: os.fork(), self._fork)
        for pid in linux.read_text(f"/proc/self/task/{os.getpid()}/children").split():
            os.kill(int(pid), signal.SIGKILL)

    def _fork(self, descriptors: Sequence[int]) -> NoReturn:
        """Join the sandbox in a child process and fork again, because only its child is in the new pid namespace."""
        try:
            # otherwise, if stopped here, it would outlive a killed zygote
            linux.die_with_parent(signal.SIGKILL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request, connection, output = descriptors
            job = fork_requests.job_in(request)
            namespaces.join(job["target"])
            # reset by the change of user
            linux.die_with_parent(signal.SIGKILL)
            if os.fork() == 0:
                self._move_in(job, connection, output)
        except namespaces.SandboxGone:
            _tell(connection, {"gone": True})
        except BaseException as error:
            _tell(connection, {"failed": f"{type(error).__name__}: {error}"})
        os._exit(0)

    def _move_in(self, job: dict[str, Any], connection: int, output: int) -> NoReturn:
        """Adopt, in the sandbox, the state of a kernel that was started there, and serve."""
        try:
            self._settle(job, connection, output)
            self._program.serve(socket.socket(fileno=cell_protocol.CONNECTION), self._prepared)
        finally:
            os._exit(0)

    def _settle(self, job: dict[str, Any], connection: int, output: int) -> None:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.umask(0o022)
        # descriptor 0 is /dev/null here, but the policy may have replaced the sandbox's
        namespaces.renumber({0: 0, 1: output, 2: output, cell_protocol.CONNECTION: connection})
        # before the limits apply, because the sandbox's other processes may have used up the descriptors in flight
        _tell(cell_protocol.CONNECTION, {"pid": os.getpid()}, os.pidfd_open(os.getpid()))
        namespaces.confine(job["target"])
        linux.keep_bounded_capabilities()
        # the policy may have removed the folder
        with contextlib.suppress(OSError):
            os.chdir(job["cwd"])
        os.environ.clear()
        os.environ.update(job["env"])
        mark = job["env"][MARK].encode()
        ctypes.memmove(self._mark, mark, len(mark))
        gc.enable()
        # until here, no process inside could inspect this one
        linux.let_others_look_in(True)
        # nor could this process access its own files in /proc
        namespaces.be_killed_first()


def _tell(connection: int, head: dict[str, Any], descriptor: int | None = None) -> None:
    """Send the first frame of a connection, with a descriptor. The other end may be closed already."""
    descriptors = [] if descriptor is None else [descriptor]
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection)) as answer:
        answer.sendmsg(
            [cell_protocol.packed(head)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        )
    for number in descriptors:
        os.close(number)


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> None:
    """Serve. The arguments are `FOLDER PROGRAM CONTROL`: the kernels' files, their program, the socket's descriptor."""
    folder, name, control = sys.argv[1:]
    program = importlib.import_module(f"workers.sandboxes.kernel.{name}")
    cell_protocol.leave_only(folder, program.PACKAGES)
    ZygoteServer(socket.socket(fileno=int(control)), program).serve()
