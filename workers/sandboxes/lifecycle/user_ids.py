"""A separate user id of the node for each sandbox: see `sandboxes/isolation/id_mapping.py`.

The ids come from the sandbox user's subordinate ids (subuid(5) and subgid(5)), as configured by the administrator, or
from `FARM_SANDBOX_IDS`; any other id may belong to a person. No two sandboxes of a machine have the same id at the same
time, even if they belong to different farms: an id is one byte of a file, locked through an open file that the
sandbox's monitor inherits. The kernel releases the lock when the last process that holds it ends in any way.
(Containers on one machine, each with its own `/run`, need different ids.)

Without root, such ids or kernel support, or when all are taken, sandboxes share the sandbox user, and the log reports
it once. Then only `sandboxes/isolation/kernel_limits.py` protects them from each other.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from farm.errors import SandboxError
from workers.config import SandboxConfig
from workers.sandboxes.processes.fork_client import fork_client
from workers.sandboxes.sandbox_user import sandbox_user

_SUBORDINATE = (Path("/etc/subuid"), Path("/etc/subgid"))
_LOCKS = Path("/run/farm-sandbox-ids")
_LINE = re.compile(r"(\d{1,10}):(\d{1,10})")
_TOO_HIGH = (1 << 32) - 1
_ANSWER_S = 20.0
log = logging.getLogger(__name__)
_refusals: dict[tuple[int, int], str] = {}
"""By mount of this node, why nothing on it can be id-mapped; empty if it can."""


@contextmanager
def own_id(config: SandboxConfig, folders: Sequence[str]) -> Iterator[tuple[int, list[int]]]:
    """Yield an id for a sandbox with these folders and the descriptors that hold it, for its monitor; 0 if none."""
    user = sandbox_user(config.user)
    ids = _ids(user, config.user, config.ids)
    held = None if not ids or _refusal(folders, ids, user) else _locked(ids, user)
    if held is None:
        yield 0, []
        return
    number, lock = held
    try:
        yield number, [lock]
    finally:
        os.close(lock)


@cache
def _ids(user: tuple[int, int] | None, name: str, chosen: str) -> range:
    """Return the ids available to sandboxes; empty if this process is not root."""
    if user is None:
        return range(0)
    ids = _parsed(chosen) if chosen else subordinate(_SUBORDINATE, name, user[0])
    if not ids:
        log.info("Sandboxes share the user %s: it has no subordinate ids, and FARM_SANDBOX_IDS is not set", name)
    return ids


def _parsed(text: str) -> range:
    """Parse `FIRST:COUNT`. Raises SandboxError."""
    match = _LINE.fullmatch(text)
    first, count = map(int, match.groups()) if match else (0, 0)
    if first < 1 or first + count > _TOO_HIGH:
        raise SandboxError(f"FARM_SANDBOX_IDS={text} is invalid: set it to FIRST:COUNT, as in /etc/subuid")
    return range(first, first + count)


def subordinate(files: Sequence[Path], name: str, uid: int) -> range:
    """Return the first range that both /etc/subuid and /etc/subgid give a user, by name or number; empty if none."""
    starts = [_first(file, name, uid) for file in files]
    return range(max(ids.start for ids in starts), min(ids.stop for ids in starts))


def _first(file: Path, name: str, uid: int) -> range:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return range(0)
    for line in lines:
        owner, _, ids = line.strip().partition(":")
        if owner in (name, str(uid)):
            with suppress(SandboxError):
                return _parsed(ids)
    return range(0)


def _refusal(folders: Sequence[str], ids: range, user: tuple[int, int] | None) -> str:
    """Return why a folder cannot be id-mapped; empty if all can. Tested once for each mount."""
    for folder in folders:
        mounted = _mount_of(folder)
        if mounted not in _refusals:
            _refusals[mounted] = _ask(folder, ids[0], user)
            if _refusals[mounted]:
                _warn(f"sandboxes of {folder} share one user of this node: {_refusals[mounted]}")
        if _refusals[mounted]:
            return _refusals[mounted]
    return ""


@cache
def _warn(text: str) -> None:
    """Log a warning once."""
    log.warning(text)


def _mount_of(folder: str) -> tuple[int, int]:
    """Return the number of a folder's mount, which can be reused, and that of its file system."""
    descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
    try:
        lines = Path(f"/proc/self/fdinfo/{descriptor}").read_text().splitlines()
        number = next(line for line in lines if line.startswith("mnt_id:")).split()[1]
        return int(number), os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


def _ask(folder: str, number: int, user: tuple[int, int] | None) -> str:
    answers = fork_client().request({"do": "map", "folder": folder, "own_id": number, "user": user}, [])
    try:
        answer, _ = answers.wait(_ANSWER_S) or ({}, [])
    finally:
        answers.close()
    if "error" in answer or "refused" not in answer:
        raise SandboxError(f"{folder} could not be tested for id-mapped mounts: {answer.get('error', 'no answer')}")
    return str(answer["refused"])


def _locked(ids: range, user: tuple[int, int] | None) -> tuple[int, int] | None:
    try:
        file = os.open(_LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        _warn(f"sandboxes share one user of this node: {error}")
        return None
    first = secrets.randbelow(len(ids))
    for at in range(len(ids)):
        number = ids[(first + at) % len(ids)]
        if number in (user or ()):
            continue
        try:
            # struct flock; the lock belongs to the open file, not to the process
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except BlockingIOError:
            continue
        return number, file
    os.close(file)
    return None
