# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH109, PTH110, PTH118, PTH120, PTH123, PTH211, S606
# pathlib and typing would double the time of a start, and nothing here may need a shell
"""The monitor of one sandbox: builds it, holds it, and takes everything away when it ends; standard library only.

One process per sandbox, because whoever holds a sandbox must outlive the worker that asked for it, and must be small:
200 of them live on one node. The monitor stays in the host's namespaces; a child, the builder, makes the sandbox's. So
what was mounted is gone with the last process, and the monitor can delete the folder without meeting a mount.

`main()` reads the plan, a `workers.sandboxes.start.Plan`, as JSON from standard input; one line of JSON, the sandbox's
record or `{"error": ...}`, comes back on standard output. It ends the sandbox on SIGTERM, when the lifeline's other end
closes, or when the sandbox's first process ends. Killed itself, it takes the processes with it and leaves its folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys

# os.execvpe would import it when the host's files are out of reach already
import warnings  # noqa: F401

from workers.sandboxes import linux

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from workers.sandboxes.start import Plan

FIRST_PROCESS = ["bash", "--norc", "--noprofile", "-c"]
FIRST_PROCESS += ["trap : CHLD; echo up; while :; do read -r _ || (($? > 128)) || exit 0; done"]
"""Bash as process 1: reaps orphans, and ends when its standard input, held by the monitor, is closed."""
FOLDERS = ("dev", "proc", "sys", "tmp", "var/tmp", "root", "run")
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
OLD_ROOT = "/.old-root"


def started_at(pid: int) -> int:
    """When a process started, in clock ticks since boot: with the pid, a name that is never given twice."""
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[19])


def stage(plan: Plan) -> None:
    """Bind all sources below the sandbox's own folder, read-only, where any user can reach them."""
    linux.make_mounts_private()
    exposed = [plan["exposed"]] if plan["exposed"] else []
    for number, source in enumerate([*plan["lower"], *(source for source, _ in plan["binds"]), *exposed]):
        linux.bind_read_only(source, f"stage/{number}")


def expose(plan: Plan) -> None:
    """Let the runtime's folder be entered, here and nowhere else, where one above it is closed to ordinary users."""
    if plan["exposed"]:
        number = len(plan["lower"]) + len(plan["binds"])
        linux.mount("tmpfs", plan["closed"], "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=64k")
        os.makedirs(plan["exposed"])
        linux.bind_read_only(f"stage/{number}", plan["exposed"])


def become(uid: int, gid: int) -> None:
    """From here on an ordinary user: root of the host must not be root of a sandbox."""
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    linux.be_dumpable()


def mount_root(plan: Plan) -> None:
    """The sandbox's root file system: the image and its layers below, a writable layer of its own above."""
    lower = ":".join(f"stage/{number}" for number in range(len(plan["lower"])))
    linux.mount("overlay", "root", "overlay", 0, f"userxattr,lowerdir={lower},upperdir=upper,workdir=work")


def in_child(work: Callable[[], None]) -> None:
    """Run `work()` in a child process, which leaves this one's root folder alone. Raises OSError if it fails."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            os.write(write_end, f"{type(error).__name__}: {error}".encode()[:2000])
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        complaint = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if complaint:
        raise OSError(complaint)


def make_mount_points(plan: Plan) -> None:
    """Folders and files that will be mounted on; from within the root, so that its links lead nowhere else."""
    os.chroot("root")
    os.chdir("/")
    for folder in (*FOLDERS, plan["workdir"]):
        os.makedirs(os.path.join("/", folder), exist_ok=True)
    for number, (_, target) in enumerate(plan["binds"]):
        if plan["are_folders"][number]:
            os.makedirs(target, exist_ok=True)
        elif not os.path.exists(target):
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))


def enter_root(plan: Plan) -> None:
    """As process 1 of a namespace sandbox: complete its root, move into it, and let the host's go."""
    linux.unshare(linux.NEWNS)
    state = os.getcwd()
    os.chdir("root")
    os.mkdir(OLD_ROOT[1:])
    linux.pivot_root(".", OLD_ROOT[1:])
    os.chdir("/")
    for number, (_, target) in enumerate(plan["binds"], start=len(plan["lower"])):
        linux.bind_read_only(f"{OLD_ROOT}{state}/stage/{number}", target)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    fill_dev()
    linux.unmount(OLD_ROOT)
    os.rmdir(OLD_ROOT)
    linux.set_hostname("sandbox")
    linux.loopback_up()


