"""Migration of a database to the schema of this code, by Alembic: the only way that tables are created.

Every process checks the schema, but few migrate it, and Alembic loads slowly. So only `migrate` imports it.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from farm.errors import StoreUnavailable
from farm.store.database import Store

_PACKAGE = Path(__file__).parent.parent


def scripts() -> Path:
    """Return the folder of the migrations: in the installed package, or at the top of a checkout."""
    packaged = _PACKAGE / "migrations"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "alembic"


def head() -> str:
    """Return the newest revision of this code."""
    return revisions()[-1]


def revisions() -> list[str]:
    """Return the revisions of this code, oldest first, by the numbers in their file names."""
    return sorted(path.name.partition("_")[0] for path in (scripts() / "versions").glob("*.py"))


def revision(store: Store, patience_s: float | None = None) -> str | None:
    """Return the revision of the database; None when it is empty. `patience_s` overrides the store's own."""
    return store.read(_revision, patience_s)


def _revision(connection: Connection) -> str | None:
    if not inspect(connection).has_table("alembic_version"):
        return None
    revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if revision is None else str(revision)


def check(store: Store, patience_s: float | None = None) -> None:
    """Raise StoreUnavailable unless the database is at this code's revision. `patience_s` as in `revision`."""
    # opening a missing file would create it
    current = revision(store, patience_s) if store.is_there else None
    if current is not None and current not in revisions():
        raise StoreUnavailable(
            f"{store.name} is at schema revision {current}, unknown to this version: a newer one migrated it; "
            f"install that version here; this one needs {head()}"
        )
    if current != head():
        raise StoreUnavailable(
            f"{store.name} is at schema revision {current or 'none'}, this version needs {head()}: run `farm migrate`"
        )


def migrate(store: Store, to: str = "head") -> None:
    """Upgrade, or with an older revision or `base` downgrade, in one transaction."""
    from alembic import command
    from alembic.config import Config

    def work(connection: Connection) -> None:
        config = Config()
        # rows of a table may refer to each other
        config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
        config.attributes["connection"] = connection
        current = _revision(connection)
        if to == "base" or (current is not None and to in revisions() and to < current):
            command.downgrade(config, to)
        else:
            command.upgrade(config, to)

    # if the database refuses the connection, a read raises that at once
    revision(store)
    store.write(work)
