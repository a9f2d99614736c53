"""A database with a clock skew that a test sets, at once and for all its sessions."""

from __future__ import annotations

import sqlite3
from typing import Any

from sqlalchemy import event, text
from sqlalchemy.engine import make_url

from farm.store.database import Store

_POSTGRES = """
CREATE SCHEMA skewed;
CREATE TABLE skewed.clock (off_s double precision NOT NULL);
INSERT INTO skewed.clock VALUES (0);
CREATE FUNCTION skewed.clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql AS
  $$ SELECT pg_catalog.clock_timestamp() + make_interval(secs => off_s) FROM skewed.clock $$;
"""


class Skewed:
    """Sets the clock of a store's database; `open` returns further stores that see it, like other processes would."""

    def __init__(self, store: Store) -> None:
        self._off_s = 0.0
        self._url = store.url
        self._postgres = make_url(store.url).get_backend_name() == "postgresql"
        if self._postgres:
            with store.engine.begin() as connection:
                connection.execute(text(_POSTGRES))
                name = connection.execute(text("SELECT current_database()")).scalar_one()
                # before the catalogue, in which the function of that name is otherwise found
                connection.execute(text(f"ALTER DATABASE {name} SET search_path = skewed, pg_catalog, public"))

    @property
    def off_s(self) -> float:
        return self._off_s

    def open(self, **options: Any) -> Store:
        store = Store(self._url, **options)
        if not self._postgres:
            event.listen(store.engine, "connect", self._prepare)
        return store

    def set(self, off_s: float) -> None:
        """Set the error of the clock from now on."""
        self._off_s = off_s
        if self._postgres:
            store = Store(self._url)
            store.write(
                lambda connection: connection.execute(text("UPDATE skewed.clock SET off_s = :s"), {"s": off_s}) and None
            )
            store.close()

    def _prepare(self, connection: Any, record: Any) -> None:
        clock = sqlite3.connect(":memory:", check_same_thread=False)

        def julianday(_: str) -> float:
            return float(clock.execute("SELECT julianday('now')").fetchone()[0]) + self._off_s / 86400

        connection.create_function("julianday", 1, julianday)
