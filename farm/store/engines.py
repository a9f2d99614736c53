"""The LLM servers that the farm may use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from sqlalchemy import Connection, Table, delete, insert, select

from farm.store.clock import db_now
from farm.store.tables import EngineRow

engines = cast(Table, EngineRow.__table__)

ACTIVE = "active"


@dataclass(frozen=True, slots=True)
class Engine:
    """An OpenAI-compatible server: `url` ends in /v1; `model` is what it is asked for."""

    url: str
    model: str
    key: str = "none"
    added_by: str = ""
    """The node that was started with it and takes it along when it ends; empty if a client added it."""


def add(connection: Connection, engine: Engine) -> None:
    """Use a server from now on; the same URL again replaces its model and key."""
    remove(connection, engine.url)
    values = {"url": engine.url, "model": engine.model, "key": engine.key, "state": ACTIVE, "added_by": engine.added_by}
    connection.execute(insert(engines).values(added_at=db_now(), **values))


def remove(connection: Connection, url: str) -> bool:
    """Use a server no more. False if it was not known."""
    return connection.execute(delete(engines).where(engines.c.url == url)).rowcount == 1


def remove_of(connection: Connection, node: str) -> None:
    """Use no more what a node was started with."""
    connection.execute(delete(engines).where(engines.c.added_by == node))


def listing(connection: Connection) -> list[Engine]:
    """The servers in use, oldest first."""
    statement = select(engines).where(engines.c.state == ACTIVE).order_by(engines.c.added_at, engines.c.url)
    return [Engine(row.url, row.model, row.key, row.added_by) for row in connection.execute(statement)]
