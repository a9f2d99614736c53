"""The commands for submitted batches: ls, watch, show, artefacts, cancel, rescore."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from farm.cli.console import batch_ids, connected, console, plain_errors, url_option
from farm.errors import InvalidRequest, Pruned
from farm.ids import RolloutRef


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of batches.")
@click.option("--before", metavar="BATCH", help="Only batches submitted before this one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
@url_option
@plain_errors
def ls(limit: int, before: str | None, as_json: bool, url: str | None) -> None:
    """List the newest batches: state, size, age, mean reward, submitter."""
    from farm.cli import display

    with connected(url) as farm:
        batches = farm.batches(limit, before)
    if as_json:
        from farm.client import serialization

        for batch in batches:
            click.echo(serialization.written(batch).decode())
    elif batches:
        display.print_whole(console, display.batch_table(batches))
    else:
        click.echo("no batches yet; `farm submit FILE` starts one", err=True)


@click.command()
@click.argument("batch_id", shell_complete=batch_ids)
@click.option("--exit-status", is_flag=True, help="Exit with status 1 unless every rollout was completed.")
@url_option
@plain_errors
def watch(batch_id: str, exit_status: bool, url: str | None) -> None:
    """Show a batch's progress until it has ended, then a line per group."""
    from farm.cli import display

    with connected(url) as farm:
        status = display.watch(farm, batch_id, console)
        rollouts = farm.rollouts(batch_id)
    display.print_whole(console, display.group_table(rollouts))
    for line in display.failures(rollouts)[:10]:
        console.print(line, style="red", markup=False, soft_wrap=True)
    if exit_status and status.n_completed < status.n_rollouts:
        sys.exit(1)


@click.command()
@click.argument("rollout_id")
@click.option("--atif", is_flag=True, help="Print an Agent Trajectory Interchange Format 1.8 document, with tokens.")
@url_option
@plain_errors
def show(rollout_id: str, atif: bool, url: str | None) -> None:
    """Print a rollout: transcript, rewards, times per stage and token counts."""
    from farm.cli import display

    with connected(url) as farm:
        rollout = farm.rollout(rollout_id)
        if atif:
            from farm.records.atif_export import atif_trajectory

            calls = farm.calls(rollout_id)
            if not calls:
                raise InvalidRequest(
                    f"{rollout_id} has no model calls, and an ATIF document needs a step", field="--atif"
                )
            click.echo(atif_trajectory(rollout, calls, farm.rewards(rollout_id)).to_json())
            return
        rewards, pruned = farm.rewards(rollout_id), ""
        try:
            shown = display.transcript(rollout, farm.calls(rollout_id), farm.timings(rollout_id), rewards)
        except Pruned as error:
            shown, pruned = display.transcript(rollout, (), (), rewards), str(error)
        console.print(shown)
        if pruned:
            console.print(pruned, markup=False, soft_wrap=True)
            return
        by = farm.status(RolloutRef.of(rollout_id).batch_id).submitter
        console.print(f"submitted by {by or '-'}", markup=False)
        try:
            kept = farm.artefacts(rollout_id)
        except Pruned as error:
            console.print(error, markup=False, soft_wrap=True)
            return
        if kept:
            console.print(display.artefact_table(kept))


@click.command()
@click.argument("rollout_id")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), help="- is stdout.")
@url_option
@plain_errors
def artefacts(rollout_id: str, name: str | None, output: Path | None, url: str | None) -> None:
    """List a rollout's artefacts (outputs that the model was not shown), or fetch one.

    NAME is written to a file with that name, or to OUTPUT.
    """
    from farm.cli import display
    from farm.cli.export import check_writable, replaced

    target = None if output == Path("-") or name is None else output or Path(Path(name).name)
    if target is not None:
        check_writable(target)
    with connected(url) as farm:
        if name is None:
            console.print(display.artefact_table(farm.artefacts(rollout_id)))
            return
        data = farm.artefact(rollout_id, name)
    if target is None:
        sys.stdout.buffer.write(data)
        return
    with replaced(target) as file:
        file.write(data)
    click.echo(f"{len(data)} bytes written to {target}")


@click.command()
@click.argument("id", shell_complete=batch_ids)
@click.argument("rollout_ids", nargs=-1)
@url_option
@plain_errors
def cancel(id: str, rollout_ids: tuple[str, ...], url: str | None) -> None:
    """Cancel a batch, a group (BATCH.GROUP) or a rollout (BATCH.GROUP.SAMPLE).

    With ROLLOUT_IDS, only these are cancelled.
    """
    with connected(url) as farm:
        click.echo(f"{len(farm.cancel(id, rollout_ids or None))} rollouts cancelled")


@click.command()
@click.argument("id", shell_complete=batch_ids)
@url_option
@plain_errors
def rescore(id: str, url: str | None) -> None:
    """Score a batch, a group or a rollout again, without running it again.

    The stored submissions are scored.
    """
    with connected(url) as farm:
        click.echo(f"{len(farm.rescore(id))} rollouts will be scored again")
