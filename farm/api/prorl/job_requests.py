"""A request of `/process` as a batch of one rollout, and the ids by which it is found again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from farm.api.prorl.data_sources import DEFAULT, fields_of, handler_of
from farm.api.prorl.requests import DEFAULT_ANSWER_TOKENS, ProcessRequest, SamplingMix
from farm.api.protocol_parts.content_hash import content_hash
from farm.client.request_checks import invalid
from farm.errors import InvalidRequest
from farm.records.request import MAX_INSTANCE_BYTES, BatchRequest
from farm.records.values import size_of

_ENGINE = {"engine_url", "engine_model", "engine_key", "engine_tokenizer"}


def sampling_of(request: ProcessRequest) -> SamplingMix:
    """Return the validated `sampling_params`. Raises InvalidRequest naming each refused key."""
    try:
        return SamplingMix.model_validate(request.sampling_params)
    except ValidationError as error:
        raise invalid(error, "sampling_params") from None


def content_of(request: ProcessRequest) -> str:
    """Return a hash of the request."""
    return content_hash([request.instance, request.sampling_params])


def job_of(request: ProcessRequest) -> str:
    """Return the id of a job: its name, if it has one, and its whole request.

    Raises InvalidRequest if it is too large.
    """
    try:
        size_of(request.instance, MAX_INSTANCE_BYTES)
    except ValueError as error:
        raise InvalidRequest(str(error), field="instance") from None
    return f"{named_job(request.job_id)}:{content_of(request)}"


def named_job(job_id: str | None) -> str:
    """Return the prefix of the ids of jobs with one client-given name, or without one."""
    return "-" if job_id is None else content_hash(["job", job_id])


def server_of(request: ProcessRequest, servers: Sequence[str], key: str) -> str:
    """Return the server of a job: the samples of an instance take turns over the servers. "" if there is none.

    Repeats of one job, which have no number, differ by their `key`.
    """
    if not servers:
        return ""
    instance = request.instance
    sample = instance.get("trajectory_id")
    first = int(content_hash([instance.get("instance_id"), None if "instance_id" in instance else instance])[:8], 16)
    place = sample if isinstance(sample, int) else int(content_hash(key)[:8], 16)
    return servers[(first + place) % len(servers)]


def batch_request(request: ProcessRequest, sampling: SamplingMix, server: str, key: str, run_s: float) -> BatchRequest:
    """Return the batch of one rollout. Raises InvalidRequest by the names of this protocol, and UnknownHandler."""
    data_source = request.instance.get("data_source", DEFAULT)
    if not isinstance(data_source, str):
        raise InvalidRequest("must be text", field="instance.data_source")
    instance: dict[str, Any] = {
        "data_source": handler_of(data_source),
        "fields": fields_of(request.instance, data_source),
        "instance_id": _text(request.instance.get("instance_id")),
    }
    max_turns = 1 if sampling.is_reasoning_task else sampling.max_iterations
    limits: dict[str, Any] = {
        "run_s": run_s,
        "max_turns": max_turns,
        "max_repeats": 2 if sampling.strict_loop_detector else 4,
        "max_observation_chars": sampling.max_message_chars,
        "max_row_tokens": sampling.row_tokens,
        "max_tokens": sampling.row_tokens or max_turns * (sampling.answer_tokens or DEFAULT_ANSWER_TOKENS),
    }
    values: dict[str, Any] = {
        "instances": [instance],
        "limits": limits,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "max_tokens": sampling.answer_tokens,
        },
        "idempotency_key": key,
    }
    if sampling.enable_thinking is not None:
        values["chat_template_kwargs"] = {"enable_thinking": sampling.enable_thinking}
    if server:
        values |= {
            "engine_url": server,
            "engine_model": sampling.model_name,
            "engine_key": sampling.api_key or "",
            "engine_tokenizer": sampling.custom_tokenizer or "",
        }
    else:
        values["model"] = sampling.model_name
    try:
        return BatchRequest.model_validate(values)
    except ValidationError as error:
        raise named_as_sent(invalid(error)) from None


def named_as_sent(error: InvalidRequest) -> InvalidRequest:
    """Return the error with this protocol's names in place of the batch's fields."""
    return InvalidRequest.of([(_sent(field), message) for field, message in error.complaints])


def _sent(field: str) -> str:
    if field.startswith("instances"):
        rest = field.removeprefix("instances[0]").removeprefix(".")
        return ".".join(filter(None, ["instance", rest.removeprefix("fields").removeprefix(".")]))
    return f"sampling_params.{field}" if field.split(".")[0] in {"sampling", "limits", *_ENGINE} else field


def _text(value: Any) -> str:
    return "" if value is None else str(value)
