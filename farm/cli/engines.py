"""The commands for engines: `farm engines list | add | drain | remove | clear | pause | resume | …`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

import click
from rich.markup import escape
from rich.table import Table

from farm.cli.console import connected, console, on_farm, plain_errors, url_option
from farm.configuration.service_urls import normal_url

if TYPE_CHECKING:
    from farm.client.farm import Farm
    from farm.records.engine_state import EngineState, StoredEngine

_ASK_S = 5.0
_NODE_S = 15.0
"""Seconds to wait for a node's probe, which usually takes one."""
_POLL_S = 0.1


@click.group()
def engines() -> None:
    """Manage the LLM servers that all nodes share."""


@engines.command(name="list")
@on_farm
def list_engines(farm: Farm) -> None:
    """List the engines: kind, capabilities, state, load, weights, and problems."""
    states = farm.engines()
    if not states:
        console.print("no engines; `farm engines add http://HOST:PORT/v1` adds one")
        return
    print_engines(states)


def table(states: Sequence[EngineState]) -> Table:
    """Return a row for each engine in its last known state, without its key."""
    shown = Table(box=None, pad_edge=False)
    # addresses must be complete, to be copied
    shown.add_column("engine", no_wrap=True)
    for title in ("kind", "model", "state", "token-exact", "calls", "tokens", "version"):
        shown.add_column(title, overflow="fold", min_width=len(title))
    for state in states:
        engine, info = state.engine, state.engine.info
        kind = f"{info.kind} {info.version}".strip() if info else "?"
        model = engine.model or (info.model if info else "") or "?"
        cells = [engine.url, kind, model, _state(engine), _exact(engine), str(state.n_calls), str(state.n_tokens)]
        shown.add_row(*map(escape, [*cells, _version(engine)]))
    return shown


def print_engines(states: Sequence[EngineState]) -> None:
    """Print the table of engines, and a line for each that gets no calls."""
    from farm.cli.display import print_whole
    from farm.cli.readiness import engine_trouble

    print_whole(console, table(states))
    for state in states:
        if trouble := engine_trouble(state.engine):
            console.print(f"{state.engine.url}: {trouble}", style="yellow", markup=False, soft_wrap=True)


def _state(engine: StoredEngine) -> str:
    if not engine.paused:
        return f"{engine.state}, {engine.status}" if engine.status == "without weights" else engine.state
    waits = "" if engine.n_done >= engine.n_orders else ", not ordered yet"
    return f"{engine.state}, paused ({engine.paused}) for {engine.paused_s:.0f} s by {engine.paused_by}{waits}"


def _exact(engine: StoredEngine) -> str:
    info = engine.info
    if info is None:
        return "?"
    if info.token_in and info.token_out:
        return f"yes ({info.token_in})"
    return "answers only" if info.token_out else "no"


def _version(engine: StoredEngine) -> str:
    if engine.version == engine.engine_version:
        return engine.version
    return f"{engine.version} (has {engine.engine_version or 'none'})"


@engines.command()
@click.argument("engine")
@click.option("--model", default="", help="Model to request; default: the first that it lists.")
@click.option(
    "--key-file", type=click.File(), help="A file with its API key, which keeps the key out of the shell's history."
)
@click.option("--tokenizer", default="", help="A folder or a name on a hub, if the engine does not report it.")
@click.option("--tool-format", default="", help="Format of its model's tool calls; default: from its chat template.")
@url_option
@plain_errors
def add(engine: str, model: str, key_file: TextIO | None, tokenizer: str, tool_format: str, url: str | None) -> None:
    """Add ENGINE, such as http://HOST:8000/v1, or change its settings.

    Probes it once from here, and shows the capabilities found by a node. An engine that does not answer stays added.
    """
    from farm.cli.readiness import takes_rollouts

    key = key_file.read().strip() if key_file is not None else "none"
    with connected(url) as farm:
        farm.add_engine(engine, model, key, tokenizer, tool_format)
        address = normal_url(engine)
        if problem := _problem(address, key, model):
            click.secho(f"{address} was added, but {problem}", fg="yellow", err=True)
            return
        state = _once_probed(farm, address) if any(map(takes_rollouts, farm.nodes())) else None
    if state is None:
        click.secho(f"{address} was added and answers here; no node has probed it yet", fg="yellow", err=True)
        return
    print_engines([state])


