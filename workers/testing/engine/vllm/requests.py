"""Request bodies of vLLM's endpoints, with the fields that the double uses; others are ignored, as by vLLM."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class StreamOptions(BaseModel):
    include_usage: bool = False


class VllmSampling(BaseModel):
    """The fields common to all requests."""

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


class VllmCommonBody(BaseModel):
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


class GenerateSampling(VllmSampling):
    logprobs: int | None = None
    routed_experts_prompt_start: int = Field(0, ge=0)


class VllmGenerateBody(VllmCommonBody):
    token_ids: Any
    sampling_params: GenerateSampling
    output_mode: Literal["tokens", "text"] = "tokens"
