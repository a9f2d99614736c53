# without pathlib and typing, which would double the memory of a monitor
"""The monitor of one sandbox: builds it, holds it, and removes it when it ends. Standard library only.

There is one monitor for each sandbox, because a sandbox must outlive the worker that started it. It must be small,
because a node can have 200: it runs Python while it builds, then becomes a waiting bash of a third of a megabyte. It
stays in the host's namespaces. Its child, the builder, creates the sandbox's namespaces, so all mounts disappear with
their last process, and the monitor can delete the folder.

The monitor is a child of the fork server and gets a `workers.sandboxes.lifecycle.start.MonitorPlan`. It ends the
sandbox on SIGUSR1, when the lifeline's other end is closed, or when the sandbox's first process ends. It ignores
SIGTERM, which is sent to all processes of a node that drains. If the monitor is killed, the processes die with it and
its folder remains. It uses the folder as its working directory, without a path, because a warm sandbox is renamed when
it is taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket

# imported here, because os.execvpe imports it when the host's files are out of reach
import warnings  # noqa: F401
from functools import cache

from workers.sandboxes.isolation import id_mapping, kernel_limits, linux, namespaces, seccomp
from workers.sandboxes.isolation.namespaces import become, started_at
from workers.sandboxes.isolation.network import hosts_file
from workers.sandboxes.isolation.parent_death_pipe import continue_at_the_end, opened_again, signal_at_the_end, wait_for
from workers.sandboxes.isolation.watcher import watch_over

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from workers.sandboxes.lifecycle.start import MonitorPlan

END = signal.SIGUSR1
FIRST_PROCESS = ["bash", "--norc", "--noprofile", "-c"]
FIRST_PROCESS += ["exec 2>/dev/null; trap : CHLD; echo up; while :; do read -r _ || (($? > 128)) || exit 0; done"]
"""Bash as process 1: reaps orphans, and exits when its standard input, held by the monitor, is closed.

Standard error is closed, because programs inside could write to the log through /proc/1/fd.
"""
FOLDERS = ("dev", "proc", "sys", "tmp", "var/tmp", "root", "run/farm")
SOCKETS = "/run/farm"
MASKED = ("/proc/keys", "/proc/key-users")
"""Files that list keys of the same user outside."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


@cache
def script() -> str:
    """Return the script that the monitor becomes. Cached, as it cannot be read after the change of user."""
    with open(os.path.join(os.path.dirname(__file__), "monitor.sh"), encoding="utf-8") as file:
        return file.read()


def stage(plan: MonitorPlan) -> None:
    """Bind all sources read-only below the sandbox's state folder, where every user can reach them."""
    linux.make_mounts_private()
    exposed = [plan["exposed"]] if plan["exposed"] else []
    for number, source in enumerate([*plan["lower"], *(source for source, _ in plan["binds"]), *exposed]):
        linux.bind_read_only(source, f"stage/{number}")


def expose(plan: MonitorPlan) -> None:
    """Make the runtime's folder accessible in this mount namespace, if a parent is closed to ordinary users."""
    if plan["exposed"]:
        number = len(plan["lower"]) + len(plan["binds"])
        linux.mount("tmpfs", plan["closed"], "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=64k")
        os.makedirs(plan["exposed"])
        linux.bind_read_only(f"stage/{number}", plan["exposed"])


def mount_root(plan: MonitorPlan) -> None:
    """Mount the overlay: image and layers below, the sandbox's writable layer above."""
    lower = ":".join(f"stage/{number}" for number in range(len(plan["lower"])))
    own = f"{id_mapping.MAPPED}/" if plan["own_id"] else ""
    options = f"userxattr,lowerdir={lower},upperdir={own}upper,workdir={own}work"
    linux.mount("overlay", "root", "overlay", 0, options)


