"""Enforce memory, process and disk limits of one sandbox from the node's watcher. Standard library only.

Without a delegated cgroup the kernel does not limit a sandbox as a whole. So the watcher measures it, often while it
works and rarely while it is idle, and kills the process with the largest share, like the kernel's OOM killer. If that
does not help, it kills all processes but the first. It does the same if the sandbox stays near its process limit for a
second (a fork bomb). Each kill adds a line to the sandbox's `notices`, which the model gets to read.

Everything that the sandbox makes the node hold counts: memory of processes, of memory files, of sockets, of messages in
transit; disk blocks and inodes at any depth. If the memory belongs to a process, that process is killed. If it belongs
to none, all are killed, which also frees what they left behind.

Processes are read from the sandbox's own /proc, which is opened once: the node's /proc lists too many, and a /proc that
the policy mounts over it has no effect. A process that blocked a read before is skipped: see `watcher.py`.
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

    from workers.sandboxes.isolation.memfd import Held
    from workers.sandboxes.isolation.watcher import Checkpoint
    from workers.sandboxes.lifecycle.start import MonitorBounds


NOTICES = "notices"
CGROUP = "cgroup"
BUSY_S, _IDLE_S = 0.25, 1.0
_MIN_PAUSE_S = 0.02
_BYTES_PER_S = 4 << 30
"""Assumed maximum growth of memory. It makes checks more frequent as a sandbox approaches its limit."""
_PAUSE_FACTOR = 20
"""A pause lasts at least this many times the CPU time of the check before it (5 % of a core)."""
_DISK_S = 1.0
_DISK_IDLE_S = 10.0
_N_DISK_CHECKS = 2
"""Number of disk checks after a process was seen to work, because short work stays below one CPU tick."""
_DISK_PAUSE_FACTOR = 20
"""The same factor for disk checks."""
_SIZE_S = 0.05
"""Time to wait for a measurement of the layer. A longer one is collected at a later check."""
_MB = 1 << 20
_FILES_PER_MB, _MIN_FILES = 64, 16384
"""Limit on files: one for each 16 KB, as file systems usually have inodes, and enough for a small package."""
_MANY_FILES = 100
"""Growth of the number of files that counts as growth of the layer."""
_PAGE = os.sysconf("SC_PAGE_SIZE")
_NEAR_LIMIT = 0.8
"""Share of the process limit that counts as reached: the kernel also counts threads and exiting processes."""
_MAX_SINGLE_KILLS = 4
"""Number of single kills without effect before all processes are killed."""


class LimitWatch:
    """Watch of one sandbox. Raises OSError or SandboxGone if the sandbox has ended."""

    def __init__(self, folder: str, record: Mapping[str, int], bounds: MonitorBounds, checkpoint: Checkpoint) -> None:
        pid1 = record["pid1"]
        self._checkpoint = checkpoint
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
        # the memory of a sandbox with a cgroup is limited by the kernel
        self._memory = 0 if os.path.lexists(os.path.join(folder, CGROUP)) else bounds["memory_mb"] * _MB
        self._disk = bounds["disk_mb"] * _MB
        self._proc = os.open(f"/proc/{pid1}/root/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        # checked after opening, because the pid can have been reused before
        if namespaces.started_at(pid1) != record["pid1_started"]:
            os.close(self._proc)
            raise namespaces.SandboxGone
        self._mounts = own_mounts(f"/proc/{pid1}/root")
        # held open, because the folder can be renamed
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._seen: dict[str, tuple[int, int]] = {}
        self._due = self._disk_due = 0.0
        self._pause_s = BUSY_S
        self._room = 0
        self._files = max(_MIN_FILES, bounds["disk_mb"] * _FILES_PER_MB)
        self._disk_used = self._n_files = 0
        self._killed_recently = False
        self._ticks: dict[str, int] = {}
        self._size: LayerSize | None = None
        self._kernel: KernelMemory | None = None
        self._n_disk_checks = _N_DISK_CHECKS
        self._n_written: dict[str, int] = {}
        self._held: Held = {}
        self._n_kills = {"memory": 0, "disk": 0, "processes": 0, "tcp": 0}
        self._max_tcp = most_tcp()

    def close(self) -> None:
        if self._size is not None:
            self._size.close()
        if self._kernel is not None:
            self._kernel.close()
        os.close(self._proc)
        os.close(self._folder)

    def check(self, now: float) -> None:
        """Measure the sandbox and enforce its limits, if that is due."""
        if now >= self._due:
            # so that a failed check is not retried at once
            self._due = now + BUSY_S
            began = time.thread_time()
            self._pause_s = BUSY_S if self._measure() else min(2 * self._pause_s, _IDLE_S)
            if self._memory and self._pause_s == BUSY_S:
                min_pause_s = max(_MIN_PAUSE_S, _PAUSE_FACTOR * (time.thread_time() - began))
                self._pause_s = min(BUSY_S, max(min_pause_s, self._room / _BYTES_PER_S))
            self._due = now + self._pause_s

    def due_in(self, now: float) -> float:
        """Return the seconds until the next check; 0 or less if it is due."""
        return self._due - now

    def _measure(self) -> bool:
        """Measure and enforce. Returns True if the sandbox worked since the last check, or is at its process limit."""
        processes = self._processes()
        worked = {pid: seen[0] for pid, seen in processes.items()} != {pid: seen[0] for pid, seen in self._seen.items()}
        # processes that wait for a fork use no CPU time
        full = self._check_processes(processes)
        if worked:
            self._n_disk_checks = _N_DISK_CHECKS
        elif processes and time.monotonic() > self._disk_due + _DISK_IDLE_S:
            self._n_disk_checks = max(1, self._n_disk_checks)
        if self._n_disk_checks or self._size is not None:
            self._check_disk(processes)
        if worked:
            self._check_memory(processes)
            self._check_tcp(processes)
        self._seen = processes
        return worked or full

    def _processes(self) -> dict[str, tuple[int, int]]:
        """Return CPU ticks and resident bytes, including shared memory, of each process except the first."""
        measurements = {}
        pids = os.listdir(self._proc)
        if "1" not in pids:
            raise namespaces.SandboxGone
        for pid in pids:
            if pid.isdigit() and pid != "1":
                with contextlib.suppress(OSError):
                    measurements[pid] = self._measured(pid)
        return measurements

    def _measured(self, pid: str) -> tuple[int, int]:
        if not self._is_responsive(pid):
            # statm never blocks
            return 0, int(self._read(f"{pid}/statm").split()[1]) * _PAGE
        fields = self._read(f"{pid}/stat").rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12]), int(fields[21]) * _PAGE

    def _is_responsive(self, pid: str) -> bool:
        """Return False if a read of this process blocked recently. Must be called before a read that can block."""
        return self._checkpoint.at(f"{self._target['pid']} {pid}")

    def _read(self, path: str) -> str:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._proc)
        with os.fdopen(descriptor, errors="replace") as file:
            return file.read()

    def _check_processes(self, processes: dict[str, tuple[int, int]]) -> bool:
        """Return whether the process limit is reached. Kills all if it stays so: a fork bomb retries forever."""
        if len(processes) + 1 < self._n_processes * _NEAR_LIMIT:
            self._n_kills["processes"] = 0
            return False
        self._n_kills["processes"] += 1
        if self._n_kills["processes"] > _MAX_SINGLE_KILLS:
            reason = f"process limit of {self._n_processes} reached, all processes were ended"
            self._kill_largest("processes", reason, dict.fromkeys(processes, 0), urgent=True)
        return True

    def _check_memory(self, processes: dict[str, tuple[int, int]]) -> None:
        if not self._memory:
            return
        # `_held` can still contain processes that have ended
        files = sum(memory for pid, (memory, _) in self._held.items() if pid in processes) + self._shared()
        of_sockets: dict[str, int] = {}
        kernel = 0
        # an error is retried at the next check; the rest is still enforced
        with contextlib.suppress(OSError, KeyError, namespaces.SandboxGone):
            shared, kernel, of_sockets = self._kernel_memory(processes)
            files += shared
        estimate = sum(resident for _, resident in processes.values()) + files + kernel
        self._room = max(0, self._memory - estimate)
        if estimate <= self._memory:
            self._n_kills["memory"] = 0
            return
        # over the estimate, which counts shared memory once per process: measure proportional shares
        own = {
            pid: self._proportional(pid) if self._is_responsive(pid) else (resident, 0)
            for pid, (_, resident) in processes.items()
        }
        used = sum(private for private, _ in own.values()) + max(files, sum(shared for _, shared in own.values()))
        used += kernel
        self._room = max(0, self._memory - used)
        if used > self._memory:
            amounts = {pid: sum(own[pid]) + self._held.get(pid, (0, 0))[0] + of_sockets.get(pid, 0) for pid in own}
            # kill all if most of the memory belongs to no process
            urgent = used > 1.5 * self._memory or sum(amounts.values()) < used // 2
            self._kill_largest("memory", f"memory limit of {self._memory // _MB} MB reached", amounts, urgent)

    def _kernel_memory(self, processes: dict[str, tuple[int, int]]) -> tuple[int, int, dict[str, int]]:
        """Return bytes of System V memory, of other kernel memory, and of the sockets of each process if they are many.

        Raises OSError or SandboxGone.
        """
        self._kernel = self._kernel or KernelMemory(self._target)
        shared, waiting, each = self._kernel.shared(), self._kernel.messages(), self._kernel.sockets()
        total = sum(each.values())
        if total + shared + waiting < self._memory // 8:
            return shared, waiting if self._kernel.shares_network else waiting + total, {}
        inodes = sockets(self._proc, filter(self._is_responsive, processes))
        by_process = {pid: sum(each.get(inode, 0) for inode in own) for pid, own in inodes.items()}
        if self._kernel.shares_network:
            total = sum(each.get(inode, 0) for inode in set[int]().union(*inodes.values()))
        return shared, waiting + total, by_process

    def _check_tcp(self, processes: dict[str, tuple[int, int]]) -> None:
        """Kill the process with the largest TCP buffers above the limit. Skipped if the network is the node's own."""
        with contextlib.suppress(OSError, KeyError, namespaces.SandboxGone):
            self._kernel = self._kernel or KernelMemory(self._target)
            if self._kernel.shares_network:
                return
            each = self._kernel.sockets()
            if self._kernel.tcp <= self._max_tcp:
                self._n_kills["tcp"] = 0
                return
            inodes = sockets(self._proc, filter(self._is_responsive, processes))
            amounts = {pid: sum(each.get(inode, 0) for inode in own) for pid, own in inodes.items()}
            reason = f"TCP memory limit of {self._max_tcp // _MB} MB reached"
            self._kill_largest("tcp", reason, amounts, urgent=sum(amounts.values()) < self._kernel.tcp // 2)

    def _shared(self) -> int:
        with contextlib.suppress(OSError):
            shm = os.statvfs(f"/proc/{self._target['pid']}/root/dev/shm")
            return (shm.f_blocks - shm.f_bfree) * shm.f_frsize
        return 0

    def _proportional(self, pid: str) -> tuple[int, int]:
        """Return a process's proportional share of memory in bytes: without memory files, and of memory files."""
        with contextlib.suppress(OSError, KeyError):
            fields = dict(line.split(":", 1) for line in self._read(f"{pid}/smaps_rollup").splitlines()[1:])
            total, shared = (int(fields[name].split()[0]) << 10 for name in ("Pss", "Pss_Shmem"))
            return total - shared, shared
        return 0, 0

    def _check_disk(self, processes: dict[str, tuple[int, int]]) -> None:
        if self._size is None and time.monotonic() < self._disk_due:
            return
        started = time.monotonic()
        measured = self._measured_size()
        if measured is None:
            return
        size, n_files, took_s = measured
        self._held = held(self._proc, filter(self._is_responsive, processes), self._mounts)
        used = size + sum(disk for _, disk in self._held.values())
        now = time.monotonic()
        self._disk_due = now + max(_DISK_S, _DISK_PAUSE_FACTOR * (took_s + now - started))
        grown = used - self._disk_used > _MB or n_files - self._n_files > _MANY_FILES
        self._disk_used, self._n_files = used, n_files
        written = {pid: self._written(pid) for pid in processes if self._is_responsive(pid)}
        recently_written = {pid: amount - self._n_written.get(pid, 0) for pid, amount in written.items()}
        self._n_written = written
        ticks_by_pid = {pid: ticks - self._ticks.get(pid, 0) for pid, (ticks, _) in processes.items()}
        self._ticks = {pid: ticks for pid, (ticks, _) in processes.items()}
        n_kills_before = self._n_kills["disk"]
        if used > self._disk:
            self._kill_writer(processes, recently_written, grown, used > 1.5 * self._disk)
        elif n_files > self._files:
            self._kill_creator(processes, ticks_by_pid, grown, n_files > 1.5 * self._files)
        else:
            self._n_kills["disk"] = 0
        self._killed_recently = self._n_kills["disk"] > n_kills_before

    def _measured_size(self) -> tuple[int, int, float] | None:
        """Return bytes, files and seconds (of a child) of the layer, or None while a child still counts."""
        # if the direct count blocked before (dead disk), only a child counts, without a wait
        if self._size is None:
            few = size_of_few(self._folder) if self._is_responsive("layer") else None
            self._size = LayerSize(self._folder) if few is None else None
            self._n_disk_checks -= 1
            if few is not None:
                return *few, 0.0
        assert self._size is not None
        measured = self._size.take(_SIZE_S)
        if measured is not None:
            self._size.close()
            self._size = None
        return measured

    def _kill_writer(
        self, processes: dict[str, tuple[int, int]], written: dict[str, int], grown: bool, urgent: bool
    ) -> None:
        reason = f"disk limit of {self._disk // _MB} MB reached"
        writers = {pid: amount for pid, amount in written.items() if amount > _MB}
        if not writers and grown:
            # fallocate takes space without a write
            sizes = opened(self._proc, filter(self._is_responsive, processes), self._mounts)
            writers = {pid: size for pid, size in sizes.items() if size > _MB}
        if writers:
            self._kill_largest("disk", reason, writers, urgent)
        elif grown:
            self._kill_all_if_repeated(reason, processes, urgent)

    def _kill_creator(
        self, processes: dict[str, tuple[int, int]], ticks_by_pid: dict[str, int], grown: bool, urgent: bool
    ) -> None:
        """Kill the process with the most CPU time while files were added. Their creator is not recorded."""
        if grown:
            reason = f"disk limit reached: there can be {self._files} files and folders"
            creators = {pid: ticks for pid, ticks in ticks_by_pid.items() if ticks}
            if creators:
                self._kill_largest("disk", reason, creators, urgent)
            else:
                self._kill_all_if_repeated(reason, processes, urgent)

    def _kill_all_if_repeated(self, reason: str, processes: dict[str, tuple[int, int]], urgent: bool) -> None:
        """Kill all if growth without a known process repeats, or is urgent and no process was killed just before."""
        self._n_kills["disk"] += 1
        if processes and (self._n_kills["disk"] > _MAX_SINGLE_KILLS or (urgent and not self._killed_recently)):
            self._kill_largest("disk", reason, dict.fromkeys(processes, 0), urgent=True)

    def _written(self, pid: str) -> int:
        with contextlib.suppress(OSError, StopIteration):
            lines = self._read(f"{pid}/io").splitlines()
            return max(int(line.split()[1]) for line in lines if line.startswith(("wchar:", "write_bytes:")))
        return 0

    def _kill_largest(self, kind: str, reason: str, amounts: dict[str, int], urgent: bool) -> None:
        """Kill the process with the largest amount; all if it is urgent, or after too many single kills."""
        if not amounts:
            return
        self._n_kills[kind] += 1
        # written before the kill, so that it can be read when the end is noticed
        notices = os.open(NOTICES, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644, dir_fd=self._folder)
        os.write(notices, f"{reason}\n".encode())
        os.close(notices)
        if urgent or self._n_kills[kind] > _MAX_SINGLE_KILLS:
            kill_all(self._target)
        else:
            self._kill(max(amounts, key=lambda pid: amounts[pid]))

    def _kill(self, pid: str) -> None:
        with contextlib.suppress(OSError):
            descriptor = os.open(pid, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._proc)
            try:
                # a descriptor of a /proc/PID folder works as a pidfd
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            finally:
                os.close(descriptor)


def kill_all(target: namespaces.JoinTarget) -> None:
    """Kill all processes of a sandbox except the first with one SIGKILL from within, which no fork can escape.

    Also removes their System V objects, which would otherwise stay without an owner.
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
    # the kernel reaps the watcher's children
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
