"""The file by which nodes and clients find the head of a shared folder: its addresses, and the keys of the farm.

Only its owner can read it. The farm's id, its passwords and its keys stay when the head moves; hosts and ports change.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from farm.configuration.config_file import pinned
from farm.home import ADDRESS_FILE, write_own, written_once

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class SharedAddress:
    """Addresses and keys of a farm with a head. `own` names the parts that the head serves, which move with it."""

    farm_id: str
    store_url: str = ""
    broker_url: str = ""
    api_url: str = ""
    flower_url: str = ""
    api_key: str = field(default="", repr=False)
    secret_key: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    own: tuple[str, ...] = ()
    head: str = ""
    """The head's unique mark; empty without a head."""


_stored = TypeAdapter(SharedAddress)


def read_address(folder: Path) -> SharedAddress | None:
    """Return the address in a folder; None if there was never a head."""
    try:
        return _stored.validate_json((folder / ADDRESS_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def first_address(folder: Path) -> SharedAddress:
    """Return the address in a folder, or a new one with the password that the data was created with.

    The farm's id derives from the password, which has a separate file: the address file can be rewritten, also by
    others such as `farm up`.
    """
    known = read_address(folder) or SharedAddress("")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = written_once(folder / "password", known.password or secrets.token_hex(24))
    return replace(known, farm_id=sha256(password.encode()).hexdigest()[:8], password=password)


def write_address(folder: Path, address: SharedAddress) -> None:
    """Write the address atomically, private to its owner."""
    write_own(folder / ADDRESS_FILE, json.dumps(asdict(address), indent=1))


def await_address(
    folder: Path, say: Callable[[str], None], *, going_on: Callable[[], bool] = lambda: True
) -> SharedAddress | None:
    """Return the address of a folder once it has a head; None if `going_on` becomes false before."""
    logged = False
    while going_on():
        address = read_address(folder)
        if address is not None and address.head:
            return address
        if not logged:
            logged = True
            say(f"waiting for a head in {folder} (`farm head --dir {folder}`)")
        time.sleep(_POLL_S)
    return None


def environment(address: SharedAddress) -> dict[str, str]:
    """Return this process's environment with the settings for a farm at an address."""
    return {
        **os.environ,
        **pinned(),
        "FARM_STORE_URL": address.store_url,
        "FARM_BROKER_URL": address.broker_url,
        "FARM_API_KEY": address.api_key,
        "FARM_SECRET_KEY": address.secret_key,
    }


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
