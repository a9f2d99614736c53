"""Scaling of jobs: to the queue, over pools in their order, with successors in time; busy nodes are never ended."""

from __future__ import annotations

import math

import pytest

from farm.launch.slurm_commands import SlurmJob
from farm.launch.slurm_keeper import IDLE_S, Plan, ahead_s, plan, wanted
from farm.launch.slurm_pool import HEAD, SlurmPool

POOL = SlurmPool(min=1, max=4, time="4:00:00", init_slots=1, run_slots=8, eval_slots=1)


def job(job_id: str, state: str = "RUNNING", left_s: float = 10_000) -> SlurmJob:
    return SlurmJob(job_id, job_id, f"{job_id}_1", state, left_s, "cpu", "n1", "farm-x-node", "None")


@pytest.mark.parametrize(
    ("n_rollouts", "expected"),
    [(0, (1, 0)), (1, (1, 0)), (10, (1, 0)), (11, (2, 0)), (40, (4, 0)), (41, (4, 1)), (10**6, (4, 2))],
)
def test_pools_are_filled_in_order_to_the_number_of_rollouts(n_rollouts: int, expected: tuple[int, int]) -> None:
    second = POOL.model_copy(update={"min": 0, "max": 2})
    head = SlurmPool(min=2, max=2)
    assert wanted({HEAD: head, "a": POOL, "b": second}, n_rollouts) == {HEAD: 2, "a": expected[0], "b": expected[1]}


@pytest.mark.parametrize(
    ("time", "expected"), [("4:00:00", 600), ("10", 150), ("10:00", 150), ("1-00", 600), ("1-00:00:00", 600)]
)
def test_successors_start_before_the_time_limit(time: str, expected: float) -> None:
    assert ahead_s(SlurmPool(time=time)) == expected


def test_job_that_ends_soon_has_exactly_one_successor() -> None:
    ends = job("1", left_s=599)
    assert plan(POOL, 1, [ends], {}) == Plan(n_submit=1)
    assert plan(POOL, 1, [ends, job("2", "PENDING")], {}) == Plan()
    assert plan(POOL, 1, [ends, job("2")], {}) == Plan()
    assert plan(POOL, 1, [ends, job("2", "PENDING")], {"1": 1e9}) == Plan(), "it may still be needed"
    assert plan(POOL, 1, [ends, job("2")], {"1": 1e9}) == Plan(cancel=("1",)), "not after its successor runs"


def test_job_whose_node_takes_no_more_rollouts_has_a_successor() -> None:
    assert (ahead_s(POOL, 300.0), ahead_s(POOL, 1800.0), ahead_s(POOL, 1e9)) == (600, 1860, 7200)
    old = job("1", left_s=1800)
    assert plan(POOL, 1, [old], {}) == Plan()
    assert plan(POOL, 1, [old], {}, longest_s=1800.0) == Plan(n_submit=1)
    assert plan(POOL, 2, [old, job("2")], {"1": 1e9}, longest_s=1800.0) == Plan(n_submit=1)
    assert plan(POOL, 1, [old, job("2")], {"1": 1e9}, longest_s=1800.0) == Plan(cancel=("1",))


def test_pending_jobs_count_and_are_cancelled_first() -> None:
    jobs = [job("1"), job("2"), job("3", "PENDING"), job("4", "PENDING")]
    assert plan(POOL, 6, jobs, {}) == Plan(n_submit=2)
    assert plan(POOL, 3, jobs, {"1": 1e9, "2": 1e9}) == Plan(cancel=("3",))
    assert plan(POOL, 1, jobs, {}) == Plan(cancel=("3", "4"))


def test_only_idle_running_jobs_are_ended_longest_idle_first() -> None:
    jobs = [job("1"), job("2"), job("3")]
    assert plan(POOL, 1, jobs, {}) == Plan()
    assert plan(POOL, 1, jobs, {"1": IDLE_S - 1, "3": IDLE_S}) == Plan(cancel=("3",))
    assert plan(POOL, 2, jobs, {"1": IDLE_S, "2": IDLE_S + 5}) == Plan(cancel=("2",))
    assert plan(POOL, 0, [job("1", left_s=math.inf)], {"1": IDLE_S}) == Plan(cancel=("1",))
