"""Bodies of SGLang's sampling routes with the fields that the double uses; others are ignored, as by SGLang."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from farm.records.trajectory import Message


class SglangSampling(BaseModel):
    model_config = ConfigDict(extra="ignore")

    max_new_tokens: int | None = Field(128, ge=1)
    temperature: float = Field(1.0, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    sampling_seed: int | None = None


class SglangGenerateBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    text: str | None = None
    input_ids: Any = None
    sampling_params: SglangSampling = Field(default_factory=lambda: SglangSampling.model_validate({}))
    return_logprob: bool = False
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0
    stream: bool = False
    lora_path: str | None = None
    rid: str | None = None
    cache_salt: str | None = None


class SglangChatBody(BaseModel):
    model_config = ConfigDict(extra="ignore")

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    input_ids: Any = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0)
    stop: str | list[str] | None = None
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    rid: str | None = None
