"""The commands that start something on this machine: a farm, a node, a scripted engine, an image build, Flower."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import click

from farm.cli.console import become, console, plain_errors, runs_farm, signals
from farm.errors import InvalidRequest

_POLL_S = 0.2
_THROUGH = {"ignore_unknown_options": True, "help_option_names": []}
"""Context settings of commands whose options another program parses."""


class _Up(click.Command):
    """Adds the node's options to its help."""

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        shown = subprocess.run([sys.executable, "-m", "workers.node", "--help"], capture_output=True, text=True)
        _, _, options = shown.stdout.partition("Options:\n")
        with formatter.section("NODE_OPTIONS"):
            formatter.write(options)


@click.command(cls=_Up, context_settings={"ignore_unknown_options": True})
@click.option(
    "--flower/--no-flower", default=True, show_default=True, help="Serve Flower, a view of the jobs for browsers."
)
@click.option("--web/--no-web", default=True, show_default=True, help="Serve the API and the page for browsers.")
@click.argument("node_options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
@runs_farm
def up(flower: bool, web: bool, node_options: tuple[str, ...]) -> None:
    """Run a whole farm on this machine until Ctrl-C: SQLite, Redis, three worker pools, API, page, Flower.

    NODE_OPTIONS are those of `farm node`, such as --run 64; they are checked before anything is started.
    """
    from farm.cli.doctor import sandbox_in_use
    from farm.configuration.secret_values import without_credentials
    from farm.embedded.embedded_farm import FLOWER_USER, Embedded
    from farm.home import KEY_FILE
    from farm.observing import process_log
    from farm.settings import settings

    try:
        settings().home.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        where = f"{settings().home} cannot be created ({error.strerror})"
        raise InvalidRequest(f"{where}: set FARM_HOME to a folder that you own", field="FARM_HOME") from error
    if node_options:
        # check them first, so that a mistake does not cost a start
        check = [sys.executable, "-m", "workers.node.option_check", *node_options]
        read = subprocess.run(check, start_new_session=True)
        if read.returncode:
            sys.exit(read.returncode)
    received = signals()
    process_log.set_up(settings(), "up")
    with Embedded(settings(), node_options=node_options, flower=flower, api=web) as farm:
        store_url, broker_url = (without_credentials(url) for url in (farm.store_url, farm.broker_url))
        console.print(f"farm    {farm.home}\nstore   {store_url}\nbroker  {broker_url}", soft_wrap=True)
        if farm.api_url:
            console.print(f"page    {farm.api_url}/web/ (the key is in {farm.home / KEY_FILE})", soft_wrap=True)
        if farm.flower_url:
            login = f"(user {FLOWER_USER}, password in {farm.home / KEY_FILE})"
            console.print(f"flower  {farm.flower_url} {login}", soft_wrap=True)
        console.print(f"sandbox {sandbox_in_use(settings())}", soft_wrap=True, markup=False, highlight=False)
        console.print("ready; Ctrl-C ends it", highlight=False)
        while not received:
            farm.check()
            time.sleep(_POLL_S)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def node(options: tuple[str, ...]) -> None:
    """Run this machine's part of a farm until SIGTERM; one per node, for example under srun.

    Needs FARM_STORE_URL and FARM_BROKER_URL. --help lists the options.
    """
    become("workers.node", options)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def images(options: tuple[str, ...]) -> None:
    """Manage sandbox images: alias, build, list, prune, pull."""
    become("workers.cli.images", options)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def tasks(options: tuple[str, ...]) -> None:
    """Test tasks before they are submitted: `check DIR` with their solutions, `attack DIR|FILE` with cheats."""
    become("workers.cli.harbor_tasks", options)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def agents(options: tuple[str, ...]) -> None:
    """List the installed agents, or run one on a scripted engine, without a farm: list, check."""
    become("workers.cli.agent_check", options)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def environments(options: tuple[str, ...]) -> None:
    """List the installed step environments, or check that one is deterministic: list, check."""
    become("workers.cli.environment_check", options)


@click.command(context_settings=_THROUGH)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def engine(options: tuple[str, ...]) -> None:
    """Run a scripted LLM server, to try the farm without a GPU: --scripted."""
    if "--scripted" not in options and not {"-h", "--help"} & {*options}:
        raise click.UsageError("--scripted is required: see `farm engine --scripted --help`")
    become("workers.testing.engine", [option for option in options if option != "--scripted"])


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=5555, show_default=True)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@plain_errors
@runs_farm
def flower(port: int, address: str) -> None:
    """Show the farm's jobs in a browser, read-only.

    Log in as user `farm` with the farm's key as the password: FARM_API_KEY, else the one in FARM_HOME, which is created
    if missing.
    """
    from farm.cli.doctor import store_and_broker
    from farm.cli.listening import bind
    from farm.embedded.embedded_farm import flower_command
    from farm.home import own_key
    from farm.scheduler.broker import check_broker
    from farm.settings import settings

    _, broker_url = store_and_broker(settings())
    check_broker(broker_url)
    # a port in use: Flower would print a traceback
    bind(address, port).close()
    os.environ |= {"FARM_BROKER_URL": broker_url, "FARM_API_KEY": own_key(settings())}
    os.execv(sys.executable, flower_command(port, address))  # noqa: S606 - no shell is wanted
