"""A submission that is not collected in time: scored 0 if the policy made it slow, retried otherwise."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from farm.errors import HandlerError, SandboxError, ToolError
from tests.services.virtual_time import run
from workers.plugins.interfaces import Sandbox, Submission
from workers.stage_clock import StageClock
from workers.stages.handler_calls import Collect, collected
from workers.testing import FakeSandbox

LIMIT_S = 60.0
OURS, FRESH = FakeSandbox(), FakeSandbox()
WHOLE = Submission(answer="answer", files={"patch": "+"})


class Collecting:
    """Takes its seconds in the policy's sandbox, in order, and `fresh_s` in a fresh one."""

    def __init__(self, seconds: Sequence[float], fresh_s: float, error: Exception | None = None) -> None:
        self._seconds = iter(seconds)
        self._fresh_s = fresh_s
        self._error = error
        self.n_open = 0

    async def collect(self, sandbox: Sandbox | None) -> Submission:
        await asyncio.sleep(self._fresh_s if sandbox is FRESH else next(self._seconds))
        if self._error and sandbox is FRESH:
            raise self._error
        return WHOLE

    @asynccontextmanager
    async def fresh(self) -> AsyncIterator[Sandbox]:
        self.n_open += 1
        try:
            yield FRESH
        finally:
            self.n_open -= 1

    async def submission(self, sandbox: Sandbox | None = OURS) -> tuple[Submission, float]:
        """Return the submission, and its seconds on the clock of the stage."""
        now = asyncio.get_running_loop().time
        began = now()
        with StageClock(now).as_current() as clock:
            submission = await collected(Collect(self.collect, self.fresh, LIMIT_S, 300.0), sandbox, "answer")
        assert self.n_open == 0
        return submission, now() - began - clock.stopped_s


def test_submission_in_time_is_accepted_at_once() -> None:
    submission, on_clock_s = run(Collecting([59.0], 1.0).submission())
    assert (submission, round(on_clock_s)) == (WHOLE, 59)


def test_submission_that_the_policy_made_slow_is_scored_only_by_its_answer() -> None:
    submission, on_clock_s = run(Collecting([1e4, 1e4], 1.0).submission())
    assert submission == Submission(answer="answer")
    assert on_clock_s == pytest.approx(LIMIT_S), "finding the cause is not on its clock"


def test_submission_in_time_at_the_second_attempt_is_accepted() -> None:
    assert run(Collecting([1e4, 30.0], 1.0).submission())[0] == WHOLE


def test_submission_that_a_fresh_sandbox_cannot_read_either_counts_as_in_time() -> None:
    assert run(Collecting([1e4, 1e4], 1.0, ToolError("no file")).submission())[0] == Submission(answer="answer")


@pytest.mark.parametrize(
    ("collecting", "says"),
    [
        (Collecting([1e4], 1e4), "nearly as long in a fresh sandbox"),
        (Collecting([1e4], 31.0), "nearly as long in a fresh sandbox"),
        (Collecting([1e4], 1.0, SandboxError("no room")), "a fresh sandbox fails: no room"),
        (Collecting([1e4], 1.0, HandlerError("no git")), "a fresh sandbox fails: no git"),
        (Collecting([1e4], 1.0, TimeoutError()), "nearly as long in a fresh sandbox"),
    ],
)
def test_submission_that_is_slow_in_any_sandbox_is_a_farm_fault(collecting: Collecting, says: str) -> None:
    with pytest.raises(TimeoutError, match=f"longer than 60 s.*{says}"):
        run(collecting.submission())


def test_timeout_without_a_sandbox_is_not_the_policys_fault() -> None:
    with pytest.raises(TimeoutError, match="longer than 60 s"):
        run(Collecting([1e4], 1.0).submission(sandbox=None))
