"""Brings a database to the schema of this code, by the Alembic migrations: the only way tables come to be."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from farm.errors import StoreUnavailable
from farm.store.engine import Store

_PACKAGE = Path(__file__).parent.parent


def scripts() -> Path:
    """The folder of the migrations: inside the installed package, or at the top of a checkout."""
    packaged = _PACKAGE / "migrations"
    return packaged if packaged.is_dir() else _PACKAGE.parent / "alembic"


def head() -> str:
    """The newest revision that this code has."""
    return str(ScriptDirectory(str(scripts())).get_current_head())


def revision(store: Store) -> str | None:
    """The revision the database is at; None when it is empty."""
    return store.read(lambda connection: MigrationContext.configure(connection).get_current_revision())


def check(store: Store) -> None:
    """Raise StoreUnavailable unless the database is at this code's revision."""
    current = revision(store)
    known = {each.revision for each in ScriptDirectory(str(scripts())).walk_revisions()}
    if current is not None and current not in known:
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
    if to in {"head", "heads"}:
        return False
    current = MigrationContext.configure(connection).get_current_revision()
    if to == "base" or current is None:
        return to == "base"
    older = ScriptDirectory(str(scripts())).iterate_revisions(current, "base")
    return to in {script.revision for script in older} - {current}
