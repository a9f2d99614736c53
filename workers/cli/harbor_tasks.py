"""Folders of tasks from the command line: `farm tasks check DIR`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import console, plain_errors
from farm.embedded.node_folder import own_folder
from farm.records.request import Limits
from farm.settings import settings
from farm.tasks.harbor_folder import task_paths
from workers.cli.task_checks import CheckOptions, TaskCheck, checked

_TOOL_S = 3600.0


@click.group()
def main() -> None:
    """Folders of tasks in the forms of Harbor and terminal-bench."""
    shared = settings()
    os.environ["FARM_SCRATCH"] = str(own_folder(shared.scratch, "tasks", str(shared.home.absolute())))
    settings.cache_clear()


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-j", "--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Tasks at a time.")
@click.option("--sandbox", default="auto", show_default=True, help="auto, singularity or namespace.")
@click.option("--network", type=click.Choice(["refuse", "allow", "off"]), default="refuse", show_default=True)
@click.option("--reward", default="", help="The reward that counts, of tasks that give several.")
@click.option("--secrets", type=click.File(), help='A file with JSON, such as {"TOKEN": "..."}, for ${TOKEN} of tasks.')
@click.option("--json", "as_json", is_flag=True, help="One JSON object per task, for programs.")
@plain_errors
def check(folder: Path, jobs: int, sandbox: str, network: str, reward: str, secrets: click.File, as_json: bool) -> None:
    """Play the solution of each task in FOLDER, and nothing: they must score 1 and 0.

    Every task runs on this machine as a rollout would, and needs no engine. Exit status 1 if any is not sound.
    """
    options = CheckOptions(
        sandbox=sandbox,
        network=network,  # type: ignore[arg-type]
        secrets=json.load(secrets) if secrets else {},  # type: ignore[arg-type]
        reward=reward,
        limits=Limits(tool_s=_TOOL_S),
        n_parallel=jobs,
    )
    results = asyncio.run(checked(task_paths(folder), options, lambda each: _tell(each, as_json)))
    if not as_json:
        console.print(_table(results))
    if not all(each.sound for each in results):
        sys.exit(1)


def _tell(result: TaskCheck, as_json: bool) -> None:
    if as_json:
        fields = {name: getattr(result, name) for name in ("name", "sound", "solved", "untouched", "problem")}
        click.echo(json.dumps(fields))
    else:
        click.echo(f"{'sound' if result.sound else 'NOT SOUND'}  {result.name}", err=True)


def _table(results: list[TaskCheck]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("task", "solution", "untouched", ""):
        table.add_column(title, overflow="fold")
    for each in sorted(results, key=lambda each: each.name):
        scores = ["-" if score is None else f"{score:g}" for score in (each.solved, each.untouched)]
        table.add_row(escape(each.name), *scores, "sound" if each.sound else f"[red]{escape(each.problem)}[/red]")
    return table


if __name__ == "__main__":
    main(prog_name="farm tasks")
