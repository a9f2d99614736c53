"""Tasks by id: each is a batch of one instance, found by its idempotency key. Its sessions are rollouts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from sqlalchemy import Connection

from farm.api.protocols import KeptState, content_hash, exact_tokens, known_handler
from farm.client.local import LocalFarm
from farm.client.request_checks import HANDLERS, checked
from farm.errors import Conflict, InvalidRequest, NotFound, ServiceError
from farm.notifications import Signals
from farm.plugins import installed, load
from farm.records.request import BatchRequest
from farm.records.request_values import HttpUrl, Json, Name, Request, Seconds
from farm.records.rollout import Outcome, Rollout, Stage, State, Timing
from farm.records.training_run import KeyedBatch
from farm.records.trajectory import Message, ModelCall, Segment, ToolSchema, calls_of_segments, segments, tools_by_call
from farm.store import batches
from farm.store.database import Store
from farm.store.reports import keyed_rollouts

PREFIX = "polar:"
_SWE = "swebench_harness"
_SETTINGS = ("temperature", "top_p", "top_k", "max_tokens")
_AGENT_TIMEOUT, _SEED = "agent_timeout", "eval_sampling_seed_base"

_TOMBSTONE_S = 300.0
"""Seconds for which the submit of a task that was cancelled before is refused."""
Value = dict[str, Any]


class PolarAgent(Request):
    """`harness` is an agent of the farm by name; empty for the handler's choice."""

    harness: Annotated[Name, Field(max_length=64)] = ""
    model_name: Annotated[Name, Field(max_length=200)] | None = None
    settings: dict[str, Any] = Field(default_factory=dict)


class PolarBuilder(Request):
    """`per_request`: a trace for each model call; `prefix_merging`: one for each training row."""

    strategy: Annotated[str, Field(pattern="^(per_request|prefix_merging)$")] = "per_request"
    config: Annotated[dict[str, Any], Field(max_length=0)] = Field(default_factory=dict)


class PolarEvaluator(Request):
    """`strategy` is a handler of the farm, or `swebench_harness`; `config` has the fields of its instance."""

    strategy: Annotated[Name, Field(min_length=1, max_length=64)]
    config: dict[str, Any] = Field(default_factory=dict)
    env: Annotated[dict[str, str], Field(max_length=0)] = Field(default_factory=dict)
    refresh_runtime: bool = False


class PolarTask(Request):
    """A task: `num_samples` sessions of one problem. The handler makes the sandbox, so `runtime` is unsupported."""

    task_id: Annotated[Name, Field(min_length=1, max_length=200)]
    instruction: Annotated[str, Field(max_length=1_000_000)] = ""
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    dispatch_priority: Annotated[int, Field(ge=0, le=100)] = 0
    early_stop_min_usable_sessions: None = None
    timeout_seconds: Seconds = 600.0
    runtime: None = None
    agent: PolarAgent
    builder: PolarBuilder = PolarBuilder()
    evaluator: PolarEvaluator
    callback_url: HttpUrl | None = None
    metadata: Json = Field(default_factory=dict)

    @model_validator(mode="after")
    def _have_known_settings(self) -> Self:
        """Refuse settings of the agent that have no effect here."""
        if unknown := sorted(set(self.agent.settings) - set(_SETTINGS)):
            raise ValueError(f"agent.settings.{unknown[0]} must be one of {', '.join(_SETTINGS)}")
        return self


class PolarCancel(Request):
    register_if_missing: bool = False


class PolarTasksQuery(Request):
    status: str | None = None
    harness: str | None = None
    since: float | None = None
    limit: Annotated[int, Field(ge=1, le=1000)] = 200


class PolarPause(Request):
    timeout_seconds: Annotated[float, Field(gt=0, le=3600)] = 60.0


def key_of_task(task_id: str) -> str:
    """Return the idempotency key of a task."""
    return f"{PREFIX}{content_hash(task_id)}"


