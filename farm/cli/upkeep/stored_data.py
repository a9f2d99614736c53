"""The commands for stored data: `farm backup`, `farm restore`, `farm prune`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import click

from farm.cli.console import batch_ids as completed_ids
from farm.cli.console import first_s, plain_errors, runs_farm, seconds, signals, url_option
from farm.configuration.service_urls import sqlite_url
from farm.errors import InvalidRequest

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.argument("batch_ids", metavar="[BATCH]...", nargs=-1, shell_complete=completed_ids)
@click.option(
    "--older-than",
    "older_s",
    metavar="AGE",
    callback=seconds,
    help="Batches that ended at least this long ago, such as 14d.",
)
@click.option(
    "--keep",
    type=click.Choice(["trajectories", "rewards", "nothing"]),
    help="Data to keep.  [default: rewards]",
)
@click.option("--dry-run", is_flag=True, help="Only print what would be removed.")
@click.option("--pin", is_flag=True, help="Keep these batches whatever their age.")
@click.option("--unpin", is_flag=True, help="Undo --pin.")
@url_option
@plain_errors
@runs_farm
def prune(
    batch_ids: tuple[str, ...],
    older_s: float | None,
    keep: str | None,
    dry_run: bool,
    pin: bool,
    unpin: bool,
    url: str | None,
) -> None:
    """Remove the data of old batches, except their rewards.

    Safe while a farm runs. --keep rewards keeps each rollout's rewards, counts and failures; --keep trajectories keeps
    the training data and removes artefacts, files and earlier attempts; --keep nothing removes everything. Never
    removed: unfinished or pinned batches, and batches that a consumer or a training run used within that age. Without
    --older-than it does what a farm does every hour, by FARM_KEEP_TRAJECTORIES_DAYS and FARM_KEEP_REWARDS_DAYS. After
    an interrupt the next run continues.
    """
    from farm.client.local import open_store
    from farm.home import is_http
    from farm.settings import settings
    from farm.store.retention.kept import RetentionLevel
    from farm.store.retention.pruning import PrunedBatch, Pruner, ages
    from farm.store.retention.pruning import pin as change

    if is_http(url):
        raise InvalidRequest("an API does not prune: give the database's URL, or leave --url out", field="url")
    if (pin or unpin) and (not batch_ids or pin == unpin or older_s is not None or keep):
        raise click.UsageError("--pin and --unpin need batches, and allow no other options")
    if keep and older_s is None:
        raise click.UsageError("--keep needs --older-than AGE")
    received: list[int] = []

    def say(batch: PrunedBatch) -> None:
        ended = time.strftime("%F", time.gmtime(batch.ended_at))
        click.echo(f"{batch.batch_id}: {batch.n_rollouts} rollouts, ended {ended}; kept: {batch.kept}")

    with contextlib.closing(open_store(url, first_s=first_s())[0]) as store:
        if pin or unpin:
            for batch_id in batch_ids:
                store.write(lambda connection, id=batch_id: change(connection, id, pin))  # type: ignore[misc]
                click.echo(f"{batch_id} is {'pinned' if pin else 'not pinned'}")
            return
        rounds = ages(settings()) if older_s is None else [(older_s, RetentionLevel(keep or "rewards"))]
        chosen = batch_ids or None
        pruner = Pruner(store, lambda: not received)
        pruned: dict[str, PrunedBatch] = {}
        if not dry_run:
            received = signals()
        for age_s, kept in rounds:
            some = pruner.candidates(age_s, kept, chosen) if dry_run else pruner.prune(age_s, kept, chosen, say)
            if dry_run:
                for each in some:
                    say(each)
            pruned |= {each.batch_id: each for each in some}
        if not dry_run and not received and older_s is not None:
            pruner.forget(older_s)
        n = sum(each.n_rollouts for each in pruned.values())
        click.echo(f"{len(pruned)} batches, {n} rollouts{' would be pruned' if dry_run else ' pruned'}")
        if received:
            raise click.ClickException("interrupted; the next run continues")


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
    from farm.cli.export import check_writable
    from farm.client.local import open_store
    from farm.home import is_http
    from farm.settings import settings
    from farm.store.access.sealed_secrets import SecretKey, has_secrets
    from farm.store.backups.backup import back_up

    if is_http(url):
        raise InvalidRequest("an API makes no backups: give the database's URL, or leave --url out", field="url")
    check_writable(file)
    with contextlib.closing(open_store(url, first_s=first_s())[0]) as store:
        received = signals()

        def check() -> None:
            if received:
                raise click.ClickException("interrupted: no backup was written")

        written = back_up(store, SecretKey.of(settings(), store.engine.url), file, check)
        size_mb = file.stat().st_size / 1e6
        click.echo(f"{file}: {written.n_batches} batches, {written.n_rollouts} rollouts, {size_mb:,.1f} MB")
        if "secret_key" not in written.files and store.read(has_secrets):
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
    from farm.home import is_http
    from farm.settings import settings
    from farm.store.access.sealed_secrets import SecretKey
    from farm.store.backups.backup import read_backup
    from farm.store.backups.backup import restore as restored
    from farm.store.database import Store

    if is_http(url):
        raise InvalidRequest("an API restores nothing: give the database's URL, or leave --url out", field="url")
    backup = read_backup(file)
    with contextlib.closing(Store(_target(url))) as store:
        secret_key = SecretKey.of(settings(), store.engine.url)
        written = restored(store, secret_key, backup, settings().node_timeout_s, replace)
        made_at = time.strftime("%F %T", time.gmtime(backup.made_at))
        click.echo(f"{store.name}: {backup.n_batches} batches, {backup.n_rollouts} rollouts, as of {made_at} UTC")
        for path in written:
            click.echo(f"written: {path}")


def _target(url: str | None) -> str:
    """Return the database of an address, which may have no farm yet."""
    from farm.home import ADDRESS_FILE, address_of, own_home
    from farm.settings import DATABASE_FILE, settings

    if url is None and settings().store_url:
        return settings().store_url
    if url is not None and "://" in url:
        return url
    folder = settings().home if url is None else Path(url).expanduser()
    if (folder / ADDRESS_FILE).exists():
        return address_of(folder, settings())[0]
    return sqlite_url(own_home(folder) / DATABASE_FILE)
