"""Starting a sandbox: its folder, its plan, and the monitor that carries it out."""

from __future__ import annotations

import fcntl
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypedDict

from farm.errors import SandboxError
from farm.settings import settings
from workers.sandboxes.owner import sandbox_user
from workers.sandboxes.record import Record, folder, folder_of_all

START_S = 60.0
"""A sandbox that is not up by then is given up: on a busy node a start takes seconds, never a minute."""

_PROJECT = str(Path(__file__).parents[2])
_MONITOR = "import sys; sys.path.append(sys.argv[1]); from workers.sandboxes.launch import main; main()"

_monitors: list[subprocess.Popen[bytes]] = []


class Plan(TypedDict):
    """What a monitor is told; plain JSON.

    `lower` are the layers below the writable one, the uppermost first; `binds` are pairs of source and target, and
    `are_folders` says which of them are. `runtime` is the command that makes the sandbox, empty if the monitor does;
    `exposed` is the folder that it lies in, if the sandbox's user cannot enter `closed`, a folder above.
    """

    sandbox_id: str
    kind: str
    state: str
    user: tuple[int, int] | None
    lower: list[str]
    binds: list[tuple[str, str]]
    are_folders: list[bool]
    workdir: str
    env: dict[str, str]
    exposed: str
    closed: str
    runtime: list[str]
    runtime_env: dict[str, str]
    lifeline_fd: int
    lock_fd: int


@cache
def _own_lifeline() -> int:
    """The read end of a pipe whose write end this process holds until it ends, whichever way."""
    read_end, _write_end = os.pipe()
    return read_end


def lifeline() -> int:
    """What a monitor watches: the supervisor's pipe, so that sandboxes survive the worker; ours if there is none."""
    number = settings().lifeline_fd
    if number is None:
        return _own_lifeline()
    try:
        os.fstat(number)
    except OSError:
        raise SandboxError(f"FARM_LIFELINE_FD={number} is not open in this process") from None
    return number


def make_folder(sandbox_id: str, n_staged: Sequence[bool]) -> tuple[Path, int]:
    """The sandbox's folder, with mount points for what is staged (True for a folder, False for a file).

    Returns it with a locked descriptor that tells of the monitor's life. Raises SandboxError if the id is taken.
    """
    state = folder(sandbox_id)
    user = sandbox_user()
    parent = folder_of_all()
    parent.mkdir(parents=True, exist_ok=True)
    if user:
        # the monitor, by then no longer root, must be able to delete its folder; nobody needs to list the others
        os.chown(parent, *user)
        parent.chmod(0o711)
    try:
        state.mkdir(mode=0o711)
    except FileExistsError:
        raise SandboxError(f"sandbox {sandbox_id}: there is one of this id on the node already") from None
    lock = os.open(state / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (state / "log").touch(mode=0o600)
    for name in ("upper", "work", "root", "runtime", "stage"):
        (state / name).mkdir()
    for number, is_folder in enumerate(n_staged):
        target = state / "stage" / str(number)
        target.mkdir() if is_folder else target.touch()
    if user:
        for path in (state, *state.iterdir()):
            os.chown(path, *user)
    return state, lock


def launch(plan: Plan) -> Record:
    """Start the monitor and wait until the sandbox is up. Raises SandboxError, with no process left. Blocks."""
    _monitors[:] = [monitor for monitor in _monitors if monitor.poll() is None]
    state = Path(plan["state"])
    with (state / "log").open("ab") as log:
        monitor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _MONITOR, _PROJECT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"},
            pass_fds=(plan["lifeline_fd"], plan["lock_fd"]),
            start_new_session=True,
        )
    _monitors.append(monitor)
    try:
        answer = _ask(monitor, plan)
        record = Record.load(state)
        if record is None:
            raise SandboxError(f"sandbox {plan['sandbox_id']} did not start: {answer['error']}")
        return record
    except BaseException:
        monitor.kill()
        monitor.wait()
        raise


def _ask(monitor: subprocess.Popen[bytes], plan: Plan) -> dict[str, Any]:
    assert monitor.stdin
    assert monitor.stdout
    with monitor.stdout as answer:
        with monitor.stdin as plan_in:
            plan_in.write(json.dumps(plan).encode())
        poll = select.poll()
        poll.register(answer, select.POLLIN)
        if not poll.poll(START_S * 1000):
            raise SandboxError(f"sandbox {plan['sandbox_id']}: not up after {START_S:.0f} s")
        line = answer.readline()
    return json.loads(line) if line else {"error": (Path(plan["state"]) / "log").read_text(errors="replace")[-500:]}