def _problem(url: str, key: str, model: str) -> str:
    """Probe an engine for its models; return the reason why rollouts may find none there, or an empty text."""
    import httpx2

    headers = {} if key == "none" else {"authorization": f"Bearer {key}"}
    try:
        answer = httpx2.get(f"{url}/models", headers=headers, timeout=_ASK_S, trust_env=False)
        names = [str(each["id"]) for each in answer.raise_for_status().json()["data"]]
    except httpx2.HTTPStatusError as error:
        return f"it answers with status {error.response.status_code}: does it need a key (--key-file)?"
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"it does not answer from here ({error}): nodes will keep probing it"
    except (ValueError, KeyError, TypeError):
        return "the server there is not OpenAI-compatible: does the address end in /v1?"
    if not names:
        return "it serves no model"
    if model and model not in names:
        return f"it does not serve {model!r}, but {', '.join(names[:10])}"
    return ""


def _once_probed(farm: Farm, url: str) -> EngineState | None:
    """Return an engine's state once a node has probed it; None if none does within `_NODE_S`."""
    deadline = time.monotonic() + _NODE_S
    while True:
        state = next((each for each in farm.engines() if each.engine.url == url), None)
        if state is None or state.engine.info is not None or state.engine.failure:
            return state
        if time.monotonic() > deadline:
            return None
        time.sleep(_POLL_S)


@engines.command()
@click.argument("engine")
@on_farm
def drain(farm: Farm, engine: str) -> None:
    """Send no new rollouts to ENGINE; running ones finish there."""
    farm.drain_engine(engine)


@engines.command()
@click.argument("engine")
@on_farm
def remove(farm: Farm, engine: str) -> None:
    """Stop using ENGINE; its running rollouts move to another engine."""
    farm.remove_engine(engine)


@engines.command()
@click.option("--forget-weights", is_flag=True, help="Engines added later may start with their own weights.")
@on_farm
def clear(farm: Farm, forget_weights: bool) -> None:
    """Remove all engines. Engines added later get no calls until they have the weights that were named last."""
    click.echo(f"{farm.clear_engines(forget_weights)} engines removed")


@engines.command()
@click.argument("engine", nargs=-1)
@click.option("--mode", type=click.Choice(("drain", "keep", "abort")), default="drain", show_default=True)
@click.option("--timeout", "timeout_s", default=600.0, show_default=True)
@on_farm
def pause(farm: Farm, engine: tuple[str, ...], mode: str, timeout_s: float) -> None:
    """Hold back new calls to all engines, or to ENGINE..., and wait until they are paused.

    Running calls end first (drain), freeze (keep), or are cut and continue after the resume (abort).
    """
    farm.pause_engines(mode, engine or None, timeout_s)  # type: ignore[arg-type]


@engines.command()
@click.argument("engine", nargs=-1)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True)
@on_farm
def resume(farm: Farm, engine: tuple[str, ...], timeout_s: float) -> None:
    """Resume calls to all engines, or to ENGINE..."""
    farm.resume_engines(engine or None, timeout_s)


@engines.command(name="set-version")
@click.argument("version")
@click.argument("engine", nargs=-1)
@click.option("--timeout", "timeout_s", default=60.0, show_default=True)
@on_farm
def set_version(farm: Farm, version: str, engine: tuple[str, ...], timeout_s: float) -> None:
    """Set the weight version of all engines, or of ENGINE..., to VERSION."""
    missed = farm.set_version(version, engine or None, timeout_s)
    if missed:
        raise click.ClickException(f"not reached, and without calls until they confirm: {', '.join(missed)}")
