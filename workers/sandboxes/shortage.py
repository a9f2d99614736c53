# ruff: noqa: PTH208
"""Detect shortages of the node during a stage: a rollout that ran then is not to blame for its failure.

The result of a stage counts only if the node had free resources all the time. A program that finds the disk full fails
like a wrong one and often gives no reason, so the node is checked, not the program. Free space and inodes of the
scratch file system, and the node's processes and open files, are sampled while anything is watched. Kernel counters
(OOM kills, refused forks) are compared. A MemoryError alone proves nothing, because a request for more memory than any
node has raises it, too; it counts only if hardly any memory is left when it is checked.

A node's shortage does not excuse a sandbox that reached its own limit of the same resource, or whose policy used at
least half of the disk's free space. Otherwise, a policy could undo a failure by exhausting the node.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from operator import sub
from pathlib import Path

from workers.config import SandboxConfig
from workers.sandboxes.isolation.layer_size import size_of_few, usage_and_closed
from workers.sandboxes.isolation.memfd import held, own_mounts
from workers.sandboxes.resource_exhaustion import REMEDIES

SAMPLE_S, SOONEST_S = 0.2, 0.005
BYTES_PER_S, FILES_PER_S = 2_000_000_000, 400_000
"""Upper bounds for the speed at which a disk fills. The less space is left, the sooner the disk is sampled again."""
MIN_BYTES, MIN_FILES = 16 << 20, 256
"""A disk counts as full below these values, or below a twentieth of its size if that is less."""
MIN_MEMORY = 64 << 20
"""Memory counts as exhausted below this value, or below a twentieth of the total if that is less."""
_IDLE_S = 2.0
_MOST_BYTES = 1 << 16
_SHARE = 20
_NEARLY = 0.97
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT, errno.EAGAIN})
_NOTICES = {"disk limit": "disk", "memory limit": "memory", "process limit": "processes"}
_NO_THREAD = "can't start new thread"

_DISK_SHARE = 2
_NEAR_S = 1.0
_MOST_OF_THE_TIME = 10
"""Ratio of time to measuring time: one second of CPU time in ten."""


class ShortageWindow:
    """The shortages during one block. A cause is `disk`, `memory`, `processes` or `files`."""

    def __init__(self, sampler: _Sampler) -> None:
        self._began = time.monotonic()
        self._sampler = sampler
        self._counted = sampler.counted()
        self._excused: set[str] = set()
        self._kept: dict[str, str] = {}
        self._uses: list[DiskUse] = []
        self.on_disk = False
        """True if the block used the scratch folder."""

    @contextmanager
    def as_current(self) -> Iterator[ShortageWindow]:
        """Make this the window that `judging` refers to, within the block and its tasks."""
        token = _CURRENT.set(self)
        try:
            yield self
        finally:
            _CURRENT.reset(token)

    def follow(self, use: DiskUse) -> None:
        """Ignore a full disk if this sandbox filled it; `close` closes `use`."""
        self._uses.append(use)
        self._sampler.follow(use)

    def close(self) -> None:
        """Stop following all sandboxes."""
        for use in self._uses:
            self._sampler.leave(use)

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Ignore shortages during the block, if it ends without an error."""
        kept = self._seen()
        yield
        self._kept = kept
        self._counted = self._sampler.counts()
        self._began = time.monotonic()

    def excuse(self, reached: str) -> None:
        """Ignore the causes that a sandbox met by limits of its own, given the words of its notices."""
        self._excused |= {cause for words, cause in _NOTICES.items() if words in reached}

    def reason(self) -> str:
        """Return the resources that the node ran out of, in words; empty if none."""
        seen = self._seen()
        without_disk = not self.on_disk or any(use.filled_the_disk for use in self._uses)
        out = self._excused | {"disk"} if without_disk else self._excused
        return "; ".join(words for cause, words in seen.items() if cause not in out)

    def _seen(self) -> dict[str, str]:
        self._sampler.sample()
        words = {"memory": REMEDIES[errno.ENOMEM], "processes": REMEDIES[errno.EAGAIN]}
        grown = {cause: words[cause] for cause, n in self._sampler.counts().items() if n > self._counted.get(cause, n)}
        return {**grown, **self._sampler.since(self._began), **self._kept}


