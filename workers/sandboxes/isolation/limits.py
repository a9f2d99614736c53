# ruff: noqa: PTH118, PTH208
"""Memory, processes and disk of one sandbox, looked after by the watcher of its node; standard library only.

Where no cgroup is delegated, nothing in the kernel bounds a sandbox's processes together. So they are measured, often
while they work and seldom while they do not, and the one that takes most is killed, as the kernel's own killer would.
If that does not help, all but the first process are, as they are if a fork bomb is at its limit for a second. Each
killing is a line in the sandbox's `notices`, for the model to read.

The rule: all that a sandbox makes the node hold counts, wherever it is: memory of processes, of files without a disk,
of sockets, on its way in messages or left behind; blocks of disk and inodes, by whatever call and at whatever depth.
When a process is to blame, that one is killed; if none is, all are, and with them goes what belonged to no one.

Processes are found in the sandbox's own /proc, through a descriptor: the node's own lists too many, and a /proc that
the policy mounts over another hides nothing. A process that did not answer is left alone: see `hang_guard.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from workers.sandboxes.isolation import linux, namespaces
from workers.sandboxes.isolation.kernel_memory import KernelMemory, most_tcp, remove_system_v_objects
from workers.sandboxes.isolation.layer_size import LayerSize, size_of_few
from workers.sandboxes.isolation.memfd import held, opened, own_mounts, sockets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import TypedDict

    from workers.sandboxes.isolation.hang_guard import Checkpoint
    from workers.sandboxes.isolation.memfd import Held

    class WatchedBounds(TypedDict):
        """Of the whole sandbox; plain JSON."""

        memory_mb: int
        n_processes: int
        disk_mb: int


NOTICES = "notices"
CGROUP = "cgroup"
BUSY_S, _IDLE_S = 0.25, 1.0
_SOONEST_S = 0.02
_BYTES_PER_S = 4 << 30
"""A thread hardly takes memory faster: the less is left, the sooner it is looked at again."""
_LOOKING_SHARE = 20
"""Looking sooner than usual may take a twentieth of a core."""
_DISK_S = 1.0
_DISK_IDLE_S = 10.0
_MEASURED = 2
"""So often after work was seen, as its end may be shorter than what CPU time is counted in, and yet reserve much."""
_DISK_SHARE = 20
"""Measuring the disk may take a twentieth of a core."""
_SIZE_S = 0.05
"""A layer is measured in milliseconds, or it is looked for at the next turn."""
_MB = 1 << 20
_FILES_PER_MB, _MIN_FILES = 64, 16384
"""As many files as a file system usually has inodes for, one for each 16 KB; and as a small program package has."""
_MANY_FILES = 100
"""Made in one go."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_FULL = 0.8
"""Of the process limit; the kernel counts threads too, and those that are about to end."""
_PATIENCE = 4
"""So many single killings without effect, then all."""


