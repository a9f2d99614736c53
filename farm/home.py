"""FARM_HOME, the farm's folder, and the key of the farm, which are private to their owner; and addresses of farms.

Users of a cluster share loopback and the file system of each machine. So files that hold prompts, answers or keys are
made unreadable to others before anything is written to them, and clients send the farm's key even on 127.0.0.1.

A farm's address is a database URL, the folder of an embedded farm, or the `http://HOST:PORT` of its API.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import stat
from pathlib import Path

from farm.configuration.service_urls import url_fault
from farm.errors import FarmUnreachable, InvalidRequest, NotAllowed
from farm.settings import Settings

KEY_FILE = "api_key"
_OTHERS = 0o077
ADDRESS_FILE = "address.json"
WAIT_TIMEOUT_S = 30.0
"""Seconds to wait for a farm (its database or its API) that does not answer."""


def own_home(home: Path) -> Path:
    """Make the folder, or remove other users' permissions on it. Raises NotAllowed if it is another user's."""
    home = home.absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = home.stat()
    if status.st_uid != os.getuid():
        raise NotAllowed(f"{home} belongs to another user: set FARM_HOME to a folder of your own")
    if status.st_mode & _OTHERS:
        home.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS)
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


def is_http(url: str | Path | None) -> bool:
    """Return whether an address is the address of an API."""
    return str(url).startswith(("http://", "https://"))


def api_url(url: str | Path | None, defaults: Settings) -> str | None:
    """Return the API address in `url`, or in FARM_STORE_URL if `url` is None; None for other addresses."""
    named = defaults.store_url if url is None else str(url)
    return named if is_http(named) else None


def address_of(url: str | Path | None, defaults: Settings) -> tuple[str, str]:
    """Return (store URL, broker URL) for an address as `farm.connect` takes it. API addresses are refused.

    Raises InvalidRequest, and FarmUnreachable for a folder without the address of a farm.
    """
    if api_url(url, defaults) is not None:
        raise InvalidRequest(
            "this needs the farm's database URL or its folder, not the address of its API",
            field="store_url" if url is None else "url",
        )
    if url is None and defaults.store_url:
        return defaults.store_url, defaults.broker_url
    text = str(defaults.home if url is None else url)
    if "://" in text:
        if fault := url_fault(text):
            raise InvalidRequest(fault, field="url")
        return text, defaults.broker_url
    file = Path(text).expanduser() / ADDRESS_FILE
    try:
        address = json.loads(file.read_bytes())
        store_url, broker_url = str(address["store_url"]), str(address["broker_url"])
    except (FileNotFoundError, NotADirectoryError):
        raise FarmUnreachable(
            f"no farm was ever started in {file.parent}: run `farm up`, or set FARM_STORE_URL"
        ) from None
    # any content is possible here
    except (ValueError, TypeError, LookupError, RecursionError):
        raise FarmUnreachable(
            f"{file} does not hold a farm's address: `farm up`, or `farm head` on a cluster, rewrites it"
        ) from None
    if not store_url:
        raise FarmUnreachable(f"the head of {file.parent} is not ready: start it with `farm head --dir {file.parent}`")
    return store_url, broker_url
