"""The commands for API keys and the audit log: `farm keys add | list | revoke`, `farm log`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import console, on_farm

if TYPE_CHECKING:
    from farm.callers import ApiKey
    from farm.client.farm import Farm


@click.group()
def keys() -> None:
    """Manage named API keys with scopes and quotas; the farm's own key always exists."""


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(("read", "submit", "operate", "admin")),
    default=("submit",),
    show_default=True,
    help="Rights of the key; may be repeated. Every scope includes `read`; `admin` includes all.",
)
@click.option("--max-open", type=click.IntRange(0), help="Limit of its unfinished rollouts.")
@click.option("--max-engines", type=click.IntRange(0), help="Limit of engines added with it.")
@click.option(
    "--max-rate", type=click.FloatRange(0, min_open=True), help="Limit of requests per second at each API process."
)
@on_farm
def add(
    farm: Farm,
    name: str,
    scopes: tuple[str, ...],
    max_open: int | None,
    max_engines: int | None,
    max_rate: float | None,
) -> None:
    """Create a key and print it, only this once: the farm keeps a hash of it.

    The client sets FARM_API_KEY to it. NAME is shown on everything submitted with it, and in the log.
    """
    quotas = {"max_open": max_open, "max_engines": max_engines}
    click.echo(farm.access.add_key(name, scopes, **quotas, max_rate=max_rate))


@keys.command(name="list")
@on_farm
def list_keys(farm: Farm) -> None:
    """List the keys: scopes, quotas, creator and date."""
    known = farm.access.keys()
    if known:
        console.print(_table(known))
    else:
        click.echo("no keys except the farm's own; `farm keys add NAME` creates one", err=True)


def _table(known: Sequence[ApiKey]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("key", "scopes", "most open", "engines", "requests/s", "made by", "on"):
        table.add_column(column, overflow="fold")
    for key in known:
        quotas = ["-" if most is None else f"{most:g}" for most in (key.max_open, key.max_engines, key.max_rate)]
        created = time.strftime("%Y-%m-%d", time.localtime(key.created_at))
        table.add_row(key.name, " ".join(scope.value for scope in key.scopes), *quotas, escape(key.created_by), created)
    return table


@keys.command()
@click.argument("name")
@on_farm
def revoke(farm: Farm, name: str) -> None:
    """Revoke a key: every API refuses it within seconds, including waiting requests."""
    farm.access.revoke_key(name)
    click.echo(f"key {name} was revoked")


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of entries.")
@click.option("--before", type=click.IntRange(0), help="Only entries before this number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
@click.option(
    "--prune",
    "days",
    type=click.FloatRange(0),
    metavar="DAYS",
    help="Remove entries older than DAYS, and show nothing.",
)
@on_farm
def log(farm: Farm, limit: int, before: int | None, as_json: bool, days: float | None) -> None:
    """List the audit log, newest first: submits, cancels, changes of engines, weights and keys, by whom."""
    from farm.client import serialization

    if days is not None:
        click.echo(f"{farm.access.prune_orders(days)} entries removed from the log")
        return
    orders = farm.access.orders(limit, before)
    for order in orders:
        if as_json:
            click.echo(serialization.written(order).decode())
            continue
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(order.at))
        line = f"{order.number:>7}  {at}  {order.by}  {order.verb}  {order.target}  {order.details}".rstrip()
        # names given by clients may hold any character
        click.echo("".join(c if c.isprintable() else "\ufffd" for c in line))