_CURRENT: ContextVar[ShortageWindow | None] = ContextVar("shortage_window", default=None)


@contextmanager
def judging() -> Iterator[None]:
    """Ignore shortages during the block in the current window, because the block attributes them itself."""
    window = _CURRENT.get()
    with contextlib.nullcontext() if window is None else window.interrupted():
        yield


def exhausted(error: BaseException | None) -> str:
    """Return the exhausted resource that made a call of this process fail, in words. Checks the error's causes, too."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _EXHAUSTED and not isinstance(error, TimeoutError):
            return REMEDIES[error.errno or 0]
        if isinstance(error, MemoryError) and memory_is_short():
            return REMEDIES[errno.ENOMEM]
        if isinstance(error, RuntimeError) and _NO_THREAD in str(error):
            return REMEDIES[errno.EAGAIN]
        error = error.__cause__
    return ""


def memory_is_short() -> bool:
    """Return whether this process or its node has hardly any memory left."""
    with contextlib.suppress(OSError, ValueError, LookupError):
        strict = Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
        if used_up(Path("/proc/meminfo").read_text(), strict=strict):
            return True
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        return limit != resource.RLIM_INFINITY and limit - taken < min(MIN_MEMORY, limit // _SHARE)
    return False


def used_up(meminfo: str, *, strict: bool) -> bool:
    """Return whether /proc/meminfo shows hardly any memory left. `strict`: the kernel never overcommits."""
    rows = (line.partition(":") for line in meminfo.splitlines())
    n_bytes = {name: int(value.split()[0]) << 10 for name, _, value in rows}
    least = min(MIN_MEMORY, n_bytes["MemTotal"] // _SHARE)
    if strict and n_bytes["CommitLimit"] - n_bytes["Committed_AS"] < least:
        return True
    return n_bytes["MemAvailable"] + n_bytes["SwapFree"] < least


@contextmanager
def watched(config: SandboxConfig) -> Iterator[ShortageWindow]:
    """Watch the node while the block runs."""
    sampler = _sampler(config.scratch, config.cgroup)
    with sampler.running(), contextlib.closing(ShortageWindow(sampler)) as window:
        yield window


class _Sampler:
    """A thread that samples periodically while anything is watched, and a little longer, as starting one takes time."""

    def __init__(self, scratch: Path, cgroup: Path | None) -> None:
        self._scratch, self._cgroup = scratch, cgroup
        self._lock = threading.Lock()
        self._n = 0
        self._watched_at = 0.0
        self._thread: threading.Thread | None = None
        self._seen: dict[str, tuple[float, str]] = {}
        self._counted: tuple[float, dict[str, int]] = -math.inf, {}
        self._uses: set[DiskUse] = set()
        self._using = threading.Lock()

    def follow(self, use: DiskUse) -> None:
        with self._using:
            self._uses.add(use)

    def leave(self, use: DiskUse) -> None:
        with self._using:
            self._uses.discard(use)
            use.close()

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._lock:
            self._n += 1
            if self._thread is None:
                # without a thread, there are still the samples at the end of each window
                with contextlib.suppress(RuntimeError):
                    thread = threading.Thread(target=self._run, name="shortage", daemon=True)
                    thread.start()
                    self._thread = thread
        try:
            yield
        finally:
            with self._lock:
                self._n -= 1
                self._watched_at = time.monotonic()

    def _run(self) -> None:
        due = 0.0
        while not self._is_over():
            time.sleep(_pause_s(self._scratch))
            if time.monotonic() >= due:
                self.sample()
                due = time.monotonic() + SAMPLE_S
            else:
                self._look("disk", partial(_disk, self._scratch))

    def _is_over(self) -> bool:
        with self._lock:
            if self._n or time.monotonic() < self._watched_at + _IDLE_S:
                return False
            self._thread = None
            return True

    def counted(self) -> dict[str, int]:
        """Return the kernel's counters, at most one sample interval old; later increases count as shortages."""
        if time.monotonic() - self._counted[0] > SAMPLE_S:
            self._counted = time.monotonic(), self.counts()
        return self._counted[1]

    def counts(self) -> dict[str, int]:
        """Return the kernel's counters of OOM kills and refused forks, of this process's control group if possible."""
        refusals_in = _counted_in()[1]
        counts = {"memory": n_kills(self._cgroup), "processes": _count(refusals_in, "max") if refusals_in else None}
        return {cause: n for cause, n in counts.items() if n is not None}

    def sample(self) -> None:
        # memory is not sampled, only its kernel counter is compared
        self._look("disk", partial(_disk, self._scratch))
        self._look("processes", _processes)
        self._look("files", _files)

    def _look(self, cause: str, look: Callable[[], str]) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            # the time at the start, so that an old observation does not count in a window that begins meanwhile
            began = time.monotonic()
            if words := look():
                with self._lock:
                    if began >= self._seen.get(cause, (began,))[0]:
                        self._seen[cause] = began, words
            if cause == "disk" and (words or _pause_s(self._scratch) < SAMPLE_S):
                self._measure(full=bool(words))

    def _measure(self, *, full: bool) -> None:
        with self._using:
            for use in self._uses:
                with contextlib.suppress(OSError):
                    use.look(full=full)

    def since(self, began: float) -> dict[str, str]:
        return {cause: words for cause, (seen, words) in list(self._seen.items()) if seen >= began}