def task_batch(task: PolarTask) -> BatchRequest:
    """Return the batch of a task. Raises InvalidRequest by the names of the task, and UnknownHandler."""
    strategy = task.evaluator.strategy
    handler = "swe-bench" if strategy == _SWE else known_handler(strategy, {_SWE})
    fields = dict(task.evaluator.config)
    if strategy == _SWE and isinstance(fields.get("instance"), dict):
        fields = dict(fields["instance"])
    if task.instruction:
        fields.setdefault(_instruction_field(handler), task.instruction)
    sampling = {name: task.agent.settings[name] for name in _SETTINGS if name in task.agent.settings}
    if _SEED in task.metadata:
        sampling["seed"] = task.metadata[_SEED]
    values: dict[str, Any] = {
        "instances": [{"data_source": handler, "fields": fields}],
        "n_samples": task.num_samples,
        "priority": task.dispatch_priority,
        "limits": {"run_s": task.metadata.get(_AGENT_TIMEOUT, task.timeout_seconds)},
        "sampling": sampling,
        "model": task.agent.model_name or "",
        "agent": task.agent.harness,
        "idempotency_key": key_of_task(task.task_id),
        "webhook": None if task.callback_url is None else {"url": task.callback_url, "form": "polar"},
        "metadata": {"task": task.model_dump(mode="json", exclude={"evaluator": {"config"}})},
    }
    try:
        return checked(BatchRequest, values)
    except InvalidRequest as error:
        raise error.renamed(_sent_name) from None


def _instruction_field(handler: str) -> str:
    """Return the field of a handler's instances that has the problem's text. Raises InvalidRequest."""
    if handler == "swe-bench":
        return "problem_statement"
    if handler in installed(HANDLERS):
        fields = load(HANDLERS, handler).instance_type.model_fields
        for name in ("question", "problem_statement", "instruction"):
            if name in fields:
                return name
    raise InvalidRequest(f"is not used by {handler!r}: leave it empty, as its config is complete", field="instruction")


_SENT: Mapping[str, str] = {
    "limits.run_s": f"metadata.{_AGENT_TIMEOUT}",
    "sampling.seed": f"metadata.{_SEED}",
    "agent": "agent.harness",
    "model": "agent.model_name",
    "webhook.url": "callback_url",
}


def _sent_name(field: str) -> str:
    """Return the task's name of a field of the batch."""
    if field in _SENT:
        return _SENT[field]
    if field.startswith("instances[0]"):
        rest = field.removeprefix("instances[0]").removeprefix(".").removeprefix("fields").removeprefix(".")
        return ".".join(filter(None, ["evaluator.config", rest]))
    return f"agent.settings.{field.removeprefix('sampling.')}" if field.startswith("sampling.") else field


