"""Runs migrations on the connection that farm.store.migrations hands over, or on the farm's own database."""

from alembic import context

from farm.settings import settings
from farm.store.database import Store
from farm.store.sql.schema import Base


def run(connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, compare_type=True, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    Store(settings().database_url).write(run)
