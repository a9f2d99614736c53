"""The porter: a small process that forks the monitors of sandboxes, and what joins them; standard library only.

A worker has a hundred megabytes and many threads, so it must not fork; a fresh interpreter for each monitor would cost
25 ms and 6 MB. The porter has nothing but these modules, its children share its memory, and a fork takes half a
millisecond. It keeps no state: killed, it takes nothing with it, and the worker starts another.

A request is one message on the control socket with descriptors: a memory file with the job as JSON, the socket that the
answers go to, then those that the job names.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys

from workers.sandboxes import inside, joining, launch, lifeline, linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MAX_DESCRIPTORS = 16


def serve(control: socket.socket) -> None:
    """Until the worker's end is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, MAX_DESCRIPTORS)
        if not message:
            return
        if len(descriptors) > 1:
            # before there is anything that could be stopped
            lifeline.continue_at_the_end(descriptors[1], os.getpid())
        try:
            child = os.fork()
        except OSError as error:
            # the next one may succeed, and who asked for this one can be told
            refuse(descriptors, error)
            child = -1
        if child == 0:
            control.close()
            work(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def refuse(descriptors: Sequence[int], error: OSError) -> None:
    """Say why a request is not worked on."""
    if len(descriptors) > 1:
        answer = socket.socket(fileno=descriptors[1])
        tell(answer, {"error": f"the node cannot start a process: {error.strerror}"})
        answer.detach()


def work(descriptors: Sequence[int]) -> None:
    """In a child: do the job, tell how it went, end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, answers, *given = descriptors
    answer = socket.socket(fileno=answers)
    code = 1
    try:
        with os.fdopen(request, "rb") as file:
            file.seek(0)
            job = json.load(file)
        code = _JOBS[job["do"]](job, given, answer) or 0
    except joining.Gone:
        tell(answer, {"gone": True})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        tell(answer, {"error": f"{type(error).__name__}: {error}"})
    os._exit(code)


def tell(answer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message; nobody may be listening any more."""
    with contextlib.suppress(OSError):
        socket.send_fds(answer, [json.dumps(message).encode()], descriptors)


def enter(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Run a program in a sandbox; tells its pid, with a pidfd, then its exit code."""
    target = job["target"]
    # here, as this process is not in the /proc of the sandbox
    joining.be_killed_first()
    joining.join(target)
    # until its exec, /proc/PID/exe of the child inside is a program of the host
    linux.let_others_look_in(False)
    child = os.fork()
    if child == 0:
        linux.die_with_parent(signal.SIGKILL)
        joining.default_signals()
        joining.place(dict(zip(job["numbers"], given, strict=True)))
        joining.confine(target)
        joining.run_program(job["argv"], job["env"], job["cwd"], job["terminal"])
    for descriptor in given:
        os.close(descriptor)
    process = os.pidfd_open(child)
    tell(answer, {"pid": child}, [process])
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(answer, 0)
    # a worker that is gone, or has lost interest, wants no process left
    if process not in dict(poll.poll()):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    tell(answer, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def use_files(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Read or write files of a sandbox, from within its mounts, so that every path and link is the sandbox's own."""
    inside.load(job["action"])
    # nobody waits for what it does any more
    lifeline.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    joining.join(job["target"], joining.FILES)
    joining.limit({"RLIMIT_FSIZE": job["target"]["limits"]["RLIMIT_FSIZE"]})
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    try:
        inside.ACTIONS[job["action"]](job["path"], given[0], job["max_bytes"])
    except inside.Refused as refused:
        tell(answer, {"refused": str(refused)})
    except OSError as error:
        tell(answer, {"refused": f"{job['path']}: {error.strerror or error}"})
    else:
        tell(answer, {"done": True})


def start(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Become the monitor of a new sandbox; tells a pidfd of itself, then its record."""
    lock, shared, *others = given
    watched = lifeline.opened_again(shared)
    lifeline.continue_at_the_end(watched, os.getpid())
    os.close(shared)
    os.setsid()
    # for who finds a start that hangs, and nobody who waits for it
    os.pwrite(lock, f"{os.getpid()} {joining.started_at(os.getpid())}".encode(), 0)
    tell(answer, {"monitor": os.getpid()}, [os.pidfd_open(os.getpid())])
    launch.monitor(job["plan"], [lock, watched, *others], lambda message: tell(answer, message))


_JOBS = {"enter": enter, "files": use_files, "start": start}


def main() -> None:
    """The control socket's number is the last argument."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # children are waited for by nobody; nor is what a killed one leaves, and a sandbox ends only when that is
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.adopt_orphans()
    gc.disable()
    gc.freeze()
    serve(control)
