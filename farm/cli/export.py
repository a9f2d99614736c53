"""Output files that are written completely or not at all.

Rule: the output path is checked before any wait, and an existing file stays until the new one is complete.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from farm.errors import InvalidRequest

_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")


def check_writable(path: Path) -> None:
    """Raise InvalidRequest unless a file can be written at this path; called before any wait."""
    folder = path.absolute().parent
    problem = ""
    if _DRIVE.match(str(path)):
        problem = "is a Windows path; use / between folders"
    elif not folder.is_dir():
        problem = f"cannot be written: there is no folder {folder}"
    elif path.is_dir():
        problem = "is a folder: give a file in it"
    else:
        try:
            # permissions say too little: a quota may be full, or the file system read-only
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"cannot be written: no file can be created in {folder} ({error.strerror})"
    if problem:
        raise InvalidRequest(f"{path} {problem}", field="output")


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` if the block succeeds; else `path` stays as it was."""
    # follows a link, and gives a new file the usual permissions
    target = path.resolve()
    descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    part = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.chmod(target.stat().st_mode & 0o7777 if target.exists() else 0o666 & ~_umask())
        part.replace(target)
    except BaseException as error:
        part.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno and error.filename is None:
            # the error of a full disk does not name the file
            error.filename = str(path)
        raise


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
