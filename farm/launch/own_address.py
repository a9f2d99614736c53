"""This machine's address as reachable from others."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable


def own_address() -> str:
    """Return this machine's address for others: that of its host name, else the source address of its default route."""
    return _beyond_loopback(_of_name) or _beyond_loopback(_outwards) or "127.0.0.1"


def bracketed(host: str) -> str:
    """Return a host in the notation of URLs."""
    return f"[{host}]" if ":" in host else host


def _beyond_loopback(addresses: Callable[[], list[str]]) -> str:
    try:
        candidates = addresses()
    except OSError:
        return ""
    return next((each for each in candidates if not ipaddress.ip_address(each).is_loopback), "")


def _of_name() -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]


def _outwards() -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # sends nothing: the kernel only selects the address
        probe.connect(("192.0.2.1", 9))
        return [str(probe.getsockname()[0])]
