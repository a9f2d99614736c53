"""Google's generateContent, `POST /v1beta/models/MODEL:generateContent`: contents in parts, calls as objects.

A stream is the same answer in pieces, as server-sent events. https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api, request_fields
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.request_fields import (
    GOOGLE,
    GOOGLE_CALL,
    GOOGLE_CONFIG,
    GOOGLE_PART,
    GOOGLE_RESULT,
    camel,
    of_google,
    schema_of_google,
)
from workers.policy.message_images import Content, PicturePart, joined

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_STATUS_NAMES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    413: "INVALID_ARGUMENT",
    415: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_FINISH_REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
_TEXT_OF_RESULT = ("output", "result")
_PART_REMARKS = frozenset({"thought", *GOOGLE_PART.ignored})


class GoogleApi:
    """The `model_api.Api` of this dialect. It keeps the policy's literal arguments; clients send back their meaning."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, bytes], str] = {}

    def parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        body = camel(body)
        if isinstance(inner := body.get("generateContentRequest"), dict):
            body = {**camel(inner), "model": body.get("model"), "stream": body.get("stream")}
        config = camel(_object(body.get("generationConfig"), "generationConfig"))
        unknown = [*GOOGLE.unknown(body), *(f"generationConfig.{name}" for name in GOOGLE_CONFIG.unknown(config))]
        if config.get("candidateCount") not in (None, 1):
            raise BadRequest("only one answer per request is supported", "generationConfig.candidateCount")
        if set(_texts(config.get("responseModalities"), "generationConfig.responseModalities")) - {"TEXT"}:
            raise BadRequest("only text answers are supported", "generationConfig.responseModalities")
        tools, left_out = _tools(body.get("tools"))
        choice = of_google(body.get("toolConfig")).checked(tools, left_out, "toolConfig")
        contents = body.get("contents")
        return ParsedRequest(
            messages=[
                *_system(body.get("systemInstruction")),
                *model_api.conversation(self._messages(contents), "contents"),
            ],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=model_api.flag(body, "stream"),
            max_tokens=model_api.count(config, "maxOutputTokens"),
            stop=model_api.texts(config.get("stopSequences"), "generationConfig.stopSequences"),
            requested_params=model_api.requested_params(
                {**{name: body[name] for name in ("model", "toolConfig") if name in body}, **config}, left_out, unknown
            ),
            body=body,
            tool_choice=choice.mode,
            tools_allowed=choice.allowed,
            answer_schema=schema_of_google(config),
            logprobs=model_api.flag(config, "responseLogprobs"),
            labels=model_api.labels({"model": body.get("model"), "metadata": body.get("labels")}),
        )

    def answer(self, request: ParsedRequest, completion: Completion) -> dict[str, Any]:
        return self._answered(request, completion, model_api.new_id("resp"), "", "")

    def events(self, request: ParsedRequest) -> GoogleEvents:
        return GoogleEvents(self, request)

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        name = _STATUS_NAMES.get(problem.status, "INTERNAL")
        message = problem.message
        if problem.code == "context_length_exceeded":
            message = f"The input token count exceeds the maximum number of tokens allowed. {message}"
        return {"error": {"code": problem.status, "message": message, "status": name}}

    def counted(self, n_tokens: int) -> dict[str, Any]:
        return {"totalTokens": n_tokens}

    def _answered(
        self, request: ParsedRequest, completion: Completion, response_id: str, sent_thought: str, sent_text: str
    ) -> dict[str, Any]:
        message = completion.response
        parts: list[dict[str, Any]] = []
        thought = model_api.rest(model_api.reasoning(message), sent_thought)
        if thought and thinks(request):
            parts.append({"text": thought, "thought": True})
        calls = model_api.calls(message)
        text = model_api.rest(model_api.content(message), sent_text)
        if text or not (calls or sent_text):
            parts.append({"text": text})
        for call in calls:
            args = model_api.argument_object(call.arguments)
            self._written[call.name, _meaning(args)] = call.arguments
            parts.append({"functionCall": {"id": call.call_id, "name": call.name, "args": args}})
        reason = _FINISH_REASONS.get(model_api.finish_reason(completion), "STOP")
        logprobs = model_api.of_google(completion)
        return {
            "candidates": [
                {"content": {"role": "model", "parts": parts}, "finishReason": reason, "index": 0, **logprobs}
            ],
            "usageMetadata": _usage(completion),
            "modelVersion": request.model,
            "responseId": response_id,
        }

    def _messages(self, value: object) -> list[Message]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        contents = [value] if isinstance(value, dict) else value
        messages: list[Message] = []
        # A result without an id answers the first unanswered call of its name.
        open_calls: dict[str, deque[str]] = {}
        for number, content in enumerate(model_api.mappings(contents, "contents")):
            name = f"contents[{number}]"
            parts = [_part(each, f"{name}.parts[{n}]") for n, each in enumerate(_parts(content, name))]
            role = content.get("role") or "user"
            if role == "model":
                message = self._model_message(parts, name, number)
                for call in model_api.calls(message):
                    open_calls.setdefault(call.name, deque()).append(call.call_id)
                messages.append(message)
            elif role in ("user", "function", "tool"):
                messages += _users(parts, name, open_calls)
            else:
                raise BadRequest(f"{role!r} is not a known role", f"{name}.role")
        return messages

    def _model_message(self, parts: Sequence[Mapping[str, Any]], name: str, number: int) -> Message:
        text: list[str] = []
        thought: list[str] = []
        calls: list[AnsweredToolCall] = []
        for index, part in enumerate(parts):
            path = f"{name}.parts[{index}]"
            if (call := part.get("functionCall")) is not None:
                called = camel(_object(call, f"{path}.functionCall"))
                model_api.refuse(called, GOOGLE_CALL.refused, f"{path}.functionCall")
                args = _object(called.get("args"), f"{path}.functionCall.args")
                its_name = model_api.word(called.get("name"), f"{path}.functionCall.name")
                written = self._written.get((its_name, _meaning(args))) or orjson.dumps(args).decode()
                calls.append(AnsweredToolCall(str(called.get("id") or f"call_{number}_{index}"), its_name, written))
            elif part.get("text") is not None:
                (thought if part.get("thought") else text).append(model_api.word(part["text"], f"{path}.text"))
            else:
                raise _not_taken(part, path)
        # Pieces of a stream come back as separate parts.
        return model_api.assistant("".join(text), "".join(thought), calls)


