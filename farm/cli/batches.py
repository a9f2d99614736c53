"""The commands for submitted batches: ls, watch, show, artefacts, collect, logs, cancel, rescore."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from farm.cli.console import batch_ids, connected, console, on_farm, plain_errors, url_option
from farm.errors import InvalidRequest, NotFound, Pruned
from farm.ids import RolloutRef

if TYPE_CHECKING:
    from farm.client.farm import Farm

_KINDS = (".npz", ".jsonl")


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of batches.")
@click.option("--before", metavar="BATCH", help="Only batches submitted before this one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
@on_farm
def ls(farm: Farm, limit: int, before: str | None, as_json: bool) -> None:
    """List the newest batches: state, size, age, mean reward, submitter."""
    from farm.cli import display

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
@on_farm
def watch(farm: Farm, batch_id: str, exit_status: bool) -> None:
    """Show a batch's progress until it has ended, then a line per group."""
    from farm.cli import display

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
@on_farm
def show(farm: Farm, rollout_id: str, atif: bool) -> None:
    """Print a rollout: transcript, rewards, times per stage and token counts."""
    from farm.cli import display

    rollout = farm.rollout(rollout_id)
    if atif:
        from farm.records.atif_export import atif_trajectory

        calls = farm.calls(rollout_id)
        if not calls:
            raise InvalidRequest(f"{rollout_id} has no model calls, and an ATIF document needs a step", field="--atif")
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
@on_farm
def cancel(farm: Farm, id: str, rollout_ids: tuple[str, ...]) -> None:
    """Cancel a batch, a group (BATCH.GROUP) or a rollout (BATCH.GROUP.SAMPLE).

    With ROLLOUT_IDS, only these are cancelled.
    """
    click.echo(f"{len(farm.cancel(id, rollout_ids or None))} rollouts cancelled")


@click.command()
@click.argument("id", shell_complete=batch_ids)
@on_farm
def rescore(farm: Farm, id: str) -> None:
    """Score a batch, a group or a rollout again, without running it again.

    The stored submissions are scored.
    """
    click.echo(f"{len(farm.rescore(id))} rollouts will be scored again")


@click.command()
@click.argument("batch_id", shell_complete=batch_ids)
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help=".npz or .jsonl")
@click.option("--whole-groups", is_flag=True, help="In .npz: only groups whose rollouts can all train.")
@click.option("--timeout", "timeout_s", type=float, help="Seconds to wait for the batch to end.")
@url_option
@plain_errors
def collect(batch_id: str, output: Path, whole_groups: bool, timeout_s: float | None, url: str | None) -> None:
    """Write a batch to a file once it has ended: arrays (.npz) or a rollout per line (.jsonl).

    A line holds the messages, training rows, scores with their details, and times of one rollout. The output path is
    checked first; an existing file is replaced at the end.
    """
    from farm.cli import display
    from farm.cli.export import check_writable, replaced
    from farm.client.exports.rollout_line import rollout_line

    if output.suffix not in _KINDS:
        raise InvalidRequest(f"{output} must end in {' or '.join(_KINDS)}", field="output")
    if whole_groups and output.suffix != ".npz":
        raise InvalidRequest("only .npz leaves groups out; a .jsonl has every rollout", field="whole-groups")
    check_writable(output)
    # stdout is for programs
    progress = Console(stderr=True)
    with connected(url) as farm:
        display.watch(farm, batch_id, progress, timeout_s=timeout_s)
        rollouts = farm.collect(batch_id)
        with replaced(output) as file:
            if output.suffix == ".npz":
                import numpy as np

                from farm.adapters.arrays import arrays

                np.savez_compressed(file, **arrays(rollouts, whole_groups=whole_groups).as_dict())  # type: ignore[arg-type]
            else:
                for rollout in rollouts:
                    key = rollout.rollout_id
                    file.write(
                        rollout_line(
                            rollout, farm.calls(key), farm.timings(key), farm.rewards(key), farm.annotations.of(key)
                        )
                    )
    click.echo(f"{len(rollouts)} rollouts written to {output}")


@click.command()
@click.argument("ref", metavar="ID", shell_complete=batch_ids)
@click.option(
    "--in",
    "folders",
    metavar="DIR",
    multiple=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder of logs, searched recursively; may be repeated.  [default: FARM_LOG_DIR, and logs in FARM_HOME]",
)
@plain_errors
def logs(ref: str, folders: tuple[Path, ...]) -> None:
    """Print the farm's log lines about a batch, a group or a rollout, by time.

    Logs of several nodes are in the folder that they share: with `farm slurm` it is DIR/logs.
    """
    from farm.observing.process_log import lines_about
    from farm.settings import settings

    RolloutRef.of(ref)
    known = [each for each in (settings().log_dir, settings().home / "logs") if each is not None and each.is_dir()]
    log_folders = list(folders) or known
    if not log_folders:
        raise NotFound("there are no logs in FARM_LOG_DIR or FARM_HOME here: give the nodes' log folder with --in DIR")
    if not (lines := lines_about(ref, log_folders)):
        where = ", ".join(map(str, log_folders))
        raise NotFound(f"no log in {where} has a line about {ref}: give the nodes' log folder with --in DIR")
    for line in lines:
        click.echo(line.text)
