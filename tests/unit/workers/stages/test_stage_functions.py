"""Attribution of an expired rollout time limit: to the policy, an engine, or neither."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import pytest

from farm.errors import EngineError, HandlerError, SandboxError
from farm.records.request import BatchSettings, Limits, TrainCalls
from farm.records.rollout import Outcome
from farm.records.trajectory import ModelCall
from workers.plugins.interfaces import Artefact, Completion
from workers.policy.recording import Stopwatch, model_call
from workers.stages.run_clock import ended
from workers.stages.run_stage import RunResult
from workers.stages.stage_functions import run, trained_calls
from workers.stages.stage_job import StageJob, resolve_problem
from workers.testing import ChatHandler
from workers.testing.fakes import ScriptedPolicy, answering


class Slow(ScriptedPolicy):
    """Answers after a while; `paused` makes all of that time a pause for new weights."""

    def __init__(self, *, blocked: str = "", paused: bool = False, takes_s: float = 30.0) -> None:
        super().__init__(answering("done"))
        self.blocked = blocked
        self._paused = paused
        self._takes_s = takes_s
        self._since = time.monotonic()
        self.cancelled = False

    @property
    def paused_s(self) -> float:
        return time.monotonic() - self._since if self._paused else 0.0

    @paused_s.setter
    def paused_s(self, value: float) -> None:
        """The base class sets it once."""

    async def complete(self, *args: Any, **more: Any) -> Completion:
        self._since = time.monotonic()
        try:
            await asyncio.sleep(self._takes_s)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return await super().complete(*args, **more)


async def record(call: ModelCall) -> None:
    pass


async def keep(index: int, artefact: Artefact) -> str:
    return ""


def job_of(run_s: float = 0.2, **more: Any) -> StageJob:
    return StageJob(
        rollout_id="r1",
        attempt=1,
        sample_index=0,
        data_source="chat",
        fields={"question": "Are we there yet?"},
        batch=BatchSettings(limits=Limits(run_s=run_s), **more),
    )


def run_stage(policy: Slow, run_s: float = 0.2) -> RunResult:
    return asyncio.run(run(resolve_problem(job_of(run_s)), policy, record, keep))


def test_slow_policy_reaches_its_deadline() -> None:
    policy = Slow()
    assert run_stage(policy).outcome is Outcome.DEADLINE
    assert policy.cancelled


def test_deadline_during_a_wait_for_engines_is_an_engine_error() -> None:
    policy = Slow(blocked="engine http://e1/v1 is out")
    with pytest.raises(
        EngineError, match=r"r1: its 0\.2 s ended while it waited for engines: engine http://e1/v1 is out"
    ):
        run_stage(policy)
    assert policy.cancelled


def test_pause_for_new_weights_is_not_charged() -> None:
    assert run_stage(Slow(paused=True, takes_s=0.6)).outcome is Outcome.ANSWERED


class Held(Slow):
    """Answers in small steps, and in one of them the whole process is blocked for as long as its limit."""

    def __init__(self, stands_s: float) -> None:
        super().__init__()
        self._stands_s = stands_s

    async def complete(self, *args: Any, **more: Any) -> Completion:
        for n in range(5):
            await asyncio.sleep(0.05)
            if n == 2:
                time.sleep(self._stands_s)  # noqa: ASYNC251 - that is what it is for
        return await ScriptedPolicy.complete(self, *args, **more)


def test_time_in_which_the_process_was_blocked_is_not_charged() -> None:
    assert run_stage(Held(stands_s=4.0), run_s=4.0).outcome is Outcome.ANSWERED


def test_error_of_the_agent_is_raised_unchanged() -> None:
    policy = Slow(takes_s=0.0)
    policy._script = iter([EngineError("r1: gone")])
    with pytest.raises(EngineError, match="r1: gone"):
        run_stage(policy)


class Stubborn:
    """An agent that swallows a number of cancellations, and then raises."""

    def __init__(self, n_swallowed: int, error: Exception | None = None) -> None:
        self.n_cancelled = 0
        self._n_swallowed = n_swallowed
        self._error = error

    async def run(self) -> None:
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.n_cancelled += 1
                if self._error is not None:
                    raise self._error from None
                if self.n_cancelled > self._n_swallowed:
                    raise


def end(agent: Stubborn) -> list[dict[str, Any]]:
    """Start and end it; return the complaints of the event loop."""
    complaints: list[dict[str, Any]] = []
    # leftovers of other tests would be reported here
    gc.collect()

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        run_stage = asyncio.ensure_future(agent.run())
        await asyncio.sleep(0)
        await ended(run_stage, "r1", patience_s=0.01)
        assert run_stage.done()
        del run_stage
        gc.collect()

    asyncio.run(main())
    return complaints


def test_agent_that_swallows_cancellations_is_cancelled_again() -> None:
    agent = Stubborn(n_swallowed=3)
    assert end(agent) == []
    assert agent.n_cancelled == 4


def test_error_raised_by_an_agent_during_its_cancellation_is_not_logged() -> None:
    assert end(Stubborn(0, SandboxError("r1: gone meanwhile"))) == []


class Choosing(ChatHandler):
    """A handler that trains only some of its calls."""

    chosen: ClassVar[Any]

    def train_calls(self, calls: Sequence[ModelCall]) -> Collection[int]:
        assert self.instance.question
        result: Collection[int] = type(self).chosen(calls)
        return result


def called(index: int) -> ModelCall:
    return model_call(index, [], answering("yes"), Stopwatch(), {}, [])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (lambda calls: [call.index for call in calls if call.index != 2], [1, 3]),
        (lambda calls: {3}, [3]),
        (lambda calls: (), []),
        (lambda calls: [0], HandlerError),
        (lambda calls: 7, HandlerError),
        (lambda calls: 1 / 0, HandlerError),
    ],
)
def test_handler_narrows_the_calls_that_train(monkeypatch: pytest.MonkeyPatch, chosen: Any, expected: Any) -> None:
    monkeypatch.setattr(
        "workers.plugins.registry.handler", lambda _: type("Chosen", (Choosing,), {"chosen": staticmethod(chosen)})
    )
    problem = resolve_problem(job_of(train_calls=TrainCalls(last=3)))
    calls = [called(index) for index in range(4)]
    if expected is HandlerError:
        with pytest.raises(HandlerError, match="r1: the handler's train_calls"):
            trained_calls(problem, calls)
    else:
        assert [call.index for call in trained_calls(problem, calls)] == expected


def test_all_calls_train_by_default() -> None:
    assert [call.index for call in trained_calls(resolve_problem(job_of()), [called(0), called(1)])] == [0, 1]
