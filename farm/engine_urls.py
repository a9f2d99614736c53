"""Addresses and keys of LLM servers, in the one form in which the farm keeps and compares them."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from farm.errors import InvalidRequest

_KEY_CHARS = 500
_PORTS = {"http": 80, "https": 443}


def normal_url(url: str) -> str:
    """Return the normal form of an engine's address. Raises InvalidRequest if it is none, or one of a link."""
    url = url.strip()
    if not url.isprintable() or " " in url:
        # the parser drops some of them without a word
        raise InvalidRequest(f"{url!a} has blanks or control characters", field="url")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidRequest("that is no address such as http://HOST:8000/v1", field="url") from None
    if "@" in parts.netloc:
        # without showing it: everybody is shown an address
        raise InvalidRequest("an address must not hold a password: give the engine's API key", field="url")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequest(f"{url!r} is no address such as http://HOST:8000/v1", field="url")
    if _is_of_a_link(parts.hostname):
        # a cloud gives its machines' credentials to whoever asks there
        raise InvalidRequest(f"{url!r} is an address of one network link, where no engine is", field="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/') or '/v1'}"


def _is_of_a_link(host: str) -> bool:
    """Return whether a host is a link-local address, in any of the forms that the system's resolver takes."""
    address: ipaddress.IPv4Address | ipaddress.IPv6Address | None = None
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
    with suppress(OSError):
        address = address or ipaddress.ip_address(socket.inet_aton(host))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_link_local if address is not None else False


def sound_key(key: str) -> str:
    """Return the key, "none" for none. Raises InvalidRequest, which does not show it, if no header can hold it."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > _KEY_CHARS:
        wanted = f"an API key is printable ASCII without blanks, {_KEY_CHARS} characters at most; is it the right file?"
        raise InvalidRequest(wanted, field="key")
    return key or "none"
