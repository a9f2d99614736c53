"""The fork server: a small process that forks the monitors of sandboxes, and what joins them; standard library only.

A worker has a hundred megabytes and many threads, so it must not fork; a fresh interpreter for each monitor would cost
25 ms and 6 MB. The fork server has nothing but these modules, its children share its memory, and a fork takes half a
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

from workers.sandboxes.isolation import (
    id_mapping,
    ignored_sigterm,
    linux,
    monitor,
    namespaces,
    parent_death_pipe,
    sandbox_files,
    seccomp,
)
from workers.sandboxes.isolation.network import service_sockets

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
            parent_death_pipe.continue_at_the_end(descriptors[1], os.getpid())
        try:
            child = os.fork()
        except OSError as error:
            # the next one may succeed, and the sender of this one can get a reason
            refuse(descriptors, error)
            child = -1
        if child == 0:
            control.close()
            work(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def refuse(descriptors: Sequence[int], error: OSError) -> None:
    """Answer why a request is not worked on."""
    if len(descriptors) > 1:
        answer = socket.socket(fileno=descriptors[1])
        tell(answer, {"error": f"the node cannot start a process: {error.strerror}"})
        answer.detach()


def work(descriptors: Sequence[int]) -> None:
    """In a child: do the job, answer how it went, end."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, answers, *result = descriptors
    # else the kernel is asked for each of the three
    answer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, answers)
    code = 1
    try:
        job = json.loads(os.pread(request, os.fstat(request).st_size, 0))
        os.close(request)
        code = _JOBS[job["do"]](job, result, answer) or 0
    except namespaces.SandboxGone:
        tell(answer, {"gone": True})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        tell(answer, {"error": f"{type(error).__name__}: {error}"})
    os._exit(code)


def tell(answer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message; the other end may be closed."""
    with contextlib.suppress(OSError):
        socket.send_fds(answer, [json.dumps(message).encode()], descriptors)


def enter(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Run a program in a sandbox; answers with its pid and a pidfd, then its exit code."""
    target = job["target"]
    # here, as this process is not in the /proc of the sandbox
    namespaces.be_killed_first()
    namespaces.join(target)
    # until its exec, /proc/PID/exe of the child inside is a program of the host
    linux.let_others_look_in(False)
    child = os.fork()
    if child == 0:
        linux.die_with_parent(signal.SIGKILL)
        namespaces.default_signals()
        namespaces.place(dict(zip(job["numbers"], given, strict=True)))
        namespaces.confine(target)
        namespaces.run_program(job["argv"], job["env"], job["cwd"], job["terminal"])
    for descriptor in given:
        os.close(descriptor)
    process = os.pidfd_open(child)
    tell(answer, {"pid": child}, [process])
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(answer, 0)
    # if the worker has ended, or given up, no process is to be left: not this one either, which could be stopped while
    # it waits for the other's end, and nothing would continue it any more
    if process not in dict(poll.poll()):
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return
    tell(answer, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def use_files(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Read or write files of a sandbox, from within its mounts, so that every path and link is the sandbox's own."""
    sandbox_files.load(job["action"])
    # its result is not waited for any more
    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    namespaces.join(job["target"], namespaces.FILES)
    namespaces.limit({"RLIMIT_FSIZE": job["target"]["limits"]["RLIMIT_FSIZE"]})
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    try:
        action = sandbox_files.ACTIONS[job["action"]]
        if job["owners"] is None:
            action(job["path"], given[0], job["max_bytes"])
        else:
            action(job["path"], given[0], job["max_bytes"], job["owners"])
    except sandbox_files.FileRefused as refused:
        tell(answer, {"refused": str(refused)})
    except OSError as error:
        tell(answer, {"refused": f"{job['path']}: {error.strerror or error}"})
    else:
        tell(answer, {"done": True})


def start(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Become the monitor of a new sandbox; answers with a pidfd of itself, then its record."""
    lock, shared, *others = given
    watched = parent_death_pipe.opened_again(shared)
    parent_death_pipe.continue_at_the_end(watched, os.getpid())
    os.close(shared)
    os.setsid()
    # for the reaper of a start that hangs and is not waited for
    os.pwrite(lock, f"{os.getpid()} {namespaces.started_at(os.getpid())}".encode(), 0)
    tell(answer, {"monitor": os.getpid()}, [os.pidfd_open(os.getpid())])
    monitor.monitor(job["plan"], [lock, watched, *others], lambda message: tell(answer, message))


def try_mapping(job: dict[str, Any], _given: Sequence[int], answer: socket.socket) -> None:
    """Answer why a folder cannot be shown as another user's; empty if it can."""
    tell(answer, {"refused": id_mapping.refusal(job["folder"], job["own_id"], job["user"])})


def use_layer(job: dict[str, Any], given: Sequence[int], answer: socket.socket) -> None:
    """Pack or unpack the files of a layer, a folder of the node, as root of all that the sandbox user has.

    The folders below it, and the layer itself, may lie in one that this user cannot enter, such as FARM_HOME.
    """
    from workers.sandboxes.isolation import layer_files

    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    os.chdir(job["folder"])
    lower = [f"/proc/self/fd/{os.open(each, os.O_PATH | os.O_DIRECTORY)}" for each in job["lower"]]
    if job["user"]:
        namespaces.become(*job["user"])
    linux.become_root_of_a_new_user_namespace()
    try:
        found = layer_files.ACTIONS[job["action"]](given[0], job["max_bytes"], lower)
    except Exception as error:  # of whatever the policy left
        tell(answer, {"refused": f"{type(error).__name__}: {error}"[:2000]})
    else:
        tell(answer, {"done": found or {}})


def use_sockets(job: dict[str, Any], _given: Sequence[int], answer: socket.socket) -> None:
    """Tell the addresses at which a sandbox listens; or listen at some in it, or connect to one: sends the sockets."""
    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    if job["action"] == "list":
        tell(answer, {"addresses": service_sockets.listening(job["target"])})
        return
    service_sockets.join(job["target"])
    act = {"listen": service_sockets.listen, "connect": service_sockets.connect}[job["action"]]
    for address in job["addresses"]:
        try:
            made = act(address)
        except (OSError, UnicodeError, OverflowError) as error:
            tell(answer, {"address": address, "refused": str(error)})
        else:
            tell(answer, {"address": address}, [made.fileno()])
            made.close()


_JOBS = {
    "enter": enter,
    "files": use_files,
    "sockets": use_sockets,
    "layer": use_layer,
    "start": start,
    "map": try_mapping,
}


def main() -> None:
    """The control socket's number is the last argument."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignored_sigterm.ignore_sigterm()
    # children are not waited for; nor is what a killed one leaves, and a sandbox ends only when that is
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.become_subreaper()
    seccomp.prepare()
    monitor.script()
    gc.disable()
    gc.freeze()
    serve(control)
