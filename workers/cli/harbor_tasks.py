"""Tasks from the command line: `farm tasks check DIR`, `farm tasks attack DIR|FILE`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import console, plain_errors
from farm.embedded.node_folder import own_folder
from farm.errors import FarmError
from farm.records.request import Limits
from farm.settings import choose, settings
from farm.tasks.harbor_folder import task_paths
from workers.cli.images import ago
from workers.cli.task_attacks import AttackOptions, AttackReport, attacked, targets_of
from workers.cli.task_checks import CheckOptions, TaskCheck, checked

F = TypeVar("F", bound=Callable[..., Any])
_TOOL_S = 3600.0


@click.group()
def main() -> None:
    """Check and attack tasks before submitting them: folders of Harbor and terminal-bench, files of rows."""
    shared = settings()
    choose(scratch=own_folder(shared.scratch, "tasks", str(shared.home.absolute())))


def _of_batch(command: F) -> F:
    """Add the options that stand for a batch's settings, and the form of the output."""
    for option in (
        click.option("--json", "as_json", is_flag=True, help="One JSON object per task, for programs."),
        click.option(
            "--secrets", type=click.File(), help='A file with JSON, such as {"TOKEN": "..."}, for ${TOKEN} of tasks.'
        ),
        click.option("--reward", default="", help="The reward that counts, for tasks with several."),
        click.option("--network", type=click.Choice(["refuse", "allow", "off"]), default="refuse", show_default=True),
        click.option("--sandbox", default="auto", show_default=True, help="auto, singularity or namespace."),
    ):
        command = option(command)
    return command


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--again", is_flag=True, help="Repeat checks with a known result.")
@click.option(
    "-j", "--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Number of concurrent tasks."
)
@_of_batch
@plain_errors
def check(folder: Path, again: bool, jobs: int, as_json: bool, **batch: Any) -> None:
    """Run each task in FOLDER with its solution, and with no work: the scores must be 1 and 0.

    Every task runs on this machine like a rollout, without an engine. Its result is stored, and shown again until
    anything that affects it changes. Exit status 1 if any task is not sound.
    """
    options = replace(_options(jobs, **batch), again=again)
    results = asyncio.run(checked(task_paths(folder), options, lambda each: _tell(each, as_json)))
    if not as_json:
        console.print(_table(results))
    if not all(each.sound for each in results):
        sys.exit(1)


@main.command()
@click.argument("path", type=click.Path(exists=True, path_type=Path), metavar="DIR|FILE")
@click.option("--as", "form", default="", metavar="FORM", help="FILE has rows of a form, or of a data source.")
@click.option("--runs", "n_runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Of the solution.")
@click.option("--kind", "kinds", multiple=True, metavar="CLASS", help="Only attacks of this class, such as echo.")
@click.option("--again", is_flag=True, help="Repeat attacks with a known report.")
@click.option(
    "-j", "--jobs", type=click.IntRange(1, 256), default=2, show_default=True, help="Number of concurrent submissions."
)
@_of_batch
@plain_errors
def attack(
    path: Path, form: str, n_runs: int, kinds: tuple[str, ...], again: bool, jobs: int, as_json: bool, **batch: Any
) -> None:
    """Show which tasks give reward without work: a folder of Harbor tasks, or a FILE of rows.

    Each task is scored on this machine untouched, with its own solution, and with the known attacks for its data
    source. Needs no farm and no engine. The lines of FILE are {"data_source": ..., "fields": {...}}, or with --as the
    rows of a data set. Exit status 1 if there are findings, 2 if a task could not be run.
    """
    try:
        targets = targets_of(path, form)
    except FarmError as error:
        raise click.UsageError(str(error)) from error
    options = AttackOptions(_options(jobs, **batch), n_runs, again, kinds)
    results = asyncio.run(attacked(targets, options, lambda each: _tell_attack(each, as_json)))
    if not as_json:
        console.print(_attack_table(results))
    if any(each.findings for each in results):
        sys.exit(1)
    if any(each.problem for each in results):
        sys.exit(2)


def _options(jobs: int, sandbox: str, network: str, reward: str, secrets: TextIO | None) -> CheckOptions:
    return CheckOptions(
        sandbox=sandbox,
        network=network,  # type: ignore[arg-type]
        secrets=json.load(secrets) if secrets else {},
        reward=reward,
        limits=Limits(tool_s=_TOOL_S),
        n_parallel=jobs,
    )


def _tell_attack(report: AttackReport, as_json: bool) -> None:
    if as_json:
        fields = asdict(report)
        click.echo(json.dumps({**fields, "findings": report.findings, "n_unscored": report.n_unscored}))
    else:
        words = ", ".join(report.findings) or ("not tried" if report.problem else "nothing found")
        click.echo(f"{words}  {report.name}", err=True)


def _attack_table(reports: list[AttackReport]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("task", "solution", "untouched", "attacks", "finding"):
        table.add_column(title, overflow="fold")
    for each in sorted(reports, key=lambda each: each.name):
        scores = ["-" if not run or not run.scores else f"{run.best:g}" for run in (each.solution, each.untouched)]
        lines = [f"[red]{name}[/red]: {escape(text)}" for name, text in each.findings.items()]
        lines += [f"[red]{escape(each.problem)}[/red]"] * bool(each.problem)
        lines += [f"{each.n_unscored} attacks have no score"] * bool(each.n_unscored)
        lines += ["no attacks were run"] * (not each.attacks and not lines)
        lines += [f"known since {each.scored_at}"] * each.known
        table.add_row(escape(each.name), *scores, str(len(each.attacks)), "\n".join(lines) or "nothing found")
    return table


def _tell(task_check: TaskCheck, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({**asdict(task_check), "sound": task_check.sound}))
    else:
        click.echo(f"{'sound' if task_check.sound else 'NOT SOUND'}  {task_check.name}", err=True)


def _table(results: list[TaskCheck]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("task", "solution", "untouched", ""):
        table.add_column(title, overflow="fold")
    for each in sorted(results, key=lambda each: each.name):
        scores = ["-" if score is None else f"{score:g}" for score in (each.solved, each.untouched)]
        lines = ["sound" if each.sound else f"[red]{escape(each.problem)}[/red]"]
        lines += [escape(each.image)] * bool(each.image)
        if footprint := each.evidence.footprint:
            lines.append(escape(f"policies may change, as its solution does: {', '.join(footprint)}"))
        if not each.sound and each.log:
            rewards = ", ".join(f"{name} {value:g}" for name, value in each.rewards.items())
            lines.append(escape(f"its tests say: {each.test_output or 'nothing'}"))
            lines.append(escape(f"rewards of the solution: {rewards or 'none'}; all that was written: {each.log}"))
        if each.known:
            lines.append(
                f"checked {ago(datetime.fromisoformat(each.checked_at).timestamp())}: --again repeats the check"
            )
        table.add_row(escape(each.name), *scores, "\n".join(lines))
    return table


if __name__ == "__main__":
    main(prog_name="farm tasks")
