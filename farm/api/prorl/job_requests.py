"""Bodies of the requests; a request of `/process` as a batch of one rollout, and the ids by which it is found again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from farm.api.protocols import columns_without, content_hash, known_handler
from farm.client.request_checks import checked
from farm.errors import InvalidRequest, UnknownHandler
from farm.records.request import MAX_INSTANCE_BYTES, BatchRequest
from farm.records.request_values import Count, Name, Request
from farm.records.values import size_of

DEFAULT = "swebench"
_HANDLERS = {
    "swebench": "swe-bench",
    "r2egym": "swe-bench",
    "deepscaler": "answer",
    "codecontests": "programs",
    "apps": "programs",
    "codeforces": "programs",
    "taco": "programs",
}
_PREFIXES = {"deepcoder": "programs", "stem": "answer"}
_UNSUPPORTED = {
    "swebench_multimodal": "images in an issue",
    "gui": "a browser",
    "visual_browsing": "a browser",
    "browsergym": "a browser",
    "osworld": "a desktop",
    "near": "search on the web",
    "research": "search on the web",
    "deep_research": "search on the web",
    "prorl": "its own scorers",
    "rStar": "its own scorers",
    "tool_call": "its own scorers",
    "if_eval": "its own scorers",
    "llm_judge": "its own judge",
}
"""Data sources without a handler here, each with its missing requirement."""

JobId = Annotated[Name, Field(min_length=1, max_length=200)]
_Retry = Annotated[float, Field(ge=0)]
DEFAULT_ANSWER_TOKENS = 4096
_DEFAULT_MODEL_LEN = 32_768
_ENGINE = {"engine_url", "engine_model", "engine_key", "engine_tokenizer"}


def handler_of(data_source: str) -> str:
    """Return the farm's handler for a data source. Raises UnknownHandler, naming the known ones."""
    if data_source in _UNSUPPORTED:
        raise UnknownHandler(f"data_source {data_source!r} needs {_UNSUPPORTED[data_source]}, which the farm lacks")
    if data_source in _HANDLERS:
        return _HANDLERS[data_source]
    for prefix, handler in _PREFIXES.items():
        if data_source.startswith(prefix):
            return handler
    return known_handler(data_source, {*_HANDLERS, *(f"{prefix}…" for prefix in _PREFIXES)})


def fields_of(instance: Mapping[str, Any], data_source: str) -> dict[str, Any]:
    """Return the fields of an instance: the row unchanged, or for the farm's own handlers their fields."""
    if data_source in _HANDLERS or data_source.startswith(tuple(_PREFIXES)):
        return columns_without(instance, ("data_source", "trajectory_id"))
    return columns_without(instance, ("data_source", "trajectory_id", "instance_id"))