def give_own_files(plan: MonitorPlan) -> None:
    """Mount an overlay over each bound folder, so that locks and watches on its files are not shared between sandboxes.

    Folders with mounts inside, and folders on a file system that overlayfs does not support, are left as they are.
    """
    numbers = [number for number, is_folder in enumerate(plan["are_folders"], start=len(plan["lower"])) if is_folder]
    folders = [f"{os.getcwd()}/stage/{number}" for number in numbers]
    for number, folder, is_divided in zip(numbers, folders, linux.mounted_below(folders), strict=True):
        if not is_divided:
            # a read-only overlay needs at least two lower folders; `root` is still empty
            options = f"userxattr,lowerdir=stage/{number}:root"
            with contextlib.suppress(OSError):
                linux.mount("overlay", folder, "overlay", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, options)


def in_child(work: Callable[[], None]) -> None:
    """Run `work()` in a child process, which can change its root folder. Raises OSError if it fails."""
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
        error_text = pipe.read().decode(errors="replace")
    os.waitpid(child, 0)
    if error_text:
        raise OSError(error_text)


def make_folders(path: str) -> None:
    """Create a folder and its missing parents. Parents that are files or dangling links are removed.

    The common case, at most one missing folder, takes one system call.
    """
    try:
        os.mkdir(path)
        return
    except OSError:
        with contextlib.suppress(OSError):
            os.makedirs(path, exist_ok=True)
            return
    parts = path.strip("/").split("/")
    for above in ("/" + "/".join(parts[: n + 1]) for n in range(len(parts))):
        if os.path.lexists(above) and not os.path.isdir(above):
            os.unlink(above)
    os.makedirs(path, exist_ok=True)


def make_mount_points(plan: MonitorPlan) -> None:
    """Create the folders and files to mount on, within the current root folder, so that links cannot lead outside.

    Also completes the hosts file.
    """
    for folder in (*FOLDERS, plan["workdir"]):
        make_folders(os.path.join("/", folder))
    for number, (_, target) in enumerate(plan["binds"]):
        if plan["are_folders"][number]:
            make_folders(target)
        elif not os.path.exists(target):
            make_folders(os.path.dirname(target))
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    hosts_file.complete()


def prepare_for_runtime(plan: MonitorPlan) -> None:
    """Create the mount points for a container runtime, which mounts the sources itself."""
    os.chroot("root")
    os.chdir("/")
    make_mount_points(plan)


