"""A thread of a node that keeps the cache of images, environments and programs within its bounds."""

from __future__ import annotations

import logging
import threading
from typing import Self

from farm.settings import Settings
from workers.sandboxes.images.image_pruning import prune_by_itself

log = logging.getLogger(__name__)

_FIRST_S = 600.0
_PERIOD_S = 3600.0
_DAY_S = 86_400.0
_MB = 1_000_000


class CacheKeeper:
    """Prunes once an hour while the block runs."""

    def __init__(self, options: Settings, first_s: float = _FIRST_S) -> None:
        self._options = options
        self._first_s = first_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        # no wait for the removal of a large image on a slow disk: the next pruning continues with the moved folder
        self._closed.set()

    def _run(self) -> None:
        wait_s = self._first_s
        while not self._closed.wait(wait_s):
            wait_s = _PERIOD_S
            try:
                self.prune()
            except Exception as error:
                log.warning("Cache not pruned: %s", error)

    def prune(self) -> None:
        """Remove the entries beyond the bounds."""
        gone = [
            each.entry
            for each in prune_by_itself(self._options.keep_cache_days * _DAY_S, self._options.cache_mb * _MB)
            if not each.kept
        ]
        if gone:
            n_mb = sum(entry.card.n_bytes for entry in gone) // _MB
            log.warning("Removed %d images and other folders of the cache, %d MB", len(gone), n_mb)
