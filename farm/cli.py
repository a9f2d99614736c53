"""The command line: `farm up | node | api | engines | images | submit | watch | show | collect | doctor | …`."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from prometheus_client import generate_latest, start_http_server
from rich.table import Table

from farm import display, doctor
from farm import metrics as farm_metrics
from farm.adapters.arrays import arrays
from farm.api_cli import api
from farm.client import connect, open_store
from farm.embedded import Embedded, flower_command
from farm.engines_cli import engines
from farm.errors import InvalidRequest
from farm.rollout import Rollout
from farm.settings import settings
from farm.store import migrations
from farm.store.engine import Store
from farm.store.engines import normal_url
from farm.terminal import console, plain_errors, url_option

_TICK_S = 0.2


@click.group()
def main() -> None:
    """Play rollouts of LLM agents for reinforcement learning. Settings are read from FARM_* variables."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a transcript may hold what a model wrote and no terminal can show
            stream.reconfigure(errors="backslashreplace")


main.add_command(engines)
main.add_command(api)


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--flower/--no-flower", default=True, show_default=True, help="Show the jobs in a browser.")
@click.argument("node_options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def up(flower: bool, node_options: tuple[str, ...]) -> None:
    """Run a whole farm on this machine until Ctrl-C: SQLite, Redis, three worker pools, Flower.

    NODE_OPTIONS are those of `farm node`, such as --run 64.
    """
    told = _signals()
    with Embedded(settings(), node_options=node_options, flower=flower) as farm:
        console.print(f"farm   {farm.home}\nstore  {farm.store_url}\nbroker {farm.broker_url}", soft_wrap=True)
        if farm.flower_url:
            console.print(f"flower {farm.flower_url}")
        console.print("ready; Ctrl-C ends it", highlight=False)
        while not told:
            farm.check()
            time.sleep(_TICK_S)


def _signals() -> list[int]:
    """Grows with each Ctrl-C and SIGTERM, which end nothing by themselves from now on."""
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # a list has no lock, which the very code that is interrupted might hold
        signal.signal(number, lambda number, frame: told.append(number))
    return told


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def node(options: tuple[str, ...]) -> None:
    """Run this machine's part of a farm until SIGTERM; one per node, for example under srun.

    Needs FARM_STORE_URL and FARM_BROKER_URL. --help lists the options.
    """
    os.execv(sys.executable, [sys.executable, "-m", "workers.node", *options])  # noqa: S606 - no shell is wanted


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def images(options: tuple[str, ...]) -> None:
    """Build sandbox images, or list and prune those in the cache: build, list, prune, pull; --help."""
    os.execv(sys.executable, [sys.executable, "-m", "workers.images", *options])  # noqa: S606 - no shell is wanted


@main.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def engine(options: tuple[str, ...]) -> None:
    """Run a double of an LLM server, to try the farm without a GPU: --scripted, and what --scripted --help lists."""
    if "--scripted" not in options:
        raise click.UsageError("only --scripted engines are the farm's own: `farm engine --scripted --help`")
    words = [option for option in options if option != "--scripted"]
    os.execv(sys.executable, [sys.executable, "-m", "workers.testing.engine", *words])  # noqa: S606 - no shell is wanted


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-n", "--n-samples", default=1, show_default=True, help="Rollouts of each instance.")
@click.option("--model", default="", help="Play only on engines with this model.")
@click.option("--agent", default="", help="Who plays it, such as mini-swe-agent. Default: the handler's own choice.")
@click.option("--sandbox", default="auto", show_default=True, help="auto, singularity or namespace.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--seed", type=int, help="Sample k of a group is sent seed + k.")
@click.option("--max-turns", type=int)
@click.option("--priority", default=0, show_default=True)
@click.option("--key", help="Idempotency key: the same key gives the same batch.")
@click.option("--engine", help="An LLM server to add first if the farm does not have it: http://HOST:PORT/v1.")
@url_option
@plain_errors
def submit(
    file: Path,
    n_samples: int,
    model: str,
    agent: str,
    sandbox: str,
    temperature: float,
    seed: int | None,
    max_turns: int | None,
    priority: int,
    key: str | None,
    engine: str | None,
    url: str | None,
) -> None:
    """Start a batch from FILE: one instance per line, {"data_source": ..., "fields": {...}}. Prints the batch id."""
    request = {
        "instances": _instances(file),
        "n_samples": n_samples,
        "model": model,
        "agent": agent,
        "sandbox": sandbox,
        "sampling": {"temperature": temperature, "seed": seed},
        "limits": {} if max_turns is None else {"max_turns": max_turns},
        "priority": priority,
        "idempotency_key": key,
    }
    with connect(url) as farm:
        if engine and normal_url(engine) not in [state.engine.url for state in farm.engines()]:
            # one that is there has settings of its own, such as a key
            farm.add_engine(engine, model)
        click.echo(farm.submit(request))


def _instances(file: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(file.read_bytes().split(b"\n"), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise InvalidRequest(f"no JSON: {error}", field=f"{file}:{number}") from error
            except RecursionError as error:
                raise InvalidRequest("it is nested too deep", field=f"{file}:{number}") from error
    return found


@main.command()
@click.argument("batch_id")
@url_option
@plain_errors
def watch(batch_id: str, url: str | None) -> None:
    """Show a batch's progress until it has ended, then a line per group."""
    with connect(url) as farm:
        display.watch(farm, batch_id, console)
        rollouts = farm.rollouts(batch_id)
        console.print(display.group_table(rollouts))
        for line in display.failures(rollouts)[:10]:
            console.print(line, style="red", markup=False)


@main.command()
@click.argument("rollout_id")
@url_option
@plain_errors
def show(rollout_id: str, url: str | None) -> None:
    """Print what a rollout did: its transcript, rewards, times per stage and token counts."""
    with connect(url) as farm:
        rollout = farm.rollout(rollout_id)
        console.print(
            display.transcript(rollout, farm.calls(rollout_id), farm.timings(rollout_id), farm.rewards(rollout_id))
        )
        if kept := farm.artefacts(rollout_id):
            console.print(display.artefact_table(kept))


@main.command()
@click.argument("rollout_id")
@click.argument("name", required=False)
@click.option("-o", "--output", type=click.Path(dir_okay=False, allow_dash=True, path_type=Path), help="- is stdout.")
@url_option
@plain_errors
def artefacts(rollout_id: str, name: str | None, output: Path | None, url: str | None) -> None:
    """List what a rollout's tools made and the model was not shown, or write one of them, NAME, to a file."""
    with connect(url) as farm:
        if name is None:
            console.print(display.artefact_table(farm.artefacts(rollout_id)))
            return
        data = farm.artefact(rollout_id, name)
    if output == Path("-"):
        sys.stdout.buffer.write(data)
        return
    target = output or Path(Path(name).name)
    target.write_bytes(data)
    click.echo(f"{len(data)} bytes written to {target}")


@main.command()
@click.argument("batch_id")
@click.option("-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help=".npz or .jsonl")
@click.option("--whole-groups", is_flag=True, help="In .npz: only groups all of whose rollouts can train.")
@click.option("--timeout", "timeout_s", type=float, help="Wait no longer than this for the batch to end.")
@url_option
@plain_errors
def collect(batch_id: str, output: Path, whole_groups: bool, timeout_s: float | None, url: str | None) -> None:
    """Write a batch to a file once it has ended: padded arrays (.npz) or one rollout per line (.jsonl)."""
    if output.suffix not in {".npz", ".jsonl"}:
        raise InvalidRequest("must end in .npz or .jsonl", field="output")
    with connect(url) as farm:
        rollouts = farm.collect(batch_id, timeout_s)
    if output.suffix == ".npz":
        with output.open("wb") as file:
            np.savez_compressed(file, **arrays(rollouts, whole_groups=whole_groups).as_dict())  # type: ignore[arg-type]
    else:
        output.write_text("".join(json.dumps(_line(rollout)) + "\n" for rollout in rollouts), encoding="utf-8")
    click.echo(f"{len(rollouts)} rollouts written to {output}")


def _line(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "data_source": rollout.data_source,
        "instance_id": rollout.instance_id,
        "state": rollout.state,
        "outcome": rollout.outcome,
        "reward": rollout.reward,
        "trainable": rollout.trainable,
        "failure": None if rollout.failure is None else rollout.failure.message,
        "segments": [
            {name: getattr(segment, name).tolist() for name in segment.__slots__} for segment in rollout.segments
        ],
    }


@main.command()
@click.argument("id")
@click.argument("rollout_ids", nargs=-1)
@url_option
@plain_errors
def cancel(id: str, rollout_ids: tuple[str, ...], url: str | None) -> None:
    """End a batch, a group (BATCH.GROUP) or a rollout (BATCH.GROUP.SAMPLE), or only some rollouts of it, now."""
    with connect(url) as farm:
        click.echo(f"{len(farm.cancel(id, rollout_ids or None))} rollouts cancelled")


@main.command()
@click.argument("id")
@url_option
@plain_errors
def rescore(id: str, url: str | None) -> None:
    """Score a batch, a group or a rollout again from what was submitted, without playing it again."""
    with connect(url) as farm:
        click.echo(f"{len(farm.rescore(id))} rollouts will be scored again")


@main.command()
@click.option("--port", type=click.IntRange(1, 65535), default=5555, show_default=True)
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="Flower has no login: think before you widen it."
)
@plain_errors
def flower(port: int, address: str) -> None:
    """Show the farm's jobs in a browser, read-only."""
    _, broker_url = doctor.store_and_broker(settings())
    os.environ["FARM_BROKER_URL"] = broker_url
    os.execv(sys.executable, flower_command(port, address))  # noqa: S606 - no shell is wanted


@main.command(name="doctor", context_settings={"ignore_unknown_options": True})
@click.option("--sandbox", help="Try on this kind of sandbox what every sandbox promises, for a minute or two.")
@click.option("--engine", help="Show what the LLM server at this address can do, such as http://HOST:8000/v1.")
@click.option("--batch", help="Check a batch: is all of it there, once, and is nothing where it must not be.")
@url_option
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def check_up(
    sandbox: str | None, engine: str | None, batch: str | None, url: str | None, options: tuple[str, ...]
) -> None:
    """Check what a farm needs here and say how to mend what is missing. Exit status 1 if something needed is.

    With --batch, exit status 1 if the numbers do not add up or an invariant is broken. With --sandbox, OPTIONS are
    those of `python -m workers.testing.promises`, such as --group limits or --list; with --engine, those of
    `python -m workers.engines`.
    """
    if batch is not None:
        with connect(url) as farm:
            numbers, wrong = farm.conservation(batch), farm.violations(batch)
        console.print(display.conservation(numbers, wrong))
        sys.exit(1 if wrong or numbers.off else 0)
    if engine is not None:
        words = ["-m", "workers.engines", engine, *options]
        os.execv(sys.executable, [sys.executable, *words])  # noqa: S606 - no shell is wanted
    if sandbox is not None:
        words = ["-m", "workers.testing.promises", sandbox, *options]
        os.execv(sys.executable, [sys.executable, *words])  # noqa: S606 - no shell is wanted
    if options:
        raise click.UsageError(f"{' '.join(options)}: only --sandbox NAME and --engine URL take more options")
    table = Table(box=None, pad_edge=False, show_header=False)
    findings = list(doctor.examine(settings(), *doctor.store_and_broker(settings(), url)))
    for finding in findings:
        mark = "[green]ok[/green]" if finding.ok else ("[red]bad[/red]" if finding.needed else "[yellow]no[/yellow]")
        table.add_row(mark, finding.what, finding.detail + ("" if finding.ok else f"\n  → {finding.mend}"))
    console.print(table)
    kinds = [finding.ok for finding in findings if finding.what.startswith("sandbox ")]
    if not any(kinds):
        console.print("[red]no kind of sandbox can run on this machine[/red]")
    if not any(kinds) or any(finding.needed and not finding.ok for finding in findings):
        sys.exit(1)


@main.command()
@click.option(
    "--port", type=click.IntRange(0, 65535), help="Serve them at this port until Ctrl-C, instead of printing them once."
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Where to serve them.")
@url_option
@plain_errors
def metrics(port: int | None, address: str, url: str | None) -> None:
    """Print the farm's numbers as Prometheus reads them; farm_violations is the alarm."""
    options = settings()
    with contextlib.closing(open_store(url)[0]) as store:
        numbers = farm_metrics.registry(store, options.node_timeout_s)
        if port is None:
            click.echo(generate_latest(numbers).decode(), nl=False)
            return
        told = _signals()
        server, _ = start_http_server(port, address, numbers)
        click.echo(f"http://{address}:{server.server_port}/metrics")
        while not told:
            time.sleep(_TICK_S)
        server.shutdown()


@main.command()
@click.option("--to", default="head", show_default=True, help="A revision, `head` or `base`.")
@click.option("--url", help="A database URL. Default: FARM_STORE_URL, or the embedded farm's SQLite.")
@plain_errors
def migrate(to: str, url: str | None) -> None:
    """Bring the database to this farm's schema."""
    store = Store(url or settings().database_url)
    try:
        migrations.migrate(store, to)
        click.echo(f"{store.name} is at {migrations.revision(store) or 'base'}")
    finally:
        store.close()
