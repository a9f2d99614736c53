"""Checks of servers' addresses: an unencoded character could be read as part of the host, port or path."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

_ENCODED = "@ as %40, : as %3A, / as %2F, # as %23, ? as %3F, % as %25, ; as %3B, [ as %5B, ] as %5D, a blank as %20"
_UNENCODED = f"a character of its user or its password is not encoded: write {_ENCODED}"
_PORT = "its port is no number from 1 to 65535"
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")


def sqlite_url(path: Path | str) -> str:
    """Return the address of a SQLite file; `%` and `?` in its path are literal."""
    return "sqlite:///" + str(path).replace("%", "%25").replace("?", "%3F")


def sqlite_path(url: str) -> Path:
    """Return the file of an SQLite address."""
    return Path(unquote(url.removeprefix("sqlite:///").partition("?")[0]))


def url_fault(url: str) -> str:
    """Return the fault of a server's address, and the remedy; empty if it is valid.

    The text never quotes the address, as any part may belong to a password. Several addresses are separated by `;`.
    """
    parts = url.split(";")
    if all("://" in part for part in parts):
        return next((fault for part in parts if (fault := _fault(part))), "")
    return _UNENCODED if len(parts) > 1 and "@" in url and not url.startswith("sqlite") else ""


def _fault(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if scheme in ("sqlite", "unix", "redis+socket") or scheme.partition("+")[0] == "sqlite":
        return ""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    login, has_login, place = authority.rpartition("@")
    path, _, query = rest[len(authority) :].partition("?")
    if "@" in login or "@" in path or ("@" in query and authority and not has_login):
        return _UNENCODED
    if any(mark in login for mark in "[]\\") or _BLANK.search(authority) or _STRAY_PERCENT.search(login):
        return _UNENCODED
    try:
        port = urlsplit(f"{scheme}://{place}").port
    except ValueError:
        return _PORT
    try:
        parts = urlsplit(url)
    except ValueError:
        # a character that normalizes to a delimiter of the host
        return _UNENCODED
    if port == 0:
        return _PORT
    if parts.fragment and not scheme.endswith(("http", "https")):
        return "it has a `#`, which has no meaning there: write %23"
    if scheme in ("redis", "rediss"):
        if not parts.hostname:
            return "it names no host: write redis://HOST:6379/0"
        if (number := parts.path.strip("/")) and not (number.isascii() and number.isdecimal()):
            return "what follows its host is not the number of a database, such as /0"
    return ""
