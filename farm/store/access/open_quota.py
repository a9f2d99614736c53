"""The rollouts that may be open at one time: of the whole farm, and of each key."""

from __future__ import annotations

from sqlalchemy import Connection, func, select

from farm.callers import Caller, Scope
from farm.errors import Forbidden, InvalidRequest, NotFound, Overloaded
from farm.store.locks import lock_room
from farm.store.rollouts import batches


def check_room(connection: Connection, n_new: int, most: int, submitter: str = "", n_written: int = 0) -> None:
    """Raise what is due if with so many more rollouts more than `most` would be open, of all or of one submitter.

    `n_written` of them are among those that are there.
    """
    who, setting = (f"key {submitter!r}", "its quota") if submitter else ("the farm", "FARM_MAX_OPEN")
    if n_new > most:
        raise InvalidRequest(
            f"{n_new} rollouts, and {who} takes {most} at a time: submit several batches, or set {setting}",
            field="instances",
        )
    n_now = n_open(connection, submitter) - n_written
    if n_now + n_new > most:
        raise Overloaded(
            f"{n_now} rollouts have not ended; {n_new} more would be beyond {most}, as many as {who} takes: "
            f"submit again when some have ended, or set {setting}"
        )


def check_room_again(connection: Connection, n_written: int, most: int) -> None:
    """Raise Overloaded if with these rollouts, which this transaction has written, more than `most` are open.

    Others may have been written since room was looked for: only that look is taken in turn, as writing takes long.
    """
    if lock_room(connection, "rollouts"):
        check_room(connection, n_written, most, n_written=n_written)


def n_open(connection: Connection, submitter: str = "") -> int:
    """Return how many rollouts of all batches, or a submitter's, have not ended; not those that are scored again."""
    left = batches.c.n_rollouts - batches.c.last_seq
    chosen = [left > 0, *([batches.c.submitter == submitter] if submitter else [])]
    return int(connection.execute(select(func.coalesce(func.sum(left), 0)).where(*chosen)).scalar_one())


def check_own(connection: Connection, caller: Caller, batch_id: str) -> None:
    """Raise Forbidden unless the caller may change a batch: its own, or with `operate` anybody's. Raises NotFound."""
    if caller.may(Scope.OPERATE):
        return
    one = select(batches.c.submitter).where(batches.c.batch_id == batch_id)
    submitter = connection.execute(one).scalar_one_or_none()
    if submitter is None:
        raise NotFound(f"there is no batch {batch_id}")
    if submitter != caller.name:
        raise Forbidden(f"{submitter!r} submitted batch {batch_id}, and key {caller.name!r} may change its own alone")
