# ruff: noqa: PTH102, PTH103, PTH104, PTH106, PTH108, PTH109, PTH110, PTH112, PTH118, PTH120, PTH123, PTH211, S606
# pathlib and typing would double the memory of a monitor, and nothing here may need a shell
"""The monitor of one sandbox: builds it, holds it, and takes everything away when it ends; standard library only.

One process per sandbox, because what holds a sandbox must outlive the worker that started it, and must be small:
there are 200 on one node. So it is Python only while it builds; then it becomes a bash that waits, of a third of a
megabyte. It stays in the host's namespaces; a child, the builder, makes the sandbox's. So what was mounted is gone with
the last process, and the monitor can delete the folder without meeting a mount.

It is a child of the fork server that is given a plan, a `workers.sandboxes.lifecycle.start.MonitorPlan`. It ends the
sandbox on SIGUSR1, when the lifeline's other end closes, or when the sandbox's first process ends; not on SIGTERM,
which all processes of a node may be sent that is to drain. Killed itself, it takes the processes with it and leaves
its folder. It works in that folder and knows no path to it, as a sandbox in the warm pool is renamed when taken.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket

# os.execvpe would import it when the host's files are out of reach already
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
"""Bash as process 1: reaps orphans, and ends when its standard input, held by the monitor, is closed.

The log is closed, as programs inside could write to it through /proc/1/fd.
"""
FOLDERS = ("dev", "proc", "sys", "tmp", "var/tmp", "root", "run/farm")
SOCKETS = "/run/farm"
MASKED = ("/proc/keys", "/proc/key-users")
"""Files that list keys which the same user has outside."""
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LINKS = {"fd": "/proc/self/fd", "stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}


@cache
def script() -> str:
    """Return the script that the monitor becomes, read while this process may still read it."""
    with open(os.path.join(os.path.dirname(__file__), "monitor.sh"), encoding="utf-8") as file:
        return file.read()


def stage(plan: MonitorPlan) -> None:
    """Bind all sources below the sandbox's own folder, read-only, where any user can reach them."""
    linux.make_mounts_private()
    exposed = [plan["exposed"]] if plan["exposed"] else []
    for number, source in enumerate([*plan["lower"], *(source for source, _ in plan["binds"]), *exposed]):
        linux.bind_read_only(source, f"stage/{number}")


def expose(plan: MonitorPlan) -> None:
    """Let the runtime's folder be entered, here and nowhere else, where one above it is closed to ordinary users."""
    if plan["exposed"]:
        number = len(plan["lower"]) + len(plan["binds"])
        linux.mount("tmpfs", plan["closed"], "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=755,size=64k")
        os.makedirs(plan["exposed"])
        linux.bind_read_only(f"stage/{number}", plan["exposed"])


def mount_root(plan: MonitorPlan) -> None:
    """The sandbox's root file system: the image and its layers below, a writable layer of its own above."""
    lower = ":".join(f"stage/{number}" for number in range(len(plan["lower"])))
    own = f"{id_mapping.MAPPED}/" if plan["own_id"] else ""
    options = f"userxattr,lowerdir={lower},upperdir={own}upper,workdir={own}work"
    linux.mount("overlay", "root", "overlay", 0, options)


def give_own_files(plan: MonitorPlan) -> None:
    """Have the files of bound folders as this sandbox's own: a lock, or a watch, on one of them is no other sandbox's.

    A folder in which something else is mounted, or whose file system no overlay can have below it, stays as it is.
    """
    there = [number for number, is_folder in enumerate(plan["are_folders"], start=len(plan["lower"])) if is_folder]
    folders = [f"{os.getcwd()}/stage/{number}" for number in there]
    for number, folder, is_divided in zip(there, folders, linux.mounted_below(folders), strict=True):
        if not is_divided:
            # an overlay without a writable layer has two others at least; nothing is mounted on `root` yet
            options = f"userxattr,lowerdir=stage/{number}:root"
            with contextlib.suppress(OSError):
                linux.mount("overlay", folder, "overlay", linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV, options)


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


def make_folders(path: str) -> None:
    """Make a folder and those above it, as far as they are missing; nearly always at most the last is.

    What a policy left in place of one, such as a file or a link to nothing, is removed.
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
    """Folders and files to mount on, in what is the root folder now, so that its links lead nowhere else.

    The file of its addresses' names is completed, too.
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
    """A runtime itself mounts what its options name, where there is something to mount on."""
    os.chroot("root")
    os.chdir("/")
    make_mount_points(plan)


def enter_root(plan: MonitorPlan) -> None:
    """As process 1 of a namespace sandbox: complete its root, move into it, and let the host's go."""
    linux.unshare(linux.NEWNS)
    state = os.getcwd()
    # a name that no link of the image can know
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
    os.mkdir("/dev/shm")  # noqa: S108
    linux.mount("tmpfs", "/dev/shm", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "mode=1777,size=64m")  # noqa: S108


