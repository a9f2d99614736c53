"""A row of `/run` as a batch of one rollout, and the ids by which it is found again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from farm.api.protocols import ROW_READERS, columns_without, content_hash, known_handler
from farm.client.request_checks import checked
from farm.errors import InvalidRequest
from farm.records.request import BatchRequest
from farm.records.request_values import Count, Name, Request

_HANDLERS = {
    "math_with_judge": "answer",
    "library_judge_math": "answer",
    "mcqa": "answer",
    "code_gen": "programs",
    "comp_coding": "programs",
    "swe_bench": "swe-bench",
}
"""Handlers by the resources servers whose rows they read, which are the prefixes of their agents' names."""
_OF_THE_WIRE = ("agent_ref", "skills_ref", "task_source", "policy_base_url", "policy_api_key", "policy_model_name")
KEY_COLUMN = "policy_api_key"
"""The column with the model server's key, which is never shown."""
_ROLLOUT_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_INDEX = Annotated[int, Field(ge=0, le=2**31 - 1)]


class CreateParams(Request):
    """`responses_create_params`: the agent's request to its model. Values that the farm does not support are refused.

    The handler has its own tools, so a row must have none.
    """

    input: str | list[Any]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    model: Annotated[Name, Field(max_length=200)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    metadata: dict[str, str] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)

    # these have no effect on the rollout
    parallel_tool_calls: bool = True
    store: bool | None = None
    stream: Literal[False] | None = None
    tool_choice: Literal["auto"] = "auto"
    truncation: Literal["disabled"] | None = None
    user: str | None = None

    # known but unsupported: only null is accepted
    background: Literal[False] | None = None
    context_management: None = None
    conversation: None = None
    include: None = None
    max_tool_calls: None = None
    moderation: None = None
    previous_response_id: None = None
    prompt: None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    reasoning: None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    stream_options: None = None
    text: None = None
    top_logprobs: None = None


class AgentRef(Request):
    name: Annotated[Name, Field(min_length=1, max_length=200)]
    type: str = ""


class RowNames(Request):
    """The columns of a row that belong to the protocol; all others belong to its task."""

    model_config = ConfigDict(extra="ignore")

    responses_create_params: CreateParams
    agent_ref: AgentRef | None = None
    data_source: Annotated[Name, Field(min_length=1, max_length=64)] | None = None
    policy_base_url: str | list[str] = ""
    policy_api_key: Annotated[Name, Field(repr=False)] = ""
    policy_model_name: Annotated[Name, Field(max_length=200)] = ""
    rollout_id: Annotated[str | None, Field(alias="_ng_rollout_id", max_length=200)] = None
    task_index: Annotated[_INDEX | None, Field(alias="_ng_task_index")] = None
    rollout_index: Annotated[_INDEX | None, Field(alias="_ng_rollout_index")] = None
    attempt_index: Annotated[_INDEX, Field(alias="_ng_attempt_index")] = 0


@dataclass(frozen=True, slots=True)
class RowIdentity:
    """The identity of a row's rollout: `key` is empty if nothing distinguishes it from other rows.

    With a `rollout_id` it means that rollout forever. With only its two indices, which begin again in each run, it
    means that rollout until its answer was given.
    """

    key: str
    is_lasting: bool


def row_names(row: Any) -> RowNames:
    """Return the validated columns of the protocol. Raises InvalidRequest naming each invalid one."""
    names = checked(RowNames, row)
    if names.rollout_id is not None and not _ROLLOUT_ID.fullmatch(names.rollout_id):
        raise InvalidRequest(
            "must consist of letters, digits, dots, dashes and underscores, and begin with a letter or digit",
            field="_ng_rollout_id",
        )
    return names


def identity_of(names: RowNames, row: Mapping[str, Any]) -> RowIdentity:
    """Return the identity of a row."""
    if names.rollout_id is not None:
        return RowIdentity(f"nemo-gym:{content_hash([names.rollout_id, names.attempt_index])}", True)
    if names.task_index is None or names.rollout_index is None:
        return RowIdentity("", False)
    return RowIdentity(f"nemo-gym:{content_hash(columns_without(row, (KEY_COLUMN,)))}", False)


def batch_request(names: RowNames, row: Mapping[str, Any], key: str) -> BatchRequest:
    """Return the batch of one rollout. Raises InvalidRequest by the names of the row, and UnknownHandler."""
    handler = _handler_of(names)
    wire = {*_OF_THE_WIRE, *(name for name in row if name.startswith(("_ng_", "_row")))}
    if handler in ROW_READERS:
        fields = columns_without(row, wire)
    else:
        fields = columns_without(row, {*wire, "responses_create_params", "data_source", "instance_id"})
    params = names.responses_create_params
    sampling = {"temperature": params.temperature, "top_p": params.top_p, "max_tokens": params.max_output_tokens}
    name = row.get("instance_id")
    values: dict[str, Any] = {
        "instances": [{"data_source": handler, "fields": fields, "instance_id": "" if name is None else str(name)}],
        "sampling": {name: value for name, value in sampling.items() if value is not None},
        "idempotency_key": key or None,
        "chat_template_kwargs": _template_kwargs(params.metadata or {}),
    }
    model = params.model or names.policy_model_name
    if url := _engine_of(names, row):
        values |= {"engine_url": url, "engine_model": model, "engine_key": names.policy_api_key}
    else:
        values["model"] = model
    try:
        return checked(BatchRequest, values)
    except InvalidRequest as error:
        raise error.renamed(sent_name) from None


def _handler_of(names: RowNames) -> str:
    if names.data_source is not None and names.data_source in ROW_READERS:
        return names.data_source
    agent = names.agent_ref.name if names.agent_ref is not None else ""
    for prefix, handler in _HANDLERS.items():
        if agent.startswith(prefix):
            return handler
    name = agent or names.data_source
    if not name:
        raise InvalidRequest("must name an agent or a data_source, which select the handler", field="row")
    return known_handler(name.removesuffix("_simple_agent"), {f"{prefix}…" for prefix in _HANDLERS})


def _engine_of(names: RowNames, row: Mapping[str, Any]) -> str:
    """Return the model server of the row; with several servers, the samples of a task are spread over them."""
    base_url = names.policy_base_url
    urls = [base_url] if isinstance(base_url, str) else base_url
    if not urls or not urls[0]:
        return ""
    task = names.responses_create_params.input
    number = names.rollout_index if names.rollout_index is not None else int(content_hash(dict(row))[:8], 16)
    return urls[(int(content_hash(task)[:8], 16) + number) % len(urls)]


def _template_kwargs(metadata: Mapping[str, str]) -> dict[str, Any]:
    text = metadata.get("chat_template_kwargs")
    if text is None:
        return {}
    try:
        kwargs = json.loads(text)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        field = "responses_create_params.metadata.chat_template_kwargs"
        raise InvalidRequest("must be a JSON object", field=field)
    return kwargs


_SENT = {
    "engine_url": "policy_base_url",
    "engine_key": "policy_api_key",
    "engine_model": "policy_model_name",
    "sampling.max_tokens": "responses_create_params.max_output_tokens",
}


def sent_name(field: str) -> str:
    """Return the row's name of a field of the batch."""
    if field.startswith("instances[0]"):
        rest = field.removeprefix("instances[0]").removeprefix(".fields").removeprefix(".")
        return rest or "row"
    if field in _SENT:
        return _SENT[field]
    return f"responses_create_params.{field.removeprefix('sampling.')}" if field.startswith("sampling.") else field
