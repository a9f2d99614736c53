"""The body of a submit, and its batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from farm.api.protocol_parts import content_hash, known_handler
from farm.client.request_checks import HANDLERS, invalid
from farm.errors import InvalidRequest
from farm.plugins import installed, load
from farm.records.request import BatchRequest
from farm.records.request_values import HttpUrl, Json, Name, Request, Seconds

PREFIX = "polar:"
_SWE = "swebench_harness"
_SETTINGS = ("temperature", "top_p", "top_k", "max_tokens")
_AGENT_TIMEOUT, _SEED = "agent_timeout", "eval_sampling_seed_base"


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
        return BatchRequest.model_validate(values)
    except ValidationError as error:
        raise named_as_sent(invalid(error)) from None


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


def named_as_sent(error: InvalidRequest) -> InvalidRequest:
    """Return the error with the task's names in place of the batch's fields."""
    return InvalidRequest.of([(_sent(field), message) for field, message in error.complaints])


_SENT: Mapping[str, str] = {
    "limits.run_s": f"metadata.{_AGENT_TIMEOUT}",
    "sampling.seed": f"metadata.{_SEED}",
    "agent": "agent.harness",
    "model": "agent.model_name",
    "webhook.url": "callback_url",
}


def _sent(field: str) -> str:
    if field in _SENT:
        return _SENT[field]
    if field.startswith("instances[0]"):
        rest = field.removeprefix("instances[0]").removeprefix(".").removeprefix("fields").removeprefix(".")
        return ".".join(filter(None, ["evaluator.config", rest]))
    return f"agent.settings.{field.removeprefix('sampling.')}" if field.startswith("sampling.") else field
