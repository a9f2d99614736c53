"""The commands for who may do what, and who did: `farm keys add | list | revoke`, `farm log`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import connected, console, plain_errors, url_option

if TYPE_CHECKING:
    from farm.callers import ApiKey

_SCOPES = ("read", "submit", "operate", "admin")


@click.group()
def keys() -> None:
    """Keys of the API: named, with scopes and quotas; the farm's own is always there."""


@keys.command()
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(_SCOPES),
    default=("submit",),
    show_default=True,
    help="What it may do; several may be given. Each has `read` in it, and `admin` all.",
)
@click.option("--max-open", type=click.IntRange(0), help="Rollouts of it that may be open at a time.")
@click.option("--max-engines", type=click.IntRange(0), help="Engines that it may have added.")
@click.option("--max-rate", type=click.FloatRange(0, min_open=True), help="Requests per second at each API process.")
@url_option
@plain_errors
def add(
    name: str,
    scopes: tuple[str, ...],
    max_open: int | None,
    max_engines: int | None,
    max_rate: float | None,
    url: str | None,
) -> None:
    """Make a key and print it, this once: the farm keeps a hash of it.

    Its client sets FARM_API_KEY to it. NAME stands on what is submitted with it, and in the log.
    """
    with connected(url) as farm:
        quotas = {"max_open": max_open, "max_engines": max_engines}
        click.echo(farm.access.add_key(name, scopes, **quotas, max_rate=max_rate))


@keys.command(name="list")
@url_option
@plain_errors
def list_keys(url: str | None) -> None:
    """Show the keys: their scopes and quotas, who made them, and when."""
    with connected(url) as farm:
        known = farm.access.keys()
    if known:
        console.print(_table(known))
    else:
        click.echo("no keys beside the farm's own; `farm keys add NAME` makes one", err=True)


def _table(known: Sequence[ApiKey]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("key", "scopes", "most open", "engines", "requests/s", "made by", "on"):
        table.add_column(column, overflow="fold")
    for key in known:
        quotas = ["-" if most is None else f"{most:g}" for most in (key.max_open, key.max_engines, key.max_rate)]
        made = time.strftime("%Y-%m-%d", time.localtime(key.created_at))
        table.add_row(key.name, " ".join(scope.value for scope in key.scopes), *quotas, escape(key.created_by), made)
    return table


@keys.command()
@click.argument("name")
@url_option
@plain_errors
def revoke(name: str, url: str | None) -> None:
    """End a key: every API refuses it within seconds, also where a request of it waits."""
    with connected(url) as farm:
        farm.access.revoke_key(name)
    click.echo(f"key {name} was revoked")


@click.command()
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many of them.")
@click.option("--before", type=click.IntRange(0), help="Those before the order of this number.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, for programs.")
@click.option("--prune", "days", type=click.FloatRange(0), metavar="DAYS", help="Remove older ones, and show nothing.")
@url_option
@plain_errors
def log(limit: int, before: int | None, as_json: bool, days: float | None, url: str | None) -> None:
    """List who ordered what: submits, cancels, changes of engines, weights and keys; the newest first."""
    from farm.client import serialization

    with connected(url) as farm:
        if days is not None:
            click.echo(f"{farm.access.prune_orders(days)} orders removed from the log")
            return
        orders = farm.access.orders(limit, before)
    for order in orders:
        if as_json:
            click.echo(serialization.written(order).decode())
            continue
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(order.at))
        line = f"{order.number:>7}  {at}  {order.by}  {order.verb}  {order.target}  {order.details}".rstrip()
        # what a client named may hold anything
        click.echo("".join(c if c.isprintable() else "\ufffd" for c in line))
