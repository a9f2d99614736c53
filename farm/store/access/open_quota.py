"""Limits on open rollouts: of the whole farm, and of each key."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from farm.callers import Caller, Scope
from farm.errors import Forbidden, InvalidRequest, NotFound, Overloaded
from farm.store.locks import lock_room
from farm.store.rollouts import batches


def check_room(connection: Connection, n_new: int, most: int, submitter: str = "", n_written: int = 0) -> None:
    """Check that `n_new` more rollouts leave at most `most` open, of all submitters or of one.

    Raises InvalidRequest if the new ones exceed the limit by themselves, else Overloaded. `n_written` of the new ones
    are in the store already.
    """
    who, setting = (f"key {submitter!r}", "its quota") if submitter else ("the farm", "FARM_MAX_OPEN")
    if n_new > most:
        raise InvalidRequest(
            f"{n_new} rollouts in a batch exceed the limit of {who}, {most}: submit several batches, or set {setting}",
            field="instances",
        )
    n_now = n_open(connection, submitter) - n_written
    if n_now + n_new > most:
        raise Overloaded(
            f"{n_now} rollouts are open; {n_new} more would exceed {most}, the limit of {who}: "
            f"submit again when some have ended, or set {setting}"
        )


def check_room_again(connection: Connection, n_written: int, most: int) -> None:
    """Raise Overloaded if with the `n_written` rollouts of this transaction more than `most` are open.

    Others may have written since the first check. The lock is taken only for this second check, because writing takes
    long.
    """
    if lock_room(connection, "rollouts"):
        check_room(connection, n_written, most, n_written=n_written)


def n_open(connection: Connection, submitter: str = "") -> int:
    """Return the open rollouts of all batches or of one submitter, without those that are scored again."""
    left = batches.c.n_rollouts - batches.c.last_seq
    chosen = [left > 0, *([batches.c.submitter == submitter] if submitter else [])]
    return int(connection.execute(select(func.coalesce(func.sum(left), 0)).where(*chosen)).scalar_one())


def check_own(connection: Connection, caller: Caller, batch_id: str) -> None:
    """Raise Forbidden unless the caller submitted the batch or has `operate`. Raises NotFound."""
    if caller.may(Scope.OPERATE):
        return
    one = select(batches.c.submitter).where(batches.c.batch_id == batch_id)
    submitter = connection.execute(one).scalar_one_or_none()
    if submitter is None:
        raise NotFound(f"there is no batch {batch_id}")
    if submitter != caller.name:
        raise Forbidden(f"{submitter!r} submitted batch {batch_id}; key {caller.name!r} may only change its own")
