"""OpenAI's chat completions, `POST /v1/chat/completions`: the API closest to the policy's own.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Literal, cast

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.openai_answers import (
    ChatCompletionChunkDict,
    ChatCompletionDict,
    ChatCompletionMessageDict,
    ChoiceDeltaDict,
    ChoiceDict,
    ChoiceLogprobsDict,
    ChunkChoiceDict,
    CompletionUsageDict,
    ErrorObjectDict,
    FinishReason,
)
from workers.policy.gateway.dialects.request_fields import CHAT, CHAT_MESSAGE, of_openai, schema_of_format

if TYPE_CHECKING:
    from openai.types.chat import (
        ChatCompletionMessageParam,
        CompletionCreateParams,
    )

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


class ChatApi:
    """The `model_api.Api` of this dialect."""

    def parse(self, body: CompletionCreateParams) -> ParsedRequest:
        if body.get("n") not in (None, 1):
            raise BadRequest("only one answer per request is supported", "n")
        unknown = CHAT.unknown(body)
        if set(model_api.texts(body.get("modalities"), "modalities")) - {"text"}:
            raise BadRequest("only text answers are supported", "modalities")
        tools, left_out = model_api.function_tools(body.get("tools"), flat=False)
        choice = of_openai(body.get("tool_choice"), flat=False).checked(tools, left_out, "tool_choice")
        messages = cast("list[ChatCompletionMessageParam]", model_api.mappings(body.get("messages"), "messages"))
        parsed = [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]
        return ParsedRequest(
            messages=model_api.conversation(parsed, "messages"),
            tools=tools,
            model=str(body.get("model") or ""),
            stream=model_api.flag(body, "stream"),
            max_tokens=model_api.count(body, "max_completion_tokens", "max_tokens"),
            stop=model_api.texts(body.get("stop"), "stop"),
            requested_params=model_api.requested_params(body, left_out, unknown),
            body=body,
            tool_choice=choice.mode,
            tools_allowed=choice.allowed,
            answer_schema=schema_of_format(body.get("response_format"), "response_format", flat=False),
            logprobs=model_api.flag(body, "logprobs"),
            labels=model_api.labels(body),
        )

    def answer(self, request: ParsedRequest, completion: Completion) -> ChatCompletionDict:
        choice: ChoiceDict = {
            "index": 0,
            "message": _answer(completion.response),
            "logprobs": _logprobs(request, completion),
            "finish_reason": model_api.finish_reason(completion),
        }
        return {
            "id": model_api.new_id("chatcmpl"),
            "object": "chat.completion",
            "created": int(time.time()),
            "model": request.model,
            "choices": [choice],
            "usage": usage(completion),
        }

    def events(self, request: ParsedRequest) -> ChatEvents:
        return ChatEvents(request)

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        return openai_problem(problem)

    def counted(self, n_tokens: int) -> dict[str, Any]:
        return {"input_tokens": n_tokens}


class ChatEvents:
    """The `model_api.Events` of this API: the role comes first; the reason and `[DONE]` come last."""

    def __init__(self, request: ParsedRequest) -> None:
        self._empty: ChatCompletionChunkDict = {
            "id": model_api.new_id("chatcmpl"),
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
            "choices": [],
        }
        options = request.body.get("stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._sent = {"content": "", "reasoning_content": ""}
        self._request = request

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        return self._text("reasoning_content" if delta.reasoning else "content", delta.text)

    def ping(self) -> bytes:
        return model_api.COMMENT

    def end(self, completion: Completion) -> bytes:
        message = completion.response
        pieces = [
            self._text(
                "reasoning_content", model_api.rest(model_api.reasoning(message), self._sent["reasoning_content"])
            ),
            self._text("content", model_api.rest(model_api.content(message), self._sent["content"])),
        ]
        for number, call in enumerate(model_api.calls(message)):
            pieces.append(self._chunk({"tool_calls": [{"index": number, **model_api.tool_call(call)}]}))
        if self._request.logprobs:
            pieces.append(self._chunk({}, logprobs=_logprobs(self._request, completion)))
        pieces.append(self._chunk({}, model_api.finish_reason(completion)))
        if self._usage:
            last: ChatCompletionChunkDict = {**self._empty, "usage": usage(completion)}
            pieces.append(model_api.event(last))
        return b"".join([*pieces, b"data: [DONE]\n\n"])

    def error(self, problem: ApiProblem) -> bytes:
        return model_api.event(openai_problem(problem))

    def _text(self, field: Literal["content", "reasoning_content"], text: str) -> bytes:
        self._sent[field] += text
        delta: ChoiceDeltaDict = {"content": text} if field == "content" else {"reasoning_content": text}
        return self._chunk(delta) if text else b""

    def _chunk(
        self,
        delta: ChoiceDeltaDict,
        finish_reason: FinishReason | None = None,
        logprobs: ChoiceLogprobsDict | None = None,
    ) -> bytes:
        choice: ChunkChoiceDict = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        chunk: ChatCompletionChunkDict = {**self._empty, "choices": [choice]}
        if self._usage:
            chunk["usage"] = None
        return model_api.event(chunk)


def _logprobs(request: ParsedRequest, completion: Completion) -> ChoiceLogprobsDict | None:
    return {"content": model_api.of_openai(completion), "refusal": None} if request.logprobs else None


def usage(completion: Completion) -> CompletionUsageDict:
    n_prompt, n_response = completion.n_prompt_tokens, completion.n_response_tokens
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_response,
        "total_tokens": n_prompt + n_response,
        "prompt_tokens_details": {"cached_tokens": completion.n_cached_tokens or 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def openai_problem(problem: ApiProblem) -> dict[str, ErrorObjectDict]:
    """Return the body of an error in the form of both OpenAI APIs."""
    error: ErrorObjectDict = {
        "message": problem.message,
        "type": "server_error" if problem.status >= 500 else "invalid_request_error",
        "param": problem.param or None,
        "code": problem.code,
    }
    return {"error": error}


def _answer(message: Message) -> ChatCompletionMessageDict:
    calls = model_api.calls(message)
    text, thought = model_api.content(message), model_api.reasoning(message)
    answer: ChatCompletionMessageDict = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "refusal": None,
        "annotations": [],
    }
    if thought:
        answer["reasoning_content"] = thought
    if calls:
        answer["tool_calls"] = [model_api.tool_call(call) for call in calls]
    return answer


def _message(message: ChatCompletionMessageParam, name: str) -> Message:
    """Return the part of a message that the policy sees; keys that clients add are dropped."""
    model_api.refuse(message, CHAT_MESSAGE.refused, name)
    role = message.get("role")
    if role in ("user", "tool"):
        content = model_api.shown(message.get("content"), f"{name}.content", _TEXT_PARTS)
        answers = {"tool_call_id": str(message.get("tool_call_id") or "")} if role == "tool" else {}
        return {"role": role, **answers, "content": content}
    text = model_api.plain(message.get("content"), f"{name}.content", _TEXT_PARTS)
    if role in ("system", "developer"):
        return {"role": "system", "content": text}
    if role == "assistant":
        text = text or model_api.plain(message.get("refusal"), f"{name}.refusal")
        thought = message.get("reasoning_content") or message.get("reasoning")
        return model_api.assistant(text, thought if isinstance(thought, str) else "", _calls(message, name))
    raise BadRequest(f"{role!r} is not a known role", f"{name}.role")


def _calls(message: ChatCompletionMessageParam, name: str) -> list[AnsweredToolCall]:
    calls = []
    for number, call in enumerate(model_api.mappings(message.get("tool_calls") or [], f"{name}.tool_calls")):
        called = call.get("function")
        path = f"{name}.tool_calls[{number}].function"
        if not isinstance(called, dict):
            raise BadRequest("must be an object", path)
        arguments = model_api.word(called.get("arguments") or "", f"{path}.arguments")
        calls.append(
            AnsweredToolCall(str(call.get("id") or ""), model_api.word(called.get("name"), f"{path}.name"), arguments)
        )
    return calls
