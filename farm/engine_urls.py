"""Addresses and keys of LLM servers, in the one form in which the farm keeps and compares them."""

from __future__ import annotations

from urllib.parse import urlsplit

from farm.errors import InvalidRequest

_KEY_CHARS = 500
_PORTS = {"http": 80, "https": 443}


def normal_url(url: str) -> str:
    """Return the normal form of an engine's address. Raises InvalidRequest if it is none."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port
    except ValueError:
        raise InvalidRequest("that is no address such as http://HOST:8000/v1", field="url") from None
    if "@" in parts.netloc:
        # without showing it: everybody is shown an address
        raise InvalidRequest("an address must not hold a password: give the engine's API key", field="url")
    if parts.scheme not in _PORTS or not parts.hostname:
        raise InvalidRequest(f"{url!r} is no address such as http://HOST:8000/v1", field="url")
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    netloc = host if port in (None, _PORTS[parts.scheme]) else f"{host}:{port}"
    return f"{parts.scheme}://{netloc}{parts.path.rstrip('/') or '/v1'}"


def sound_key(key: str) -> str:
    """Return the key, "none" for none. Raises InvalidRequest, which does not show it, if no header can hold it."""
    if not key.isascii() or not key.isprintable() or " " in key or len(key) > _KEY_CHARS:
        wanted = f"an API key is printable ASCII without blanks, {_KEY_CHARS} characters at most; is it the right file?"
        raise InvalidRequest(wanted, field="key")
    return key or "none"
