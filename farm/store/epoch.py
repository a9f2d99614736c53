"""The store's epoch, which shows that a store went back in time: a backup was restored, or a disk failed.

The leading dispatcher raises a counter every few seconds, and standbys read it. A process that finds the counter lower
than before begins another epoch. Every process that remembers the old epoch reports it, and rollouts get unused numbers
from then on, so that a stream that continues from its own cursor misses no rollout that ends again.
"""

from __future__ import annotations

import logging
import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, select, update

from farm.store.rollouts import batches
from farm.store.sql.schema import EpochRow

log = logging.getLogger(__name__)

epochs = EpochRow.__table__

_SKIPPED = 1_000_000
"""More numbers than a batch assigns between two backups."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch and its counter."""

    epoch: str
    counter: int


def current(connection: Connection) -> Epoch:
    """Return the store's epoch."""
    return Epoch(*connection.execute(select(epochs.c.epoch, epochs.c.counter)).one())


def advance(connection: Connection, last: Epoch | None) -> Epoch:
    """Raise the counter, or begin another epoch if the store is behind `last`, the newest state seen of this epoch."""
    epoch = current(connection)
    if last is None or epoch.epoch != last.epoch or epoch.counter >= last.counter:
        connection.execute(update(epochs).values(counter=epochs.c.counter + 1))
    else:
        begin(connection, last)
    return current(connection)


def begin(connection: Connection, last: Epoch) -> None:
    """Begin another epoch, beyond `last`, for a store that went back; only the first caller's change applies."""
    statement = update(epochs).where(epochs.c.epoch == last.epoch)
    if connection.execute(statement.values(epoch=secrets.token_hex(8), counter=last.counter + 1)).rowcount:
        connection.execute(
            update(batches)
            .where(batches.c.last_seq < batches.c.n_rollouts)
            .values(last_seq=batches.c.last_seq + _SKIPPED)
        )


class EpochTracker:
    """The last committed epoch that one process has seen."""

    def __init__(self) -> None:
        self.last: Epoch | None = None

    def note(self, epoch: Epoch) -> None:
        """Remember it; log an alarm if the store went back since the last time."""
        last, self.last = self.last, epoch
        if last is not None and (epoch.epoch != last.epoch or epoch.counter < last.counter):
            log.error(
                "ALARM the store went back in time, as if a backup was restored (epoch %s at %d, before: %s at %d): "
                "what was submitted or ended since is gone or comes again; submit again what is not found",
                *(epoch.epoch, epoch.counter, last.epoch, last.counter),
            )
            if epoch.epoch == last.epoch:
                # until another epoch begins
                self.last = last
