"""Keeps the number of a farm's Slurm jobs at its pools' targets, in the head's process, by a lease in the store.

The target of each pool, and the jobs to submit and to cancel, are pure functions.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import Connection

from farm.errors import FarmError, NotFound, StoreUnavailable
from farm.home import write_own
from farm.launch import slurm_commands
from farm.launch.slurm_commands import SlurmJob, seconds
from farm.launch.slurm_pool import HEAD, SIGNAL_S, Pools, SlurmPool, job_name, script_path, stored_pools
from farm.store import leader, nodes, placement
from farm.store.database import Store
from farm.store.reports.demand import longest_s, slots_wanted

log = logging.getLogger(__name__)

ROLE = "slurm"
_LEASE_S = 30.0
_PERIOD_S = 5.0
_PAUSE_S = (10.0, 600.0)
_STOP_S = 5.0
_STATUS = "slurm_status.json"

IDLE_S = 60.0
"""Seconds without a rollout after which an unneeded node ends."""
_AHEAD_S = 600.0
"""Minimum of seconds before its time limit at which a job gets a successor; a quarter of the limit if less."""


class SlurmKeeper:
    """Runs in a thread from `start` to `stop`. A pool whose jobs end early is retried ever later."""

    def __init__(
        self,
        folder: Path,
        farm_id: str,
        store_url: str,
        owner: str,
        node_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._folder = folder
        self._farm_id = farm_id
        self._store = Store(store_url)
        self._owner = owner
        self._node_timeout_s = node_timeout_s
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="slurm-keeper", daemon=True)
        self._stopped = threading.Event()
        self._idle_since: dict[str, float] = {}
        self._awaited: dict[str, str] = {}
        """Array → pool, for arrays without a known node yet."""
        self._n_failed: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._faults: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                self.round()
            except (StoreUnavailable, slurm_commands.SlurmFailed, OSError) as error:
                log.warning("Slurm jobs not checked; retrying: %s", error)
            except Exception:
                log.exception("Slurm jobs not checked; retrying")
            self._stopped.wait(_PERIOD_S)
        try:
            self._store.write(lambda connection: leader.release_leadership(connection, ROLE, self._owner))
        except FarmError as error:
            log.warning("Lease of the job keeper not released; it will expire: %s", error)

    def stop(self) -> None:
        """Release the lease, and close the store."""
        self._stopped.set()
        self._thread.join(_STOP_S)
        self._store.close()

    def round(self) -> None:
        """Check once, and submit and cancel jobs as needed."""
        try:
            pools = stored_pools(self._folder)
        except NotFound:
            return
        if not self._store.write(lambda connection: leader.acquire_leadership(connection, ROLE, self._owner, _LEASE_S)):
            return
        occupied, n_rollouts, node_of = self._store.read(partial(demand, node_timeout_s=self._node_timeout_s))
        most_s = self._store.read(longest_s)
        names = {job_name(self._farm_id, pool): pool for pool in pools}
        jobs = slurm_commands.jobs_named(list(names))
        self._check_awaited(jobs, node_of)
        idle_s = self._idle_s(jobs, node_of, occupied)
        targets = wanted(pools, n_rollouts)
        for name, pool in pools.items():
            own = [job for job in jobs if names[job.name] == name]
            todo = plan(pool, targets[name], own, *(({}, 0.0) if name == HEAD else (idle_s, most_s)))
            if todo.cancel:
                log.info("Pool %s needs %d jobs; cancelling %s", name, targets[name], ", ".join(todo.cancel))
                slurm_commands.cancel([job for job in own if job.job_id in todo.cancel])
                left = {job.array_id for job in own if job.job_id not in todo.cancel}
                for array_id in {job.array_id for job in own} - left:
                    # cancelled, so its end is not a failure
                    self._awaited.pop(array_id, None)
            if todo.n_submit and self._clock() >= self._not_before.get(name, 0.0):
                self._submit(name, todo.n_submit)
        status = {name: {"wanted": targets[name], "fault": self._faults.get(name, "")} for name in pools}
        write_own(self._folder / _STATUS, json.dumps(status))

    def _submit(self, pool: str, n: int) -> None:
        try:
            array_id = slurm_commands.submit(script_path(self._folder, pool), n)
        except FarmError as error:
            self._pause(pool, f"sbatch refused: {error}")
            return
        self._awaited[array_id] = pool
        log.info("Pool %s: submitted %d jobs as array %s", pool, n, array_id)

    def _check_awaited(self, jobs: list[SlurmJob], node_of: Mapping[str, str]) -> None:
        """Slow down a pool whose jobs end before they have a node of the farm; normal again when one has."""
        for array_id, pool in list(self._awaited.items()):
            own = [job for job in jobs if job.array_id == array_id]
            if any(job.job_id in node_of for job in own) or (pool == HEAD and own):
                del self._awaited[array_id]
                self._n_failed.pop(pool, None)
                self._faults.pop(pool, None)
            elif not own:
                del self._awaited[array_id]
                self._pause(pool, f"array {array_id} ended before a node of it was known: see {self._folder / 'logs'}")

    def _pause(self, pool: str, reason: str) -> None:
        n = self._n_failed[pool] = self._n_failed.get(pool, 0) + 1
        pause_s = min(_PAUSE_S[0] * 2 ** min(n - 1, 16), _PAUSE_S[1])
        self._not_before[pool] = self._clock() + pause_s
        self._faults[pool] = reason
        log.error("Pool %s: %s; next try in %g s", pool, reason, pause_s)

    def _idle_s(
        self, jobs: list[SlurmJob], node_of: Mapping[str, str], occupied: Mapping[str, int]
    ) -> dict[str, float]:
        now = self._clock()
        self._idle_since = {job: self._idle_since.get(job, now) for job in idle_jobs(jobs, node_of, occupied)}
        return {job: now - since for job, since in self._idle_since.items()}


def demand(connection: Connection, node_timeout_s: float) -> tuple[dict[str, int], int, dict[str, str]]:
    """Return node → rollouts on it, the wanted number of slots, and job → its node, for live nodes."""
    occupied = placement.occupied(connection)
    known = {
        str(node.info["slurm_job"]): node.node
        for node in nodes.listing(connection)
        if "slurm_job" in node.info and node.heartbeat_age_s < node_timeout_s
    }
    return occupied, slots_wanted(connection), known


def status(folder: Path) -> dict[str, dict[str, str | int]]:
    """Return the last target and fault of each pool from its keeper; empty before the first round."""
    try:
        states: dict[str, dict[str, str | int]] = json.loads((folder / _STATUS).read_text())
    except (OSError, ValueError):
        return {}
    return states


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of jobs of one pool to submit, and the ids of those to cancel."""

    n_submit: int = 0
    cancel: tuple[str, ...] = ()


