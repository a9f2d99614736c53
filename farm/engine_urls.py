"""URLs and keys of LLM servers, in the normal form in which the farm stores and compares them."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from farm.errors import InvalidRequest

_KEY_CHARS = 500
_PORTS = {"http": 80, "https": 443}


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
