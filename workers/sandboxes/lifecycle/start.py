"""Start of a sandbox: its folder, its plan, and the monitor that executes the plan."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TypedDict

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.isolation.id_mapping import MAPPED
from workers.sandboxes.lifecycle.state import SandboxRecord, starter
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.remove_tree import remove
from workers.sandboxes.resource_exhaustion import disk_is_full
from workers.sandboxes.sandbox_user import sandbox_user

START_S = 60.0
"""Time limit of a start. Even on a busy node a start takes seconds, never a minute."""
KILL_S = 5.0
SOCKETS = "sockets"
"""The folder, in that of a sandbox, that the sandbox sees as `/run/farm`."""


class MonitorBounds(TypedDict):
    """The limits of the whole sandbox that the monitor enforces."""

    memory_mb: int
    n_processes: int
    disk_mb: int


class MonitorPlan(TypedDict):
    """The input of a monitor; plain JSON.

    `own_id` is a user id of this node that only this sandbox has, or 0 if it has that of `user`. `lower` are the layers
    below the writable one, the uppermost first. `binds` are pairs of source and target, and `are_folders` tells for
    each whether it is a folder. `runtime` is the command that creates the sandbox, empty if the monitor creates it.
    `exposed` is the runtime's folder if the sandbox user cannot enter `closed`, one of its parents. `bare` is a sandbox
    without programs, into which files are copied.
    """

    sandbox_id: str
    kind: str
    state: str
    user: tuple[int, int] | None
    own_id: int
    lower: list[str]
    binds: list[tuple[str, str]]
    are_folders: list[bool]
    workdir: str
    env: dict[str, str]
    exposed: str
    closed: str
    runtime: list[str]
    runtime_env: dict[str, str]
    network: bool
    sockets: str
    bare: bool
    limits: MonitorBounds
    cgroup: str


@cache
def _own_lifeline() -> int:
    """Return the read end of a pipe whose write end this process holds until it ends in any way."""
    read_end, _write_end = os.pipe()
    return read_end


def lifeline(number: int | None) -> int:
    """Return the pipe that monitors watch: the supervisor's, so that sandboxes outlive a worker, or this process's."""
    if number is None:
        return _own_lifeline()
    try:
        os.fstat(number)
    except OSError:
        raise SandboxError(f"FARM_LIFELINE_FD={number} is not open in this process") from None
    return number


def make_folder(config: SandboxConfig, state: Path, n_staged: Sequence[bool]) -> int:
    """Create the sandbox's folder, with mount points for the bind sources (True for a folder, False for a file).

    Returns a locked descriptor that shows whether the monitor runs. Raises SandboxError if the folder exists already,
    or OSError; then nothing is created.
    """
    user = sandbox_user(config.user)
    parent = config.sandboxes_folder
    parent.mkdir(parents=True, exist_ok=True)
    if user:
        # the monitor must be able to delete its folder after it drops root; no process needs to list the other folders
        os.chown(parent, *user)
        parent.chmod(0o711)
    try:
        state.mkdir(mode=0o711)
    except FileExistsError:
        raise SandboxError(f"sandbox {state.name}: a sandbox with this id exists on the node already") from None
    try:
        lock = os.open(state / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _fill_folder(state, n_staged, user)
        except BaseException:
            os.close(lock)
            raise
    except BaseException:
        remove(state)
        raise
    return lock


def _fill_folder(state: Path, n_staged: Sequence[bool], user: tuple[int, int] | None) -> None:
    (state / "log").touch(mode=0o600)
    (state / SOCKETS).mkdir(mode=0o700)
    for name in ("upper", "work", "root", "runtime", "stage", MAPPED):
        (state / name).mkdir()
    for number, is_folder in enumerate(n_staged):
        target = state / "stage" / str(number)
        target.mkdir() if is_folder else target.touch()
    if user:
        for path in (state, *state.iterdir()):
            os.chown(path, *user)


def launch(plan: MonitorPlan, lock: int, lifeline_fd: int | None, held: Sequence[int] = ()) -> SandboxRecord:
    """Start the monitor, which keeps `held` open; returns once the sandbox is up. Blocks.

    Raises SandboxError and then leaves no process.
    """
    state = Path(plan["state"])
    log = os.open(state / "log", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        answers = fork_client().request({"do": "start", "plan": plan}, [lock, lifeline(lifeline_fd), log, *held])
    finally:
        os.close(log)
    monitor, answer = -1, None
    try:
        _, descriptors = answers.wait(START_S) or ({}, [])
        monitor = descriptors[0] if descriptors else -1
        answer, _ = answers.wait(START_S) or (None, [])
        record = SandboxRecord.load(state)
        if record is not None:
            return record
        if monitor >= 0:
            _kill(monitor)
        if starting := starter(state):
            starting.kill_group()
    finally:
        answers.close()
        if monitor >= 0:
            os.close(monitor)
    if answer is None:
        raise SandboxError(f"sandbox {plan['sandbox_id']}: not up after {START_S:.0f} s")
    reason = answer.get("error") or (state / "log").read_text(errors="replace")[-500:] or "its monitor was killed"
    raise SandboxError(f"sandbox {plan['sandbox_id']} did not start: {disk_is_full(state) or reason}")


def _kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll(KILL_S * 1000)
