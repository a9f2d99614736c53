"""The fork server: forks the monitors of sandboxes and the processes that join them. Standard library only.

A worker must not fork: it has many threads and a hundred megabytes. A new interpreter for each monitor would cost 25 ms
and 6 MB. The fork server imports only these modules; a fork takes half a millisecond, and children share its memory. It
has no state: if it is killed, no sandbox is lost and the worker starts another one.

A request (see `fork_requests.py`) has the socket for the answers before the other descriptors of the job.
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
    fork_requests,
    id_mapping,
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


def fork(descriptors: Sequence[int]) -> int:
    """Fork; report a failure to the requester, because the next fork can succeed."""
    if len(descriptors) > 1:
        # before the fork, so that no stopped child remains after the worker's end
        parent_death_pipe.continue_at_the_end(descriptors[1], os.getpid())
    try:
        return os.fork()
    except OSError as error:
        if len(descriptors) > 1:
            answer = socket.socket(fileno=descriptors[1])
            tell(answer, {"error": f"the node cannot start a process: {error.strerror}"})
            answer.detach()
        return -1


def work(descriptors: Sequence[int]) -> None:
    """In a child: run the job, report errors, and exit."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, answers, *passed = descriptors
    # explicit arguments, because Python would ask the kernel for each of the three
    answer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, answers)
    code = 1
    try:
        job = fork_requests.job_in(request)
        code = _JOBS[job["do"]](job, passed, answer) or 0
    except namespaces.SandboxGone:
        tell(answer, {"gone": True})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        tell(answer, {"error": f"{type(error).__name__}: {error}"})
    os._exit(code)


def tell(answer: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Send a message. A closed peer is ignored."""
    with contextlib.suppress(OSError):
        socket.send_fds(answer, [json.dumps(message).encode()], descriptors)


def enter(job: dict[str, Any], descriptors: Sequence[int], answer: socket.socket) -> None:
    """Run a program in a sandbox. Answers with its pid and pidfd, then with its exit code."""
    target = job["target"]
    # before joining: this process is not visible in the sandbox's /proc
    namespaces.be_killed_first()
    namespaces.join(target)
    # until the child's exec, its /proc/PID/exe refers to a program of the host
    linux.let_others_look_in(False)
    child = os.fork()
    if child == 0:
        linux.die_with_parent(signal.SIGKILL)
        namespaces.default_signals()
        namespaces.renumber(dict(zip(job["numbers"], descriptors, strict=True)))
        namespaces.confine(target)
        namespaces.run_program(job["argv"], job["env"], job["cwd"], job["terminal"])
    for descriptor in descriptors:
        os.close(descriptor)
    process = os.pidfd_open(child)
    tell(answer, {"pid": child}, [process])
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.register(answer, 0)
    # The worker has ended or given up: kill the program and exit without waiting. Waiting here would leave this process
    # behind if it is stopped, because nothing would continue it.
    if process not in dict(poll.poll()):
        signal.pidfd_send_signal(process, signal.SIGKILL)
        return
    tell(answer, {"code": os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])})


def use_files(job: dict[str, Any], descriptors: Sequence[int], answer: socket.socket) -> None:
    """Read or write files from within the sandbox's mounts, so that all paths and links are resolved inside."""
    sandbox_files.load(job["action"])
    # ends this process when the requester closes its end
    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    namespaces.join(job["target"], namespaces.FILES)
    namespaces.limit({"RLIMIT_FSIZE": job["target"]["limits"]["RLIMIT_FSIZE"]})
    with contextlib.suppress(OSError):
        os.chdir(job["cwd"])
    try:
        action = sandbox_files.ACTIONS[job["action"]]
        if job["owners"] is None:
            action(job["path"], descriptors[0], job["max_bytes"])
        else:
            action(job["path"], descriptors[0], job["max_bytes"], job["owners"])
    except sandbox_files.FileRefused as refused:
        tell(answer, {"refused": str(refused)})
    except OSError as error:
        tell(answer, {"refused": f"{job['path']}: {error.strerror or error}"})
    else:
        tell(answer, {"done": True})


def start(job: dict[str, Any], descriptors: Sequence[int], answer: socket.socket) -> None:
    """Become the monitor of a new sandbox. Answers with its pid and pidfd, then with its record."""
    lock, shared_lifeline, *others = descriptors
    lifeline = parent_death_pipe.opened_again(shared_lifeline)
    parent_death_pipe.continue_at_the_end(lifeline, os.getpid())
    os.close(shared_lifeline)
    os.setsid()
    # lets the reaper find a start that hangs after its requester has given up
    os.pwrite(lock, f"{os.getpid()} {namespaces.started_at(os.getpid())}".encode(), 0)
    tell(answer, {"monitor": os.getpid()}, [os.pidfd_open(os.getpid())])
    monitor.monitor(job["plan"], [lock, lifeline, *others], lambda message: tell(answer, message))


def try_mapping(job: dict[str, Any], _descriptors: Sequence[int], answer: socket.socket) -> None:
    """Answer with the reason why a folder cannot be id-mapped; empty if it can."""
    tell(answer, {"refused": id_mapping.refusal(job["folder"], job["own_id"], job["user"])})


def use_layer(job: dict[str, Any], descriptors: Sequence[int], answer: socket.socket) -> None:
    """Run an action of `layer_files` on a layer's folder, as root of a user namespace of the sandbox user.

    Folders are opened before the change of user, because they can be below one that this user cannot enter (FARM_HOME).
    """
    from workers.sandboxes.isolation import layer_files

    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    os.chdir(job["folder"])
    lower = [f"/proc/self/fd/{os.open(each, os.O_PATH | os.O_DIRECTORY)}" for each in job["lower"]]
    if job["user"]:
        namespaces.become(*job["user"])
    linux.become_root_of_a_new_user_namespace()
    try:
        summary = layer_files.ACTIONS[job["action"]](descriptors[0], job["max_bytes"], lower)
    except Exception as error:  # the layer's contents are arbitrary
        tell(answer, {"refused": f"{type(error).__name__}: {error}"[:2000]})
    else:
        tell(answer, {"done": summary or {}})


def use_sockets(job: dict[str, Any], _descriptors: Sequence[int], answer: socket.socket) -> None:
    """List the addresses at which a sandbox listens, or send sockets that listen in it or connect to it."""
    parent_death_pipe.signal_at_the_end(answer.fileno(), signal.SIGKILL, os.getpid())
    if job["action"] == "list":
        tell(answer, {"addresses": service_sockets.listening(job["target"])})
        return
    service_sockets.join(job["target"])
    open_endpoint = {"listen": service_sockets.listen, "connect": service_sockets.connect}[job["action"]]
    for address in job["addresses"]:
        try:
            endpoint = open_endpoint(address)
        except (OSError, UnicodeError, OverflowError) as error:
            tell(answer, {"address": address, "refused": str(error)})
        else:
            tell(answer, {"address": address}, [endpoint.fileno()])
            endpoint.close()


_JOBS = {
    "enter": enter,
    "files": use_files,
    "sockets": use_sockets,
    "layer": use_layer,
    "start": start,
    "map": try_mapping,
}


def main() -> None:
    """Serve requests from the control socket, whose number is the last argument."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    control.set_inheritable(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_requests.ignore_sigterm()
    # The kernel reaps children. As a subreaper this process also reaps the descendants of a killed monitor: a sandbox
    # ends only when these are reaped.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    linux.become_subreaper()
    seccomp.prepare()
    monitor.script()
    gc.disable()
    gc.freeze()
    fork_requests.serve(control, fork, work)
