"""rLLM: a `RemoteAgentRuntime` that runs rLLM's tasks on the farm, each in a session of rLLM's own model gateway.

rLLM's `RemoteAgentFlowEngine` creates a session for each rollout and passes its address and key to a runtime; its
gateway records the tokens of all calls there, and trains on those. So the farm provides sandboxes, agents and scores,
and only sends plain chat requests to that address: a probe of the engine would be trained on. The result is the reward
and the end of each rollout. A failed rollout is `finished=False` without a reward.

rLLM is imported when its results are made, in its own process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from farm.adapters.protocol import TrainerResult
from farm.client.connect import connect
from farm.client.farm import Farm
from farm.client.gathered_rollouts import GatheredRollouts, StartedRollout
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest, EngineSettings, Instance
from farm.records.rollout import Outcome, Rollout
from farm.records.trajectory import ModelCall

if TYPE_CHECKING:
    # from a package that is not installed with the farm
    RemoteTaskResult = Any

_REASONS = {
    Outcome.SUBMITTED: "ENV_DONE",
    Outcome.ANSWERED: "ENV_DONE",
    Outcome.INVALID_ACTION: "ENV_DONE",
    Outcome.REPEATING: "ENV_DONE",
    Outcome.MAX_TURNS: "MAX_TURNS_EXCEEDED",
    Outcome.MAX_TOKENS: "MAX_RESPONSE_LENGTH_EXCEEDED",
    Outcome.CONTEXT_FULL: "MAX_PROMPT_LENGTH_EXCEEDED",
    Outcome.DEADLINE: "TIMEOUT",
}
"""rLLM's termination reason for each outcome caused by the policy; others are `ERROR`."""

MAPPED = frozenset(
    {
        *("rollout.train", "rollout.val", "remote_runtime.session_timeout", "remote_runtime.enabled"),
        *("compact_filtering.enable", "compact_filtering.mask_error"),
    }
)
"""Keys of rLLM's configuration that the farm's rollouts follow; its gateway sets the sampling of every call."""


class TaskSubmission(Protocol):
    """rLLM's `TaskSubmission`; versions with session keys also have `inference_api_key`."""

    task: dict[str, Any]
    session_id: str
    task_id: str
    inference_url: str


def instance_of(task: Mapping[str, Any]) -> Instance:
    """Return the instance of a task with `data_source` and `fields`, like `farm.Instance`. Raises InvalidRequest.

    Other columns of a task are rLLM's own.
    """
    try:
        return Instance(data_source=task["data_source"], fields=task["fields"])
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{type(error).__name__}: {error}; a task needs data_source and fields, or give FarmRuntime(instance=...)",
            field="task",
        ) from None


class FarmRuntime:
    """rLLM's `RemoteAgentRuntime` on a farm.

    `farm` is an address for `farm.connect`, or a client, which stays open. `instance` makes an instance of a task.
    `request` has further fields of `farm.BatchRequest`, such as `agent`, `limits` and `max_attempts`. `model` is the
    name sent to rLLM's gateway, which may use its own.
    """

    def __init__(
        self,
        farm: str | Path | Farm | None = None,
        *,
        instance: Callable[[dict[str, Any]], Instance] = instance_of,
        request: Mapping[str, Any] | None = None,
        model: str = "default",
    ) -> None:
        self._address = farm
        self._instance = instance
        self._request = dict(request or {})
        self._model = model
        self._rollouts: GatheredRollouts | None = None
        fixed = {"instances", "n_samples", "idempotency_key", *EngineSettings.model_fields} & self._request.keys()
        if fixed:
            raise InvalidRequest("rLLM sets it for each task", field=f"request.{min(fixed)}")

    def initialize(self) -> None:
        """Connect to the farm. Raises the errors of `farm.connect`, and ValueError for wrong fields of `request`."""
        BatchRequest.model_validate({"instances": [{"data_source": "none", "fields": {}}]} | self._request)
        client = self._address if isinstance(self._address, Farm) else connect(self._address)
        self._rollouts = GatheredRollouts(client)

    async def execute_tasks(
        self,
        submissions: Sequence[TaskSubmission],
        timeout: float | None = None,  # noqa: ASYNC109 - the name is rLLM's
    ) -> list[RemoteTaskResult]:
        """Run the tasks and return one result for each, in order; `timeout` is in seconds, including waits.

        A task that is not completed within the timeout is cancelled. Never raises for a single task.
        """
        if self._rollouts is None:
            raise RuntimeError("call initialize() before execute_tasks()")
        return list(await asyncio.gather(*[self._executed(self._rollouts, each, timeout) for each in submissions]))

    def shutdown(self) -> None:
        """Cancel running tasks, and close the connection unless a client was given."""
        rollouts, self._rollouts = self._rollouts, None
        if rollouts is not None:
            rollouts.close()
            if rollouts.client is not self._address:
                rollouts.client.close()

    async def _executed(
        self, rollouts: GatheredRollouts, submission: TaskSubmission, limit_s: float | None
    ) -> RemoteTaskResult:
        began = time.monotonic()
        ids = {"session_id": submission.session_id, "task_id": submission.task_id}
        started: StartedRollout | None = None
        try:
            started = rollouts.start(self._on_session(submission), self._request)
            async with asyncio.timeout(limit_s):
                rollout = await asyncio.wrap_future(started.ended)
                calls = await asyncio.to_thread(_calls_of, rollouts.client, rollout)
        except TimeoutError:
            assert started is not None
            rollouts.abandon(started)
            waited_s = time.monotonic() - began
            name = f"rollout {started.rollout_id}" if started.rollout_id else "a task that was not submitted yet"
            return _broken(ids, f"{name}: no end in {waited_s:.1f} s, waiting for a node included", waited_s)
        except asyncio.CancelledError:
            if started is not None:
                rollouts.abandon(started)
            raise
        except Exception as error:
            return _broken(ids, f"{type(error).__name__}: {error}", time.monotonic() - began)
        return _result(ids, rollout, calls, time.monotonic() - began)

    def _on_session(self, submission: TaskSubmission) -> Instance:
        """Return the instance of a task with the engine of its session. Raises ValueError for a wrong address."""
        instance = self._instance(submission.task)
        session = {
            "engine_url": submission.inference_url,
            "engine_key": getattr(submission, "inference_api_key", "") or "",
            "engine_model": self._model,
            "engine_route": "chat",
        }
        return Instance.model_validate(instance.model_dump() | session)


