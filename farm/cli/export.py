"""Files that appear whole or not at all.

Rule: where a file is to be written is checked before anything is waited for, and what was there before stays until
the new one is complete.
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
    """Raise InvalidRequest, before anything is waited for, unless a file can be written at this place."""
    folder = path.absolute().parent
    problem = ""
    if _DRIVE.match(str(path)):
        problem = "is a path of Windows; here folders are separated by /"
    elif not folder.is_dir():
        problem = f"cannot be written: there is no folder {folder}"
    elif path.is_dir():
        problem = "is a folder: name a file in it"
    else:
        try:
            # permissions say too little: of a full quota, a read-only or a special file system
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            problem = f"cannot be written: no file can be made in {folder} ({error.strerror})"
    if problem:
        raise InvalidRequest(f"{path} {problem}", field="output")


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Yield a file to write, which replaces `path` if the block succeeds; else `path` stays as it was."""
    # where it leads to, if it is a link, and with the rights that an ordinary new file has
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
            # a full disk does not say what could not be written
            error.filename = str(path)
        raise


def _umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
