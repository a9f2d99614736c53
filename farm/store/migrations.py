"""Migration of a database to the schema of this code, by Alembic: the only way tables are created.

Every process checks the schema, few change it, and Alembic takes long to load: so only `migrate` loads it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from farm.errors import StoreUnavailable
from farm.store.database import Store

_PACKAGE = Path(__file__).parent.parent


def scripts() -> Path:
    """Return the folder of the migrations: inside the installed package, or at the top of a checkout."""
    packaged = _PACKAGE / "migrations"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "alembic"


def head() -> str:
    """Return the newest revision that this code has."""
    return revisions()[-1]


def revisions() -> list[str]:
    """Return the revisions that this code has, the oldest first, by the numbers that begin their files' names."""
    return sorted(path.name.partition("_")[0] for path in (scripts() / "versions").glob("*.py"))


def revision(store: Store, patience_s: float | None = None) -> str | None:
    """Return the revision the database is at; None when it is empty. `patience_s` in place of the store's own."""
    return store.read(_revision, patience_s)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    result = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if result is None else str(result)


def check(store: Store, patience_s: float | None = None) -> None:
    """Raise StoreUnavailable unless the database is at this code's revision. `patience_s` as in `revision`."""
    # to look into a file that is not there would make one
    current = revision(store, patience_s) if store.is_there else None
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
        # a value there may refer to others
        config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
        config.attributes["connection"] = connection
        if _is_older(connection, to):
            command.downgrade(config, to)
        else:
            command.upgrade(config, to)

    # a database that refuses the connection says so to a read, at once
    revision(store)
    store.write(work)


def _is_older(connection: Connection, to: str) -> bool:
    current = _revision(connection)
    return to == "base" or (current is not None and to in revisions() and to < current)
