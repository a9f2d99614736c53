"""Bodies of the requests, and the mix of agent, engine and sampling settings in `sampling_params`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from farm.records.request_values import Count, Name, Request

JobId = Annotated[Name, Field(min_length=1, max_length=200)]
_Retry = Annotated[float, Field(ge=0)]

DEFAULT_ANSWER_TOKENS = 4096
_DEFAULT_MODEL_LEN = 32_768


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
