"""The recorded batch in the package: a compressed backup of a farm that ran `make demo`.

`examples/record_demo.py` makes it. It contains no key, and its farm no longer exists.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from farm.configuration.service_urls import sqlite_url
from farm.store.backups.backup import read_backup
from farm.store.database import Store

FILE = Path(__file__).with_name("recorded_batch.db.gz")


def recorded_store(folder: Path, file: Path = FILE) -> Store:
    """Unpack a recording into a folder and open it as a store, which the caller must close.

    Raises StoreUnavailable if the recording has another schema than this version of the farm.
    """
    path = folder / "recorded_batch.db"
    with gzip.open(file, "rb") as packed, path.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    read_backup(path)
    return Store(sqlite_url(path))
