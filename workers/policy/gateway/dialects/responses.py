"""OpenAI's responses, `POST /v1/responses`: a conversation as a list of items, or continuing an earlier response.

A namespace is a group of functions, which the policy sees as functions with longer names.

https://platform.openai.com/docs/api-reference/responses
https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.chat_completions import openai_problem
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.openai_answers import (
    ErrorObjectDict,
    InputTokenCountResponseDict,
    OutputItem,
    ResponseDict,
    ResponseUsageDict,
)
from workers.policy.gateway.dialects.request_fields import RESPONSES, of_openai, schema_of_format

if TYPE_CHECKING:
    from openai.types.responses import (
        ResponseCreateParams,
        ResponseFunctionToolCallParam,
        ResponseInputItemParam,
        ResponseInputParam,
        ResponseOutputTextParam,
    )
    from openai.types.responses.response_output_text_param import Logprob
    from openai.types.responses.response_reasoning_item_param import Content

_JOIN = "__"
Kind: TypeAlias = Literal["reasoning", "message"]
Finish: TypeAlias = "Callable[[Completion, list[OutputItem]], ResponseDict]"
"""Makes the finished response from a completion and its streamed items."""
_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg"}
_TEXTS: dict[Kind, str] = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")


def flat_name(namespace: str, name: str) -> str:
    """Return the policy's name for a function of a namespace; unchanged if it is in none."""
    return f"{namespace}{_JOIN}{name}" if namespace else name


class Namespaces:
    """The namespaces of the tools in one rollout's requests."""

    def __init__(self) -> None:
        self._by_flat_name: dict[str, tuple[str, str]] = {}

    def flattened(self, tools: object) -> list[Mapping[str, Any]]:
        """Return the tools with namespaces replaced by their functions, under longer names. Raises BadRequest."""
        flat_tools: list[Mapping[str, Any]] = []
        for number, tool in enumerate(model_api.mappings(tools or [], "tools")):
            path = f"tools[{number}]"
            if tool.get("type") != "namespace":
                if tool.get("type") == "function" and str(tool.get("name")) in self._by_flat_name:
                    raise BadRequest(
                        f"a function of a namespace is also named {tool['name']!r}: rename one", f"{path}.name"
                    )
                flat_tools.append(tool)
                continue
            namespace = model_api.word(tool.get("name"), f"{path}.name")
            for index, inner in enumerate(model_api.mappings(tool.get("tools") or [], f"{path}.tools")):
                if inner.get("type") != "function":
                    flat_tools.append(inner)
                    continue
                name = model_api.word(inner.get("name"), f"{path}.tools[{index}].name")
                self._by_flat_name[flat_name(namespace, name)] = (namespace, name)
                described = [
                    each for each in (tool.get("description"), inner.get("description")) if index == 0 and each
                ]
                more = {"description": "\n".join(map(str, described))} if described else {}
                flat_tools.append({**inner, **more, "name": flat_name(namespace, name)})
        return flat_tools

    def within(self, call: AnsweredToolCall) -> AnsweredToolCall:
        """Return a call of the policy with the client's name of the function."""
        if call.name not in self._by_flat_name:
            return call
        namespace, name = self._by_flat_name[call.name]
        return replace(call, name=name, namespace=namespace)


def output_items(completion: Completion, calls: Sequence[AnsweredToolCall]) -> list[OutputItem]:
    """Return an assistant message as output items: reasoning, text, and tool calls."""
    message, logprobs = completion.response, model_api.of_openai(completion)
    texts: dict[Kind, str] = {"reasoning": model_api.reasoning(message), "message": model_api.content(message)}
    items = [
        _text_item(kind, model_api.new_id(_PREFIXES[kind]), text, "completed", logprobs)
        for kind, text in texts.items()
        if text
    ]
    return [*items, *map(_call_item, calls)]


