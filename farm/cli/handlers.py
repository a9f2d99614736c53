"""The commands that list what can be submitted: `farm handlers`, `farm handlers show NAME`.

Examples are lines for `farm submit`, in a file `examples.jsonl` next to the handler's module, or in a package above it.
"""

from __future__ import annotations

import inspect
import json
from importlib.resources import files
from typing import TYPE_CHECKING

import click

from farm.cli.console import console, plain_errors, runs_farm
from farm.errors import NotFound

if TYPE_CHECKING:
    from pydantic import BaseModel


EXAMPLES = "examples.jsonl"


@click.group(invoke_without_command=True)
@click.pass_context
def handlers(context: click.Context) -> None:
    """List the kinds of problems; `show NAME` prints their fields and an example."""
    if context.invoked_subcommand is None:
        context.invoke(list_handlers)


@handlers.command(name="list")
@plain_errors
@runs_farm
def list_handlers() -> None:
    """List the handlers installed here, and the agents and sandboxes that a batch may select."""
    from rich.markup import escape
    from rich.table import Table

    from farm.plugins import installed, load

    table = Table(box=None, pad_edge=False)
    for title in ("data_source", "fields", "agent", "about"):
        table.add_column(title, no_wrap=title == "data_source", overflow="fold")
    for name in sorted(installed("farm.handlers")):
        try:
            handler = load("farm.handlers", name)
            fields = _fields(handler.instance_type)
            cells = [", ".join(field + ("" if needed else "?") for field, needed in fields), handler.agent]
            cells.append((inspect.getdoc(handler) or "").partition("\n")[0])
        except Exception as error:
            cells = ["", "", f"cannot be loaded: {type(error).__name__}: {error}"]
        table.add_row(*map(escape, [name, *cells]))
    console.print(table)
    for kind in ("agents", "sandboxes"):
        console.print(
            f"{kind}: {', '.join(sorted(installed(f'farm.{kind}'))) or 'none'}", highlight=False, markup=False
        )
    console.print("`farm handlers show NAME` prints the fields and an example", highlight=False, markup=False)


def _fields(instance_type: type[BaseModel]) -> list[tuple[str, bool]]:
    """Return the name of each field, and whether it is required."""
    return [(field.alias or name, field.is_required()) for name, field in instance_type.model_fields.items()]


@handlers.command()
@click.argument("name")
@plain_errors
@runs_farm
def show(name: str) -> None:
    """Print the JSON schema of a problem's fields and an example line for `farm submit`."""
    from farm.plugins import installed, load

    if name not in installed("farm.handlers"):
        names = ", ".join(sorted(installed("farm.handlers"))) or "none"
        raise NotFound(f"there is no handler {name!r}; installed here: {names}")
    handler = load("farm.handlers", name)
    click.echo(json.dumps(handler.instance_type.model_json_schema(), indent=1, ensure_ascii=False))
    example = _example(handler, name)
    if example is None:
        click.echo(f"\n{name} has no example: no line of a file {EXAMPLES} next to its module has one", err=True)
        return
    click.echo("\nexample, one line of a file for `farm submit FILE`:", err=True)
    click.echo(example)


def _example(handler: type[object], name: str) -> str | None:
    """Return the example line from the handler's package, or from one above it."""
    package = handler.__module__
    while "." in package:
        package = package.rpartition(".")[0]
        file = files(package).joinpath(EXAMPLES)
        if file.is_file():
            for line in file.read_text(encoding="utf-8").splitlines():
                if json.loads(line)["data_source"] == name:
                    return line
    return None