def fill_dev() -> None:
    linux.mount("tmpfs", "/dev", "tmpfs", linux.MS_NOSUID, "mode=755,size=64k")
    for device in DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        linux.mount(f"{OLD_ROOT}/dev/{device}", f"/dev/{device}", flags=linux.MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/pts")
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.mkdir("/dev/shm")  # noqa: S108
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777,size=64m")  # noqa: S108


def run_first_process(plan: Plan) -> None:
    """As process 1 of its namespaces: move into the sandbox and stay."""
    linux.die_with_parent(signal.SIGKILL)
    enter_root(plan)
    os.chdir(plan["workdir"])
    os.execvpe("bash", FIRST_PROCESS, plan["env"])


def build(plan: Plan, to_monitor: socket.socket) -> None:
    """In the builder: all namespaces and mounts, then the first process. They all go when the builder does."""
    if plan["user"]:
        linux.unshare(linux.NEWNS)
        stage(plan)
        expose(plan)
        become(*plan["user"])
    linux.become_root_of_a_new_user_namespace(linux.NEWNS | linux.NEWCGROUP)
    linux.die_with_parent(signal.SIGKILL)
    linux.no_new_privileges()
    if plan["user"]:
        linux.make_mounts_private()
    else:
        stage(plan)
    mount_root(plan)
    in_child(lambda: make_mount_points(plan))
    if plan["runtime"]:
        # a runtime looks beside its program, and the kernel forgets where that is with the namespace it was found in
        socket.send_fds(to_monitor, [b"mounts"], [os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)])
        os.execve(plan["runtime"][0], [*plan["runtime"], *FIRST_PROCESS], plan["runtime_env"])
    linux.unshare(linux.NEWPID | linux.NEWNET | linux.NEWIPC | linux.NEWUTS)
    to_monitor.close()
    in_child(lambda: run_first_process(plan))


def start_builder(plan: Plan) -> tuple[int, list[int]]:
    """Fork it. Returns its pid and what to keep open while the sandbox lives; OSError if that does not come up."""
    stdin, lifeline = os.pipe()
    up, stdout = os.pipe()
    from_builder, to_monitor = socket.socketpair()
    builder = os.fork()
    if builder == 0:
        try:
            os.dup2(stdin, 0)
            os.dup2(stdout, 1)
            # it is ours that must be the only ends of the lifeline and the lock
            os.closerange(3, to_monitor.fileno())
            os.closerange(to_monitor.fileno() + 1, max(plan["lock_fd"], plan["lifeline_fd"]) + 1)
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            build(plan, to_monitor)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os.close(stdin)
    os.close(stdout)
    to_monitor.close()
    if plan["user"]:
        become(*plan["user"])
    with from_builder:
        _, held, _, _ = socket.recv_fds(from_builder, 16, 1)
    with os.fdopen(up, "rb") as pipe:
        if pipe.readline() != b"up\n":
            raise OSError("it did not come up: " + last_lines("log"))
    return builder, [lifeline, *held]


def last_lines(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return " | ".join(line.strip() for line in file.readlines()[-5:])


def first_process_of(child: int) -> int:
    """The pid, seen from here, of the process that is number 1 in its own namespace, among a child and its children."""
    pids = [child]
    while pids:
        pid = pids.pop()
        with open(f"/proc/{pid}/status") as file:
            numbers = next(line for line in file if line.startswith("NSpid:")).split()[1:]
        if len(numbers) > 1 and numbers[-1] == "1":
            return pid
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            pids.extend(map(int, file.read().split()))
    raise OSError("its first process is not to be found")


def write_record(plan: Plan, pid1: int) -> dict[str, Any]:
    """What other processes of this node need to know to use or end the sandbox; whole or not at all."""
    record = {
        "sandbox_id": plan["sandbox_id"],
        "kind": plan["kind"],
        "monitor_pid": os.getpid(),
        "monitor_started": started_at(os.getpid()),
        "pid1": pid1,
        "pid1_started": started_at(pid1),
    }
    with open("sandbox.json.new", "w", encoding="utf-8") as file:
        json.dump(record, file)
    os.rename("sandbox.json.new", "sandbox.json")
    return record


def wait_for_the_end(builder: int, ends: list[int]) -> None:
    """Until the sandbox is gone, or one of the descriptors `ends` has something to say."""
    poll = select.poll()
    for descriptor in (os.pidfd_open(builder), *ends):
        poll.register(descriptor, select.POLLIN)
    poll.poll()


def end(record: dict[str, Any]) -> None:
    """Kill the first process, which takes all others of the sandbox with it, and wait until they are gone."""
    descriptor = os.pidfd_open(record["pid1"])
    if started_at(record["pid1"]) == record["pid1_started"]:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()


def remove(state: str) -> None:
    """Delete the folder, as root of a user namespace: the sandbox may have left what its owner cannot enter."""
    os.chdir("/")
    linux.become_root_of_a_new_user_namespace()
    subprocess.run(["rm", "-rf", "--one-file-system", "--", state], stdin=subprocess.DEVNULL, check=False)


def signals_as_descriptor() -> int:
    """A descriptor that is readable once SIGTERM or SIGINT came."""
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return read_end


def main() -> None:
    plan: Plan = json.load(sys.stdin)
    ends = [signals_as_descriptor(), plan["lifeline_fd"]]
    os.umask(0o022)
    os.chdir(plan["state"])
    try:
        builder, held = start_builder(plan)
        record = write_record(plan, first_process_of(builder))
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps(record), flush=True)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    wait_for_the_end(builder, ends)
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        end(record)
    for descriptor in held:
        os.close(descriptor)
    os.waitpid(builder, 0)
    remove(plan["state"])
