"""The command line: `farm up | node | images | submit | watch | show | collect | cancel | rescore | doctor | …`."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from farm import display, doctor
from farm.adapters.arrays import arrays
from farm.client import connect
from farm.embedded import Embedded, flower_command
from farm.errors import FarmError, InvalidRequest
from farm.rollout import Rollout
from farm.settings import settings
from farm.store import migrations
from farm.store.engine import Store

console = Console()
F = TypeVar("F", bound=Callable[..., Any])


def _plain_errors(command: F) -> F:
    """One line for what a person can mend; no traceback."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (FarmError, TimeoutError) as error:
            raise click.ClickException(f"{type(error).__name__}: {error}") from error

    return run  # type: ignore[return-value]


_url = click.option("--url", help="The farm: a database URL or the folder of an embedded farm. Default: FARM_*.")


@click.group()
def main() -> None:
    """Play rollouts of LLM agents for reinforcement learning. Settings are read from FARM_* variables."""


@main.command(context_settings={"ignore_unknown_options": True})
@click.option("--flower/--no-flower", default=True, show_default=True, help="Show the jobs in a browser.")
@click.argument("node_options", nargs=-1, type=click.UNPROCESSED)
@_plain_errors
def up(flower: bool, node_options: tuple[str, ...]) -> None:
    """Run a whole farm on this machine until Ctrl-C: SQLite, Redis, three worker pools, Flower.

    NODE_OPTIONS are those of `farm node`, such as --run 64.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Embedded(settings(), node_options=node_options, flower=flower) as farm:
        console.print(f"farm   {farm.home}\nstore  {farm.store_url}\nbroker {farm.broker_url}", soft_wrap=True)
        if farm.flower_url:
            console.print(f"flower {farm.flower_url}")
        console.print("ready; Ctrl-C ends it", highlight=False)
        while not stop.wait(1.0):
            farm.check()


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


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("-n", "--n-samples", default=1, show_default=True, help="Rollouts of each instance.")
@click.option("--model", default="", help="Play only on engines with this model.")
@click.option("--sandbox", default="auto", show_default=True, help="auto, singularity or namespace.")
@click.option("--temperature", default=1.0, show_default=True)
@click.option("--seed", type=int, help="Sample k of a group is sent seed + k.")
@click.option("--max-turns", type=int)
@click.option("--priority", default=0, show_default=True)
@click.option("--key", help="Idempotency key: the same key gives the same batch.")
@click.option("--engine", help="An OpenAI-compatible server to add to the farm first, such as http://HOST:PORT/v1.")
@_url
@_plain_errors
def submit(
    file: Path,
    n_samples: int,
    model: str,
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
        "sandbox": sandbox,
        "sampling": {"temperature": temperature, "seed": seed},
        "limits": {} if max_turns is None else {"max_turns": max_turns},
        "priority": priority,
        "idempotency_key": key,
    }
    with connect(url) as farm:
        if engine:
            farm.add_engine(engine, model)
        click.echo(farm.submit(request))


def _instances(file: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="strict").splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise InvalidRequest(f"no JSON: {error}", field=f"{file}:{number}") from error
    return found


@main.command()
@click.argument("batch_id")
@_url
@_plain_errors
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
@_url
@_plain_errors
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
@_url
@_plain_errors
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
@_url
@_plain_errors
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
@click.argument("batch_id")
@click.argument("rollout_ids", nargs=-1)
@_url
@_plain_errors
def cancel(batch_id: str, rollout_ids: tuple[str, ...], url: str | None) -> None:
    """End a batch, or only some of its rollouts, now."""
    with connect(url) as farm:
        click.echo(f"{len(farm.cancel(batch_id, rollout_ids or None))} rollouts cancelled")


@main.command()
@click.argument("batch_id")
@_url
@_plain_errors
def rescore(batch_id: str, url: str | None) -> None:
    """Score a batch again from what was submitted, without playing it again."""
    with connect(url) as farm:
        click.echo(f"{len(farm.rescore(batch_id))} rollouts will be scored again")


@main.command()
@click.option("--port", default=5555, show_default=True)
@click.option(
    "--address", default="127.0.0.1", show_default=True, help="Flower has no login: think before you widen it."
)
@_plain_errors
def flower(port: int, address: str) -> None:
    """Show the farm's jobs in a browser, read-only."""
    _, broker_url = doctor.broker_and_store(settings())
    os.environ["FARM_BROKER_URL"] = broker_url
    os.execv(sys.executable, flower_command(port, address))  # noqa: S606 - no shell is wanted


@main.command(name="doctor", context_settings={"ignore_unknown_options": True})
@click.option("--sandbox", help="Try on this kind of sandbox what every sandbox promises, for a minute or two.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@_plain_errors
def check_up(sandbox: str | None, options: tuple[str, ...]) -> None:
    """Check what a farm needs here and say how to mend what is missing. Exit status 1 if something needed is.

    With --sandbox, OPTIONS are those of `python -m workers.testing.promises`, such as --group limits or --list.
    """
    if sandbox is not None:
        words = ["-m", "workers.testing.promises", sandbox, *options]
        os.execv(sys.executable, [sys.executable, *words])  # noqa: S606 - no shell is wanted
    if options:
        raise click.UsageError(f"{' '.join(options)}: only --sandbox NAME takes more options")
    table = Table(box=None, pad_edge=False, show_header=False)
    findings = list(doctor.examine(settings(), *doctor.broker_and_store(settings())))
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
@click.option("--to", default="head", show_default=True, help="A revision, `head` or `base`.")
@click.option("--url", help="A database URL. Default: FARM_STORE_URL, or the embedded farm's SQLite.")
@_plain_errors
def migrate(to: str, url: str | None) -> None:
    """Bring the database to this farm's schema."""
    store = Store(url or settings().database_url)
    try:
        migrations.migrate(store, to)
        click.echo(f"{store.name} is at {migrations.revision(store) or 'base'}")
    finally:
        store.close()
