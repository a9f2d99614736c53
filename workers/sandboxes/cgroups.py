"""Control groups for sandboxes, if the farm has a group to create them in. The kernel then enforces the limits.

`FARM_CGROUP` contains one group `farm-DIGEST` for each scratch folder, which contains one group for each sandbox. A
link in the sandbox's folder points to its group. The link is created first, so a group without a link is left over,
and the sweep removes it.

Both versions of control groups work. Version 2 needs the memory controller in the group and no processes directly in
it (systemd: `Delegate=yes`). For version 1, the group is a folder of the memory controller. The files are documented
in kernel.org/doc/html/latest/admin-guide/cgroup-v2.html and .../cgroup-v1/memory.html.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.sandbox_user import sandbox_user

LINK = "cgroup"
"""Name of the link in a sandbox's folder that points to its control group."""
_MB = 1 << 20
_OWN_PROCESSES = 64
"""Processes allowed beyond a sandbox's limit: those that start commands inside, and the container runtime's threads."""
WAIT_TIMEOUT_S, _POLL_S = 2.0, 0.01


@dataclass(frozen=True, slots=True)
class _Files:
    """The file names of one version of control groups. Those in `also` are optional."""

    memory: str
    events: str
    also: tuple[tuple[str, str], ...]


_V2 = _Files("memory.max", "memory.events", (("memory.swap.max", "0"), ("pids.max", "{pids}")))
_V1 = _Files("memory.limit_in_bytes", "memory.oom_control", (("memory.memsw.limit_in_bytes", "{memory}"),))


def missing(config: SandboxConfig) -> str:
    """Return why the farm cannot use its control group; empty if it can or has none."""
    try:
        parent = _parent(config, config.sandboxes_folder)
        if parent is not None:
            trial = parent / f"trial-{uuid4().hex[:8]}"
            trial.mkdir()
            try:
                _limit(trial, 64, 64)
            finally:
                trial.rmdir()
    except SandboxError as error:
        return str(error)
    except OSError as error:
        return f"FARM_CGROUP: no group can be created in it: {error}"
    return ""


_CPU_PERIOD = 100_000
"""Period of the CPU quota in microseconds."""


def make(config: SandboxConfig, state: Path, memory_mb: int, n_processes: int, cpus: float | None = None) -> str:
    """Create the group of a sandbox with its limits; return its path, empty if the farm has no group.

    `cpus` is enforced if the farm's group has the cpu controller. Raises SandboxError.
    """
    try:
        parent = _parent(config, state.parent)
        if parent is None:
            return ""
        group = parent / f"{state.name.lstrip('.')[:64]}-{uuid4().hex[:8]}"
        (state / LINK).symlink_to(group)
        group.mkdir()
        _limit(group, memory_mb, n_processes)
        if cpus is not None and (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{max(int(cpus * _CPU_PERIOD), 1000)} {_CPU_PERIOD}")
    except OSError as error:
        raise SandboxError(f"sandbox {state.name}: its control group could not be created: {error}") from error
    return str(group)


def of(state: Path) -> str:
    """Return the control group of the sandbox in a folder; empty if it has none."""
    try:
        return str((state / LINK).readlink())
    except OSError:
        return ""


def n_killed(group: str) -> int:
    """Return the number of processes in a group that the kernel killed at the memory limit; 0 if the group is gone."""
    for files in (_V2, _V1):
        with contextlib.suppress(OSError), open(f"{group}/{files.events}") as file:  # noqa: PTH123 - for each command
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    return 0


def memory_mb(group: str) -> int:
    """Return the memory limit of a group; 0 if the group is gone."""
    for files in (_V2, _V1):
        with contextlib.suppress(OSError, ValueError):
            return int(Path(group, files.memory).read_text()) // _MB
    return 0


def remove(group: str, patience_s: float = WAIT_TIMEOUT_S) -> None:
    """Kill the processes of a group and remove it; harmless if it is empty or gone.

    Blocks for milliseconds unless a process is in an uninterruptible sleep.
    """
    deadline = time.monotonic() + patience_s
    while group:
        try:
            return Path(group).rmdir()
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() >= deadline:
                return None
        for pid in _processes(group):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    return None


def sweep(config: SandboxConfig, states: Path, all_of_it: bool = False) -> None:
    """Remove groups that belong to no sandbox of the folder `states`; with `all_of_it`, also their parent group.

    A group with processes stays until they end with the first process of their sandbox.
    """
    own_group = config.cgroup
    parent = None if own_group is None else own_group / _name(states)
    if parent is None or not parent.is_dir():
        return
    # listed before the links are read, because a start creates the link before the group
    groups = [entry.path for entry in os.scandir(parent) if entry.is_dir()]
    wanted = {of(state) for state in states.iterdir()} if states.is_dir() else set()
    unwanted = [group for group in groups if group not in wanted]
    for path in [*unwanted, *([str(parent)] if all_of_it else [])]:
        with contextlib.suppress(OSError):
            Path(path).rmdir()


def _name(states: Path) -> str:
    return f"farm-{hashlib.sha256(bytes(states.absolute())).hexdigest()[:12]}"


def _processes(group: str) -> list[int]:
    try:
        return [int(word) for word in Path(group, "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _parent(config: SandboxConfig, states: Path) -> Path | None:
    """Return the parent group for the sandboxes of a folder, created if missing; None if the farm has no group.

    Raises SandboxError, OSError.
    """
    path = config.cgroup
    if path is None:
        return None
    parent = path / _name(states)
    if (path / "cgroup.controllers").exists():
        if "memory" not in (path / "cgroup.controllers").read_text().split():
            raise SandboxError(f"FARM_CGROUP={path}: the memory controller is not delegated to this control group")
        _hand_down(path)
        parent.mkdir(exist_ok=True)
        _hand_down(parent)
    elif (path / _V1.memory).exists():
        parent.mkdir(exist_ok=True)
    else:
        raise SandboxError(
            f"FARM_CGROUP={path} is neither a control group of version 2 nor one of the memory controller"
        )
    user = sandbox_user(config.user)
    if user:
        # the monitor must be able to remove its own group after it has dropped root
        os.chown(parent, *user)
    return parent


def _hand_down(group: Path) -> None:
    available = (group / "cgroup.controllers").read_text().split()
    handed = (group / "cgroup.subtree_control").read_text().split()
    wanted = [f"+{name}" for name in ("memory", "pids", "cpu") if name in available and name not in handed]
    if not wanted:
        return
    try:
        (group / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        reason = "there are processes in it" if error.errno == errno.EBUSY else error.strerror
        raise SandboxError(f"control group {group}: its controllers cannot be delegated: {reason}") from error


def _limit(group: Path, memory_mb: int, n_processes: int) -> None:
    files = _V2 if (group / "cgroup.controllers").exists() else _V1
    (group / files.memory).write_text(str(memory_mb * _MB))
    values = {"memory": memory_mb * _MB, "pids": n_processes + _OWN_PROCESSES}
    for name, value in files.also:
        # this node has no swap, or the group lacks the controller
        with contextlib.suppress(FileNotFoundError, PermissionError):
            (group / name).write_text(value.format(**values))