class ResponsesEvents:
    """The `model_api.Events` of this API: each item is added, filled and done; the last event has the response."""

    def __init__(
        self, begun: ResponseDict, calls: Callable[[Message], Sequence[AnsweredToolCall]], finish: Finish
    ) -> None:
        self._begun = begun
        self._calls = calls
        self._finish = finish
        self._number = -1
        self._items: list[OutputItem] = []
        self._open: Kind | None = None
        self._item_id = ""
        self._sent: dict[Kind, str] = {"reasoning": "", "message": ""}
        self._logprobs: list[Logprob] = []

    def begin(self) -> bytes:
        created = self._event("response.created", response=self._begun)
        return created + self._event("response.in_progress", response=self._begun)

    def delta(self, delta: Delta) -> bytes:
        return self._say("reasoning" if delta.reasoning else "message", delta.text)

    def ping(self) -> bytes:
        return model_api.COMMENT

    def end(self, completion: Completion) -> bytes:
        message = completion.response
        self._logprobs = model_api.of_openai(completion)
        pieces = [
            self._say("reasoning", model_api.rest(model_api.reasoning(message), self._sent["reasoning"])),
            self._say("message", model_api.rest(model_api.content(message), self._sent["message"])),
            self._close(),
            *(self._call(call) for call in self._calls(message)),
        ]
        response = self._finish(completion, self._items)
        return b"".join([*pieces, self._event(f"response.{response['status']}", response=response)])

    def error(self, problem: ApiProblem) -> bytes:
        failed: ResponseDict = {
            **self._begun,
            "status": "failed",
            "error": {"code": "server_error", "message": problem.message},
        }
        return self._event("response.failed", response=failed)

    def _say(self, kind: Kind, text: str) -> bytes:
        """Return the events for a piece of reasoning or text, in the open item if it is of that kind."""
        if not text:
            return b""
        opened = b"" if self._open == kind else self._close() + self._start(kind)
        self._sent[kind] += text
        more = _more(kind)
        return opened + self._of_part(f"{_TEXTS[kind]}.delta", delta=text, **more)

    def _start(self, kind: Kind) -> bytes:
        self._open, self._item_id = kind, model_api.new_id(_PREFIXES[kind])
        # A kind that comes again after the other becomes another item.
        self._sent[kind] = ""
        added = self._event(
            "response.output_item.added",
            output_index=len(self._items),
            item=_text_item(kind, self._item_id, "", "in_progress"),
        )
        return added + self._of_part("response.content_part.added", part=_part(kind, ""))

    def _close(self) -> bytes:
        kind = self._open
        if kind is None:
            return b""
        self._open, text = None, self._sent[kind]
        more = _more(kind, self._logprobs)
        item = _text_item(kind, self._item_id, text, "completed", self._logprobs)
        done = [
            self._of_part(f"{_TEXTS[kind]}.done", text=text, **more),
            self._of_part("response.content_part.done", part=_part(kind, text, self._logprobs)),
            self._event("response.output_item.done", output_index=len(self._items), item=item),
        ]
        self._items.append(item)
        return b"".join(done)

    def _call(self, call: AnsweredToolCall) -> bytes:
        index, item = len(self._items), _call_item(call)
        position = {"item_id": item["id"], "output_index": index}
        begun: ResponseFunctionToolCallParam = {**item, "arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        self._items.append(item)
        return b"".join(
            [
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event(f"{arguments}.delta", delta=call.arguments, **position),
                self._event(f"{arguments}.done", arguments=call.arguments, name=call.name, **position),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        )

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._items), content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return model_api.event({"type": kind, "sequence_number": self._number, **fields}, kind)


def _more(kind: Kind, logprobs: Sequence[Logprob] = ()) -> dict[str, Any]:
    return {"logprobs": list(logprobs)} if kind == "message" else {}


def _part(kind: Kind, text: str, logprobs: Sequence[Logprob] = ()) -> Content | ResponseOutputTextParam:
    return _thought_part(text) if kind == "reasoning" else _text_part(text, logprobs)


def _thought_part(text: str) -> Content:
    return {"type": "reasoning_text", "text": text}


def _text_part(text: str, logprobs: Sequence[Logprob]) -> ResponseOutputTextParam:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _text_item(
    kind: Kind,
    item_id: str,
    text: str,
    status: Literal["in_progress", "completed"],
    logprobs: Sequence[Logprob] = (),
) -> OutputItem:
    if kind == "reasoning":
        thoughts = [_thought_part(text)] if text else []
        return {"id": item_id, "type": "reasoning", "status": status, "content": thoughts, "summary": []}
    texts = [_text_part(text, logprobs)] if text else []
    return {"id": item_id, "type": "message", "status": status, "content": texts, "role": "assistant"}


def _call_item(call: AnsweredToolCall) -> ResponseFunctionToolCallParam:
    item: ResponseFunctionToolCallParam = {
        "id": model_api.new_id("fc"),
        "type": "function_call",
        "status": "completed",
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
    }
    if call.namespace:
        item["namespace"] = call.namespace
    return item


class ResponsesApi:
    """The `model_api.Api` of this dialect. It remembers conversations, for requests that continue a response.

    Each message is held once: other clients send all of them again with every request.
    """

    def __init__(self) -> None:
        self._conversations: dict[str, list[Message]] = {}
        self._messages: dict[bytes, Message] = {}
        self._namespaces = Namespaces()

    def parse(self, body: ResponseCreateParams) -> ParsedRequest:
        unknown = RESPONSES.unknown(body)
        tools, left_out = model_api.function_tools(self._namespaces.flattened(body.get("tools")), flat=True)
        choice = of_openai(body.get("tool_choice"), flat=True).checked(tools, left_out, "tool_choice")
        text = body.get("text")
        if not isinstance(text, dict | None):
            raise BadRequest("must be an object", "text")
        new = model_api.conversation(self._items(body.get("input")), "input")
        return ParsedRequest(
            messages=[*_instructions(body), *self._earlier(body), *new],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=model_api.flag(body, "stream"),
            max_tokens=model_api.count(body, "max_output_tokens"),
            stop=model_api.texts(body.get("stop"), "stop"),
            requested_params=model_api.requested_params(body, left_out, unknown),
            body=body,
            tool_choice=choice.mode,
            tools_allowed=choice.allowed,
            answer_schema=schema_of_format((text or {}).get("format"), "text.format", flat=True),
            logprobs="message.output_text.logprobs" in model_api.texts(body.get("include"), "include"),
            labels=model_api.labels(body),
        )

    def answer(self, request: ParsedRequest, completion: Completion) -> ResponseDict:
        return self._answered(_begun(request), request, completion)

    def events(self, request: ParsedRequest) -> ResponsesEvents:
        begun = _begun(request)
        return ResponsesEvents(
            begun, self._calls, lambda completion, items: self._answered(begun, request, completion, items)
        )

    def problem(self, problem: ApiProblem) -> dict[str, ErrorObjectDict]:
        return openai_problem(problem)

    def counted(self, n_tokens: int) -> InputTokenCountResponseDict:
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    def _answered(
        self,
        begun: ResponseDict,
        request: ParsedRequest,
        completion: Completion,
        items: list[OutputItem] | None = None,
    ) -> ResponseDict:
        """Return the finished response; `items` are its output if it was streamed."""
        if begun["store"]:
            # Instructions apply to one response only; the next may have others.
            n_instructions = len(_instructions(request.body))
            conversation = [*request.messages[n_instructions:], completion.response]
            names = (model_api.digest_of(message) for message in conversation)
            held = zip(names, conversation, strict=True)
            self._conversations[begun["id"]] = [self._messages.setdefault(name, message) for name, message in held]
        cut = completion.finish_reason == "length"
        return {
            **begun,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": output_items(completion, self._calls(completion.response)) if items is None else items,
            "usage": _usage(completion),
        }

    def _calls(self, message: Message) -> list[AnsweredToolCall]:
        return [self._namespaces.within(call) for call in model_api.calls(message)]

    def _items(self, value: str | ResponseInputParam | None) -> list[Message]:
        if isinstance(value, str):
            return [{"role": "user", "content": value}]
        conversation = _Conversation()
        items = cast("list[ResponseInputItemParam]", model_api.mappings([] if value is None else value, "input"))
        for number, item in enumerate(items):
            conversation.add(item, f"input[{number}]")
        conversation.close()
        return conversation.messages

    def _earlier(self, body: ResponseCreateParams) -> list[Message]:
        earlier = body.get("previous_response_id")
        if earlier is None:
            return []
        messages = self._conversations.get(str(earlier))
        if messages is None:
            raise BadRequest(f"there is no response {earlier!r}", "previous_response_id")
        return messages


def _begun(request: ParsedRequest) -> ResponseDict:
    body = request.body
    return {
        "id": model_api.new_id("resp"),
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "max_output_tokens": body.get("max_output_tokens"),
        "temperature": body.get("temperature"),
        "top_p": body.get("top_p"),
        "user": body.get("user"),
        "model": request.model,
        "output": [],
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "store": body.get("store") is not False,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "truncation": "disabled",
        "usage": None,
        "metadata": body.get("metadata") or {},
    }


def _usage(completion: Completion) -> ResponseUsageDict:
    n_prompt, n_response = completion.n_prompt_tokens, completion.n_response_tokens
    return {
        "input_tokens": n_prompt,
        "input_tokens_details": {"cached_tokens": completion.n_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": n_response,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_prompt + n_response,
    }


def _instructions(body: Mapping[str, Any]) -> list[Message]:
    text = body.get("instructions")
    return [{"role": "system", "content": model_api.word(text, "instructions")}] if text else []


class _Conversation:
    """The messages of a list of items: reasoning, text and calls of one assistant message are joined."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thought = ""
        self._text = ""
        self._calls: list[AnsweredToolCall] = []

    def add(self, item: ResponseInputItemParam, name: str) -> None:
        kind = item.get("type") or "message"
        if kind == "function_call":
            self._calls.append(_call(item, name))
        elif kind == "reasoning":
            self._close_answer()
            self._thought += _thought(item, name)
        elif kind == "message" and item.get("role") == "assistant":
            self._close_answer()
            self._text = model_api.plain(item.get("content"), f"{name}.content", _TEXT_PARTS)
        else:
            self.close()
            self.messages.append(_others(item, name))

    def close(self) -> None:
        """End the assistant message: the next item starts another."""
        if self._thought or self._text or self._calls:
            self.messages.append(model_api.assistant(self._text, self._thought, self._calls))
        self._thought, self._text, self._calls = "", "", []

    def _close_answer(self) -> None:
        if self._text or self._calls:
            self.close()


def _thought(item: ResponseInputItemParam, name: str) -> str:
    return model_api.plain(item.get("content"), f"{name}.content", _TEXT_PARTS) or model_api.plain(
        item.get("summary"), f"{name}.summary", _TEXT_PARTS
    )


def _call(item: ResponseInputItemParam, name: str) -> AnsweredToolCall:
    arguments = model_api.word(item.get("arguments") or "", f"{name}.arguments")
    namespace = model_api.word(item.get("namespace") or "", f"{name}.namespace")
    return AnsweredToolCall(
        model_api.word(item.get("call_id"), f"{name}.call_id"),
        flat_name(namespace, model_api.word(item.get("name"), f"{name}.name")),
        arguments,
    )


def _others(item: ResponseInputItemParam, name: str) -> Message:
    kind, role = item.get("type") or "message", item.get("role")
    if kind == "function_call_output":
        output = model_api.shown(item.get("output"), f"{name}.output", _TEXT_PARTS)
        call_id = model_api.word(item.get("call_id"), f"{name}.call_id")
        return {"role": "tool", "tool_call_id": call_id, "content": output}
    if kind != "message":
        raise BadRequest(f"an item of type {kind!r} is not supported", name)
    if role not in ("user", "system", "developer"):
        raise BadRequest(f"{role!r} is not a known role", f"{name}.role")
    if role == "user":
        return {"role": "user", "content": model_api.shown(item.get("content"), f"{name}.content", _TEXT_PARTS)}
    return {"role": "system", "content": model_api.plain(item.get("content"), f"{name}.content", _TEXT_PARTS)}
