"""The command of a farm's nodes on Ray: `farm ray up`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from farm.cli.console import plain_errors, runs_farm, say, signals

_POLL_S = 1.0


@click.group()
def ray() -> None:
    """Run nodes of a farm on a Ray cluster, next to its trainer: up."""


@ray.command()
@click.option("--at", "shared", type=click.Path(path_type=Path), help="The shared folder. Default: FARM_HOME.")
@click.option("--address", default="auto", show_default=True, help="The Ray cluster, as for ray.init.")
@click.option(
    "--nodes", "n_nodes", type=click.IntRange(min=1), help="Number of Ray nodes. Default: those that have room."
)
@click.option("--cpus", type=click.FloatRange(min=0), default=1.0, show_default=True, help="CPUs per node.")
@click.option("--init", "init_slots", type=click.IntRange(min=1), help="As for `farm node`.")
@click.option("--run", "run_slots", type=click.IntRange(min=1), help="As for `farm node`.")
@click.option("--eval", "eval_slots", type=click.IntRange(min=1), help="As for `farm node`.")
@click.option(
    "--grace", "grace_s", type=click.FloatRange(min=0), default=15.0, show_default=True, help="As for `farm node`."
)
@click.option("--head-on-first", is_flag=True, help="One of them is also the head while there is no other.")
@plain_errors
@runs_farm
def up(
    shared: Path | None,
    address: str,
    n_nodes: int | None,
    cpus: float,
    init_slots: int | None,
    run_slots: int | None,
    eval_slots: int | None,
    grace_s: float,
    head_on_first: bool,
) -> None:
    """Run a node of the farm on each Ray node until Ctrl-C; then they release their rollouts.

    They end with this process, however it ends. The farm must be installed on the Ray nodes, and they must share the
    folder.
    """
    from farm.errors import InvalidRequest, NotAllowed
    from farm.launch.head_claim import is_led
    from farm.launch.ray_nodes import RayNodes, connected_ray, loaded_ray
    from farm.launch.slurm_pool import passed_settings
    from farm.settings import settings

    loaded_ray()
    folder = (shared or settings().home).absolute()
    if not head_on_first and not is_led(folder):
        raise InvalidRequest(f"no head runs in {folder}: first run `farm head --dir {folder}`, or add --head-on-first")
    library = connected_ray(address)
    # installed after Ray's own handlers
    received = signals()
    have = [each for each in library.nodes() if each["Alive"] and each["Resources"].get("CPU", 0.0) >= cpus]
    wanted = n_nodes or len(have)
    if not wanted:
        raise NotAllowed(f"no node of the Ray cluster at {address} has {cpus:g} CPUs")
    slots = {"--init": init_slots, "--run": run_slots, "--eval": eval_slots}
    options = [str(word) for name, n in slots.items() if n is not None for word in (name, n)]
    options += ["--head-on-first"] if head_on_first else []
    say(f"{wanted} nodes on Ray; {len(have)} have {cpus:g} CPUs now")
    printed: set[str] = set()
    with RayNodes(folder, wanted, cpus=cpus, options=options, settings=passed_settings(), grace_s=grace_s) as nodes:
        while not received:
            for node in nodes.look():
                ended = f" has ended with status {node.status} and is restarted; see" if node.status else ", log"
                if (text := f"node {node.name}{ended} {node.log}") not in printed or node.status:
                    printed.add(text)
                    say(text)
            time.sleep(_POLL_S)
    library.shutdown()
