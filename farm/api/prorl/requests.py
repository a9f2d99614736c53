"""Bodies of the requests, and the mix of agent, engine and sampling settings that is called `sampling_params`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from farm.records.request_values import Count, Name, Request

JobId = Annotated[Name, Field(min_length=1, max_length=200)]
_Retry = Annotated[float, Field(ge=0)]


class ProcessRequest(Request):
    """One trajectory to play. Without a `job_id` the request itself names it, with its `trajectory_id`."""

    instance: dict[str, Any]
    sampling_params: dict[str, Any]
    job_id: JobId | None = None


class CancelRequest(Request):
    job_id: JobId


class LlmServerRequest(Request):
    address: Annotated[Name, Field(max_length=2000)]


class SamplingMix(Request):
    """`sampling_params`: an unknown key is refused, and a known one that asks for what the farm has not, too.

    Defaults are those of the server: two turns, and greedy sampling.
    """

    max_iterations: Count = 2
    ensure_thinking_end_properly: bool = False
    is_reasoning_task: bool = False
    strict_loop_detector: Literal[False] = False
    enable_vision: Literal[False] = False
    enable_a11y_tree: Literal[False] = False

    model: Annotated[Name, Field(max_length=220)] = ""
    """`PROVIDER/NAME` of LiteLLM for an OpenAI-compatible server, or the name alone."""
    api_key: Annotated[Name | None, Field(repr=False)] = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63 - 1024)] | None = None
    max_output_tokens: Count | None = None
    max_model_len: Count | None = None
    native_tool_calling: Literal[True] | None = True
    token_level_generation: bool = True
    custom_tokenizer: Annotated[Name, Field(max_length=1000)] | None = None
    enable_thinking: bool | None = None

    # of the client library that the server uses: the farm records every call, and retries by its own rules
    modify_params: bool = False
    drop_params: bool = True
    caching_prompt: bool = True
    log_completions: bool = False
    log_completions_folder: str = ""
    num_retries: int = 0
    retry_multiplier: _Retry = 0.0
    retry_min_wait: _Retry = 0.0
    retry_max_wait: _Retry = 0.0

    @property
    def model_name(self) -> str:
        """The model's own name."""
        provider, slash, name = self.model.partition("/")
        return name if slash and provider in ("hosted_vllm", "openai", "litellm_proxy") else self.model
