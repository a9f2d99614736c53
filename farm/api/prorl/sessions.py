"""Sessions of a client, from `/start` to `/stop`, with the LLM servers that it added: rows of the store.

A client is a name: that of the path, `/prorl/NAME/…`, or none. A client that died never says `/stop`, so a session has
lives: another begins with each sign that a program begins, a cleared list of servers, or a `/start` while one runs. A
job of one life is never found in the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from farm.api.protocol_parts.kept_state import KeptState
from farm.client.runs import Runs


@dataclass(frozen=True, slots=True)
class Session:
    """`number` counts the starts; `running` tells whether the last one was stopped. `life` counts within a session."""

    client: str
    number: int = 0
    running: bool = False
    servers: tuple[str, ...] = ()
    life: int = 0

    @property
    def prefix(self) -> str:
        """The beginning of the idempotency keys of what was submitted in it."""
        return f"prorl:{self.client}:{self.number}:"

    @property
    def job_prefix(self) -> str:
        """The beginning of the keys of what was submitted in this life of it."""
        return f"{self.prefix}{self.life}:"


def current(runs: Runs, client: str) -> Session:
    """Return a client's newest session."""
    return _session(_state(runs, client).read(), client)


def change(runs: Runs, client: str, to: Callable[[Session], Session]) -> Session:
    """Write what becomes of a client's newest session, and return it. `to` may be called again, and may raise."""

    def changed(record: Mapping[str, Any]) -> Mapping[str, Any]:
        session = to(_session(record, client))
        return {**asdict(session), "servers": list(session.servers)}

    return _session(_state(runs, client).change(changed), client)


def started(session: Session) -> Session:
    return replace(session, number=session.number + 1, running=True, life=0)


def reborn(session: Session) -> Session:
    return replace(session, life=session.life + 1)


def _state(runs: Runs, client: str) -> KeptState:
    return KeptState(runs, f"prorl:{client}")


def _session(record: Mapping[str, Any], client: str) -> Session:
    if not record:
        return Session(client)
    return Session(client, record["number"], record["running"], tuple(record["servers"]), record.get("life", 0))
