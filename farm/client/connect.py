"""The connection to a farm by its address: the only place that chooses between the store and the API.

Each is loaded when it is connected to, so that a trainer with an API needs no database packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farm.address import WAIT_TIMEOUT_S, api_url
from farm.extras import check_extra
from farm.home import known_key
from farm.settings import settings

if TYPE_CHECKING:
    from farm.client.farm import Farm


def connect(url: str | Path | None = None, *, broker_url: str | None = None, first_s: float = WAIT_TIMEOUT_S) -> Farm:
    """Connect to a farm by its address: a database URL, the folder of an embedded farm, the `http://HOST:PORT` of its
    API, or nothing for what FARM_STORE_URL names, a database or an API, and else FARM_HOME.

    `broker_url` only carries notifications here: without it, or while the broker is unavailable, polling does
    the same. An API is sent FARM_API_KEY, else the key in FARM_HOME; while it is unavailable it is waited for as a
    database is, and streams go on where they were.
    `first_s` is how long it, or the database, is waited for now, before it has ever answered.

    Raises InvalidRequest for an address of no kind, NotInstalled for a database or a folder where only the client is
    installed, FarmUnreachable for a folder without a farm or an API that does not answer, NotAllowed for one that wants
    another key, StoreUnavailable for a database that does not answer or is at another schema revision.
    """
    if (api := api_url(url, settings())) is not None:
        from farm.client.remote import RemoteFarm

        return RemoteFarm.opened(api, known_key(settings()), first_s)
    check_extra("a farm that is reached by its database or its folder")
    from farm.client.local import LocalFarm

    return LocalFarm.opened(url, broker_url, first_s)
