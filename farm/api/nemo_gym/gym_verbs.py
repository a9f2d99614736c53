"""The routes of NeMo Gym's agent server; its errors are `{"detail": …}`.

The answer of `/run` is the row, with a response of the Responses API and a reward, or with the class of a failure.
`/aggregate_metrics` reads such results: mean, maximum, minimum, median and deviation of each number in them.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import ConfigDict
from starlette.routing import BaseRoute

from farm.api.auth import RouteScopes
from farm.api.endpoints import Endpoints
from farm.api.nemo_gym.gym_rows import (
    KEY_COLUMN,
    RowIdentity,
    RowNames,
    batch_request,
    identity_of,
    row_names,
    sent_name,
)
from farm.api.protocols import (
    WireProtocol,
    await_batch,
    columns_without,
    exact_tokens,
    longest_row,
    reasoning_and_text,
    refuse_with_detail,
)
from farm.api.schemas import ApiRequest, RequestRejected
from farm.callers import Scope
from farm.client.http_errors import ProblemDetails
from farm.client.local import LocalFarm
from farm.errors import Conflict, InvalidRequest, ServiceError
from farm.ids import rollout_id
from farm.records.request_values import Request
from farm.records.rollout import Outcome, Rollout
from farm.records.trajectory import Message, ModelCall, ToolSchema, tools_by_call
from farm.store.reports import keyed_rollouts

Item = dict[str, Any]
_KINDS = {
    Outcome.SANDBOX_ERROR: "provider_unavailable",
    Outcome.ENGINE_ERROR: "transport_unreachable",
    Outcome.EVALUATOR_ERROR: "verifier_error",
    Outcome.LOST: "session_lost",
    Outcome.CANCELLED: "cancelled",
    Outcome.STALE: "cancelled",
}
"""Kinds of failure of unscored rollouts, in NeMo Gym's terms; all others are `agent_run_error`."""

Result = Mapping[str, Any]
_GREATEST = 1e100
"""Larger numbers are ignored: their squares overflow 64 bits."""
_STATISTICS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "max": max,
    "min": min,
    "median": statistics.median,
    "std": lambda values: statistics.stdev(values) if len(values) > 1 else 0.0,
}

_WAIT_S = 86_400.0
"""Seconds that `/run` waits: its clients have no time limit."""
_CONSUMER = "nemo-gym"
_HEALTH = ("/", "/health", "/healthz", "/livez", "/readyz")
_UNSCORED = (
    "an unscored run is not a rollout of the farm: send a row to /run, whose answer has the response and the reward"
)
_SCOPES: RouteScopes = {
    ("POST", "/run"): Scope.SUBMIT,
    ("POST", "/v1/responses"): Scope.SUBMIT,
    ("POST", "/aggregate_metrics"): Scope.READ,
    **{("GET", path): Scope.READ for path in _HEALTH},
}


def run_result(row: Mapping[str, Any], names: RowNames, rollout: Rollout, calls: Sequence[ModelCall]) -> dict[str, Any]:
    """Return the answer of `/run` for an ended rollout.

    One that the farm broke, or that was cancelled, has neither reward nor response: it is a failure, which collection
    keeps apart from results and retries, and not a zero. `mask_sample` is true for it, and for one whose engine saw
    other tokens than it was sent.
    """
    result = {**columns_without(row, (KEY_COLUMN,)), "rollout_id": rollout.rollout_id}
    if not rollout.trainable:
        kind = _KINDS.get(rollout.outcome or Outcome.LOST, "agent_run_error")
        message = f": {rollout.failure.message}" if rollout.failure is not None else ""
        reason = f"rollout {rollout.rollout_id} ended as {rollout.outcome}{message}"
        failure = {"mask_sample": True, "failure_kind": kind, "failure_reason": reason}
        return result | failure | {"_ng_failure_class": kind, "_ng_failure_message": reason}
    row_calls = longest_row(calls)
    differs = any(call.mismatch is not None for call in row_calls)
    result |= {"mask_sample": differs, "failure_kind": None, "failure_reason": None}
    if differs:
        reason = "the engine saw other tokens than it was sent"
        result |= {"failure_kind": "farm:token_mismatch", "failure_reason": reason}
    elif rollout.outcome is Outcome.DEADLINE:
        result |= {"failure_kind": "agent_timeout", "failure_reason": "the time limit of the run was reached"}
    tools = tools_by_call(calls)[row_calls[0].index] if row_calls else []
    return result | {"reward": rollout.reward, "response": _response(names, rollout, row_calls, tools)}


