"""The recorded batch that comes with the package: a backup of a farm that ran `make demo`, compressed.

`examples/record_demo.py` makes it. It holds no key, and the farm that it is of has ended.
"""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from farm.configuration.service_urls import sqlite_url
from farm.store.backups.backup_file import read_backup
from farm.store.database import Store

FILE = Path(__file__).with_name("recorded_batch.db.gz")


def recorded_store(folder: Path, file: Path = FILE) -> Store:
    """Unpack a recording into a folder and open it as a store, which the caller closes.

    Raises StoreUnavailable if the recording has another schema than this version of the farm.
    """
    path = folder / "recorded_batch.db"
    with gzip.open(file, "rb") as packed, path.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked)
    read_backup(path)
    return Store(sqlite_url(path))
