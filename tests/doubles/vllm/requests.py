"""Request bodies of vLLM's endpoints except the one for ids, as far as the double uses them; the rest is ignored."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from farm.records.trajectory import Message
from workers.testing.engine.vllm.sampling import VllmCommonBody, VllmSampling

COMPLETION_TOKENS = 16
"""Tokens that /v1/completions samples by default or for a null `max_tokens`; the others fill the context."""


class VllmCompletionsBody(VllmSampling, VllmCommonBody):
    prompt: Any = None
    logprobs: int | None = None
    echo: bool | None = False
    return_tokens_as_token_ids: bool | None = None
    return_weight_versions: bool | None = None
    routed_experts_prompt_start: int = Field(0, ge=0)


class VllmChatBody(VllmSampling, VllmCommonBody):
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