class LimitWatch:
    """Of one sandbox. Raises OSError or Gone if it is gone."""

    def __init__(self, folder: str, record: Mapping[str, int], bounds: WatchedBounds, place: Checkpoint) -> None:
        pid1 = record["pid1"]
        self._place = place
        self._target: namespaces.JoinTarget = {
            "pid": pid1,
            "started": record["pid1_started"],
            "user": None,
            "network": False,
            "users": "",
            "limits": {},
            "cgroup": "",
            "identity": None,
            "cpus": [],
        }
        self._n_processes = bounds["n_processes"]
        # where it has a control group, the kernel sees to its memory
        self._memory = 0 if os.path.lexists(os.path.join(folder, CGROUP)) else bounds["memory_mb"] * _MB
        self._disk = bounds["disk_mb"] * _MB
        self._proc = os.open(f"/proc/{pid1}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # only now, as the pid may have been another's by then
        if namespaces.started_at(pid1) != record["pid1_started"]:
            os.close(self._proc)
            raise namespaces.SandboxGone
        self._mounts = own_mounts(f"/proc/{pid1}/root")
        # it may be renamed
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._seen: dict[str, tuple[int, int]] = {}
        self._due = self._disk_due = 0.0
        self._pause_s = BUSY_S
        self._room = 0
        self._files = max(_MIN_FILES, bounds["disk_mb"] * _FILES_PER_MB)
        self._disk_used = self._n_files = 0
        self._ended_lately = False
        self._ticks: dict[str, int] = {}
        self._size: LayerSize | None = None
        self._kernel: KernelMemory | None = None
        self._n_to_measure = _MEASURED
        self._wrote: dict[str, int] = {}
        self._held: Held = {}
        self._n_tried = {"memory": 0, "disk": 0, "processes": 0, "tcp": 0}
        self._most_tcp = most_tcp()

    def close(self) -> None:
        if self._size is not None:
            self._size.close()
        if self._kernel is not None:
            self._kernel.close()
        os.close(self._proc)
        os.close(self._folder)

    def look(self, now: float) -> None:
        """Measure and act, if it is time."""
        if now >= self._due:
            # a look that fails is not tried at once again
            self._due = now + BUSY_S
            began = time.thread_time()
            self._pause_s = BUSY_S if self._look() else min(2 * self._pause_s, _IDLE_S)
            if self._memory and self._pause_s == BUSY_S:
                soonest = max(_SOONEST_S, _LOOKING_SHARE * (time.thread_time() - began))
                self._pause_s = min(BUSY_S, max(soonest, self._room / _BYTES_PER_S))
            self._due = now + self._pause_s

    def due_in(self, now: float) -> float:
        """Return the seconds until it is time to look, 0 or less if it is."""
        return self._due - now

    def _look(self) -> bool:
        """Measure and act; whether anything has worked since the last time."""
        result = self._processes()
        worked = {pid: seen[0] for pid, seen in result.items()} != {pid: seen[0] for pid, seen in self._seen.items()}
        # what waits to fork does not work
        full = self._check_processes(result)
        if worked:
            self._n_to_measure = _MEASURED
        elif result and time.monotonic() > self._disk_due + _DISK_IDLE_S:
            self._n_to_measure = max(1, self._n_to_measure)
        if self._n_to_measure or self._size is not None:
            self._check_disk(result)
        if worked:
            self._check_memory(result)
            self._check_tcp(result)
        self._seen = result
        return worked or full

    def _processes(self) -> dict[str, tuple[int, int]]:
        """Of each process but the first: its CPU time, in ticks, and the bytes it has in memory, shared ones too."""
        result = {}
        pids = os.listdir(self._proc)
        if "1" not in pids:
            raise namespaces.SandboxGone
        for pid in pids:
            if pid.isdigit() and pid != "1":
                with contextlib.suppress(OSError):
                    result[pid] = self._measured(pid)
        return result

    def _measured(self, pid: str) -> tuple[int, int]:
        if not self._may_ask(pid):
            # this never waits
            return 0, int(self._read(f"{pid}/statm").split()[1]) * _PAGE
        fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE

    def _may_ask(self, pid: str) -> bool:
        """Return whether a process has answered so far; to be called before a read of it that may block."""
        return self._place.at(f"{self._target['pid']} {pid}")

    def _read(self, path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        with os.fdopen(descriptor, errors="replace") as file:
            return file.read()

    def _check_processes(self, found: dict[str, tuple[int, int]]) -> bool:
        """Return whether it is full. The kernel refuses to fork beyond the limit; a bomb would try again for ever."""
        if len(found) + 1 < self._n_processes * _FULL:
            self._n_tried["processes"] = 0
            return False
        self._n_tried["processes"] += 1
        if self._n_tried["processes"] > _PATIENCE:
            reason = f"process limit of {self._n_processes} reached, all processes were ended"
            self._act("processes", reason, dict.fromkeys(found, 0), urgent=True)
        return True

    def _check_memory(self, found: dict[str, tuple[int, int]]) -> None:
        if not self._memory:
            return
        # of those that have ended since it was looked for, nothing is left
        files = sum(memory for pid, (memory, _) in self._held.items() if pid in found) + self._shared()
        of_sockets: dict[str, int] = {}
        kernel = 0
        # the next look tries again: what can be measured without it counts all the same
        with contextlib.suppress(OSError, KeyError, namespaces.SandboxGone):
            shared, kernel, of_sockets = self._of_the_kernel(found)
            files += shared
        most = sum(resident for _, resident in found.values()) + files + kernel
        self._room = max(0, self._memory - most)
        if most <= self._memory:
            self._n_tried["memory"] = 0
            return
        # what processes share was counted once for each, and files of memory that are mapped a second time
        own = {
            pid: self._proportional(pid) if self._may_ask(pid) else (resident, 0)
            for pid, (_, resident) in found.items()
        }
        used = sum(private for private, _ in own.values()) + max(files, sum(shared for _, shared in own.values()))
        used += kernel
        self._room = max(0, self._memory - used)
        if used > self._memory:
            amounts = {pid: sum(own[pid]) + self._held.get(pid, (0, 0))[0] + of_sockets.get(pid, 0) for pid in own}
            # no process in particular, if it is in none
            urgent = used > 1.5 * self._memory or sum(amounts.values()) < used // 2
            self._act("memory", f"memory limit of {self._memory // _MB} MB reached", amounts, urgent)

    def _of_the_kernel(self, found: dict[str, tuple[int, int]]) -> tuple[int, int, dict[str, int]]:
        """Bytes of shared memory, of what else belongs to no process, and of each process's sockets if they are many.

        Raises OSError or Gone.
        """
        self._kernel = self._kernel or KernelMemory(self._target)
        shared, waiting, each = self._kernel.shared(), self._kernel.messages(), self._kernel.sockets()
        total = sum(each.values())
        if total + shared + waiting < self._memory // 8:
            return shared, waiting if self._kernel.shares_network else waiting + total, {}
        inodes = sockets(self._proc, filter(self._may_ask, found))
        by_process = {pid: sum(each.get(inode, 0) for inode in own) for pid, own in inodes.items()}
        if self._kernel.shares_network:
            total = sum(each.get(inode, 0) for inode in set[int]().union(*inodes.values()))
        return shared, waiting + total, by_process

    def _check_tcp(self, found: dict[str, tuple[int, int]]) -> None:
        """End what holds most in TCP queues within the sandbox; with the node's own network they are the node's."""
        with contextlib.suppress(OSError, KeyError, namespaces.SandboxGone):
            self._kernel = self._kernel or KernelMemory(self._target)
            if self._kernel.shares_network:
                return
            each = self._kernel.sockets()
            if self._kernel.tcp <= self._most_tcp:
                self._n_tried["tcp"] = 0
                return
            inodes = sockets(self._proc, filter(self._may_ask, found))
            amounts = {pid: sum(each.get(inode, 0) for inode in own) for pid, own in inodes.items()}
            reason = f"TCP memory limit of {self._most_tcp // _MB} MB reached"
            self._act("tcp", reason, amounts, urgent=sum(amounts.values()) < self._kernel.tcp // 2)

    def _shared(self) -> int:
        """Bytes of the files in the sandbox's /dev/shm."""
        with contextlib.suppress(OSError):
            result = os.statvfs(f"/proc/{self._target['pid']}/root/dev/shm")
            return (result.f_blocks - result.f_bfree) * result.f_frsize
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
        if self._size is None and time.monotonic() < self._disk_due:
            return
        started = time.monotonic()
        measured = self._measured_size()
        if measured is None:
            return
        size, n_files, took_s = measured
        self._held = held(self._proc, filter(self._may_ask, found), self._mounts)
        used = size + sum(disk for _, disk in self._held.values())
        now = time.monotonic()
        self._disk_due = now + max(_DISK_S, _DISK_SHARE * (took_s + now - started))
        grown = used - self._disk_used > _MB or n_files - self._n_files > _MANY_FILES
        self._disk_used, self._n_files = used, n_files
        written = {pid: self._written(pid) for pid in found if self._may_ask(pid)}
        lately = {pid: amount - self._wrote.get(pid, 0) for pid, amount in written.items()}
        self._wrote = written
        worked = {pid: ticks - self._ticks.get(pid, 0) for pid, (ticks, _) in found.items()}
        self._ticks = {pid: ticks for pid, (ticks, _) in found.items()}
        n_tried = self._n_tried["disk"]
        if used > self._disk:
            self._end_writer(found, lately, grown, used > 1.5 * self._disk)
        elif n_files > self._files:
            self._end_maker(found, worked, grown, n_files > 1.5 * self._files)
        else:
            self._n_tried["disk"] = 0
        self._ended_lately = self._n_tried["disk"] > n_tried

    def _measured_size(self) -> tuple[int, int, float] | None:
        """Return bytes and files of the layer, and the seconds that a child took; None if it is still counting."""
        # where the disk does not answer, the next one asks a child, which is not waited for
        if self._size is None:
            few = size_of_few(self._folder) if self._may_ask("layer") else None
            self._size = LayerSize(self._folder) if few is None else None
            self._n_to_measure -= 1
            if few is not None:
                return *few, 0.0
        assert self._size is not None
        measured = self._size.take(_SIZE_S)
        if measured is not None:
            self._size.close()
            self._size = None
        return measured

    def _end_writer(self, found: dict[str, tuple[int, int]], lately: dict[str, int], grown: bool, urgent: bool) -> None:
        """End what writes, in `lately`, or holds what has grown; a process that clears up or is idle is left alone."""
        reason = f"disk limit of {self._disk // _MB} MB reached"
        writers = {pid: amount for pid, amount in lately.items() if amount > _MB}
        if not writers and grown:
            # room can be taken without writing
            sizes = opened(self._proc, filter(self._may_ask, found), self._mounts)
            writers = {pid: size for pid, size in sizes.items() if size > _MB}
        if writers:
            self._act("disk", reason, writers, urgent)
        elif grown:
            self._end_nobody_known(reason, found, urgent)

    def _end_maker(self, found: dict[str, tuple[int, int]], worked: dict[str, int], grown: bool, urgent: bool) -> None:
        """End the process that has worked most while files became more, by CPU time, as their maker is unknown."""
        if grown:
            reason = f"disk limit reached: there can be {self._files} files and folders"
            makers = {pid: ticks for pid, ticks in worked.items() if ticks}
            if makers:
                self._act("disk", reason, makers, urgent)
            else:
                self._end_nobody_known(reason, found, urgent)

    def _end_nobody_known(self, reason: str, found: dict[str, tuple[int, int]], urgent: bool) -> None:
        """As if all had, unless it may have been one that was killed, or that has just ended, and is not repeated."""
        self._n_tried["disk"] += 1
        if found and (self._n_tried["disk"] > _PATIENCE or (urgent and not self._ended_lately)):
            self._act("disk", reason, dict.fromkeys(found, 0), urgent=True)

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


def kill_all(target: namespaces.JoinTarget) -> None:
    """SIGKILL to all processes of the sandbox but the first at once, from within: nothing that forks escapes that.

    What they leave as System V objects goes, too: no process would ever have it again, or be to blame for it.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError, namespaces.SandboxGone):
            namespaces.join(target, namespaces.PROCESSES | linux.NEWIPC)
            inside = os.fork()
            if inside == 0:
                os.kill(-1, signal.SIGKILL)
                os._exit(0)
            os.waitpid(inside, 0)
            remove_system_v_objects()
        os._exit(0)
    # the kernel reaps children of the watcher
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
