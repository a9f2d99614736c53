"""Addresses of a farm: a database URL, the folder of an embedded farm, or the `http://HOST:PORT` of its API."""

from __future__ import annotations

import json
from pathlib import Path

from farm.configuration.service_urls import url_fault
from farm.errors import FarmUnreachable, InvalidRequest
from farm.settings import Settings

ADDRESS_FILE = "address.json"
WAIT_TIMEOUT_S = 30.0
"""Seconds to wait for a farm (its database or its API) that does not answer."""


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