def output_items(calls: Sequence[ModelCall]) -> list[Item]:
    """Return the items that a model and its tools added to the input; the last of a call has its tokens."""
    output: list[Item] = []
    for number, call in enumerate(calls):
        if number:
            output += [_input_item(message) for message in call.messages]
        items = _sampled_items(call)
        if call.token_exact:
            prompt, response, logprobs = exact_tokens(call)
            tokens = {"prompt_token_ids": prompt, "generation_token_ids": response, "generation_log_probs": logprobs}
            items[-1] |= tokens
        output += items
        output += [_input_item(message) for message in call.observations]
    return output


def _sampled_items(call: ModelCall) -> list[Item]:
    reasoning, text = reasoning_and_text(call.response)
    tool_calls = call.response.get("tool_calls") or []
    items: list[Item] = []
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning}]
        items.append({"type": "reasoning", "id": f"rs_{call.index}", "summary": summary})
    if text or not (reasoning or tool_calls):
        content = [{"type": "output_text", "text": text, "annotations": []}]
        message = {"type": "message", "id": f"msg_{call.index}", "role": "assistant", "status": "completed"}
        items.append({**message, "content": content})
    for each in tool_calls:
        function = each.get("function") or {}
        name = {"name": str(function.get("name", "")), "arguments": str(function.get("arguments", ""))}
        items.append({"type": "function_call", "call_id": str(each.get("id", "")), "status": "completed", **name})
    return items


def _input_item(message: Message) -> Item:
    _, text = reasoning_and_text(message)
    if message.get("role") == "tool":
        return {"type": "function_call_output", "call_id": str(message.get("tool_call_id", "")), "output": text}
    return {"type": "message", "role": str(message.get("role", "user")), "content": text}


def _function(tool: ToolSchema) -> Item:
    function = tool.get("function") or {}
    return {
        "type": "function",
        "name": function.get("name"),
        "description": function.get("description"),
        "parameters": function.get("parameters"),
        "strict": function.get("strict"),
    }


def _response(
    names: RowNames, rollout: Rollout, calls: Sequence[ModelCall], tools: Sequence[ToolSchema]
) -> dict[str, Any]:
    cut = rollout.outcome in (Outcome.MAX_TOKENS, Outcome.CONTEXT_FULL)
    sampled = sum(call.n_response_tokens for call in calls)
    prompted = sum(call.n_prompt_tokens for call in calls)
    cached = sum(call.n_cached_tokens or 0 for call in calls)
    params = names.responses_create_params
    return {
        "id": f"resp_{rollout.rollout_id}",
        "object": "response",
        "created_at": rollout.submitted_at,
        "model": params.model or names.policy_model_name,
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": output_items(calls),
        "parallel_tool_calls": params.parallel_tool_calls,
        "tool_choice": "auto",
        "tools": [_function(tool) for tool in tools],
        "usage": {
            "input_tokens": prompted,
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompted + sampled,
        },
    }


_TASK, _REPEAT = "_ng_task_index", "_ng_rollout_index"


class AggregateRequest(Request):
    """Results of `/run`; other settings of a collector are ignored."""

    model_config = ConfigDict(extra="ignore")

    verify_responses: list[dict[str, Any]]


def aggregate(results: Sequence[Result]) -> dict[str, Any]:
    """Return the metrics over all results, over those of each task, and over those of each repeat.

    Masked results and failures have no valid reward: they count in the coverage, but in no mean.
    """
    measured = [result for result in results if not result.get("mask_sample") and _is_number(result.get("reward"))]
    overall = _statistics(measured)
    missed = len(results) - len(measured)
    coverage: dict[str, Any] = {}
    if missed:
        tasks = {_index(result, _TASK) for result in measured}
        n_tasks = len({_index(result, _TASK) for result in results})
        coverage = {
            "coverage/measured_rollouts": len(measured),
            "coverage/masked_rollouts": missed,
            "coverage/measured_tasks": len(tasks),
            "coverage/fully_masked_tasks": n_tasks - len(tasks),
        }
    agent = overall | coverage
    if measured:
        agent["num_repeats"] = len({_index(result, _REPEAT) for result in results})
    return {
        "agent_metrics": agent,
        "key_metrics": {name: value for name, value in overall.items() if name.startswith("mean/")} | coverage,
        "group_level_metrics": _by(measured, _TASK),
        "repeat_level_metrics": _by(measured, _REPEAT),
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) <= _GREATEST


def _index(result: Result, name: str) -> int:
    value = result.get(name, 0)
    return value if isinstance(value, int) else 0


