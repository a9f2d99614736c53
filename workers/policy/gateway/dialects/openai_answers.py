"""The answers of the OpenAI APIs as TypedDicts, each named after the class of the package `openai` plus `Dict`.

They have the fields that the gateway sends. `openai` itself has the TypedDicts of the parts that are also valid in
requests. It is imported for type checkers only: the import takes about a second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NotRequired, TypeAlias, TypedDict

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageFunctionToolCallParam
    from openai.types.chat.chat_completion_message_function_tool_call_param import Function
    from openai.types.responses import (
        ResponseFunctionToolCallParam,
        ResponseOutputMessageParam,
        ResponseReasoningItemParam,
        ResponseStatus,
    )
    from openai.types.responses.response_output_text_param import Logprob

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "content_filter"]
Repeated: TypeAlias = object
"""A field of the request that the answer repeats; its value is not checked."""
OutputItem: TypeAlias = "ResponseOutputMessageParam | ResponseReasoningItemParam | ResponseFunctionToolCallParam"


class ErrorObjectDict(TypedDict):
    message: str
    type: Literal["server_error", "invalid_request_error"]
    param: str | None
    code: str


class ModelDict(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class PromptTokensDetailsDict(TypedDict):
    cached_tokens: int
    audio_tokens: int


class CompletionTokensDetailsDict(TypedDict):
    reasoning_tokens: int


class CompletionUsageDict(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetailsDict
    completion_tokens_details: CompletionTokensDetailsDict


class ChoiceLogprobsDict(TypedDict):
    content: list[Logprob]
    refusal: None


class ChatCompletionMessageDict(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChatCompletionMessageFunctionToolCallParam]]


class ChoiceDict(TypedDict):
    index: int
    message: ChatCompletionMessageDict
    logprobs: ChoiceLogprobsDict | None
    finish_reason: FinishReason


class ChatCompletionDict(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChoiceDict]
    usage: CompletionUsageDict


class ChoiceDeltaToolCallDict(TypedDict):
    index: int
    id: str
    type: Literal["function"]
    function: Function


class ChoiceDeltaDict(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ChoiceDeltaToolCallDict]]


class ChunkChoiceDict(TypedDict):
    index: int
    delta: ChoiceDeltaDict
    logprobs: ChoiceLogprobsDict | None
    finish_reason: FinishReason | None


class ChatCompletionChunkDict(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoiceDict]
    usage: NotRequired[CompletionUsageDict | None]


class ResponseErrorDict(TypedDict):
    code: Literal["server_error"]
    message: str


class IncompleteDetailsDict(TypedDict):
    reason: Literal["max_output_tokens"]


class InputTokensDetailsDict(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetailsDict(TypedDict):
    reasoning_tokens: int


class ResponseUsageDict(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetailsDict
    output_tokens: int
    output_tokens_details: OutputTokensDetailsDict
    total_tokens: int


class ResponseDict(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    error: ResponseErrorDict | None
    incomplete_details: IncompleteDetailsDict | None
    instructions: Repeated
    previous_response_id: Repeated
    max_output_tokens: Repeated
    temperature: Repeated
    top_p: Repeated
    user: Repeated
    model: str
    output: list[OutputItem]
    parallel_tool_calls: Repeated
    reasoning: Repeated
    store: bool
    text: Repeated
    tool_choice: Repeated
    tools: Repeated
    truncation: Literal["disabled"]
    usage: ResponseUsageDict | None
    metadata: Repeated


class InputTokenCountResponseDict(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int
