# ruff: noqa: PTH116, PTH118, PTH123, PTH208
"""Memory, processes and disk of the sandboxes of a node, looked after by one process; standard library only.

Where no cgroup is delegated, nothing in the kernel bounds a sandbox's processes together. So they are measured, often
while they work and seldom while they do not, and the one that takes most is killed, as the kernel's own killer would.
If that does not help, all but the first process are, as they are if a fork bomb is at its limit for a second. Each
killing is a line in the sandbox's `notices`, for the model to read.

Processes are found in the sandbox's own /proc, through a descriptor: the node's own lists too many, and a /proc that
the policy mounts over another hides nothing. The watcher is forked by a monitor that finds none, knows the sandboxes by
their records, and ends with the last of them; killed, it is missed until the next sandbox starts. It may fall asleep
when it asks the kernel about a process that sleeps, so it has a guard, and leaves alone what did not answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import time

from workers.sandboxes import joining
from workers.sandboxes.guard import Place, guarded
from workers.sandboxes.layer_size import LayerSize
from workers.sandboxes.lifeline import continue_at_the_end
from workers.sandboxes.unnamed import held, own_mounts

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
_SIZE_S = 0.05
"""A layer is measured in milliseconds, or it is looked for at the next turn."""
_MB = 1 << 20
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FULL = 0.8
"""Of the process limit; the kernel counts threads too, and those that are about to end."""
_PATIENCE = 4
"""So many single killings without effect, then all."""


class Watch:
    """Of one sandbox. Raises OSError or Gone if it is gone."""

    def __init__(self, folder: str, record: Mapping[str, int], bounds: Bounds, place: Place) -> None:
        pid1 = record["pid1"]
        self._place = place
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
        self._mounts = own_mounts(f"/proc/{pid1}/root")
        # it may be renamed
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._seen: dict[str, tuple[int, int]] = {}
        self._due = self._disk_due = 0.0
        self._pause_s = _BUSY_S
        self._disk_used = 0
        self._size: LayerSize | None = None
        self._unmeasured = True
        self._wrote: dict[str, int] = {}
        self._held: Held = {}
        self._n_tried = {"memory": 0, "disk": 0, "processes": 0}

    def close(self) -> None:
        if self._size is not None:
            self._size.close()
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
        # what worked last may have written what is not yet counted
        self._unmeasured |= worked
        if self._unmeasured or self._size is not None:
            self._check_disk(found)
        if worked:
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
                    found[pid] = self._measured(pid)
        return found

    def _measured(self, pid: str) -> tuple[int, int]:
        if not self._may_ask(pid):
            # this never waits for anybody
            return 0, int(self._read(f"{pid}/statm").split()[1]) * _PAGE
        fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE

    def _may_ask(self, pid: str) -> bool:
        """Whether it has answered so far; to be asked before what the kernel tells of it alone."""
        return self._place.at(f"{self._target['pid']} {pid}")

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
        # of those that have ended since it was looked for, nothing is left
        files = sum(memory for pid, (memory, _) in self._held.items() if pid in found) + self._shared()
        if not self._memory or sum(resident for _, resident in found.values()) + files <= self._memory:
            self._n_tried["memory"] = 0
            return
        # what processes share was counted once for each, and files of memory that are mapped a second time
        own = {
            pid: self._proportional(pid) if self._may_ask(pid) else (resident, 0)
            for pid, (_, resident) in found.items()
        }
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
        """Have it measured if it is time, and act once that is done."""
        if self._size is None:
            if time.monotonic() < self._disk_due:
                return
            self._size = LayerSize(self._folder)
            self._unmeasured = False
        started = time.monotonic()
        measured = self._size.take(_SIZE_S)
        if measured is None:
            return
        size, took_s = measured
        self._size.close()
        self._size = None
        self._held = held(self._proc, filter(self._may_ask, found), self._mounts)
        used = size + sum(disk for _, disk in self._held.values())
        now = time.monotonic()
        self._disk_due = now + max(_DISK_S, _DISK_SHARE * (took_s + now - started))
        before, self._disk_used = self._disk_used, used
        written = {pid: self._written(pid) for pid in found if self._may_ask(pid)}
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
    # the kernel reaps children of the watcher
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)


class Watcher:
    """Of all sandboxes in a folder."""

    def __init__(self, folder: str, place: Place) -> None:
        self._folder = folder
        self._place = place
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
                # nor is one looked at again whose very root does not answer
                if self._place.at(str(record["pid1"])):
                    self._watches[inode] = Watch(there[inode], record, record["limits"], self._place)


def watch_over(folder: str, lifeline: int) -> None:
    """Fork the watcher of a folder of sandboxes, if there is none. The folder's own lock says so.

    It ends by itself; stopped, it goes on for that when the other end of `lifeline` is closed, which it has to itself.
    """
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fork() == 0:
            continue_at_the_end(lifeline, os.getpid())
            os.setsid()
            null = os.open("/dev/null", os.O_RDWR)
            joining.place({0: null, 1: null, 2: null, 3: lock, 4: lifeline})
            os.chdir("/")
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            with contextlib.suppress(OSError):
                guarded(lambda place: _watch_until_alone(folder, place))
            os._exit(0)
    os.close(lock)


def _watch_until_alone(folder: str, place: Place) -> None:
    watcher = Watcher(folder, place)
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
        place.at()
        time.sleep(_BUSY_S)
