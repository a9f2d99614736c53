"""The command line of a node. The node's modules take a second to load and are loaded after the options are read, so
that it is cheap to show the options and to check them, as `farm up` does before it starts anything.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import click

from farm.startup import frozen_imports
from workers.process.supervision import HAND_BACK_S

_COUNT = click.IntRange(min=1)


@click.command()
@click.option(
    "--init", "init_slots", type=_COUNT, help="Sandboxes started at a time.  [default: FARM_INIT_SLOTS, else 4]"
)
@click.option("--run", "run_slots", type=_COUNT, help="Agents that run at a time.  [default: FARM_RUN_SLOTS, else 64]")
@click.option("--eval", "eval_slots", type=_COUNT, help="Evaluations at a time.  [default: FARM_EVAL_SLOTS, else 8]")
@click.option(
    "--room",
    type=click.IntRange(min=0),
    help="Maximum number of rollouts on this node; 0: the sum of the three.  [default: FARM_ROOM]",
)
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(min=0),
    help=f"Seconds that running work may go on after SIGTERM. Requeuing the rest takes up to {HAND_BACK_S:g} s more, "
    "and the clean-up a few: choose the sum less than the time until the node is killed (Slurm's KillWait is 30 s).  "
    "[default: FARM_GRACE_S, else 15]",
)
@click.option(
    "--log-dir", type=click.Path(path_type=Path), help="Write the workers' logs there.  [default: FARM_LOG_DIR]"
)
@click.option("--at", "shared", type=click.Path(path_type=Path), help="The folder of a `farm head` to follow.")
@click.option(
    "--head-on-first",
    is_flag=True,
    help="Also run the head of that folder while there is none: the first node does, and another after its end.",
)
def main(shared: Path | None, head_on_first: bool, **overrides: Any) -> None:
    """Run this machine's part of the farm until SIGTERM; a second one, seconds later, ends the grace."""
    if head_on_first and shared is None:
        raise click.UsageError("--head-on-first needs --at DIR, the folder that all nodes share")
    with frozen_imports():
        from farm.embedded.node_folder import own_settings
        from farm.errors import FarmError
        from farm.scheduler.broker import check_broker
        from farm.settings import settings
        from workers import logs
        from workers.node.followed_head import FollowedHead
        from workers.node.node_cleanup import CacheKeeper
        from workers.node.pools import Slots, WorkerForkServer
        from workers.node.supervisor import Supervisor
    with contextlib.ExitStack() as stack:
        try:
            head = stack.enter_context(FollowedHead(shared, head_on_first)) if shared is not None else None
            if head is not None and not head.reached:
                return
            chosen = settings().model_copy(
                update={name: value for name, value in overrides.items() if value is not None}
            )
            if not chosen.broker_url:
                raise click.ClickException(
                    "FARM_BROKER_URL is not set: a node needs the farm's Redis (redis://…) or RabbitMQ, or --at DIR"
                )
            # before there are threads and open files
            try:
                fork_server = WorkerForkServer(os.pipe())
                fork_server.fork(head.descriptors if head is not None else ())
            except OSError as error:
                raise click.ClickException(f"this node cannot start a process: {error}") from error
            counts = (chosen.init_slots, chosen.run_slots, chosen.eval_slots)
            slots = Slots(*counts, chosen.room or sum(counts))
            options, lock = own_settings()
            logs.set_up(options)
            if head is not None:
                head.follow()
            check_broker(options.broker_url)
            stack.enter_context(CacheKeeper(options))
            Supervisor(options, slots, chosen.log_dir, chosen.grace_s, lock, fork_server).run()
        except FarmError as error:
            raise click.ClickException(str(error)) from error
