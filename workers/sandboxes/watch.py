# ruff: noqa: PTH116, PTH118, PTH123, PTH208
"""Memory, processes and disk of the sandboxes of a node, looked after by one process; standard library only.

Where no cgroup is delegated, nothing in the kernel bounds a sandbox's processes together. So they are measured, often
while they work and seldom while they do not, and the one that takes most is killed, as the kernel's own killer would.
If that does not help, all but the first process are, as they are if a fork bomb is at its limit for a second. Each
killing is a line in the sandbox's `notices`, for the model to read.

Processes are found in the sandbox's own /proc, through a descriptor: the node's own lists too many, and a /proc that
the policy mounts over another hides nothing. The watcher is forked by a monitor that finds none, knows the sandboxes by
their records, and ends with the last of them; killed, it is missed until the next sandbox starts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import time

from workers.sandboxes import joining, linux
from workers.sandboxes.unnamed import held

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypedDict

    from workers.sandboxes.unnamed import Held

    class Bounds(TypedDict):
        """Of the whole sandbox; plain JSON."""

        memory_mb: int
        n_processes: int
        disk_mb: int


NOTICES = "notices"
RECORD = "sandbox.json"
CGROUP = "cgroup"
_BUSY_S, _IDLE_S = 0.25, 1.0
_ALONE_S = 2.0
_DISK_S = 1.0
_DISK_SHARE = 20
"""Measuring the disk may take a twentieth of a core."""
_MB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FULL = 0.8
"""Of the process limit; the kernel counts threads too, and those that are about to end."""
_PATIENCE = 4
"""So many single killings without effect, then all."""


class Watch:
    """Of one sandbox. Raises OSError or Gone if it is gone."""

    def __init__(self, folder: str, record: Mapping[str, int], bounds: Bounds) -> None:
        pid1 = record["pid1"]
        self._target: joining.Target = {
            "pid": pid1,
            "started": record["pid1_started"],
            "user": None,
            "network": False,
            "fake_root": False,
            "limits": {},
            "cgroup": "",
        }
        self._n_processes = bounds["n_processes"]
        # where it has a control group, the kernel sees to its memory
        self._memory = 0 if os.path.lexists(os.path.join(folder, CGROUP)) else bounds["memory_mb"] * _MB
        self._disk = bounds["disk_mb"] * _MB
        self._proc = os.open(f"/proc/{pid1}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # only now, as the pid may have been another's by then
        if joining.started_at(pid1) != record["pid1_started"]:
            os.close(self._proc)
            raise joining.Gone
        # it may be renamed
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._seen: dict[str, tuple[int, int]] = {}
        self._due = self._disk_due = 0.0
        self._pause_s = _BUSY_S
        self._disk_used = 0
        self._wrote: dict[str, int] = {}
        self._held: Held = {}
        self._n_tried = {"memory": 0, "disk": 0, "processes": 0}

    def close(self) -> None:
        os.close(self._proc)
        os.close(self._folder)

    def look(self, now: float) -> None:
        """Measure and act, if it is time."""
        if now >= self._due:
            self._pause_s = _BUSY_S if self._look() else min(2 * self._pause_s, _IDLE_S)
            self._due = now + self._pause_s

    def _look(self) -> bool:
        """Measure and act; whether anything has worked since the last time."""
        found = self._processes()
        worked = {pid: seen[0] for pid, seen in found.items()} != {pid: seen[0] for pid, seen in self._seen.items()}
        # what waits to fork does not work
        full = self._check_processes(found)
        if worked:
            self._check_disk(found)
            self._check_memory(found)
        self._seen = found
        return worked or full

    def _processes(self) -> dict[str, tuple[int, int]]:
        """Of each process but the first: its CPU time, in ticks, and the bytes it has in memory, shared ones too."""
        found = {}
        pids = os.listdir(self._proc)
        if "1" not in pids:
            raise joining.Gone
        for pid in pids:
            if pid.isdigit() and pid != "1":
                with contextlib.suppress(OSError):
                    fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
                    found[pid] = (int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE)
        return found

    def _read(self, path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        with os.fdopen(descriptor, errors="replace") as file:
            return file.read()

    def _check_processes(self, found: dict[str, tuple[int, int]]) -> bool:
        """Whether it is full. The kernel refuses to fork beyond the limit; a bomb would try again for ever."""
        if len(found) + 1 < self._n_processes * _FULL:
            self._n_tried["processes"] = 0
            return False
        self._n_tried["processes"] += 1
        if self._n_tried["processes"] > _PATIENCE:
            reason = f"process limit of {self._n_processes} reached, all processes were ended"
            self._act("processes", reason, dict.fromkeys(found, 0), urgent=True)
        return True

    def _check_memory(self, found: dict[str, tuple[int, int]]) -> None:
        files = sum(memory for memory, _ in self._held.values()) + self._shared()
        if not self._memory or sum(resident for _, resident in found.values()) + files <= self._memory:
            self._n_tried["memory"] = 0
            return
        # what processes share was counted once for each, and files of memory that are mapped a second time
        own = {pid: self._proportional(pid) for pid in found}
        used = sum(private for private, _ in own.values()) + max(files, sum(shared for _, shared in own.values()))
        if used > self._memory:
            amounts = {pid: sum(own[pid]) + self._held.get(pid, (0, 0))[0] for pid in own}
            self._act("memory", f"memory limit of {self._memory // _MB} MB reached", amounts, used > 1.5 * self._memory)

    def _shared(self) -> int:
        """Bytes of the files in the sandbox's /dev/shm."""
        with contextlib.suppress(OSError):
            found = os.statvfs(f"/proc/{self._target['pid']}/root/dev/shm")
            return (found.f_blocks - found.f_bfree) * found.f_frsize
        return 0

    def _proportional(self, pid: str) -> tuple[int, int]:
        """Its share of the memory it has mapped, in bytes: of its own and files, and of files of memory."""
        with contextlib.suppress(OSError, KeyError):
            fields = dict(line.split(":", 1) for line in self._read(f"{pid}/smaps_rollup").splitlines()[1:])
            total, shared = (int(fields[name].split()[0]) << 10 for name in ("Pss", "Pss_Shmem"))
            return total - shared, shared
        return 0, 0

    def _check_disk(self, found: dict[str, tuple[int, int]]) -> None:
        started = time.monotonic()
        if started < self._disk_due:
            return
        self._held = held(self._proc, found)
        used = measured(self._folder) + sum(disk for _, disk in self._held.values())
        now = time.monotonic()
        self._disk_due = now + max(_DISK_S, _DISK_SHARE * (now - started))
        before, self._disk_used = self._disk_used, used
        written = {pid: self._written(pid) for pid in found}
        lately = {pid: amount - self._wrote.get(pid, 0) for pid, amount in written.items()}
        self._wrote = written
        if used <= self._disk:
            self._n_tried["disk"] = 0
            return
        reason, urgent = f"disk limit of {self._disk // _MB} MB reached", used > 1.5 * self._disk
        # whoever clears up, or does nothing, is left alone
        if writers := {pid: amount for pid, amount in lately.items() if amount > _MB}:
            self._act("disk", reason, writers, urgent)
        elif used - before > _MB and found:
            self._n_tried["disk"] += 1
            if self._n_tried["disk"] > _PATIENCE:
                self._act("disk", reason, lately, urgent=True)

    def _written(self, pid: str) -> int:
        with contextlib.suppress(OSError, StopIteration):
            lines = self._read(f"{pid}/io").splitlines()
            return max(int(line.split()[1]) for line in lines if line.startswith(("wchar:", "write_bytes:")))
        return 0

    def _act(self, what: str, reason: str, amounts: dict[str, int], urgent: bool) -> None:
        """Kill the process with the greatest amount; all of them if that is urgent, or was tried in vain."""
        self._n_tried[what] += 1
        if not amounts:
            return
        # first, so that it can be read when the death is noticed
        notices = os.open(NOTICES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._folder)
        os.write(notices, f"{reason}\n".encode())
        os.close(notices)
        if urgent or self._n_tried[what] > _PATIENCE:
            kill_all(self._target)
        else:
            self._kill(max(amounts, key=lambda pid: amounts[pid]))

    def _kill(self, pid: str) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                # a folder of /proc serves as a pidfd
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def kill_all(target: joining.Target) -> None:
    """SIGKILL to all processes of the sandbox but the first at once, from within: nothing that forks escapes that."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError, joining.Gone):
            joining.join(target, joining.PROCESSES)
            inside = os.fork()
            if inside == 0:
                os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(inside, 0)
        os._exit(0)
    os.waitpid(child, 0)


def measured(folder: int) -> int:
    """Bytes of the writable layer, counted by a child: only root of a user namespace can enter every folder of it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            linux.become_root_of_a_new_user_namespace()
        os.write(write_end, str(_size(folder)).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return int(text or 0)


def _size(folder: int) -> int:
    """Bytes that the writable layer takes. What is nested deeper than Python can follow is not counted."""
    total = 0
    with contextlib.suppress(OSError, RecursionError):
        for _, folders, files, descriptor in os.fwalk("upper", dir_fd=folder):
            for name in (*folders, *files):
                with contextlib.suppress(OSError):
                    total += 512 * os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_blocks
    return total


class Watcher:
    """Of all sandboxes in a folder."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._watches: dict[tuple[int, int], Watch] = {}

    def look(self) -> bool:
        """At each that is due; whether there are any."""
        self._find()
        now = time.monotonic()
        for name, watch in list(self._watches.items()):
            try:
                watch.look(now)
            except joining.Gone:
                # its monitor was killed too, and its folder waits to be swept
                self._watches.pop(name).close()
            except (OSError, ValueError, IndexError):
                # whatever goes wrong with one, the others are looked after
                continue
        return bool(self._watches)

    def _find(self) -> None:
        """Sandboxes are known by their records' inodes, and times, as their names change and inodes are given again."""
        there = {}
        for name in os.listdir(self._folder):
            path = os.path.join(self._folder, name)
            with contextlib.suppress(OSError):
                found = os.stat(os.path.join(path, RECORD))
                there[found.st_ino, found.st_mtime_ns] = path
        for inode in self._watches.keys() - there.keys():
            self._watches.pop(inode).close()
        for inode in there.keys() - self._watches.keys():
            with contextlib.suppress(OSError, ValueError, KeyError, joining.Gone):
                with open(os.path.join(there[inode], RECORD)) as file:
                    record = json.load(file)
                self._watches[inode] = Watch(there[inode], record, record["limits"])


def watch_over(folder: str) -> None:
    """Fork the watcher of a folder of sandboxes, if there is none. The folder's own lock says so."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fork() == 0:
            null = os.open("/dev/null", os.O_RDWR)
            joining.place({0: null, 1: null, 2: null, 3: lock})
            os.setsid()
            os.chdir("/")
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            with contextlib.suppress(OSError):
                _watch_until_alone(folder)
            os._exit(0)
    os.close(lock)


def _watch_until_alone(folder: str) -> None:
    watcher = Watcher(folder)
    alone_since = time.monotonic()
    while True:
        if watcher.look():
            alone_since = time.monotonic()
        elif time.monotonic() - alone_since > _ALONE_S:
            fcntl.flock(3, fcntl.LOCK_UN)
            # one that started just now has seen the lock, and forked no other
            if not watcher.look():
                return
            fcntl.flock(3, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(_BUSY_S)
