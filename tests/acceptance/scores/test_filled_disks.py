"""A policy that fills its node's disk during its run is scored by its submission; other rollouts run again.

The node has a small disk, with less space than the limits of a sandbox allow. `make test` tries a few ways to fill it,
`make soak` all of them.
"""

from __future__ import annotations

import asyncio
import shutil

import pytest

from farm.errors import RolloutError
from tests.acceptance.scores.test_fault_attribution import (
    PROBLEMS,
    SUBMIT,
    bash,
    job_of,
    keep,
    record,
    small_scratch,
    solving,
)
from tests.services.farms import until
from tests.services.soak import at_length
from workers.plugins.interfaces import Completion
from workers.stages.stage_functions import evaluate, init, run
from workers.stages.stage_job import resolve_problem
from workers.testing.fakes import ScriptedPolicy

pytestmark = [pytest.mark.timeout(900), pytest.mark.soak]
BYTES, INODES = "size=150m", "size=1g,nr_inodes=6000"
FILL = "head -c 1G /dev/zero"
FILLING = {
    "a file": (BYTES, f"{FILL} > /tmp/x"),
    "a reserved file": (
        BYTES,
        "for mb in 149 148 147 146 145 144 140; do fallocate -l ${mb}M /tmp/x && break; done; sleep 1",
    ),
    "many files": (BYTES, "for n in {1..3000}; do head -c 1M /dev/zero > /tmp/$n || break; done"),
    "a file for a moment": (BYTES, f"for n in {{1..5}}; do {FILL} > /tmp/x; rm /tmp/x; done"),
    "a file without a name": (BYTES, f"exec 9<>/tmp/x; rm /tmp/x; {FILL} >&9"),
    "a file of a process that goes on": (BYTES, f"(exec 9<>/tmp/x; rm /tmp/x; {FILL} >&9; sleep 1000) & sleep 2"),
    "a file in a closed folder": (BYTES, f"mkdir -p /tmp/a/b; {FILL} > /tmp/a/b/x; chmod 0 /tmp/a/b /tmp/a"),
    "a file in a deep folder": (BYTES, f"cd /tmp; for n in {{1..300}}; do mkdir d; cd d; done; {FILL} > x"),
    "a file in place of the solution": (BYTES, f"{FILL} > /workspace/solution.py"),
    "two processes": (BYTES, f"{FILL} > /tmp/x & {FILL} > /tmp/y & wait"),
    "folders": (INODES, "cd /tmp; for n in {1..7000}; do mkdir $n || break; done"),
    "links": (INODES, "cd /tmp; for n in {1..7000}; do ln -s x $n || break; done"),
}


FEW = ("a file", "a file for a moment", "a file without a name", "folders")
FILLED = at_length({name: FILLING[name] for name in FEW}, FILLING)


async def scored(number: int, *script: Completion) -> float:
    problem = resolve_problem(job_of(PROBLEMS[number], number, tool_s=60))
    await init(problem)
    done = await run(problem, ScriptedPolicy(*script, SUBMIT), record, keep)
    return (await evaluate(problem, done.submission))[0].value


@pytest.mark.parametrize("name", FILLED)
def test_policy_that_fills_the_disk_scores_zero(name: str) -> None:
    options, command = FILLING[name]
    with small_scratch(options):
        assert asyncio.run(scored(0, bash(command))) == 0.0


def test_solution_scores_one_after_the_disk_was_filled_and_emptied() -> None:
    with small_scratch(BYTES):
        commands = bash(f"{FILL} > /tmp/x; rm /tmp/x"), solving(PROBLEMS[0])
        assert asyncio.run(scored(0, *commands)) == 1.0


def test_neighbour_of_disk_filling_policy_fails_and_passes_on_retry() -> None:
    async def both() -> tuple[float, float | BaseException]:
        filling = asyncio.create_task(scored(0, bash(f"sleep 3; {FILL} > /tmp/x; sleep 4")))
        neighbour = asyncio.create_task(
            scored(1, bash("sleep 5; head -c 1M /dev/zero > /tmp/needed"), solving(PROBLEMS[1]))
        )
        results = await asyncio.gather(filling, neighbour, return_exceptions=True)
        return results[0], results[1]  # type: ignore[return-value]

    with small_scratch(BYTES) as scratch:
        filling, neighbour = asyncio.run(both())
        assert filling == 0.0
        assert isinstance(neighbour, RolloutError), neighbour
        assert "disk is full" in str(neighbour)
        # a sandbox is removed in the background
        until(lambda: shutil.disk_usage(scratch).free > 100e6, "the disk has room again")
        assert asyncio.run(scored(1, solving(PROBLEMS[1]))) == 1.0
