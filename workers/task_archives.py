"""Task archives of this node: unpacked once per digest, and read by all rollouts whose instances name them."""

from __future__ import annotations

from pathlib import Path

from farm.errors import HandlerError
from farm.settings import settings

_FILES = "files"


def folder_of_archives() -> Path:
    return settings().scratch.absolute() / "archives"


def archive_folder(digest: str) -> Path:
    """Return the folder of an unpacked archive. Raises HandlerError if it is not there (`fetch` brings it)."""
    folder = folder_of_archives() / digest / _FILES
    if not folder.is_dir():
        raise HandlerError(f"the task archive {digest} is not on this node yet")
    return folder