class PolarTasks:
    """The tasks that clients of this protocol submitted."""

    def __init__(self, farm: LocalFarm) -> None:
        self._farm = farm

    def submit(self, task: PolarTask) -> str:
        """Submit a task, unless the same one was submitted, and return its batch.

        Raises InvalidRequest, UnknownHandler, Conflict, and ServiceError if there is no engine.
        """
        request = task_batch(task)
        if time.time() < self._tombstone(task.task_id).read().get("until", 0.0):
            raise Conflict(f"task {task.task_id} was cancelled before submission")
        if not self._farm.engines():
            raise ServiceError("there is no engine: add one to the farm, `farm engines add`")
        try:
            return self._farm.submit(request)
        except InvalidRequest as error:
            raise error.renamed(_sent_name) from None
        except Conflict:
            raise Conflict(f"task {task.task_id} belongs to a different request: use another task_id") from None

    def status(self, task_id: str) -> dict[str, Any]:
        """Return the state of a task with the results of all ended sessions. Raises NotFound."""
        return self._status(task_id, self._batch(task_id))

    def ended(self, batch_id: str) -> dict[str, Any]:
        """Return the state of the task of a batch. Raises NotFound."""
        request = self._farm.store.read(partial(batches.request_of, batch_id=batch_id))
        return self.status(request["metadata"]["task"]["task_id"])

    def cancel(self, task_id: str, register_if_missing: bool) -> dict[str, Any]:
        """Cancel a task; with `register_if_missing` refuse the later submit of an unknown one. Raises NotFound."""
        try:
            batch = self._batch(task_id)
        except NotFound:
            if not register_if_missing:
                raise
            self._tombstone(task_id).change(lambda _: {"until": time.time() + _TOMBSTONE_S})
            empty = {"total_sessions": 0, "completed_sessions": 0, "results": [], "result_paths": []}
            return {"task_id": task_id, "status": "cancelled", **empty}
        self._farm.cancel(batch.batch_id)
        return self._status(task_id, batch)

    def sessions(self, task_id: str) -> list[dict[str, Any]]:
        """Return one-line summaries of the sessions of a task. Raises NotFound."""
        rollouts = self._farm.rollouts(self._batch(task_id).batch_id)
        return [
            {"session_id": each.rollout_id, "task_id": task_id, "status": session_status(each), "reward": each.reward}
            for each in rollouts
        ]

    def listing(self, query: PolarTasksQuery) -> list[dict[str, Any]]:
        """Return one-line summaries of the newest tasks."""
        return self._farm.store.read(lambda connection: list(islice(_lines(connection, query), query.limit)))

    def counts(self) -> dict[str, Any]:
        """Return the number of running tasks, and of their open sessions by stage."""
        of_prefix = partial(keyed_rollouts.open_batches, prefix=PREFIX)
        counts = self._farm.store.read(partial(keyed_rollouts.open_counts, prefix=PREFIX))
        by_stage: Counter[str] = Counter()
        for (stage, _), n in counts.items():
            by_stage[stage.value] += n
        return {"running_tasks": len(self._farm.store.read(of_prefix)), "sessions": dict(by_stage)}

    def _batch(self, task_id: str) -> KeyedBatch:
        for batch in self._farm.runs.keyed_batches([key_of_task(task_id)]):
            return batch
        raise NotFound("Task not found")

    def _status(self, task_id: str, batch: KeyedBatch) -> dict[str, Any]:
        rollouts = self._farm.rollouts(batch.batch_id)
        ended = [each for each in rollouts if each.finished_at is not None]
        n_cancelled = sum(each.state is State.CANCELLED for each in rollouts)
        builder = batch.metadata["task"]["builder"]["strategy"]
        return {
            "task_id": task_id,
            "status": _status_of(len(rollouts), len(ended), n_cancelled),
            "total_sessions": len(rollouts),
            "completed_sessions": len(ended),
            "results": [self._result(task_id, builder, each) for each in ended],
            "result_paths": [],
        }

    def _result(self, task_id: str, builder: str, rollout: Rollout) -> dict[str, Any]:
        name = rollout.rollout_id
        return session_result(task_id, builder, rollout, self._farm.calls(name), self._farm.timings(name))

    def _tombstone(self, task_id: str) -> KeptState:
        return KeptState(self._farm.runs, key_of_task(task_id))


def callback_body(store: Store, batch_id: str) -> dict[str, Any]:
    """Return the body of a task's callback: its status with all results, as its route returns it. Raises NotFound."""
    return PolarTasks(LocalFarm(store, Signals(""), 0)).ended(batch_id)


def _lines(connection: Connection, query: PolarTasksQuery) -> Iterator[dict[str, Any]]:
    for each in keyed_rollouts.summaries(connection, PREFIX):
        task = each.metadata["task"]
        line = {
            "task_id": task["task_id"],
            "status": _status_of(each.n_rollouts, each.n_ended, each.n_cancelled),
            "harness": task["agent"]["harness"],
            "model": task["agent"]["model_name"],
            "total_sessions": each.n_rollouts,
            "completed_sessions": each.n_ended,
            "mean_reward": each.mean_reward,
            "created_at": each.created_at,
            "updated_at": each.updated_at,
        }
        is_requested = query.status in (None, line["status"]) and query.harness in (None, line["harness"])
        if is_requested and (query.since is None or each.updated_at >= query.since):
            yield line


def _status_of(n_sessions: int, n_ended: int, n_cancelled: int) -> str:
    """Return `running` until all have ended, then `cancelled` if none ended by itself, else `completed`."""
    if n_ended < n_sessions:
        return "running"
    return "cancelled" if n_cancelled == n_sessions else "completed"


def session_status(rollout: Rollout) -> str:
    """Return the status of a session: COMPLETED if it was scored, TIMEOUT if its policy ran out of time."""
    if rollout.finished_at is None:
        if rollout.stage is Stage.INIT:
            return "REGISTERED" if rollout.state is State.QUEUED else "INITIALIZING"
        if rollout.stage is Stage.RUN:
            return "READY" if rollout.state is State.QUEUED else "RUNNING"
        return "POST_RUN" if rollout.state is State.QUEUED else "EVALUATING"
    if not rollout.trainable:
        return "ERROR"
    return "TIMEOUT" if rollout.outcome is Outcome.DEADLINE else "COMPLETED"


