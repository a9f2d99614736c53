"""Commands for operating a farm: doctor, metrics, drain, migrate."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import become, connected, console, first_s, on_farm, plain_errors, runs_farm, signals, url_option
from farm.extras import check_extra

if TYPE_CHECKING:
    from farm.cli.readiness import CheckResult
    from farm.client.farm import Farm
    from farm.client.http_connection import ApiConnection

_POLL_S = 0.2


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--sandbox", help="Test the promises of sandboxes on this kind; takes a minute or two.")
@click.option("--engine", help="Show the capabilities of the LLM server at this address, such as http://HOST:8000/v1.")
@click.option("--adapter", help="Test the promises of trainer adapters on this one, with constructed rollouts.")
@click.option("--batch", help="Check that a batch's counts add up and that no invariant is violated.")
@url_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def doctor(
    sandbox: str | None,
    engine: str | None,
    adapter: str | None,
    batch: str | None,
    url: str | None,
    options: tuple[str, ...],
) -> None:
    """Check what a farm needs here, and print the remedy for each problem.

    Exit status 1 if something required fails. With --batch: if the counts do not add up or an invariant is violated.
    With --adapter: if a promise is broken. With --sandbox, OPTIONS are those of `python -m workers.conformance`, such
    as --group limits or --list; with --engine, those of `python -m workers.cli.engine_check`.
    """
    if batch is not None:
        _check_batch(batch, url)
    if engine is not None:
        become("workers.cli.engine_check", [engine, *options])
    if sandbox is not None:
        become("workers.conformance", [sandbox, *options])
    if options:
        raise click.UsageError(f"{' '.join(options)}: only --sandbox NAME and --engine URL accept further options")
    if adapter is not None:
        _check_adapter(adapter)
    from farm.home import api_url
    from farm.settings import settings

    if (of_api := api_url(url, settings())) is not None:
        findings = _findings_of_api(of_api)
        console.print(_table(findings))
        sys.exit(1 if any(finding.needed and not finding.ok for finding in findings) else 0)
    check_extra("a check of this machine")
    from farm.cli.doctor import examine, examine_scorers, store_and_broker

    findings = [*examine(settings(), *store_and_broker(settings(), url)), *examine_scorers()]
    console.print(_table(findings))
    kinds = [finding.ok for finding in findings if finding.what.startswith("sandbox ")]
    if not any(kinds):
        console.print("[red]no kind of sandbox works on this machine[/red]")
    if not any(kinds) or any(finding.needed and not finding.ok for finding in findings):
        sys.exit(1)


def _api(url: str) -> ApiConnection:
    from farm.client.http_connection import ApiConnection
    from farm.home import known_key
    from farm.settings import settings

    return ApiConnection(url, known_key(settings()), first_s(), settings().api_ca)


def _findings_of_api(url: str) -> list[CheckResult]:
    from farm.cli.readiness import CheckResult

    with contextlib.closing(_api(url)) as api:
        return api.get(list[CheckResult], "/v1/doctor")


def _table(findings: Sequence[CheckResult]) -> Table:
    """Return the results of `farm doctor`, a line each, with the remedy below each failure."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else ("[red]bad[/red]" if finding.needed else "[yellow]no[/yellow]")
        remedy = "" if finding.ok or not finding.remedy else f"\n→ {finding.remedy}"
        table.add_row(mark, finding.what, escape(finding.detail + remedy))
    return table


def _check_batch(batch_id: str, url: str | None) -> None:
    from farm.cli import display

    with connected(url) as farm:
        numbers, wrong = farm.conservation(batch_id), farm.violations(batch_id)
    console.print(display.conservation(numbers, wrong))
    sys.exit(1 if wrong or numbers.off else 0)


def _check_adapter(name: str) -> None:
    from farm.adapters.conformance.adapter_promises import examine_adapter
    from farm.adapters.conformance.result_promises import examine_results
    from farm.adapters.protocol import gives_results
    from farm.client.farm import ADAPTERS
    from farm.errors import NotFound
    from farm.plugins import load

    try:
        adapter = load(ADAPTERS, name)
        results = list(examine_results(adapter) if gives_results(adapter) else examine_adapter(adapter))
    except ImportError as error:
        raise NotFound(f"adapter {name} needs its trainer's package in this Python: {error}") from error
    for each in results:
        mark, fault = ("[green]ok[/green] ", "") if each.ok else ("[red]bad[/red]", f"\n    {each.fault}")
        console.print(f"{mark} {escape(each.promise + fault)}", highlight=False, soft_wrap=True)
    sys.exit(0 if all(each.ok for each in results) else 1)


@click.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve them at this port until Ctrl-C, instead of printing them once."
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to serve them on.")
@url_option
@plain_errors
def metrics(port: int | None, address: str, url: str | None) -> None:
    """Print the farm's metrics for Prometheus; farm_violations is the alarm.

    With --port they are served to clients that send the farm's key as a bearer token: FARM_API_KEY, else the one in
    FARM_HOME.
    """
    from farm.home import api_url
    from farm.settings import settings

    if (of_api := api_url(url, settings())) is not None:
        if port is not None:
            raise click.UsageError(f"the API serves them at {of_api}/metrics already: leave out --port")
        with contextlib.closing(_api(of_api)) as api:
            click.echo(api.data("/metrics").decode(), nl=False)
        return
    check_extra("reading metrics from the database")
    from prometheus_client import generate_latest

    from farm import metrics as farm_metrics
    from farm.cli.listening import bind, url_of
    from farm.client.local import open_store
    from farm.home import own_key

    with contextlib.closing(open_store(url, first_s=first_s())[0]) as store:
        numbers = farm_metrics.registry(store, settings().node_timeout_s)
        if port is None:
            click.echo(generate_latest(numbers).decode(), nl=False)
            return
        with bind(address, port) as listener:
            server = farm_metrics.server(listener, numbers, own_key(settings()))
            received = signals()
            threading.Thread(target=server.serve_forever, daemon=True).start()
            click.echo(f"{url_of(listener)}/metrics")
            while not received:
                time.sleep(_POLL_S)
            server.shutdown()


@click.command()
@click.argument("node")
@on_farm
def drain(farm: Farm, node: str) -> None:
    """Drain a node: it gets no more rollouts, finishes or releases those it has, and exits.

    Same as SIGTERM to its `farm node`. `farm doctor` lists the nodes with their states.
    """
    farm.drain_node(node)


@click.command()
@click.option("--to", default="head", show_default=True, help="A revision, `head` or `base`.")
@click.option("--url", help="A database URL. Default: FARM_STORE_URL, or the embedded farm's SQLite.")
@plain_errors
@runs_farm
def migrate(to: str, url: str | None) -> None:
    """Migrate the database to this farm's schema."""
    from farm.settings import settings
    from farm.store import migrations
    from farm.store.database import Store

    store = Store(url or settings().database_url)
    try:
        migrations.migrate(store, to)
        click.echo(f"{store.name} is at {migrations.revision(store) or 'base'}")
    finally:
        store.close()
