"""The command that removes old batches: `farm prune`."""

from __future__ import annotations

import contextlib
import time

import click

from farm.cli.console import batch_ids as completed_ids
from farm.cli.console import first_s, plain_errors, runs_farm, seconds, signals, url_option
from farm.errors import InvalidRequest


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
    from farm.address import is_http
    from farm.client.local import open_store
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
        found: dict[str, PrunedBatch] = {}
        if not dry_run:
            received = signals()
        for age_s, kept in rounds:
            some = pruner.candidates(age_s, kept, chosen) if dry_run else pruner.prune(age_s, kept, chosen, say)
            if dry_run:
                for each in some:
                    say(each)
            found |= {each.batch_id: each for each in some}
        if not dry_run and not received and older_s is not None:
            pruner.forget(older_s)
        n = sum(each.n_rollouts for each in found.values())
        click.echo(f"{len(found)} batches, {n} rollouts{' would be pruned' if dry_run else ' pruned'}")
        if received:
            raise click.ClickException("interrupted; the next run continues")
