"""The commands for a farm's Slurm jobs: `farm slurm script | up | ls | logs | scale | down`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from farm.cli.console import console, first_s, plain_errors, runs_farm, say

if TYPE_CHECKING:
    from farm.launch.slurm_pool import Pools

_POLL_S = 0.5
_PATIENCE_S = 30.0
"""Seconds to wait for the head's answer about the nodes of jobs."""
_HEAD_SIZE = {"cpus": 1, "min": 2, "max": 2}
"""One head, and one on standby."""

_dir = click.option("--dir", "folder", type=click.Path(path_type=Path), help="The shared folder. Default: FARM_HOME.")


def _pool_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe the jobs; they override the tables of farm.toml."""
    options = [
        _dir,
        click.option("--pool", help="Only this one of the tables [slurm.NAME] in farm.toml."),
        click.option("--partition", help="Slurm's partition."),
        click.option("--account", help="Slurm's account."),
        click.option("--time", help="Time limit of each job, such as 4:00:00."),
        click.option("--cpus", type=click.IntRange(min=1), help="CPUs per job."),
        click.option("--mem", help="Memory per job, such as 32G."),
        click.option("--nodes", type=click.IntRange(min=0), help="Number of jobs: sets --min and --max."),
        click.option("--min", "least", type=click.IntRange(min=0), help="Minimum number of jobs."),
        click.option("--max", "most", type=click.IntRange(min=0), help="Maximum number of jobs, while rollouts wait."),
        click.option("--setup", help="Shell commands before the node starts, such as 'module load apptainer'."),
        click.option(
            "--sbatch", multiple=True, help="Additional sbatch option, such as --constraint=ssd; may be repeated."
        ),
        click.option("--run", "run_slots", type=click.IntRange(min=1), help="Agents that run at a time on a node."),
        click.option(
            "--head/--no-head", default=None, help="Submit a job for the head. Default: if none runs elsewhere."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@click.group()
def slurm() -> None:
    """Run nodes of a farm as Slurm jobs: script, up, ls, logs, scale, down."""


@slurm.command()
@_pool_options
@plain_errors
@runs_farm
def script(folder: Path | None, **given: Any) -> None:
    """Print the scripts that would be submitted, one per pool."""
    from farm.launch.slurm_commands import kill_wait_s
    from farm.launch.slurm_pool import job_script

    shared = _shared(folder)
    for name, pool in _pools(shared, given).items():
        click.echo(job_script(shared, _farm_id(shared), name, pool, kill_wait_s()), nl=False)


@slurm.command()
@_pool_options
@click.option(
    "--script",
    "scripts",
    multiple=True,
    metavar="POOL=FILE",
    help="Submit this script for a pool, e.g. an edited one of `farm slurm script`.",
)
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the first node is ready.")
@plain_errors
@runs_farm
def up(folder: Path | None, scripts: tuple[str, ...], wait: bool, **given: Any) -> None:
    """Submit the jobs of a farm, including its head, which maintains their number from then on."""
    from farm.embedded.node_folder import locked
    from farm.errors import InvalidRequest
    from farm.home import own_home, write_own
    from farm.launch import slurm_commands
    from farm.launch.head_claim import is_led
    from farm.launch.slurm_pool import HEAD, job_keys, job_name, job_script, keys_path, replace_pools, script_path

    shared = _shared(folder)
    own_home(shared)
    pools, own = _pools(shared, given), dict(each.partition("=")[::2] for each in scripts)
    if unknown := own.keys() - pools.keys():
        raise InvalidRequest(f"there is no pool {', '.join(sorted(unknown))}: {', '.join(pools)}", field="script")
    led = is_led(shared)
    if HEAD not in pools and not led:
        raise InvalidRequest(
            f"no head runs in {shared} to maintain the jobs: first run `farm head --dir {shared}` on a machine "
            "that can submit jobs, or leave --no-head out"
        )
    farm_id, kill_wait_s = _farm_id(shared), slurm_commands.kill_wait_s()
    for sub in ("slurm", "logs"):
        (shared / sub).mkdir(mode=0o700, exist_ok=True)
    # two at once would submit two heads
    with locked(shared / "slurm" / "lock", f"another `farm slurm up` is running for {shared}"):
        for name, pool in pools.items():
            text = Path(own[name]).read_text() if name in own else job_script(shared, farm_id, name, pool, kill_wait_s)
            write_own(script_path(shared, name), text)
            write_own(keys_path(shared, name), job_keys(name))
        replace_pools(shared, pools)
        if HEAD in pools and not led and not slurm_commands.jobs_named([job_name(farm_id, HEAD)]):
            head_id = slurm_commands.submit(script_path(shared, HEAD), max(1, pools[HEAD].min))
            say(f"job {head_id}: {HEAD}")
            for name, pool in pools.items():
                # they start loading while the head creates its database
                if name != HEAD and pool.min and not slurm_commands.jobs_named([job_name(farm_id, name)]):
                    say(f"job {slurm_commands.submit(script_path(shared, name), pool.min, after=head_id)}: {name}")
    if wait:
        _await_node(shared, job_name(farm_id, HEAD), any(pool.min for name, pool in pools.items() if name != HEAD))


@slurm.command()
@_dir
@plain_errors
@runs_farm
def ls(folder: Path | None) -> None:
    """List the jobs of a farm with their nodes and numbers of rollouts."""
    from farm.errors import ServiceError
    from farm.launch.slurm_commands import jobs_named
    from farm.launch.slurm_keeper import status
    from farm.launch.slurm_pool import job_name, stored_pools

    shared = _shared(folder)
    pools = stored_pools(shared)
    names = {job_name(_farm_id(shared), pool): pool for pool in pools}
    jobs, fault = jobs_named(list(names)), ""
    try:
        node_of, occupied = _nodes(shared, first_s())
    except ServiceError as error:
        node_of, occupied, fault = {}, {}, str(error)
    table = Table(box=None, pad_edge=False)
    for column in ("job", "pool", "state", "left", "on", "node", "rollouts"):
        table.add_column(column, no_wrap=True)
    for job in jobs:
        node = node_of.get(job.job_id, "")
        left = "" if job.pending else ("∞" if job.left_s == float("inf") else f"{job.left_s / 60:.0f} min")
        state = f"{job.state} ({job.reason})" if job.pending else job.state
        n_rollouts = str(occupied.get(node, 0)) if node else ""
        table.add_row(job.array_element, names[job.name], state, left, job.nodes, node, n_rollouts)
    console.print(table)
    for name, pool_status in status(shared).items():
        n = sum(names[job.name] == name for job in jobs)
        if name in pools:
            line = f"{name}: {n} jobs, {pool_status.get('wanted')} wanted, from {pools[name].min} to {pools[name].max}"
            say(f"{line}; {pool_status['fault']}" if pool_status.get("fault") else line)
    if fault:
        say(f"the head does not answer, so nodes are not shown: {fault}")


@slurm.command()
@click.argument("node")
@click.option("-f", "follow", is_flag=True, help="Follow the log.")
@_dir
@plain_errors
@runs_farm
def logs(node: str, follow: bool, folder: Path | None) -> None:
    """Print the log of NODE: a node's name, a job's id, or `head`."""
    from farm.errors import FarmError, NotFound
    from farm.launch.slurm_pool import HEAD

    shared, fault = _shared(folder), ""
    files = sorted((shared / "logs").glob("farm-*.log"), key=lambda path: path.stat().st_mtime)
    if node == HEAD:
        matching = [path for path in files if f"-{HEAD}-" in path.name]
    else:
        job = node
        try:
            job = {name: job for job, name in _nodes(shared, _PATIENCE_S)[0].items()}.get(node, node)
        except FarmError as error:
            fault = f"; the head, which knows the nodes' names, does not answer: {error}"
        wanted = _log_words(job)
        matching = [path for path in files if wanted & {*path.stem.split("-")} or path.stem.endswith(f"-{node}")]
    if not matching:
        raise NotFound(f"there is no log of {node} in {shared / 'logs'}: `farm slurm ls` lists jobs and nodes{fault}")
    if follow:
        os.execvp("tail", ["tail", "-n", "100", "-F", str(matching[-1])])  # noqa: S606 - no shell is wanted
    click.echo(matching[-1].read_text(errors="replace"), nl=False)


@slurm.command()
@click.argument("n", type=click.IntRange(min=0))
@click.option("--pool", help="The pool, if there are several.")
@_dir
@plain_errors
@runs_farm
def scale(n: int, pool: str | None, folder: Path | None) -> None:
    """Set the number of jobs of a pool to N regardless of load: submits more, or lets idle ones end."""
    from farm.errors import InvalidRequest
    from farm.launch.slurm_pool import HEAD, store_pools, stored_pools

    shared = _shared(folder)
    pools = stored_pools(shared)
    names = [name for name in pools if name != HEAD]
    name = pool or names[0]
    if (pool is None and len(names) > 1) or name not in names:
        raise InvalidRequest(f"give one of {', '.join(names)}", field="pool")
    store_pools(shared, pools | {name: pools[name].model_copy(update={"min": n, "max": n})})


@slurm.command()
@_dir
@plain_errors
@runs_farm
def down(folder: Path | None) -> None:
    """Cancel all jobs of a farm, the head last; its data stays."""
    from farm.launch import slurm_commands
    from farm.launch.slurm_pool import HEAD, job_name, replace_pools, stored_pools

    shared = _shared(folder)
    pools = stored_pools(shared)
    farm_id = _farm_id(shared)
    replace_pools(shared, {})
    for names in ([name for name in pools if name != HEAD], [HEAD]):
        of_pools = [job_name(farm_id, name) for name in names]
        # nodes release their rollouts to the head, so it must outlive them; it may also just have submitted another
        while of_pools and slurm_commands.any_left(of_pools):
            slurm_commands.cancel(slurm_commands.jobs_named(of_pools))
            time.sleep(_POLL_S)


def _shared(folder: Path | None) -> Path:
    from farm.settings import settings

    return (folder or settings().home).absolute()


def _farm_id(shared: Path) -> str:
    """Return the id of the farm in a folder; it is created with the first address."""
    from farm.launch.shared_address import first_address

    return first_address(shared).farm_id


def _pools(shared: Path, given: dict[str, Any]) -> Pools:
    """Return the pools of farm.toml, or one from the options only; options override the file."""
    from farm.errors import InvalidRequest
    from farm.launch.head_claim import is_led
    from farm.launch.slurm_pool import HEAD, checked, keeps_head, pools_of_file

    tables = {name: pool.model_dump(exclude_unset=True) for name, pool in pools_of_file().items()}
    own_head = tables.pop(HEAD, None)
    if given["pool"] is not None and given["pool"] not in tables:
        raise InvalidRequest(f"there is no table [slurm.{given['pool']}] in farm.toml", field="pool")
    chosen = {given["pool"]: tables[given["pool"]]} if given["pool"] else tables or {"node": {}}
    some = {"min": given["least"], "max": given["most"]}
    if given["nodes"] is not None:
        some = {"min": given["nodes"], "max": given["nodes"]}
    elif given["least"] is not None and given["most"] is None:
        some["max"] = max(given["least"], 1)
    elif given["most"] is not None and given["least"] is None:
        some["min"] = min(given["most"], 1)
    same = {name: given[name] for name in ("partition", "account", "time", "setup")}
    size = {name: given[name] for name in ("cpus", "mem", "run_slots")}
    more = {"sbatch": given["sbatch"] or None}
    options = {name: value for name, value in (same | size | some | more).items() if value is not None}
    options_of = {name: table | options for name, table in chosen.items()}
    has_job = given["head"]
    if has_job is None:
        has_job = own_head is not None or keeps_head(shared) or not is_led(shared)
    if has_job:
        shared_options = {name: value for name, value in same.items() if value is not None}
        options_of = {HEAD: _HEAD_SIZE | shared_options | (own_head or {})} | options_of
    return checked(options_of, "slurm")


def _nodes(shared: Path, patience_s: float) -> tuple[dict[str, str], dict[str, int]]:
    """Return job → node and node → number of its rollouts; nothing without a head. Raises StoreUnavailable."""
    from farm.launch.shared_address import read_address
    from farm.launch.slurm_keeper import demand
    from farm.settings import settings
    from farm.store.database import Store

    address = read_address(shared)
    if address is None or not address.head:
        return {}, {}
    store = Store(address.store_url)
    try:
        occupied, _, node_of = store.read(partial(demand, node_timeout_s=settings().node_timeout_s), patience_s)
    finally:
        store.close()
    return node_of, occupied


def _log_words(job: str) -> set[str]:
    """Return the words that identify a job's log: its own id, and its array's with the index."""
    from farm.errors import FarmError
    from farm.launch.slurm_commands import array_element

    try:
        return {job, array_element(job)}
    except FarmError:
        return {job}


def _await_node(shared: Path, head_jobs: str, has_nodes: bool) -> None:
    """Wait for the head, and for a node if there should be one. Raises NotAllowed if the head's job has ended."""
    from farm.errors import NotAllowed, ServiceError
    from farm.launch.head_claim import is_led
    from farm.launch.shared_address import read_address
    from farm.launch.slurm_commands import jobs_named
    from farm.launch.slurm_keeper import status

    printed: set[str] = set()
    while True:
        address, text = read_address(shared), ""
        if address is not None and address.head:
            text = f"page    {address.api_url}/web/ (the key is in {shared / 'api_key'})"
            with suppress(ServiceError):
                if not has_nodes or _nodes(shared, first_s())[0]:
                    if text not in printed:
                        say(text)
                    break
            for name, pool_status in status(shared).items():
                if pool_status.get("fault"):
                    text = f"pool {name}: {pool_status['fault']}"
        elif jobs := jobs_named([head_jobs]):
            text = f"waiting for the head, job {jobs[0].array_element}: {jobs[0].state} {jobs[0].reason}"
        elif not is_led(shared):
            raise NotAllowed(
                f"the head's job ended before it was ready: see `farm slurm logs head --dir {shared}`; "
                f"`farm slurm down --dir {shared}` cancels the rest"
            )
        if text and text not in printed:
            printed.add(text)
            say(text)
        time.sleep(_POLL_S)
    say(f"ready; clients: --url {shared}")
