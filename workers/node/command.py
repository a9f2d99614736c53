"""The command line of a node. What a node needs takes a second to load, and is loaded once the options have been read:
to check them, as `farm up` does before it starts anything, and to show them costs little.
"""

from __future__ import annotations

import os
from pathlib import Path

import click

from farm.startup import frozen_imports
from workers.process.supervision import HAND_BACK_S


@click.command()
@click.option("--init", "init_slots", default=4, show_default=True, help="Sandboxes started at a time.")
@click.option("--run", "run_slots", default=64, show_default=True, help="Agents that play at a time.")
@click.option("--eval", "eval_slots", default=8, show_default=True, help="Scorings at a time.")
@click.option("--room", default=0, help="Rollouts this node takes in all; default: the sum of the three.")
@click.option(
    "--grace",
    "grace_s",
    default=15.0,
    show_default=True,
    help=f"Seconds that what has begun may play on after SIGTERM. Up to {HAND_BACK_S:g} more go into handing back the "
    "rest: stay that far, and a few for the clean-up, below what kills the node: Slurm's KillWait is 30 s.",
)
@click.option("--log-dir", type=click.Path(path_type=Path), help="Write the workers' logs there.")
def main(init_slots: int, run_slots: int, eval_slots: int, room: int, grace_s: float, log_dir: Path | None) -> None:
    """Run this machine's part of the farm until SIGTERM; a second one, seconds later, ends the grace."""
    with frozen_imports():
        from farm.errors import FarmError
        from farm.settings import settings
        from workers import logs
        from workers.node.forked_worker import WorkerForkServer
        from workers.node.node_name import own_settings
        from workers.node.pools import Slots
        from workers.node.supervisor import Supervisor
    if not settings().broker_url:
        raise click.ClickException("FARM_BROKER_URL is not set: a node needs the farm's Redis (redis://…) or RabbitMQ")
    # before there are threads and files
    try:
        fork_server = WorkerForkServer(os.pipe())
        fork_server.fork()
    except OSError as error:
        raise click.ClickException(f"this node cannot start a process: {error}") from error
    slots = Slots(init_slots, run_slots, eval_slots, room or init_slots + run_slots + eval_slots)
    try:
        options, lock = own_settings()
        logs.set_up(options)
        Supervisor(options, slots, log_dir, grace_s, lock, fork_server).run()
    except FarmError as error:
        raise click.ClickException(str(error)) from error