def run_first_process(plan: MonitorPlan, to_monitor: socket.socket) -> None:
    """As process 1 of its namespaces: move into the sandbox and stay, once it is the monitor's own child."""
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
    """In the builder: all namespaces and mounts, then the first process. They all go when the builder does."""
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
        # a runtime looks beside its program, and the kernel forgets where that is with the namespace it was found in
        socket.send_fds(to_monitor, [b"mounts"], [os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)])
        os.execve(plan["runtime"][0], [*plan["runtime"], *FIRST_PROCESS], plan["runtime_env"])
    linux.unshare(linux.NEWPID | linux.NEWIPC | linux.NEWUTS | (0 if plan["network"] else linux.NEWNET))
    first = os.fork()
    if first == 0:
        run_first_process(plan, to_monitor)
    # the monitor becomes the parent: one process less for as long as the sandbox runs
    to_monitor.send(str(first).encode())
    os._exit(0)


def pair() -> tuple[int, int]:
    """The sandbox's and our end of what is no pipe, as the policy could open the other end of that in /proc/1/fd."""
    theirs, ours = socket.socketpair()
    return theirs.detach(), ours.detach()


def start_builder(plan: MonitorPlan, wanted: int) -> tuple[int, list[int]]:
    """Fork it. Returns the child that holds the sandbox, and what to keep open while it lives.

    Raises OSError if it fails, or if the other end of the pipe `wanted` is closed meanwhile.
    """
    stdin, lifeline = pair()
    stdout, up = pair()
    from_builder, to_monitor = socket.socketpair()
    continue_at_the_end(to_monitor.fileno(), os.getpid())
    linux.become_subreaper()
    builder = os.fork()
    if builder == 0:
        try:
            # the monitor's must be the only ends of the lifeline and the lock
            namespaces.place({0: stdin, 1: stdout, 2: 2, 3: to_monitor.fileno()})
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
                id_mapping.give_id(plan, builder, from_builder, wanted)
            # the watcher, which is forked from this one, reads what the processes of other users have open
            become(*plan["user"], linux.DAC_READ_SEARCH)
        wait_for(from_builder.fileno(), wanted)
        message, held, _, _ = socket.recv_fds(from_builder, 16, 1)
        if message.isdigit():
            os.waitpid(builder, 0)
            builder = int(message)
            from_builder.send(b"!")
    wait_for(up, wanted)
    if os.read(up, 3) != b"up\n":
        raise OSError("it did not come up: " + last_lines("log"))
    if plan["runtime"]:
        in_child(lambda: kernel_limits.limit_ipc_of(first_process_of(builder), plan["limits"]["memory_mb"]))
    # by default ignored; bash starts a `read` again that SIGCHLD interrupted, so would not notice the end of a child
    signal_at_the_end(up, signal.SIGURG, os.getpid())
    return builder, [up, lifeline, *held]


def end_start() -> None:
    """Kill all that a start which failed has left, whatever its parent was."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in map(int, linux.read_text(f"/proc/self/task/{os.getpid()}/children").split()):
                # a builder that is root still will find its pipe closed
                with contextlib.suppress(PermissionError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def remove() -> None:
    """Delete the folder, as root of a user namespace: the sandbox may have left what its owner cannot enter."""
    state = os.getcwd()
    os.chdir("/")
    os.execvp("unshare", ["unshare", "--user", "--map-root-user", "rm", "-rf", "--one-file-system", "--", state])


def last_lines(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return " | ".join(line.strip() for line in file.readlines()[-5:])


def first_process_of(child: int) -> int:
    """The pid, seen from here, of the process that is number 1 in its own namespace, among a child and its children."""
    pids = [child]
    while pids:
        pid = pids.pop()
        status = linux.read_text(f"/proc/{pid}/status")
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()[1:]
        if len(numbers) > 1 and numbers[-1] == "1":
            return pid
        pids.extend(map(int, linux.read_text(f"/proc/{pid}/task/{pid}/children").split()))
    raise OSError("its first process is not to be found")


def write_record(plan: MonitorPlan, pid1: int) -> dict[str, Any]:
    """Write what other processes of this node need to use or end the sandbox, whole or not at all, and return it."""
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


def monitor(plan: MonitorPlan, given: Sequence[int], tell: Callable[[dict[str, Any]], None]) -> None:
    """Be the monitor; answers with the record or error. `given` are descriptors: lock, lifeline, log, more to keep."""
    lock, lifeline, log, *image = given
    # now, as it is another user's when this process has become the sandbox's
    of_the_watcher = opened_again(lifeline)
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
            # its requester has ended
            remove()
        return
    for descriptor in (lock, lifeline, *image, *held):
        os.set_inheritable(descriptor, True)
    silent = os.pipe()
    for descriptor in silent:
        os.set_inheritable(descriptor, True)
    # bash cannot trap what is ignored when it starts; and a signal to end must not be lost from now on
    namespaces.default_signals()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    tell(record)
    watch_over(os.path.dirname(os.getcwd()), of_the_watcher)
    words = [lifeline, silent[0], builder, record["pid1"], record["pid1_started"]]
    path = os.environ.get("PATH", os.defpath)
    shell = ["bash", "--norc", "--noprofile", "-c", script(), "sandbox-monitor"]
    os.execvpe("bash", [*shell, *map(str, words)], {"PATH": path, "LC_ALL": "C"})