def _usage(result: Result) -> Mapping[str, Any]:
    response = result.get("response")
    usage = response.get("usage") if isinstance(response, Mapping) else None
    return usage if isinstance(usage, Mapping) else {}


def _by(results: Iterable[Result], name: str) -> list[dict[str, Any]]:
    groups: defaultdict[int, list[Result]] = defaultdict(list)
    for result in results:
        groups[_index(result, name)].append(result)
    return [{**_statistics(groups[index]), name: index} for index in sorted(groups)]


def _statistics(results: Sequence[Result]) -> dict[str, float]:
    numbers: defaultdict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in {**result, **_usage(result)}.items():
            if _is_number(value) and not name.startswith("_ng_") and name != "mask_sample":
                numbers[name].append(float(value))
    return {
        f"{statistic}/{name}": of(values) for name, values in numbers.items() for statistic, of in _STATISTICS.items()
    }


@dataclass(frozen=True, slots=True)
class SubmittedRow:
    """A row that was submitted as a batch of one rollout, or found again."""

    row: dict[str, Any]
    names: RowNames
    identity: RowIdentity
    batch_id: str


class _Routes:
    """The verbs, on the endpoints of an API."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints
        self._farm = endpoints.farm

    def routes(self) -> list[BaseRoute]:
        endpoints = self._endpoints
        return [
            endpoints.route("POST", "/run", self._run),
            endpoints.post("/v1/responses", self._unscored, takes_body=False),
            endpoints.post("/aggregate_metrics", self._aggregate),
            *(endpoints.health(path) for path in _HEALTH),
        ]

    async def _run(self, request: ApiRequest) -> dict[str, Any]:
        """Answer once the rollout has ended. A client that left without the answer may ask again."""
        endpoints = self._endpoints
        submitted = await endpoints.run(_submitted, self._farm, request)
        is_disconnected = request.is_disconnected
        # released here, as it may be large and the wait long
        del request
        await await_batch(endpoints, submitted.batch_id, _WAIT_S, is_disconnected)
        rollout, result = await endpoints.run(_result, self._farm, submitted)
        if submitted.identity.key and not submitted.identity.is_lasting and not await is_disconnected():
            await endpoints.run(self._farm.acknowledge_up_to, submitted.batch_id, rollout.cursor, _CONSUMER)
        return result

    def _aggregate(self, request: ApiRequest) -> dict[str, Any]:
        return aggregate(request.parse_body(AggregateRequest).verify_responses)

    def _unscored(self, request: ApiRequest) -> Any:
        raise RequestRejected(ProblemDetails(501, "NotAllowed", _UNSCORED))


def _submitted(farm: LocalFarm, request: ApiRequest) -> SubmittedRow:
    """Submit a row, or find its rollout. Raises InvalidRequest, UnknownHandler, Conflict, ServiceError."""
    row = request.body
    names = row_names(row)
    identity = identity_of(names, row)
    key = identity.key if identity.is_lasting or not identity.key else _next_key(farm, identity.key)
    batch = batch_request(names, row, key)
    if not batch.engine_url and not farm.engines():
        raise ServiceError(
            "there is no model server: name it in the row, policy_base_url, or add one to the farm, `farm engines add`"
        )
    try:
        return SubmittedRow(row, names, identity, farm.submit(batch))
    except InvalidRequest as error:
        raise error.renamed(sent_name) from None
    except Conflict:
        message = (
            f"_ng_rollout_id {names.rollout_id!r} belongs to a different request: use another one, or a new attempt"
        )
        raise Conflict(message) from None


def _next_key(farm: LocalFarm, key: str) -> str:
    """Return the key of the row's rollout whose answer is still due; of a new one if all answers were given.

    A row that is collected again, for example by a later evaluation, has the same indices.
    """
    n = len(farm.store.read(partial(keyed_rollouts.batches_named, prefix=f"{key}:")))
    if n:
        last = f"{key}:{n - 1}"
        for batch in farm.runs.keyed_batches([last]):
            is_open = farm.has_open(batch.batch_id)
            if is_open or not farm.acknowledged(batch.batch_id, _CONSUMER):
                return last
    return f"{key}:{n}"


def _result(farm: LocalFarm, submitted: SubmittedRow) -> tuple[Rollout, dict[str, Any]]:
    name = rollout_id(submitted.batch_id, 0, 0)
    rollout = farm.rollout(name)
    return rollout, run_result(submitted.row, submitted.names, rollout, farm.calls(name))


PROTOCOL = WireProtocol(lambda endpoints: _Routes(endpoints).routes(), refuse_with_detail, _SCOPES)