def _disk(scratch: Path) -> str:
    room = os.statvfs(scratch)
    least = min(MIN_BYTES, room.f_blocks * room.f_frsize // _SHARE)
    full = room.f_bavail * room.f_frsize < least
    if full or (room.f_files and room.f_favail < min(MIN_FILES, room.f_files // _SHARE)):
        return REMEDIES[errno.ENOSPC]
    return ""


def _pause_s(scratch: Path) -> float:
    """Return the seconds until a disk with this free space can be full, at most the interval of the other samples."""
    with contextlib.suppress(OSError):
        room = os.statvfs(scratch)
        bytes_s = room.f_bavail * room.f_frsize / BYTES_PER_S
        files_s = room.f_favail / FILES_PER_S if room.f_files else SAMPLE_S
        return max(SOONEST_S, min(SAMPLE_S, bytes_s, files_s))
    return SAMPLE_S


def _processes() -> str:
    """Return a message if the node is nearly out of processes. Threads count, as in the kernel."""
    n = int(_read("/proc/loadavg").split()[3].partition("/")[2])
    return REMEDIES[errno.EAGAIN] if n > _NEARLY * _most_processes() else ""


@cache
def _most_processes() -> int:
    return min(int(_read(f"/proc/sys/kernel/{name}")) for name in ("pid_max", "threads-max"))


def _files() -> str:
    n, _, most = map(int, _read("/proc/sys/fs/file-nr").split())
    return REMEDIES[errno.ENFILE] if n > _NEARLY * most else ""


def n_kills(cgroup: Path | None) -> int | None:
    """Return the number of OOM kills, except those at a sandbox's own limit; None if they cannot be told apart.

    Kills in this process's control group count, because another job of the machine may have reached only its own limit.
    Where no group counts them, those of the whole machine count.
    """
    counted_in = _counted_in()[0]
    n = _count(counted_in, "oom_kill")
    # a version 1 group counts only its own processes, not those in the groups of sandboxes
    if n is None or not cgroup or counted_in.endswith("/memory.oom_control"):
        return n
    own = _count(f"{cgroup}/memory.events", "oom_kill")
    return None if own is None else n - own


@cache
def _counted_in() -> tuple[str, str]:
    """Return the files with the counters of OOM kills and refused forks; empty if none. A process keeps its group."""
    group, memory_group = own_groups(_text("/proc/self/cgroup"))
    kills = [f"{group}/memory.events", f"{memory_group}/memory.oom_control"]
    # since Linux 6.11, `pids.events` includes the groups below
    refusals = [f"{group}/pids.events.local", f"{group}/pids.events"]
    return (
        next((file for file in kills if "oom_kill " in _text(file)), "/proc/vmstat"),
        next((file for file in refusals if _text(file)), ""),
    )


def own_groups(lines: str) -> tuple[str, str]:
    """Return the folders of a process's group, of version 2 and of the version 1 memory controller; empty if none.

    `lines` is the text of `/proc/PID/cgroup`. The root group does not count: in version 1 it counts only its own
    processes.
    """
    version_2 = version_1 = ""
    for line in lines.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            version_2 = f"/sys/fs/cgroup/{path.lstrip('/')}"
        elif "memory" in controllers.split(",") and path != "/":
            version_1 = f"/sys/fs/cgroup/memory/{path.lstrip('/')}"
    return version_2, version_1


def _text(file: str) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return _read(file)
    return ""


def _count(file: str, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        lines = f"\n{_read(file)}"
        at = lines.find(f"\n{name} ")
        return int(lines[at:].split(maxsplit=2)[1]) if at >= 0 else None
    return None


def _read(file: str) -> str:
    """Return a kernel file's text with three system calls: these files are read at both ends of every stage."""
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, _MOST_BYTES).decode()
    finally:
        os.close(descriptor)


class DiskUse:
    """The growth of a sandbox since this object was created, compared with the free space of the disk at that time.

    `folder` belongs to the sandbox, `first_pid` is its first process. Raises OSError if the sandbox is gone.
    """

    def __init__(self, folder: Path, first_pid: int) -> None:
        self._path = folder
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_pid = first_pid
        self._room = self._left()
        # with many files, measuring is too slow for the start of each rollout
        self._before = size_of_few(self._folder) or (0, 0)
        self.filled_the_disk = False
        """True if the sandbox used at least half of the free bytes or inodes within a second of a full disk.

        A sandbox with a folder that its own user cannot read also counts, because the folder can hide its usage.
        """
        self._due = 0.0
        self._much_at = self._full_at = -math.inf

    def close(self) -> None:
        os.close(self._folder)

    def look(self, *, full: bool) -> None:
        """Measure the sandbox if the disk is full, or nearly full with less than half of the original free space.

        Usage shortly before the disk became full counts, too, because the files can be deleted immediately afterwards.
        """
        now = time.monotonic()
        if full:
            self._full_at = now
        if now >= self._due and (full or any(map(_is_much, self._room, map(sub, self._room, self._left())))):
            began = time.thread_time()
            if self._takes_much():
                self._much_at = now
            ended = time.monotonic()
            # CPU time is counted, because on a busy machine most of the elapsed time is spent waiting for a processor
            self._due = ended + max(_MOST_OF_THE_TIME * (time.thread_time() - began), ended - now)
        self.filled_the_disk = self.filled_the_disk or abs(self._much_at - self._full_at) < _NEAR_S

    def _takes_much(self) -> bool:
        size = size_of_few(self._folder)
        n_bytes, n_files, n_closed = (*size, 0) if size else usage_and_closed(self._folder)
        n_bytes += self._nameless()
        return n_closed > 0 or any(map(_is_much, self._room, map(sub, (n_bytes, n_files), self._before)))

    def _left(self) -> tuple[int, int]:
        file_system = os.statvfs(self._path)
        return file_system.f_bavail * file_system.f_frsize, file_system.f_favail if file_system.f_files else 0

    def _nameless(self) -> int:
        with contextlib.suppress(OSError):
            root = f"/proc/{self._first_pid}/root"
            proc = os.open(f"{root}/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                pids = [name for name in os.listdir(proc) if name.isdigit()]
                return sum(disk for _, disk in held(proc, pids, own_mounts(root)).values())
            finally:
                os.close(proc)
        return 0


def _is_much(room: int, taken: int) -> bool:
    return room > 0 and taken >= room / _DISK_SHARE


@cache
def _sampler(scratch: Path, cgroup: Path | None) -> _Sampler:
    return _Sampler(scratch, cgroup)
