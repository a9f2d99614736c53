"""The command that prints log lines about a rollout: `farm logs`."""

from __future__ import annotations

from pathlib import Path

import click

from farm.cli.console import batch_ids as completed_ids
from farm.cli.console import plain_errors


@click.command()
@click.argument("ref", metavar="ID", shell_complete=completed_ids)
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
    from farm.errors import NotFound
    from farm.ids import RolloutRef
    from farm.observing.process_log import lines_about
    from farm.settings import settings

    RolloutRef.of(ref)
    known = [each for each in (settings().log_dir, settings().home / "logs") if each is not None and each.is_dir()]
    places = list(folders) or known
    if not places:
        raise NotFound("there are no logs in FARM_LOG_DIR or FARM_HOME here: give the nodes' log folder with --in DIR")
    if not (found := lines_about(ref, places)):
        where = ", ".join(map(str, places))
        raise NotFound(f"no log in {where} has a line about {ref}: give the nodes' log folder with --in DIR")
    for line in found:
        click.echo(line.text)
