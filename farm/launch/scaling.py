"""The target number of jobs of each pool, and the jobs to submit and to cancel: pure functions."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from farm.launch.job_script import SIGNAL_S
from farm.launch.slurm_commands import SlurmJob, seconds
from farm.launch.slurm_pool import HEAD, Pools, SlurmPool

IDLE_S = 60.0
"""Seconds without a rollout after which an unneeded node ends."""
_AHEAD_S = 600.0
"""Minimum of seconds before its time limit at which a job gets a successor; a quarter of the limit if less."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The number of jobs of one pool to submit, and the ids of those to cancel."""

    n_submit: int = 0
    cancel: tuple[str, ...] = ()


def wanted(pools: Pools, n_rollouts: int) -> dict[str, int]:
    """Return the number of jobs of each pool for this many waiting or running rollouts: the first pools first."""
    result, left = {}, n_rollouts
    for name, pool in pools.items():
        result[name] = pool.min if name == HEAD else max(pool.min, min(pool.max, math.ceil(max(0, left) / pool.room)))
        left -= 0 if name == HEAD else result[name] * pool.room
    return result


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