class GoogleEvents:
    """The `model_api.Events` of this API: each event is an answer with the new part; the last has the usage."""

    def __init__(self, api: GoogleApi, request: ParsedRequest) -> None:
        self._api = api
        self._request = request
        self._response_id = model_api.new_id("resp")
        self._sent = {True: "", False: ""}

    def begin(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        self._sent[delta.reasoning] += delta.text
        if delta.reasoning and not thinks(self._request):
            return b""
        part = {"text": delta.text, **({"thought": True} if delta.reasoning else {})}
        candidate = {"content": {"role": "model", "parts": [part]}, "index": 0}
        head = {"modelVersion": self._request.model, "responseId": self._response_id}
        return model_api.event({"candidates": [candidate], **head})

    def ping(self) -> bytes:
        # The official client would take a comment for the beginning of an error.
        return model_api.event({"modelVersion": self._request.model, "responseId": self._response_id})

    def end(self, completion: Completion) -> bytes:
        sent = (self._sent[True], self._sent[False])
        return model_api.event(self._api._answered(self._request, completion, self._response_id, *sent))

    def error(self, problem: ApiProblem) -> bytes:
        return model_api.event(self._api.problem(problem))


def thinks(request: ParsedRequest) -> bool:
    """Return whether the client requests the model's thoughts."""
    config = request.body.get("generationConfig")
    thinking = camel(config).get("thinkingConfig") if isinstance(config, dict) else None
    return isinstance(thinking, dict) and bool(camel(thinking).get("includeThoughts"))


def _usage(completion: Completion) -> dict[str, int]:
    n_prompt, n_response = completion.n_prompt_tokens, completion.n_response_tokens
    return {
        "promptTokenCount": n_prompt,
        "candidatesTokenCount": n_response,
        "totalTokenCount": n_prompt + n_response,
        "cachedContentTokenCount": completion.n_cached_tokens or 0,
    }


def _users(parts: Sequence[Mapping[str, Any]], name: str, open_calls: Mapping[str, deque[str]]) -> list[Message]:
    """Return function results as separate messages, with the text between them in order."""
    messages: list[Message] = []
    for index, part in enumerate(parts):
        path = f"{name}.parts[{index}]"
        if part.get("functionResponse") is not None:
            messages.append(_result(_object(part["functionResponse"], f"{path}.functionResponse"), path, open_calls))
            continue
        if not isinstance(part, PicturePart) and part.get("text") is None:
            raise _not_taken(part, path)
        content: Content = [part] if isinstance(part, PicturePart) else model_api.word(part["text"], f"{path}.text")
        if messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = joined([messages[-1]["content"], content], "\n")
        else:
            messages.append({"role": "user", "content": content})
    return messages


def _result(function_response: Mapping[str, Any], path: str, open_calls: Mapping[str, deque[str]]) -> Message:
    images = function_response.get("parts")
    if isinstance(images, list) and images and all(isinstance(part, PicturePart) for part in images):
        # In addition to the text, which can be read without them.
        message = _result({**function_response, "parts": None}, path, open_calls)
        texts = [message["content"]] if function_response.get("response") is not None else []
        return {**message, "content": joined([*texts, images], "\n")}
    model_api.refuse(function_response, GOOGLE_RESULT.refused, f"{path}.functionResponse")
    name = model_api.word(function_response.get("name"), f"{path}.functionResponse.name")
    waiting = open_calls.get(name, deque())
    call_id = str(function_response.get("id") or "")
    if call_id in waiting:
        waiting.remove(call_id)
    elif not call_id:
        call_id = waiting.popleft() if waiting else name
    response = function_response.get("response")
    if isinstance(response, dict) and len(response) == 1:
        only = next(iter(response))
        if only in _TEXT_OF_RESULT and isinstance(response[only], str):
            return {"role": "tool", "tool_call_id": call_id, "content": response[only]}
    text = response if isinstance(response, str) else orjson.dumps(response).decode()
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _system(value: object) -> list[Message]:
    if value is None or value == "":
        return []
    if isinstance(value, str):
        return [{"role": "system", "content": value}]
    parts = _parts(_object(value, "systemInstruction"), "systemInstruction")
    texts = []
    for index, each in enumerate(parts):
        part = _part(each, f"systemInstruction.parts[{index}]")
        if part.get("text") is None:
            raise _not_taken(part, f"systemInstruction.parts[{index}]")
        texts.append(model_api.word(part["text"], f"systemInstruction.parts[{index}].text"))
    text = "\n".join(texts)
    return [{"role": "system", "content": text}] if text else []


def _tools(value: object) -> tuple[list[ChatCompletionToolParam], list[str]]:
    """Return the function tools, and the names of tools that run only on the vendor's servers."""
    tools: list[ChatCompletionToolParam] = []
    left_out: list[str] = []
    for number, each in enumerate(model_api.mappings(value or [], "tools")):
        tool = camel(each)
        path = f"tools[{number}].functionDeclarations"
        for index, declared in enumerate(model_api.mappings(tool.get("functionDeclarations") or [], path)):
            function = camel(declared)
            name = model_api.word(function.get("name"), f"{path}[{index}].name")
            field = "parameters" if function.get("parametersJsonSchema") is None else "parametersJsonSchema"
            schema = model_api.schema(function.get(field), f"{path}[{index}].{field}")
            if field == "parameters":
                schema = request_fields.json_schema(schema)
            tools.append(model_api.function(name, function.get("description"), schema))
        left_out += [name for name, value in tool.items() if name != "functionDeclarations" and value is not None]
    return tools, left_out


def _parts(content: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    parts = content.get("parts")
    if isinstance(parts, str):
        return [{"text": parts}]
    return model_api.mappings([parts] if isinstance(parts, dict) else parts or [], f"{name}.parts")


def _part(value: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a part with exactly one kind of content. Raises BadRequest for others."""
    if isinstance(value, PicturePart):
        return value
    part = {name: each for name, each in camel(value).items() if each is not None}
    if len(kinds := part.keys() - _PART_REMARKS) != 1:
        raise BadRequest(f"a part must have one content, not {', '.join(sorted(kinds)) or 'none'}", path)
    return part


def _not_taken(part: Mapping[str, Any], path: str) -> BadRequest:
    if isinstance(part, PicturePart):
        return BadRequest(model_api.NO_IMAGE, path)
    return BadRequest(f"a part with {', '.join(sorted(part.keys() - _PART_REMARKS))} is not supported", path)


def _object(value: object, name: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRequest("must be an object", name)
    return value


def _texts(value: object, name: str) -> list[str]:
    return [each.upper() for each in model_api.texts(value, name)]


def _meaning(args: object) -> bytes:
    return orjson.dumps(args, option=orjson.OPT_SORT_KEYS)
