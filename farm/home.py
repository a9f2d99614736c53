"""FARM_HOME, the farm's folder, and the key of the farm; both are private to their owner.

Users of a cluster share loopback and the file system of each machine. So files that hold prompts, answers or keys are
made unreadable to others before anything is written to them, and clients send the farm's key even on 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from farm.errors import NotAllowed
from farm.settings import Settings

KEY_FILE = "api_key"
_OTHERS = 0o077


def own_home(home: Path) -> Path:
    """Make the folder, or remove other users' permissions on it. Raises NotAllowed if it is another user's."""
    home = home.absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    result = home.stat()
    if result.st_uid != os.getuid():
        raise NotAllowed(f"{home} belongs to another user: set FARM_HOME to a folder of your own")
    if result.st_mode & _OTHERS:
        home.chmod(stat.S_IMODE(result.st_mode) & ~_OTHERS)
    return home


def own_file(path: Path) -> Path:
    """Make an empty file, or remove other users' permissions on it; programs that open it later keep its mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~_OTHERS)
    return path


def write_own(path: Path, text: str) -> None:
    """Write a file atomically, readable by its owner only."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        own_file(partial).write_text(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def known_key(settings: Settings) -> str:
    """Return the key to send to a farm: FARM_API_KEY, else the one in FARM_HOME, else ""."""
    if settings.api_key.strip():
        return settings.api_key.strip()
    try:
        return (settings.home / KEY_FILE).read_text().strip()
    except OSError:
        return ""


def own_key(settings: Settings) -> str:
    """Return the key to require from clients: the known one, else a new one. Raises NotAllowed, OSError."""
    known = known_key(settings)
    if known:
        return known
    return written_once(own_home(settings.home) / KEY_FILE, secrets.token_hex(24))


def written_once(path: Path, text: str) -> str:
    """Create a file for its owner only; return its content. Of concurrent writers the first one wins."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        own_file(fresh).write_text(f"{text}\n")
        with contextlib.suppress(FileExistsError):
            os.link(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)
    return path.read_text().strip()
