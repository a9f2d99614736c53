"""Webhook messages: written in the transaction of the event, removed once they are accepted.

So no killed process loses one. A receiver may get it twice, and recognizes it by its id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, func, insert, literal, select, update

from farm.ids import message_id
from farm.store.rollouts import batches, rollouts
from farm.store.sql.clock import db_now, due
from farm.store.sql.schema import OutboxRow

outbox = OutboxRow.__table__

BATCH_ENDED, ALARM = "batch_ended", "alarm"
GIVE_UP_DAYS = 3.0
_FIRST_PAUSE_S = 2.0
_LONGEST_PAUSE_S = 3600.0
_SHOWN_DAYS = 30.0
"""Days that an abandoned message is still shown."""
_MOST_ALARMS = 1000
"""The maximum number of waiting alarms; more of them carry no new information."""
_DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that is due. `form` names the maker of its body, `subject` is the batch or the alarm's text."""

    message_id: str
    form: str
    subject: str
    url: str
    created_at: float
    n_tries: int


@dataclass(frozen=True, slots=True)
class Undelivered:
    """The messages to one address that were refused at least once; `n_abandoned` of them are no longer retried."""

    url: str
    n: int
    n_abandoned: int
    error: str


def put_ended(connection: Connection, batch_id: str, last: int, url: str) -> None:
    """Queue messages that a batch has ended, if it has by its number `last`: to its own address, and to the farm's."""
    row = connection.execute(select(batches.c.last_seq, batches.c.request).filter_by(batch_id=batch_id)).one()
    live = select(literal(1)).where(rollouts.c.batch_id == batch_id, rollouts.c.finish_seq.is_(None))
    if row.last_seq != last or connection.execute(live.limit(1)).first() is not None:
        return
    own = row.request.get("webhook") or {}
    targets = [(own["url"], own["form"])] if own else []
    targets += [(url, BATCH_ENDED)] if url else []
    for address, form in targets:
        _put(connection, form, batch_id, address)


def put_alarms(connection: Connection, alarms: Sequence[str], url: str) -> None:
    """Queue alarms, up to the limit."""
    waiting = select(func.count(literal(1))).where(outbox.c.form == ALARM, outbox.c.abandoned_at.is_(None))
    room = max(0, _MOST_ALARMS - connection.execute(waiting).scalar_one())
    for words in alarms[:room]:
        _put(connection, ALARM, words[:4000], url)


def _put(connection: Connection, form: str, subject: str, url: str) -> None:
    values = {"message_id": message_id(), "form": form, "subject": subject, "url": url, "n_tries": 0, "error": ""}
    connection.execute(insert(outbox).values(**values, created_at=db_now(), due_at=db_now()))


def due_messages(connection: Connection, limit: int) -> Sequence[Outgoing]:
    """Return due messages: one to each address in turn, so that no address waits for all messages of another."""
    columns = (
        *(outbox.c.message_id, outbox.c.form, outbox.c.subject, outbox.c.url),
        *(outbox.c.created_at, outbox.c.n_tries),
    )
    waiting = (outbox.c.abandoned_at.is_(None), due(outbox.c.due_at, _LONGEST_PAUSE_S))
    turn = func.row_number().over(partition_by=outbox.c.url, order_by=outbox.c.due_at)
    statement = select(*columns).where(*waiting).order_by(turn, outbox.c.due_at).limit(limit)
    return [Outgoing(*row) for row in connection.execute(statement)]


def taken(connection: Connection, message: Outgoing) -> None:
    """Remove a message that was accepted, or whose batch is gone."""
    connection.execute(delete(outbox).where(outbox.c.message_id == message.message_id))


def refused(connection: Connection, message: Outgoing, error: str) -> None:
    """Retry a message after a pause, which doubles up to an hour; or abandon it, if it is some days old."""
    pause_s = min(_FIRST_PAUSE_S * 2 ** min(message.n_tries, 16), _LONGEST_PAUSE_S)
    values: dict[str, Any] = {"n_tries": message.n_tries + 1, "due_at": db_now() + pause_s, "error": error[:500]}
    statement = update(outbox).where(outbox.c.message_id == message.message_id)
    connection.execute(statement.values(**values))
    connection.execute(
        statement.where(outbox.c.created_at < db_now() - GIVE_UP_DAYS * _DAY_S).values(abandoned_at=db_now())
    )


def undelivered(connection: Connection) -> Sequence[Undelivered]:
    """Return the refused messages by address."""
    columns = (outbox.c.url, func.count(literal(1)), func.count(outbox.c.abandoned_at), func.max(outbox.c.error))
    statement = select(*columns).where(outbox.c.n_tries > 0).group_by(outbox.c.url).order_by(outbox.c.url)
    return [Undelivered(*row) for row in connection.execute(statement)]


def forget_abandoned(connection: Connection) -> None:
    """Delete messages that were abandoned a month ago."""
    connection.execute(delete(outbox).where(outbox.c.abandoned_at < db_now() - _SHOWN_DAYS * _DAY_S))
