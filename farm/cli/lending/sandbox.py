"""The commands for borrowed sandboxes: `farm sandbox start | list | exec | shell | python | put | …`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import connected, console, on_farm, plain_errors, url_option
from farm.errors import InvalidRequest

if TYPE_CHECKING:
    from farm.client.farm import Farm
    from farm.records.lending.sandbox_calls import CommandResult, ShellOutput

_TIMED_OUT = 124
"""The exit status of a command that reached its time limit, as for `timeout`."""

_timeout = click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=120.0,
    show_default=True,
    help="Time limit in seconds.",
)
_session = click.option("--session", default="default", show_default=True, help="Name of the shell.")


@click.group()
def sandbox() -> None:
    """Borrow a sandbox of the farm: start, list, exec, shell, python, put, get, renew, stop."""


@sandbox.command()
@click.option("--image", default="host", show_default=True, help="Image, as in a handler's SandboxSpec.")
@click.option("--spec", type=click.File(), help="A file with a whole SandboxSpec, as JSON; --image is ignored then.")
@click.option("--network", is_flag=True, help="Give it the node's network.")
@click.option(
    "--lease",
    "lease_s",
    type=float,
    default=600.0,
    show_default=True,
    help="Seconds without a call after which it ends.",
)
@click.option("--name", default="", help="A name; starting it again returns the same sandbox.")
@click.option(
    "--wait-room", "wait_s", type=click.FloatRange(min=0), default=300.0, show_default=True, help="Seconds to wait."
)
@url_option
@plain_errors
def start(
    image: str, spec: TextIO | None, network: bool, lease_s: float, name: str, wait_s: float, url: str | None
) -> None:
    """Start a sandbox and print its id. It ends with `stop`, or when no call came for the time of its lease."""
    body = _read_spec(spec) if spec is not None else {"image": image, "network": network}
    with connected(url) as farm:
        handle = farm.sandboxes.start(
            body, network="allow" if network else "refuse", lease_s=lease_s, name=name, wait_s=wait_s
        )
        click.echo(handle.sandbox_id)


def _read_spec(file: TextIO) -> Any:
    try:
        return json.loads(file.read())
    except ValueError as error:
        raise InvalidRequest(f"{file.name} is not JSON: {error}", field="--spec") from None


@sandbox.command(name="list")
@click.option("--ended", is_flag=True, help="Include sandboxes that ended in the last day.")
@on_farm
def list_sandboxes(farm: Farm, ended: bool) -> None:
    """List the borrowed sandboxes."""
    from farm.cli.display import print_whole

    states = farm.sandboxes.list(ended=ended)
    if not states:
        console.print("no sandbox is borrowed; `farm sandbox start` borrows one")
        return
    shown = Table(box=None, pad_edge=False)
    for title in ("sandbox", "state", "node", "image", "age", "lease left", "name"):
        shown.add_column(title, overflow="fold", min_width=len(title))
    for each in states:
        left = each.ended_why if each.ended else f"{each.lease_left_s:.0f} s"
        cells = [each.sandbox_id, each.state.value, each.node, each.image, f"{each.age_s:.0f} s", left, each.name]
        shown.add_row(*map(escape, cells))
    print_whole(console, shown)


@sandbox.command(name="exec", context_settings={"ignore_unknown_options": True})
@click.argument("reference", metavar="SANDBOX")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED)
@_timeout
@on_farm
def exec_command(farm: Farm, reference: str, argv: tuple[str, ...], timeout_s: float) -> None:
    """Run a command in SANDBOX, an id or a name; its exit status is this command's."""
    result: CommandResult = farm.sandboxes.attach(reference).exec(*argv, timeout_s=timeout_s)
    click.echo(result.stdout, nl=False)
    click.echo(result.stderr, nl=False, err=True)
    _end(result.code, result.limit or (f"stopped after {timeout_s:g} s" if result.timed_out else ""))


@sandbox.command()
@click.argument("reference", metavar="SANDBOX")
@click.argument("command")
@_session
@_timeout
@on_farm
def shell(farm: Farm, reference: str, command: str, session: str, timeout_s: float) -> None:
    """Run COMMAND in a persistent shell of SANDBOX: directory, variables and functions stay between calls."""
    output: ShellOutput = farm.sandboxes.attach(reference).shell(command, session, timeout_s=timeout_s)
    click.echo(output.output, nl=False)
    notes = [output.limit, f"stopped after {timeout_s:g} s" if output.timed_out else "", output.note]
    _end(output.code, "; ".join(filter(None, notes)))


@sandbox.command()
@click.argument("reference", metavar="SANDBOX")
@click.argument("code")
@_timeout
@on_farm
def python(farm: Farm, reference: str, code: str, timeout_s: float) -> None:
    """Run CODE in the persistent IPython of SANDBOX; `-` reads it from standard input."""
    handle = farm.sandboxes.attach(reference)
    click.echo(handle.python(sys.stdin.read() if code == "-" else code, timeout_s).text)


@sandbox.command()
@click.argument("reference", metavar="SANDBOX")
@click.argument("source", type=click.Path(exists=True, path_type=Path))
@click.argument("path")
@on_farm
def put(farm: Farm, reference: str, source: Path, path: str) -> None:
    """Copy SOURCE, a file or a folder, into SANDBOX as PATH."""
    farm.sandboxes.attach(reference).upload(source, path)


@sandbox.command()
@click.argument("reference", metavar="SANDBOX")
@click.argument("path")
@click.argument("target", type=click.Path(path_type=Path))
@click.option("--folder", is_flag=True, help="PATH is a folder.")
@url_option
@plain_errors
def get(reference: str, path: str, target: Path, folder: bool, url: str | None) -> None:
    """Copy PATH, a file or a folder of SANDBOX, to TARGET, which must not exist."""
    if target.exists():
        raise click.UsageError(f"{target} exists")
    with connected(url) as farm:
        handle = farm.sandboxes.attach(reference)
        if folder:
            handle.download(path, target)
        else:
            target.write_bytes(handle.read(path))


@sandbox.command()
@click.argument("reference", metavar="SANDBOX")
@click.option("--lease", "lease_s", type=float, help="New length of the lease in seconds.")
@on_farm
def renew(farm: Farm, reference: str, lease_s: float | None) -> None:
    """Renew the lease of SANDBOX without a call."""
    click.echo(f"{farm.sandboxes.renew(reference, lease_s).lease_left_s:.0f} s")


@sandbox.command()
@click.argument("references", metavar="SANDBOX...", nargs=-1, required=True)
@on_farm
def stop(farm: Farm, references: tuple[str, ...]) -> None:
    """End each SANDBOX."""
    for reference in references:
        farm.sandboxes.stop(reference)


def _end(code: int | None, note: str) -> None:
    if note:
        click.echo(f"[{note}]", err=True)
    if code != 0:
        sys.exit(_TIMED_OUT if code is None else code)
