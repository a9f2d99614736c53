"""Checks of servers' addresses: an unencoded character could be read as part of the host, port or path.

Those of LLM servers have a normal form, in which the farm stores and compares them.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from farm.errors import InvalidRequest

_ENCODED = "@ as %40, : as %3A, / as %2F, # as %23, ? as %3F, % as %25, ; as %3B, [ as %5B, ] as %5D, a blank as %20"
_UNENCODED = f"a character of its user or its password is not encoded: write {_ENCODED}"
_PORT = "its port is no number from 1 to 65535"
_STRAY_PERCENT = re.compile(r"%(?![0-9A-Fa-f]{2})")
_BLANK = re.compile(r"[\s\x00-\x1f\x7f]")
_KEY_CHARS = 500
_PORTS = {"http": 80, "https": 443}


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
    login, has_login, address = authority.rpartition("@")
    path, _, query = rest[len(authority) :].partition("?")
    if "@" in login or "@" in path or ("@" in query and authority and not has_login):
        return _UNENCODED
    if any(mark in login for mark in "[]\\") or _BLANK.search(authority) or _STRAY_PERCENT.search(login):
        return _UNENCODED
    try:
        port = urlsplit(f"{scheme}://{address}").port
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


def normal_url(url: str) -> str:
    """Return the normal form of an engine's URL. Raises InvalidRequest for an invalid or link-local one."""
    url = url.strip()
    if not url.isprintable() or " " in url:
        # urlsplit drops some of these characters silently
        raise InvalidRequest(f"{url!a} contains blanks or control characters", field="url")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequest("the engine's address must look like http://HOST:8000/v1", field="url") from None
    if "@" in parts.netloc:
        # the message leaves the URL out: engine URLs are shown to everybody
        raise InvalidRequest("an address must not hold a password: give the engine's API key", field="url")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequest(f"{url!r} is not an engine's address such as http://HOST:8000/v1", field="url")
    if _is_of_a_link(parts.hostname):
        # clouds serve their machines' credentials at link-local addresses
        raise InvalidRequest(f"{url!r} is a link-local address, which cannot be an engine's", field="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/') or '/v1'}"


def _is_of_a_link(host: str) -> bool:
    """Return whether a host is a link-local address, in any notation that the system's resolver accepts."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
    with suppress(OSError):
        address = address or ipaddress.ip_address(socket.inet_aton(host))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_link_local if address is not None else False


def sound_key(key: str) -> str:
    """Return the key, or "none" if it is empty. Raises InvalidRequest, without the key, if no header can hold it."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > _KEY_CHARS:
        wanted = f"an API key is printable ASCII without blanks, {_KEY_CHARS} characters at most; is it the right file?"
        raise InvalidRequest(wanted, field="key")
    return key or "none"
