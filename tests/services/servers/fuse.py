"""A file system that hangs: its callers are in uninterruptible sleep, immune to SIGKILL, until its server ends.

The server implements the kernel's own protocol (linux/fuse.h) on /dev/fuse. It answers the init request, reads every
request, and answers only those that open a file named `held…`. The kernel waits for the reply to a request that a
server has read: SIGKILL leaves the process in state D. It simulates a network share or a disk that has gone away.

Run as `python -m tests.services.servers.fuse PID FOLDER [MARKS]` it mounts itself there, in the mount namespace of a
process, and then creates a file named by its own pid in the folder MARKS; without MARKS it ends with its parent.
"""

from __future__ import annotations

import errno
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testkit.private_server import Missing
from workers.sandboxes.isolation import linux

_ROOT = Path(__file__).parents[3]
_LOOKUP, _FORGET, _UNLINK, _OPEN, _INIT, _BATCH_FORGET = 1, 2, 10, 14, 26, 42
_IN = struct.Struct("IIQQIIIHH")
_OUT = struct.Struct("IiQ")
_REQUEST = 1 << 17
_FILE = 0o100666
_HELD = b"held"


@contextmanager
def silent_mount(pid: int, folder: str) -> Iterator[subprocess.Popen[bytes]]:
    """Mount one over a folder that process `pid` sees, 0 for none.

    The end of its server, also by leaving, wakes callers.

    Raises Missing if this user or kernel cannot.
    """
    server = subprocess.Popen(
        [sys.executable, "-m", __name__, str(pid), folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=_ROOT
    )
    try:
        assert server.stdout
        assert server.stderr
        if server.stdout.readline() != b"up\n":
            raise Missing(f"no file system of ours can be mounted: {server.stderr.read().decode().splitlines()[-1]}")
        yield server
    finally:
        server.kill()
        server.communicate()


def missing() -> str:
    """Return the reason why this user or machine cannot mount FUSE; empty if it can."""
    try:
        # in a private mount namespace, which ends with it
        with silent_mount(0, "/mnt"):
            return ""
    except Missing as why:
        return str(why)


def state_of(pid: int) -> str:
    """Return the kernel's state of a process as one letter, such as D; empty if it does not exist."""
    try:
        # `stat` has it too, but may block on a process in uninterruptible sleep
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
        return next(line.split()[1] for line in lines if line.startswith("State:"))
    except (FileNotFoundError, ProcessLookupError, StopIteration):
        return ""


def _mount(device: int, pid: int, folder: str) -> None:
    """Mount in a child with one thread: only that may change its mounts."""
    child = os.fork()
    if child:
        if os.waitpid(child, 0)[1]:
            raise SystemExit(1)
        return
    if pid:
        linux.setns(os.pidfd_open(pid), linux.NEWNS)
    else:
        linux.unshare(linux.NEWNS)
        linux.make_mounts_private()
    flags = linux.MS_NOSUID | linux.MS_NODEV
    linux.mount("silent", folder, "fuse", flags, f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other")
    os._exit(0)


def _serve(device: int) -> None:
    """Serve until the mount is gone."""
    while True:
        try:
            request = os.read(device, _REQUEST)
        except OSError as error:
            # its caller is gone
            if error.errno in {errno.ENOENT, errno.EINTR}:
                continue
            return
        _, operation, unique, node, *_ = _IN.unpack_from(request)
        answer = _answer(operation, node, request[_IN.size :])
        if answer is not None:
            os.write(device, _OUT.pack(_OUT.size + len(answer), 0, unique) + answer)


def _answer(operation: int, node: int, rest: bytes) -> bytes | None:
    if operation == _INIT:
        major, minor, read_ahead = struct.unpack_from("III", rest)
        return struct.pack("IIIIHHIIHHI28x", major, minor, read_ahead, 0, 12, 9, 4096, 1, 1, 0, 0)
    if operation == _LOOKUP and rest.startswith(_HELD):
        number = 2 + sum(rest)
        attributes = struct.pack("QQQQQQIIIIIIIIII", number, 4096, 8, 0, 0, 0, 0, 0, 0, _FILE, 1, 0, 0, 0, 4096, 0)
        return struct.pack("QQQQII", number, 0, 3600, 0, 0, 0) + attributes
    if operation == _OPEN:
        return struct.pack("QII", node, 0, 0)
    return b"" if operation == _UNLINK else None


def main() -> None:
    pid, folder, *marks = sys.argv[1:]
    if not marks:
        linux.die_with_parent(signal.SIGKILL)
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    _mount(device, int(pid), folder)
    for path in marks:
        Path(path, str(os.getpid())).touch()
    sys.stdout.write("up\n")
    sys.stdout.flush()
    _serve(device)


if __name__ == "__main__":
    main()