class ProcessRequest(Request):
    """One trajectory; its `job_id` is for cancelling it."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any]
    job_id: JobId | None = None


class CancelRequest(Request):
    job_id: JobId


class LlmServerRequest(Request):
    address: Annotated[Name, Field(max_length=2000)]


class SamplingMix(Request):
    """`sampling_params`: unknown keys are refused, and known keys with values that the farm does not support, too.

    The fields are those of the server's `LLMConfig` and of its agents' configuration, with its defaults where they
    affect a rollout: two turns, greedy sampling, answers of 4,096 tokens, observations of 30,000 characters. By token,
    an answer may be as long as `max_model_len` leaves room, whatever `max_output_tokens` says.
    """

    max_iterations: Count = 2
    ensure_thinking_end_properly: bool = False
    is_reasoning_task: bool = False
    strict_loop_detector: bool = False
    enable_vision: Literal[False] = False
    enable_a11y_tree: Literal[False] = False

    model: Annotated[Name, Field(max_length=220)] = ""
    """`PROVIDER/NAME` of LiteLLM for an OpenAI-compatible server, or only the name."""
    api_key: Annotated[Name | None, Field(repr=False)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63 - 1024)] | None = None
    max_output_tokens: Count | None = None
    max_model_len: Count | None = None
    max_message_chars: Count = 30_000
    native_tool_calling: bool | None = True
    token_level_generation: Annotated[bool | None, Field(validate_default=True)] = None
    """If left out, messages still have their ids, and answers are limited as they are by text."""
    custom_tokenizer: Annotated[Name, Field(max_length=1000)] | None = None
    enable_thinking: bool | None = None

    # settings of its client library: the farm records every call, and retries by its own rules
    modify_params: bool = False
    drop_params: bool = True
    caching_prompt: bool = True
    log_completions: bool = False
    log_completions_folder: str = ""
    num_retries: int = 0
    retry_multiplier: _Retry = 0.0
    retry_min_wait: _Retry = 0.0
    retry_max_wait: _Retry = 0.0
    timeout: Annotated[float, Field(gt=0)] | None = None
    # only counted, or unused, on that server
    max_input_tokens: Count | None = None
    input_cost_per_token: _Retry | None = None
    output_cost_per_token: _Retry | None = None
    disable_vision: bool | None = None
    # for models of services other than self-hosted LLM servers
    reasoning_effort: Name | None = None
    openrouter_site_url: Name | None = None
    openrouter_app_name: Name | None = None
    custom_llm_provider: Literal["hosted_vllm", "openai", "litellm_proxy"] | None = None
    api_version: None = None
    aws_access_key_id: None = None
    aws_secret_access_key: None = None
    aws_region_name: None = None
    ollama_base_url: None = None
    base_url: None = None
    """Refused on that server, too: `/add_llm_server` names servers."""

    @field_validator("token_level_generation")
    @classmethod
    def _not_by_text(cls, by_token: bool | None, info: ValidationInfo) -> bool | None:
        if info.data.get("native_tool_calling") is False and not by_token:
            raise ValueError(
                "must be true with native_tool_calling=false: by text that writes tool calls into the prompt, which "
                "the farm does not support"
            )
        return by_token

    @property
    def model_name(self) -> str:
        """The model's own name."""
        provider, slash, name = self.model.partition("/")
        return name if slash and provider in ("hosted_vllm", "openai", "litellm_proxy") else self.model

    @property
    def answer_tokens(self) -> int | None:
        """The token limit of one answer; None if only its row limits it."""
        return None if self.token_level_generation else self.max_output_tokens or DEFAULT_ANSWER_TOKENS

    @property
    def row_tokens(self) -> int | None:
        """The token limit of a prompt and its answer together; None if only the LLM server limits them."""
        return self.max_model_len or (_DEFAULT_MODEL_LEN if self.token_level_generation else None)


def sampling_of(request: ProcessRequest) -> SamplingMix:
    """Return the validated `sampling_params`. Raises InvalidRequest naming each refused key."""
    return checked(SamplingMix, request.sampling_params, "sampling_params")


def job_of(request: ProcessRequest) -> str:
    """Return the id of a job: its name, if it has one, and its whole request.

    Raises InvalidRequest if it is too large.
    """
    try:
        size_of(request.instance, MAX_INSTANCE_BYTES)
    except ValueError as error:
        raise InvalidRequest(str(error), field="instance") from None
    return f"{named_job(request.job_id)}:{content_hash([request.instance, request.sampling_params])}"


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
    offset = sample if isinstance(sample, int) else int(content_hash(key)[:8], 16)
    return servers[(first + offset) % len(servers)]


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
        return checked(BatchRequest, values)
    except InvalidRequest as error:
        raise error.renamed(sent_name) from None


def sent_name(field: str) -> str:
    """Return this protocol's name of a field of the batch."""
    if field.startswith("instances"):
        rest = field.removeprefix("instances[0]").removeprefix(".")
        return ".".join(filter(None, ["instance", rest.removeprefix("fields").removeprefix(".")]))
    return f"sampling_params.{field}" if field.split(".")[0] in {"sampling", "limits", *_ENGINE} else field


def _text(value: Any) -> str:
    return "" if value is None else str(value)
