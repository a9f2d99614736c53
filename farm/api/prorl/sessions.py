"""Sessions of a client, from `/start` to `/stop`, with the LLM servers that it added: rows of the store.

A client is a name: that of the path, `/prorl/NAME/…`, or none. Its state is a log of records, each written once after
the one before it, as the steps of a training run are: of two API processes that change it at one moment one is first,
and the other begins again from there.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from farm.client.runs import Runs
from farm.errors import Conflict, ServiceError
from farm.records.training_run import RecordedStep

_TRIES = 50


@dataclass(frozen=True, slots=True)
class Session:
    """`number` counts the starts; `running` tells whether the last one was stopped."""

    client: str
    number: int = 0
    running: bool = False
    servers: tuple[str, ...] = ()

    @property
    def prefix(self) -> str:
        """The beginning of the idempotency keys of what was submitted in it."""
        return f"prorl:{self.client}:{self.number}:"


def current(runs: Runs, client: str) -> Session:
    """Return a client's newest session."""
    return _read(runs.recorded_step(_run(client)), client)[1]


def change(runs: Runs, client: str, to: Callable[[Session], Session]) -> Session:
    """Write what becomes of a client's newest session, and return it. `to` may be called again, and may raise."""
    mark = secrets.token_hex(8)
    for _ in range(_TRIES):
        step, session = _read(runs.recorded_step(_run(client)), client)
        changed = to(session)
        if changed == session:
            return session
        record = {**asdict(changed), "servers": list(changed.servers), "mark": mark}
        try:
            written = runs.record_step(_run(client), step + 1, record)
        except Conflict:
            continue
        if written.record.get("mark") == mark:
            return changed
    raise ServiceError(f"the session of client {client!r} changed {_TRIES} times meanwhile: try again")


def started(session: Session) -> Session:
    return replace(session, number=session.number + 1, running=True)


def _run(client: str) -> str:
    return f"prorl:{client}"


def _read(recorded: RecordedStep | None, client: str) -> tuple[int, Session]:
    if recorded is None:
        return 0, Session(client)
    record = recorded.record
    return recorded.step, Session(client, record["number"], record["running"], tuple(record["servers"]))
