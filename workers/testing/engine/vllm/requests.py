"""What vLLM's three endpoints take, as far as the double heeds it; other fields are let pass, as vLLM does."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from farm.trajectory import Message

COMPLETION_TOKENS = 16
"""What /v1/completions samples where `max_tokens` is left out or null; the others fill the context."""


class StreamOptions(BaseModel):
    include_usage: bool = False


class Sampling(BaseModel):
    """The part that all three share."""

    model_config = ConfigDict(extra="ignore", strict=False)

    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=64)
    temperature: float | None = Field(None, ge=0)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Common(BaseModel):
    model_config = ConfigDict(extra="ignore")

    model: str | None = None
    request_id: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=128)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class Completions(Sampling, Common):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None


class Chat(Sampling, Common):
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    return_prompt_text: bool | None = None
    include_reasoning: bool = True

    @property
    def calls_tools(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


class GenerateSampling(Sampling):
    logprobs: int | None = None


class Generate(Common):
    token_ids: Any
    sampling_params: GenerateSampling
    output_mode: Literal["tokens", "text"] = "tokens"
