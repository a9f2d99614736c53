"""Task archives of this node: unpacked once per digest, shared by all rollouts whose instances name them.

They are in `DIGEST/files` of one `parent` folder, and appear atomically. They keep the packed file modes,
whatever the umask, as these become the modes of files in images and sandboxes.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from farm.errors import HandlerError, InvalidRequest
from farm.task_archive import PartStream, unpack
from workers.sandboxes.images.shared_lock import exclusive
from workers.stage_clock import off_clock

IDLE_S = 2 * 86_400.0
"""Seconds without use after which a node removes an archive; it is fetched again on demand."""
_FETCH_S = 3600.0
_FILES, _NEW, _LOCKS = "files", ".new", ".locks"


def archive_folder(parent: Path, digest: str) -> Path:
    """Return the folder of an unpacked archive and mark it as used. Raises HandlerError if it is not on this node."""
    folder = parent / digest
    try:
        os.utime(folder)
    except FileNotFoundError:
        raise HandlerError(f"the task archive {digest} is not on this node yet") from None
    return folder / _FILES


def fetch_archive(parent: Path, digest: str, part: Callable[[int], bytes | None]) -> Path:
    """Fetch an archive to this node unless it is there; one process does, the others wait. Return its folder. Blocks.

    `part` returns the stored bytes by part number. Not charged to the stage. Raises HandlerError if the store no longer
    has it, or it is corrupt.
    """
    with suppress(HandlerError):
        return archive_folder(parent, digest)
    with off_clock(_FETCH_S), exclusive(parent / _LOCKS / digest):
        with suppress(HandlerError):
            return archive_folder(parent, digest)
        sweep_archives(parent, IDLE_S)
        _bring(parent, digest, part)
    return archive_folder(parent, digest)


def _bring(parent: Path, digest: str, part: Callable[[int], bytes | None]) -> None:
    new = parent / f"{_NEW}.{uuid4().hex[:8]}"
    new.mkdir(mode=0o755)
    stream = PartStream(part)
    try:
        unpack(stream.buffered(), new / _FILES)
        if stream.digest() != digest:
            raise HandlerError(f"the task archive {digest} is no longer in the store: upload it again", retryable=False)
        new.rename(parent / digest)
    except InvalidRequest as error:
        raise HandlerError(f"the task archive {digest} is corrupt: {error}", retryable=False) from error
    finally:
        _remove(new)


def sweep_archives(parent: Path, idle_s: float) -> None:
    """Remove archives that were not used for `idle_s` seconds, and partial ones of killed processes. Blocks."""
    for folder in list(parent.iterdir()):
        with suppress(FileNotFoundError):
            if folder.name != _LOCKS and time.time() - folder.stat().st_mtime > idle_s:
                gone = folder.with_name(f"{_NEW}.{uuid4().hex[:8]}")
                folder.rename(gone)
                _remove(gone)


def _remove(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        with suppress(OSError):
            Path(folder).chmod(0o700)
    shutil.rmtree(root, ignore_errors=True)
