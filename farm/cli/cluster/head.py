"""The command that runs the head of a farm on a cluster: `farm head`."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import click

from farm.cli.console import console, plain_errors, runs_farm, signals

_POLL_S = 0.2


@click.command()
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="The shared folder. Default: FARM_HOME.")
@click.option("--host", default="", help="This machine's address for other machines. Default: from its host name.")
@click.option("--standby", is_flag=True, help="While another head runs, wait to take its place.")
@click.option(
    "--flower/--no-flower", default=True, show_default=True, help="Serve Flower, a view of the jobs for browsers."
)
@click.option("--of-node", is_flag=True, hidden=True, help="Leave SIGTERM to the node that started this.")
@plain_errors
@runs_farm
def head(folder: Path | None, host: str, standby: bool, flower: bool, of_node: bool) -> None:
    """Run the head of a farm on a cluster until Ctrl-C: Postgres, Redis, API, page, Flower.

    Its data, address and keys are in a folder that all machines share, private to its owner; `farm node --at DIR` finds
    the head there. Set FARM_STORE_URL and FARM_BROKER_URL to use existing servers instead.
    """
    from farm.embedded.embedded_farm import FLOWER_USER
    from farm.errors import Conflict
    from farm.home import KEY_FILE, own_home
    from farm.launch.head import ClusterHead
    from farm.launch.head_claim import HeadClaim
    from farm.observing import process_log
    from farm.settings import settings

    received = signals()
    if of_node:
        # Slurm signals all processes of a step, and the node needs its head to release its rollouts
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    options = settings()
    process_log.set_up(options, "head")
    home = (folder or options.home).absolute()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    claim = HeadClaim(home)
    if not claim.acquire(standby, lambda: not received):
        return
    try:
        own_home(home)
        with ClusterHead(options.model_copy(update={"home": home}), home, claim, host, flower) as started:
            address = started.address
            console.print(f"head    {home}\nstore   {started.store_name}", soft_wrap=True)
            console.print(f"page    {address.api_url}/web/ (the key is in {home / KEY_FILE})", soft_wrap=True)
            if address.flower_url:
                login = f"(user {FLOWER_USER}, password in {home / KEY_FILE})"
                console.print(f"flower  {address.flower_url} {login}", soft_wrap=True)
            console.print(f"ready; nodes: farm node --at {home}", soft_wrap=True, highlight=False)
            while not received:
                started.check()
                if claim.lost:
                    raise Conflict(f"another head has taken over {home}")
                time.sleep(_POLL_S)
    finally:
        claim.release()