def session_result(
    task_id: str, builder: str, rollout: Rollout, calls: Sequence[ModelCall], timings: Sequence[Timing]
) -> Value:
    """Return the result of an ended session.

    One that the farm broke, or that was cancelled, has no traces or reward.
    """
    status = session_status(rollout)
    error = None
    tools = tools_by_call(calls)
    if status == "ERROR":
        reason = f": {rollout.failure.message}" if rollout.failure is not None else ""
        error = f"rollout {rollout.rollout_id} ended as {rollout.outcome}{reason}"
        traces: list[Value] = []
    elif builder == "prefix_merging":
        rows = zip(segments(calls), calls_of_segments(calls), strict=True)
        traces = [_merged(row, row_calls, rollout, tools[row_calls[0].index]) for row, row_calls in rows]
    else:
        traces = [_of_call(call, rollout, tools[call.index]) for call in calls]
    metadata = {"record_count": len(calls), "outcome": str(rollout.outcome), "outcome_reward": rollout.reward}
    return {
        "session_id": rollout.rollout_id,
        "task_id": task_id,
        "status": status,
        "trajectory": {"status": status, "metadata": metadata, "traces": traces, "error": error},
        "timing": _timing(rollout, timings),
        "node_id": rollout.node,
        "error": error,
        "metadata": {"sample_index": rollout.sample_index, "instance_id": rollout.instance_id},
    }


def _merged(row: Segment, calls: Sequence[ModelCall], rollout: Rollout, tools: list[ToolSchema]) -> Value:
    """Return a training row as a trace; one that may not train is masked."""
    between: list[Message] = []
    for number, call in enumerate(calls):
        between += [*(call.messages if number else []), call.response, *call.observations]
    mask = row.response_mask.tolist() if row.trainable else [0] * len(row.response_ids)
    return {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids.tolist(),
        "loss_mask": mask,
        "response_logprobs": row.response_logprobs.tolist(),
        "prompt_messages": calls[0].messages,
        "response_messages": between,
        "tools": tools or None,
        **_end(calls[-1], rollout, row.untrainable),
    }


def _of_call(call: ModelCall, rollout: Rollout, tools: list[ToolSchema]) -> Value:
    """Return a model call as a trace, without tokens if not all are known."""
    tokens: Value = {"prompt_ids": [], "response_ids": [], "loss_mask": [], "response_logprobs": None}
    differs = "an engine saw another token than it was sent" if call.mismatch is not None else ""
    if call.token_exact:
        prompt, response, logprobs = exact_tokens(call)
        mask = [0 if differs else 1] * len(response)
        tokens = {"prompt_ids": prompt, "response_ids": response, "loss_mask": mask, "response_logprobs": logprobs}
    messages = {"prompt_messages": call.messages, "response_messages": [call.response]}
    return {**tokens, **messages, "tools": tools or None, **_end(call, rollout, differs)}


def _end(call: ModelCall, rollout: Rollout, untrainable: str) -> Value:
    metadata = {"policy_version": call.policy_version, **({"masked": untrainable} if untrainable else {})}
    return {"finish_reason": call.finish_reason, "reward": rollout.reward, "metadata": metadata}


def _timing(rollout: Rollout, timings: Sequence[Timing]) -> dict[str, float]:
    """Return the milliseconds of the last attempt's stages."""
    last = max((timing.attempt for timing in timings), default=0)
    names = {Stage.INIT: ("register_to_init_queue_ms", "init_ms"), Stage.RUN: ("ready_queue_ms", "run_ms")}
    names[Stage.EVAL] = ("postrun_queue_ms", "postrun_ms")
    times = {"e2e_ms": 1000 * ((rollout.finished_at or rollout.submitted_at) - rollout.submitted_at)}
    for timing in timings:
        if timing.attempt == last:
            queued, worked = names[timing.stage]
            times |= {queued: 1000 * (timing.queued_s or 0.0), worked: 1000 * (timing.work_s or 0.0)}
    return times
