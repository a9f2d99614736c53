"""Sessions of a client, from `/start` to `/stop`, with the LLM servers that it added: rows of the store.

A client is the NAME of the path `/prorl/NAME/…`, or empty. A client that died sends no `/stop`, so a session is divided
into epochs. A restarted client begins an epoch: by clearing the list of servers, or by `/start` while a session runs. A
job is found only in its own epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from farm.api.protocol_parts.kept_state import KeptState
from farm.client.runs import Runs


@dataclass(frozen=True, slots=True)
class Session:
    """`number` counts the starts, `epoch` the epochs of a session; `running` is False after a stop."""

    client: str
    number: int = 0
    running: bool = False
    servers: tuple[str, ...] = ()
    epoch: int = 0

    @property
    def prefix(self) -> str:
        """The prefix of the idempotency keys of its submissions."""
        return f"prorl:{self.client}:{self.number}:"

    @property
    def job_prefix(self) -> str:
        """The prefix of the idempotency keys of the current epoch."""
        return f"{self.prefix}{self.epoch}:"


def current(runs: Runs, client: str) -> Session:
    """Return a client's newest session."""
    return _session(_state(runs, client).read(), client)


def change(runs: Runs, client: str, to: Callable[[Session], Session]) -> Session:
    """Replace a client's newest session by `to(session)`, and return it. `to` may run more than once, and may raise."""

    def changed(record: Mapping[str, Any]) -> Mapping[str, Any]:
        session = to(_session(record, client))
        return {**asdict(session), "servers": list(session.servers)}

    return _session(_state(runs, client).change(changed), client)


def started(session: Session) -> Session:
    return replace(session, number=session.number + 1, running=True, epoch=0)


def next_epoch(session: Session) -> Session:
    return replace(session, epoch=session.epoch + 1)


def _state(runs: Runs, client: str) -> KeptState:
    return KeptState(runs, f"prorl:{client}")


def _session(record: Mapping[str, Any], client: str) -> Session:
    if not record:
        return Session(client)
    return Session(client, record["number"], record["running"], tuple(record["servers"]), record.get("epoch", 0))