def wanted(pools: Pools, n_rollouts: int) -> dict[str, int]:
    """Return the number of jobs of each pool for this many waiting or running rollouts: the first pools first."""
    n_jobs, left = {}, n_rollouts
    for name, pool in pools.items():
        n_jobs[name] = pool.min if name == HEAD else max(pool.min, min(pool.max, math.ceil(max(0, left) / pool.room)))
        left -= 0 if name == HEAD else n_jobs[name] * pool.room
    return n_jobs


def ahead_s(pool: SlurmPool, longest_s: float = 0.0) -> float:
    """Return how long before its end a job no longer counts: its node gets no waiting rollouts then.

    `longest_s` is how long waiting rollouts may take; the first half of a job takes everything.
    """
    limit_s = seconds(pool.time if ":" in pool.time or "-" in pool.time else f"{pool.time}:00")
    return max(min(_AHEAD_S, limit_s / 4), min(longest_s + SIGNAL_S, limit_s / 2) if longest_s else 0.0)


def plan(
    pool: SlurmPool, n_wanted: int, jobs: Sequence[SlurmJob], idle_s: Mapping[str, float], longest_s: float = 0.0
) -> Plan:
    """Return how to reach a pool's number of lasting jobs; `idle_s` is for jobs with idle nodes.

    Pending jobs count, so none is submitted while they suffice, and they are cancelled first. Of the running jobs, only
    one that has been idle for a while is ended, or one near its end that has a successor.
    """
    lasting = [job for job in jobs if job.pending or job.left_s > ahead_s(pool, longest_s)]
    lasts = {job.job_id for job in lasting if not job.pending}
    longest_first = sorted(idle_s.items(), key=lambda each: -each[1])
    idle = [job for job, since_s in longest_first if since_s >= IDLE_S]
    running = {job.job_id for job in jobs if not job.pending}
    followed = [job for job in idle if job in running - lasts] if len(lasts) >= max(1, n_wanted) else []
    surplus = len(lasting) - n_wanted
    if surplus <= 0:
        return Plan(n_submit=-surplus, cancel=tuple(followed))
    pending = [job.job_id for job in lasting if job.pending]
    return Plan(cancel=(*[*pending, *(job for job in idle if job in lasts)][:surplus], *followed))


def idle_jobs(jobs: Collection[SlurmJob], node_of: Mapping[str, str], occupied: Mapping[str, int]) -> set[str]:
    """Return the running jobs whose node is known and idle."""
    return {
        job.job_id
        for job in jobs
        if not job.pending and job.job_id in node_of and not occupied.get(node_of[job.job_id], 0)
    }