def use_runtime(trainer: Any, runtime: FarmRuntime) -> None:
    """Make an rLLM `UnifiedTrainer` use this runtime in place of the one in its config.

    rLLM creates runtimes by name and has no registry for others. It gives a failed rollout the reward 0 unless its
    filter leaves out such ends: this turns that filter on (`rllm.compact_filtering.mask_error`), and no other part of
    it. Raises InvalidRequest if the trainer has no remote runtime (`rllm.remote_runtime.enabled`).
    """
    if getattr(trainer, "_remote_runtime", None) is None or not hasattr(trainer.agent_workflow_engine, "runtime"):
        raise InvalidRequest("the trainer has no remote runtime: set it to true", field="rllm.remote_runtime.enabled")
    trainer._remote_runtime = runtime
    trainer.agent_workflow_engine.runtime = runtime
    _leave_out_errors(trainer.cf_config)


def _leave_out_errors(filtering: Any) -> None:
    """Turn on rLLM's filter of failed rollouts, in the object that its trainer and its buffer share."""
    if not filtering.enable:
        for each in fields(filtering):
            setattr(filtering, each.name, False)
        filtering.enable = True
    filtering.mask_error = True


def _calls_of(client: Farm, rollout: Rollout) -> Sequence[ModelCall]:
    """Return the calls of a rollout, if its reason depends on them."""
    return client.calls(rollout.rollout_id) if rollout.outcome is Outcome.CONTEXT_FULL else ()


def reason_name(outcome: Outcome, calls: Sequence[ModelCall]) -> str:
    """Return the name of rLLM's termination reason for an outcome caused by the policy, with these calls.

    rLLM calls a cut answer "max response length", and a rollout without an answer "max prompt length". The farm's full
    context may be either, also if the session's own `max_tokens` cut an answer, which the farm cannot see.
    """
    if outcome is Outcome.CONTEXT_FULL and calls and calls[-1].finish_reason == "length":
        return _REASONS[Outcome.MAX_TOKENS]
    return _REASONS[outcome]


def _result(ids: Mapping[str, str], rollout: Rollout, calls: Sequence[ModelCall], elapsed_s: float) -> RemoteTaskResult:
    """Return rLLM's result for a rollout with these ids of a session and a task."""
    details = {"rollout_id": rollout.rollout_id, "outcome": str(rollout.outcome or ""), "attempt": rollout.attempt}
    if not rollout.trainable:
        failure = f": {rollout.failure.message}" if rollout.failure else ""
        error = f"rollout {rollout.rollout_id} ended as {rollout.outcome}{failure}"
        return _broken(ids, error, elapsed_s, metadata={"farm": details})
    from rllm.engine.remote_runtime.protocol import RemoteTaskResult  # type: ignore[import-not-found, unused-ignore]

    return RemoteTaskResult(
        finished=True,
        **ids,
        reward=rollout.reward,
        termination_reason=_reason(reason_name(rollout.outcome or Outcome.SUBMITTED, calls)),
        elapsed=elapsed_s,
        raw_result={"metrics": {"turns": rollout.n_turns, "invalid_actions": rollout.n_invalid_actions}},
        metadata={"farm": details},
    )


def _broken(
    ids: Mapping[str, str], error: str, elapsed_s: float, metadata: dict[str, Any] | None = None
) -> RemoteTaskResult:
    """Return rLLM's result for a rollout without a score: `ERROR`, so that one of its filters leaves out all such."""
    from rllm.engine.remote_runtime.protocol import RemoteTaskResult  # type: ignore[import-not-found, unused-ignore]

    return RemoteTaskResult(
        finished=False,
        **ids,
        reward=None,
        error=error,
        termination_reason=_reason("ERROR"),
        elapsed=elapsed_s,
        raw_result={"stop_reason": error},
        metadata=metadata or {},
    )


def _reason(name: str) -> Any:
    from rllm.workflows.workflow import TerminationReason  # type: ignore[import-not-found, unused-ignore]

    return TerminationReason[name]


class RllmResults:
    """A `farm.adapters.protocol.ResultAdapter`: results as returned by `FarmRuntime`, whose tokens rLLM keeps."""

    def result(self, rollout: Rollout, calls: Sequence[ModelCall], /) -> RemoteTaskResult:
        return _result({"session_id": rollout.rollout_id, "task_id": rollout.group_id}, rollout, calls, 0.0)

    def read_result(self, result: RemoteTaskResult, /) -> TrainerResult:
        return TrainerResult(
            ended=result.finished,
            reward=result.reward,
            stop_reason=result.termination_reason.name,
            error=result.error or "",
            rollout_id=result.metadata["farm"]["rollout_id"],
        )


results = RllmResults()
