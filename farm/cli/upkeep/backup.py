"""The commands that back a farm up and restore it: `farm backup`, `farm restore`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from farm.cli.console import first_s, plain_errors, runs_farm, signals, url_option
from farm.configuration.service_urls import sqlite_url
from farm.errors import InvalidRequest

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("file", type=_FILE)
@url_option
@plain_errors
@runs_farm
def backup(file: Path, url: str | None) -> None:
    """Write the farm's whole database to one file, while the farm runs.

    The file is SQLite, also for Postgres, with the state at the start of this command. It includes the farm's keys, so
    it is private to its owner. An existing backup is replaced once the new one is complete.
    """
    from farm.address import is_http
    from farm.cli.export import check_writable
    from farm.client.local import open_store
    from farm.store.access.sealed_secrets import has_secrets
    from farm.store.backups.backup import back_up

    if is_http(url):
        raise InvalidRequest("an API makes no backups: give the database's URL, or leave --url out", field="url")
    check_writable(file)
    with contextlib.closing(open_store(url, first_s=first_s())[0]) as store:
        received = signals()

        def check() -> None:
            if received:
                raise click.ClickException("interrupted: no backup was written")

        made = back_up(store, file, check)
        size_mb = file.stat().st_size / 1e6
        click.echo(f"{file}: {made.n_batches} batches, {made.n_rollouts} rollouts, {size_mb:,.1f} MB")
        if "secret_key" not in made.files and store.read(has_secrets):
            click.echo(
                "keep FARM_SECRET_KEY with it: without that key, engines' keys in the backup cannot be read", err=True
            )


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--replace", is_flag=True, help="Remove everything that is in the database now.")
@url_option
@plain_errors
@runs_farm
def restore(file: Path, replace: bool, url: str | None) -> None:
    """Restore a backup into an empty database; its farm continues from there.

    The database may be of another kind than the backed-up one. Either everything is restored or nothing. Rollouts that
    were open then run again once nodes start. Later data is lost, and clients that saw it get an error.
    """
    from farm.address import is_http
    from farm.store.backups.backup import read_backup
    from farm.store.backups.backup import restore as restored
    from farm.store.database import Store

    if is_http(url):
        raise InvalidRequest("an API restores nothing: give the database's URL, or leave --url out", field="url")
    found = read_backup(file)
    with contextlib.closing(Store(_target(url))) as store:
        written = restored(store, found, replace)
        made = time.strftime("%F %T", time.gmtime(found.made_at))
        click.echo(f"{store.name}: {found.n_batches} batches, {found.n_rollouts} rollouts, as of {made} UTC")
        for path in written:
            click.echo(f"written: {path}")


def _target(url: str | None) -> str:
    """Return the database of an address, which may have no farm yet."""
    from farm.address import ADDRESS_FILE, address_of
    from farm.home import own_home
    from farm.settings import DATABASE_FILE, settings

    if url is None and settings().store_url:
        return settings().store_url
    if url is not None and "://" in url:
        return url
    folder = settings().home if url is None else Path(url).expanduser()
    if (folder / ADDRESS_FILE).exists():
        return address_of(folder, settings())[0]
    return sqlite_url(own_home(folder) / DATABASE_FILE)