def enter_root(plan: MonitorPlan) -> None:
    """As process 1 of a namespace sandbox: complete the root file system, pivot into it, and unmount the host's."""
    linux.unshare(linux.NEWNS)
    state = os.getcwd()
    # a random name, so that no link of the image can point to it
    old_root = f"/.{os.urandom(16).hex()}"
    os.chdir("root")
    os.mkdir(old_root[1:])
    linux.pivot_root(".", old_root[1:])
    os.chdir("/")
    make_mount_points(plan)
    for number, (_, target) in enumerate(plan["binds"], start=len(plan["lower"])):
        linux.bind_read_only(f"{old_root}{state}/stage/{number}", target)
    linux.mount(f"{old_root}{state}/{plan['sockets']}", SOCKETS, flags=linux.MS_BIND)
    linux.mount("proc", "/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    linux.bind_read_only("/proc/sys", "/proc/sys")
    fill_dev(old_root)
    for name in MASKED:
        if os.path.exists(name):
            linux.mount("/dev/null", name, flags=linux.MS_BIND)
    linux.unmount(old_root)
    os.rmdir(old_root)
    linux.set_hostname("sandbox")
    if not plan["network"]:
        linux.loopback_up()


def fill_dev(old_root: str) -> None:
    linux.mount("tmpfs", "/dev", "tmpfs", linux.MS_NOSUID, "mode=755,size=64k")
    for device in DEVICES:
        os.close(os.open(f"/dev/{device}", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        linux.mount(f"{old_root}/dev/{device}", f"/dev/{device}", flags=linux.MS_BIND)
    for name, target in LINKS.items():
        os.symlink(target, f"/dev/{name}")
    os.mkdir("/dev/pts")
    linux.mount("devpts", "/dev/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    os.symlink("pts/ptmx", "/dev/ptmx")
    os.mkdir("/dev/shm")
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777,size=64m")


def run_first_process(plan: MonitorPlan, to_monitor: socket.socket) -> None:
    """As process 1: move into the sandbox once it is the monitor's child, and stay."""
    if not to_monitor.recv(1):
        os._exit(1)
    linux.die_with_parent(signal.SIGKILL)
    to_monitor.close()
    kernel_limits.limit_ipc_namespace(plan["limits"]["memory_mb"])
    enter_root(plan)
    os.chdir(plan["workdir"])
    linux.drop_capabilities(linux.WAKE_ALARM)
    seccomp.filter_calls()
    if plan["bare"]:
        namespaces.stay_as_first()
    os.execvpe("bash", FIRST_PROCESS, plan["env"])


def build(plan: MonitorPlan, to_monitor: socket.socket) -> None:
    """In the builder: create all namespaces and mounts, then the first process."""
    if plan["cgroup"]:
        namespaces.enter_cgroup(plan["cgroup"])
    if plan["user"]:
        linux.unshare(linux.NEWNS)
        stage(plan)
        expose(plan)
        become(*plan["user"])
    user_limits = kernel_limits.of_the_user()
    mounts = id_mapping.take_id(plan, to_monitor)
    linux.become_root_of_a_new_user_namespace(linux.NEWNS | linux.NEWCGROUP)
    kernel_limits.limit_user_namespace(user_limits)
    linux.die_with_parent(signal.SIGKILL)
    linux.no_new_privileges()
    if plan["user"]:
        linux.make_mounts_private()
        id_mapping.attach(mounts, (plan["sockets"], *(["runtime"] if plan["runtime"] else [])))
    else:
        stage(plan)
    give_own_files(plan)
    mount_root(plan)
    if plan["runtime"]:
        in_child(lambda: prepare_for_runtime(plan))
        # passed on, because a runtime resolves its own folder through its program, which needs this mount namespace
        socket.send_fds(to_monitor, [b"mounts"], [os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)])
        os.execve(plan["runtime"][0], [*plan["runtime"], *FIRST_PROCESS], plan["runtime_env"])
    linux.unshare(linux.NEWPID | linux.NEWIPC | linux.NEWUTS | (0 if plan["network"] else linux.NEWNET))
    first = os.fork()
    if first == 0:
        run_first_process(plan, to_monitor)
    # this process exits, so that the monitor becomes the parent: one process less for each sandbox
    to_monitor.send(str(first).encode())
    os._exit(0)


def pair() -> tuple[int, int]:
    """Return the sandbox's and the monitor's end of a socket pair. The policy could open a pipe through /proc/1/fd."""
    theirs, ours = socket.socketpair()
    return theirs.detach(), ours.detach()


def start_builder(plan: MonitorPlan, requester: int) -> tuple[int, list[int]]:
    """Fork the builder. Returns the child that holds the sandbox, and the descriptors to keep open while it lives.

    Raises OSError if the start fails, or if the other end of the pipe `requester` is closed before it is complete.
    """
    stdin, lifeline = pair()
    stdout, up = pair()
    from_builder, to_monitor = socket.socketpair()
    continue_at_the_end(to_monitor.fileno(), os.getpid())
    linux.become_subreaper()
    builder = os.fork()
    if builder == 0:
        try:
            # close the copies of lifeline and lock: only the monitor may hold them
            namespaces.renumber({0: stdin, 1: stdout, 2: 2, 3: to_monitor.fileno()})
            os.set_inheritable(3, False)
            namespaces.default_signals()
            build(plan, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM, 0, 3))
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        os._exit(1)
    os.close(stdin)
    os.close(stdout)
    to_monitor.close()
    with from_builder:
        if plan["user"]:
            if plan["own_id"]:
                id_mapping.give_id(plan, builder, from_builder, requester)
            # DAC_READ_SEARCH for the watcher, which inherits it and reads the open files of other users' processes
            become(*plan["user"], linux.DAC_READ_SEARCH)
        wait_for(from_builder.fileno(), requester)
        message, held, _, _ = socket.recv_fds(from_builder, 16, 1)
        if message.isdigit():
            os.waitpid(builder, 0)
            builder = int(message)
            from_builder.send(b"!")
    wait_for(up, requester)
    if os.read(up, 3) != b"up\n":
        raise OSError("the sandbox did not start: " + last_lines("log"))
    if plan["runtime"]:
        in_child(lambda: kernel_limits.limit_ipc_of(first_process_of(builder), plan["limits"]["memory_mb"]))
    # SIGURG is ignored by default. SIGCHLD would not do: bash restarts a `read` that it interrupts
    signal_at_the_end(up, signal.SIGURG, os.getpid())
    return builder, [up, lifeline, *held]


def end_start() -> None:
    """Kill all children of a failed start, including adopted ones."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in map(int, linux.read_text(f"/proc/self/task/{os.getpid()}/children").split()):
                # a builder that is still root exits when its pipe is closed
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def remove() -> None:
    """Become a program that deletes the state folder. As root of a user namespace, it can enter every folder."""
    state = os.getcwd()
    os.chdir("/")
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "rm", "-rf", "--one-file-system", "--", state])


def last_lines(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return " | ".join(line.strip() for line in file.readlines()[-5:])


def first_process_of(child: int) -> int:
    """Return the host pid of the process with pid 1 in its own namespace, among `child` and its descendants."""
    pids = [child]
    while pids:
        pid = pids.pop()
        status = linux.read_text(f"/proc/{pid}/status")
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        if len(numbers) > 1 and numbers[-1] == "1":
            return pid
        pids.extend(map(int, linux.read_text(f"/proc/{pid}/task/{pid}/children").split()))
    raise OSError("the first process of the sandbox was not found")


def write_record(plan: MonitorPlan, pid1: int) -> dict[str, Any]:
    """Write the record with which other processes of the node use or end the sandbox, atomically, and return it."""
    record = {
        "kind": plan["kind"],
        "monitor_pid": os.getpid(),
        "monitor_started": started_at(os.getpid()),
        "pid1": pid1,
        "pid1_started": started_at(pid1),
        "limits": plan["limits"],
    }
    with open("sandbox.json.new", "w", encoding="utf-8") as file:
        file.write(json.dumps(record))
    os.rename("sandbox.json.new", "sandbox.json")
    return record


def monitor(plan: MonitorPlan, descriptors: Sequence[int], tell: Callable[[dict[str, Any]], None]) -> None:
    """Run as the monitor. Answers with the record or an error. `descriptors`: lock, lifeline, log, others to keep."""
    lock, lifeline, log, *image = descriptors
    # opened before the change of user, which would not permit it
    watcher_lifeline = opened_again(lifeline)
    null = os.open("/dev/null", os.O_RDWR)
    for descriptor, number in ((null, 0), (null, 1), (log, 2)):
        os.dup2(descriptor, number)
    os.umask(0o022)
    os.chdir(plan["state"])
    try:
        builder, held = start_builder(plan, lifeline)
        record = write_record(plan, first_process_of(builder))
    except OSError as error:
        end_start()
        tell({"error": str(error)})
        poll = select.poll()
        poll.register(lifeline, 0)
        if poll.poll(0):
            # the requester has ended, so nobody else removes the folder
            remove()
        return
    for descriptor in (lock, lifeline, *image, *held):
        os.set_inheritable(descriptor, True)
    silent_pipe = os.pipe()
    for descriptor in silent_pipe:
        os.set_inheritable(descriptor, True)
    # bash cannot trap signals that were ignored at its start; until then SIGUSR1 must keep its default action
    namespaces.default_signals()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tell(record)
    watch_over(os.path.dirname(os.getcwd()), watcher_lifeline)
    arguments = [lifeline, silent_pipe[0], builder, record["pid1"], record["pid1_started"]]
    path = os.environ.get("PATH", os.defpath)
    shell = ["bash", "--norc", "--noprofile", "-c", script(), "sandbox-monitor"]
    os.execvpe("bash", [*shell, *map(str, arguments)], {"PATH": path, "LC_ALL": "C"})
