"""Connection to a farm by its address: the only place that chooses between the store and the API.

Each client is imported when it is used, so a trainer with an API needs no database packages.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from farm.extras import check_extra
from farm.home import WAIT_TIMEOUT_S, api_url, known_key
from farm.settings import settings

if TYPE_CHECKING:
    from farm.client.farm import Farm


def connect(url: str | Path | None = None, *, broker_url: str | None = None, first_s: float = WAIT_TIMEOUT_S) -> Farm:
    """Connect to a farm.

    `url` is a database URL, the folder of an embedded farm, or the `http://HOST:PORT` of an API. None: FARM_STORE_URL
    (a database or an API), else FARM_HOME. `broker_url` only carries notifications: without it, or while the broker is
    unavailable, the client polls. `first_s` is how many seconds to wait for a first answer of the API or the database.

    The API gets FARM_API_KEY, else the key in FARM_HOME. While it is unavailable, calls wait as they do for a database,
    and streams continue where they were.

    Raises InvalidRequest for an invalid address, NotInstalled for a database or a folder if only the client is
    installed, FarmUnreachable for a folder without a farm or an API that does not answer, NotAllowed for a wrong key,
    StoreUnavailable for a database that does not answer or has another schema revision.
    """
    if (api := api_url(url, settings())) is not None:
        from farm.client.remote import RemoteFarm

        return RemoteFarm.opened(api, known_key(settings()), first_s)
    check_extra("a farm that is reached by its database or its folder")
    from farm.client.local import LocalFarm

    return LocalFarm.opened(url, broker_url, first_s)
