"""Tries all promises on one kind of sandbox and shows which are kept: `python -m workers.conformance NAME`."""

from __future__ import annotations

import asyncio
import pkgutil
import signal
import sys
from collections.abc import Sequence
from contextlib import aclosing
from itertools import pairwise
from typing import cast

import click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from farm.errors import FarmError
from workers.conformance.bench import PROMISES, PromiseBench, PromiseResult, PromiseState, chosen
from workers.conformance.trial import Promise
from workers.plugins import registry
from workers.plugins.interfaces import SandboxProvider

console = Console()
_COLOURS = {PromiseState.KEPT: "green", PromiseState.BROKEN: "red", PromiseState.NOT_TRIED: "yellow"}
_INTERRUPTED = 130


@click.command(no_args_is_help=True)
@click.argument("name", required=False)
@click.option("--group", multiple=True, help="Try the promises of this group. May be repeated.")
@click.option("--only", multiple=True, help="Try the promises whose name matches this pattern. May be repeated.")
@click.option("--image", default="host", show_default=True, help="The image to try them on.")
@click.option("--list", "listing", is_flag=True, help="Show the promises instead of trying them.")
def main(name: str | None, group: tuple[str, ...], only: tuple[str, ...], image: str, listing: bool) -> None:
    """Try what every sandbox promises on the kind called NAME, on this machine.

    NAME is an entry point in the group `farm.sandboxes`, or MODULE:CLASS. The image must have bash, coreutils, grep and
    sed; promises that need more than it has are not tried. Exit status 1 if a promise is broken.
    """
    if not __debug__:
        raise click.ClickException("promises use assertions: run it without python -O and PYTHONOPTIMIZE")
    try:
        promises = chosen(group, only)
        if listing:
            console.print(_list_of(promises))
            return
        if name is None:
            raise click.UsageError("name a kind of sandbox, or give --list")
        provider = provider_of(name)
        if missing := provider.missing():
            raise click.ClickException(f"sandbox {name} cannot run here: {missing}")
        results = asyncio.run(_until_a_signal(provider, promises, image))
    except (FarmError, ImportError, AttributeError) as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error
    console.print(summary_of(results, promises), highlight=False)
    if len(results) < len(promises):
        sys.exit(_INTERRUPTED)
    sys.exit(any(result.state is PromiseState.BROKEN for result in results))


def provider_of(name: str) -> SandboxProvider:
    """Return a provider by its entry point, or by module and class if it is not installed. Raises NotFound."""
    return cast(SandboxProvider, pkgutil.resolve_name(name)()) if ":" in name else registry.sandbox(name)


async def _until_a_signal(provider: SandboxProvider, promises: Sequence[Promise], image: str) -> list[PromiseResult]:
    """Return the results of the promises; after Ctrl-C or SIGTERM, those so far. Nothing is left behind."""
    results: list[PromiseResult] = []
    trying = asyncio.ensure_future(_try_all(provider, promises, image, results))
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, trying.cancel)
    await asyncio.wait({trying})
    if not trying.cancelled():
        trying.result()
    return results


async def _try_all(
    provider: SandboxProvider, promises: Sequence[Promise], image: str, results: list[PromiseResult]
) -> None:
    columns = (TextColumn("{task.completed}/{task.total}"), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("", total=len(promises))
        async with aclosing(PromiseBench(provider, image=image)) as bench:
            # a kind that does not start at all is one error, not a failure of every promise
            await bench.shared()
            for promise, group in zip(promises, _headings(promises), strict=True):
                if group:
                    progress.console.print(group, style="bold", highlight=False)
                progress.update(shown, description=promise.name)
                results.append(await bench.judge(promise))
                progress.console.print(row_of(results[-1]), highlight=False)
                progress.advance(shown)


def _headings(promises: Sequence[Promise]) -> list[str]:
    """Return for each promise the name of its group if it is the first of it, else an empty text."""
    groups = ["", *(promise.group for promise in promises)]
    return [group.replace("_", " ") if group != before else "" for before, group in pairwise(groups)]


def row_of(result: PromiseResult) -> Table:
    """Return a line for a promise that was tried; below it, over the whole width, why it is not kept."""
    state = f"[{_COLOURS[result.state]}]{result.state:>9}[/]"
    row = Table.grid(padding=(0, 1))
    row.add_row("", state, f"{result.seconds:6.1f} s  {result.promise.name}")
    lines = [result.reason, f"Promised: {result.promise.statement}"] if result.state is PromiseState.BROKEN else []
    for line in lines or filter(None, [result.reason]):
        row.add_row("", "", Padding(escape(line), (0, 0, 0, 10)))
    return row


def summary_of(results: Sequence[PromiseResult], promises: Sequence[Promise]) -> str:
    """Return one line with the number of promises in each state."""
    counts = [f"{sum(result.state is state for result in results)} {state}" for state in PromiseState]
    if missing := len(promises) - len(results):
        counts.append(f"{missing} left out, as it was interrupted")
    return ", ".join(counts)


def _list_of(promises: Sequence[Promise]) -> Table:
    title = f"{len(promises)} of {len(PROMISES)} promises"
    table = Table("group", "promise", "what it says", box=None, pad_edge=False, title=title, title_justify="left")
    for promise in promises:
        table.add_row(promise.group.replace("_", " "), promise.name, escape(promise.statement))
    return table


if __name__ == "__main__":
    main()
