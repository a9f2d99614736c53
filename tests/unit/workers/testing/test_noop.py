from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from farm.errors import EngineError, EvaluatorError, HandlerError, SandboxError
from farm.records.request import Limits, SamplingParams
from farm.records.rollout import Outcome
from farm.records.trajectory import ModelCall
from workers.plugins.interfaces import AgentContext, AgentResult, Artefact, Score
from workers.testing import NoopAgent, NoopHandler, NoopInstance, ScriptedPolicy


async def record(call: ModelCall) -> None:
    raise AssertionError("the noop agent calls no model")


async def keep(index: int, artefact: Artefact) -> str:
    raise AssertionError("the noop agent makes nothing")


def rollout(**fields: Any) -> tuple[AgentResult, Score]:
    handler = NoopHandler(NoopInstance(**fields))

    async def stages() -> tuple[AgentResult, Score]:
        assert handler.sandbox() is None
        context = AgentContext("r1", handler.messages(), {}, ScriptedPolicy(), SamplingParams(), Limits(), record, keep)
        result = await NoopAgent().run(context)
        submission = await handler.collect(None, result.answer)

        def no_sandbox(*_: object, **__: object) -> Any:
            raise AssertionError("the noop evaluator needs no sandbox")

        return result, await handler.evaluator().evaluate(submission, no_sandbox, 1.0)

    return asyncio.run(stages())


def test_reward_is_one() -> None:
    assert rollout() == (AgentResult(Outcome.SUBMITTED, "noop"), Score(1.0))


@pytest.mark.parametrize(
    ("fail", "error"),
    [
        ("init:sandbox_error", SandboxError),
        ("run:engine_error", EngineError),
        ("eval:evaluator_error", EvaluatorError),
        ("run:bug", RuntimeError),
    ],
)
def test_requested_failures_are_raised(fail: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="the instance asks for"):
        rollout(fail=fail)


def test_final_errors_are_not_retried() -> None:
    with pytest.raises(HandlerError) as final:
        rollout(fail="init:final")
    assert not final.value.retryable


@pytest.mark.parametrize("fields", [{"fail": "run:nonsense"}, {"seconds": -1}, {"secnds": 1}])
def test_invalid_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        NoopInstance(**fields)
