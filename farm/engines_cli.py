"""The command line's part for engines: `farm engines list | add | drain | remove | clear | pause | resume | …`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO

import click
from rich.markup import escape
from rich.table import Column, Table

from farm.client import connect
from farm.engines import EngineState
from farm.orders import MODES
from farm.store.engines import Engine
from farm.terminal import console, plain_errors, url_option


@click.group()
def engines() -> None:
    """The LLM servers that all nodes share."""


@engines.command(name="list")
@url_option
@plain_errors
def list_engines(url: str | None) -> None:
    """Show the engines: what they are, what they can do, what they have to do, and what is wrong with them."""
    with connect(url) as farm:
        states = farm.engines()
    if not states:
        console.print("no engines; `farm engines add http://HOST:PORT/v1` adds one")
        return
    console.print(table(states))


def table(states: Sequence[EngineState]) -> Table:
    """A row for each engine. What an engine's key is, nobody is shown."""
    # an address is there to be copied
    titles = ("kind", "model", "state", "token-exact", "calls", "tokens", "version", "")
    shown = Table(Column("engine", overflow="fold"), *titles, box=None)
    for state in states:
        engine, info = state.engine, state.engine.info
        kind = f"{info.kind} {info.version}".strip() if info else "?"
        model = engine.model or (info.model if info else "") or "?"
        cells = [engine.url, kind, model, _state(engine), _exact(engine), str(state.n_calls), str(state.n_tokens)]
        shown.add_row(*map(escape, [*cells, _version(engine), engine.failure]))
    return shown


def _state(engine: Engine) -> str:
    if not engine.paused:
        return engine.state
    waits = "" if engine.n_done >= engine.n_orders else ", not told yet"
    return f"{engine.state}, paused ({engine.paused}) for {engine.paused_s:.0f} s by {engine.paused_by}{waits}"


def _exact(engine: Engine) -> str:
    info = engine.info
    if info is None:
        return "?"
    if info.token_in and info.token_out:
        return f"yes ({info.token_in})"
    return "answers only" if info.token_out else "no"


def _version(engine: Engine) -> str:
    if engine.version == engine.engine_version:
        return engine.version
    return f"{engine.version} (told {engine.engine_version or 'none'})"


@engines.command()
@click.argument("engine")
@click.option("--model", default="", help="Ask for this model; default: the first that it lists.")
@click.option("--key-file", type=click.File(), help="A file with its API key, which so stands in no shell's history.")
@click.option("--tokenizer", default="", help="A folder or a name on a hub, where the engine does not say it.")
@click.option("--tool-format", default="", help="How its model writes tool calls; default: as its chat template says.")
@url_option
@plain_errors
def add(engine: str, model: str, key_file: TextIO | None, tokenizer: str, tool_format: str, url: str | None) -> None:
    """Let the farm use ENGINE, such as http://HOST:8000/v1, or use it again with other settings."""
    key = key_file.read().strip() if key_file is not None else "none"
    with connect(url) as farm:
        farm.add_engine(engine, model, key, tokenizer, tool_format)


@engines.command()
@click.argument("engine")
@url_option
@plain_errors
def drain(engine: str, url: str | None) -> None:
    """Send no new rollouts to ENGINE; those that play there finish there."""
    with connect(url) as farm:
        farm.drain_engine(engine)


@engines.command()
@click.argument("engine")
@url_option
@plain_errors
def remove(engine: str, url: str | None) -> None:
    """Use ENGINE no more; what plays there moves on."""
    with connect(url) as farm:
        farm.remove_engine(engine)


@engines.command()
@url_option
@plain_errors
def clear(url: str | None) -> None:
    """Use none of the engines any more."""
    with connect(url) as farm:
        click.echo(f"{farm.clear_engines()} engines removed")


@engines.command()
@click.argument("engine", nargs=-1)
@click.option("--mode", type=click.Choice(MODES), default="drain", show_default=True)
@click.option("--timeout", "timeout_s", default=600.0, show_default=True)
@url_option
@plain_errors
def pause(engine: tuple[str, ...], mode: str, timeout_s: float, url: str | None) -> None:
    """Hold back new calls to all engines, or to ENGINE..., and wait until they are paused.

    Calls that run end first (drain), freeze (keep), or are cut and go on after the resume (abort).
    """
    with connect(url) as farm:
        farm.pause_engines(mode, engine or None, timeout_s)  # type: ignore[arg-type]


@engines.command()
@click.argument("engine", nargs=-1)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True)
@url_option
@plain_errors
def resume(engine: tuple[str, ...], timeout_s: float, url: str | None) -> None:
    """Let calls to all engines, or to ENGINE..., go on."""
    with connect(url) as farm:
        farm.resume_engines(engine or None, timeout_s)


@engines.command(name="set-version")
@click.argument("version")
@click.argument("engine", nargs=-1)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True)
@url_option
@plain_errors
def set_version(version: str, engine: tuple[str, ...], timeout_s: float, url: str | None) -> None:
    """Say that all engines, or ENGINE..., have the weights VERSION now."""
    with connect(url) as farm:
        missed = farm.set_version(version, engine or None, timeout_s)
    if missed:
        raise click.ClickException(f"could not be told, and get no calls until they are: {', '.join(missed)}")
