"""The store's epoch, by which a store that went back in time is noticed: a backup that was restored, a failed disk.

The leading dispatcher raises a counter every few seconds, and standbys read it. A process that finds it lower than it
has seen begins another epoch: all that remember the old one report it, and rollouts get numbers from then on that were
never used before, so that a stream that goes on with its own cursor misses none that end again.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass
from typing import cast

from sqlalchemy import Connection, Table, select, update

from farm.store.rollouts import batches
from farm.store.sql.schema import EpochRow

log = logging.getLogger(__name__)

epochs = cast(Table, EpochRow.__table__)

_SKIPPED = 1_000_000
"""More numbers than a batch gives out between two backups."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """A store's history, and how far it has come."""

    epoch: str
    counter: int


def current(connection: Connection) -> Epoch:
    """Return the store's epoch."""
    return Epoch(*connection.execute(select(epochs.c.epoch, epochs.c.counter)).one())


def go_on(connection: Connection, last: Epoch | None) -> Epoch:
    """Count on, or begin another epoch if the store has not come as far as the `last` that was seen of this one."""
    epoch = current(connection)
    if last is None or epoch.epoch != last.epoch or epoch.counter >= last.counter:
        connection.execute(update(epochs).values(counter=epochs.c.counter + 1))
    else:
        begin(connection, last)
    return current(connection)


def begin(connection: Connection, last: Epoch) -> None:
    """Begin another epoch of a store that went back, beyond the `last` that was seen; once, whoever does."""
    anew = update(epochs).where(epochs.c.epoch == last.epoch)
    if connection.execute(anew.values(epoch=secrets.token_hex(8), counter=last.counter + 1)).rowcount:
        connection.execute(
            update(batches)
            .where(batches.c.last_seq < batches.c.n_rollouts)
            .values(last_seq=batches.c.last_seq + _SKIPPED)
        )


class EpochTracker:
    """The last committed epoch that one process has seen."""

    def __init__(self) -> None:
        self.last: Epoch | None = None

    def note(self, found: Epoch) -> None:
        """Remember it; say so if the store went back since the last time."""
        last, self.last = self.last, found
        if last is not None and (found.epoch != last.epoch or found.counter < last.counter):
            log.error(
                "ALARM the store went back in time, as if a backup was restored (epoch %s at %d, before: %s at %d): "
                "what was submitted or ended since is gone or comes again; submit again what is not found",
                *(found.epoch, found.counter, last.epoch, last.counter),
            )
            if found.epoch == last.epoch:
                # until another epoch begins
                self.last = last
