"""Brings a database to the schema of this code, by the Alembic migrations: the only way tables come to be.

Every process checks the schema, few change it, and Alembic takes long to load: so only `migrate` loads it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from farm.errors import StoreUnavailable
from farm.store.engine import Store

_PACKAGE = Path(__file__).parent.parent


def scripts() -> Path:
    """The folder of the migrations: inside the installed package, or at the top of a checkout."""
    packaged = _PACKAGE / "migrations"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "alembic"


def head() -> str:
    """The newest revision that this code has."""
    return revisions()[-1]


def revisions() -> list[str]:
    """Those that this code has, the oldest first: each begins its file's name, and they are numbered."""
    return sorted(path.name.partition("_")[0] for path in (scripts() / "versions").glob("*.py"))


def revision(store: Store) -> str | None:
    """The revision the database is at; None when it is empty."""
    return store.read(_revision)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if found is None else str(found)


def check(store: Store) -> None:
    """Raise StoreUnavailable unless the database is at this code's revision."""
    current = revision(store)
    if current is not None and current not in revisions():
        raise StoreUnavailable(
            f"{store.name} is at schema revision {current}, which this farm does not know: a newer one has brought it "
            f"there, so install that version here; this one needs {head()}"
        )
    if current != head():
        raise StoreUnavailable(
            f"{store.name} is at schema revision {current or 'none'}, this farm needs {head()}: run `farm migrate`"
        )


def migrate(store: Store, to: str = "head") -> None:
    """Upgrade, or with an older revision or `base` downgrade, in one transaction."""
    from alembic import command
    from alembic.config import Config

    def work(connection: Connection) -> None:
        config = Config()
        config.set_main_option("script_location", str(scripts()))
        config.attributes["connection"] = connection
        if _is_older(connection, to):
            command.downgrade(config, to)
        else:
            command.upgrade(config, to)

    store.write(work)


def _is_older(connection: Connection, to: str) -> bool:
    current = _revision(connection)
    return to == "base" or (current is not None and to in revisions() and to < current)
