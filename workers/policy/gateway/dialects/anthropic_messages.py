"""Anthropic's messages, `POST /v1/messages`: content in blocks, tool calls as objects instead of text.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion
from workers.policy.gateway.dialects import model_api
from workers.policy.gateway.dialects.anthropic_events import MessagesEvents, ShownMessage
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem, BadRequest, ParsedRequest
from workers.policy.gateway.dialects.request_fields import MESSAGE, MESSAGES
from workers.policy.gateway.dialects.requested_forms import of_anthropic, schema_of_format
from workers.policy.gateway.dialects.threads import ThreadStore
from workers.policy.message_images import joined

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionToolParam

_TEXT = ("text",)
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
_STOP_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}


class MessagesApi:
    """The `model_api.Api` of this dialect. It remembers threads, and the policy's literal arguments, as clients send
    back only their meaning.
    """

    def __init__(self) -> None:
        self._written: dict[str, AnsweredToolCall] = {}
        self._threads = ThreadStore()

    def parse(self, body: Mapping[str, Any]) -> ParsedRequest:
        unknown = MESSAGES.unknown(body)
        thread = self._threads.begun(body)
        fields = body if thread is None else thread.fields
        tools, left_out = _tools(fields.get("tools"))
        left_out += [
            f"mcp_servers: {each.get('name')}"
            for each in model_api.mappings(body.get("mcp_servers") or [], "mcp_servers")
        ]
        choice = of_anthropic(body.get("tool_choice")).checked(tools, left_out, "tool_choice")
        new = model_api.conversation(self._messages(body.get("messages")), "messages")
        return ParsedRequest(
            messages=[*_system(fields.get("system")), *(thread.messages if thread is not None else ()), *new],
            tools=tools,
            model=str(body.get("model") or ""),
            stream=model_api.flag(body, "stream"),
            max_tokens=model_api.count(body, "max_tokens"),
            stop=model_api.texts(body.get("stop_sequences"), "stop_sequences"),
            requested_params=model_api.requested_params(body, left_out, unknown),
            body=body,
            tool_choice=choice.mode,
            tools_allowed=choice.allowed,
            answer_schema=_schema(body),
            labels=model_api.labels(body),
        )

    def answer(self, request: ParsedRequest, completion: Completion) -> dict[str, Any]:
        return self._shown(request, completion, model_api.new_id("msg")).message()

    def events(self, request: ParsedRequest) -> MessagesEvents:
        message_id = model_api.new_id("msg")
        return MessagesEvents(
            message_id, request.model, _thinks(request), lambda completion: self._shown(request, completion, message_id)
        )

    def problem(self, problem: ApiProblem) -> dict[str, Any]:
        kind = _KINDS.get(problem.status, "api_error")
        message = problem.message
        if problem.code == "context_length_exceeded":
            # Clients recognise by these words that they must shorten the conversation.
            message = f"prompt is too long: {message}"
        details = {"details": dict(problem.details)} if problem.details else {}
        return {"type": "error", "error": {"type": kind, "message": message, **details}}

    def counted(self, n_tokens: int) -> dict[str, Any]:
        return {"input_tokens": n_tokens}

    def _shown(self, request: ParsedRequest, completion: Completion, message_id: str) -> ShownMessage:
        """Return the answer as blocks. Thinking is included only if requested: other clients take it for the text."""
        message = completion.response
        calls = model_api.calls(message)
        self._written.update({call.call_id: call for call in calls})
        thread = self._threads.begun(request.body)
        if thread is not None:
            n_system = len(_system(thread.fields.get("system")))
            self._threads.hold(message_id, thread, [*request.messages[n_system:], message])
        stop = model_api.stop_text(completion, request)
        reason = _STOP_REASONS.get(model_api.finish_reason(completion), "end_turn")
        return ShownMessage(
            message_id=message_id,
            model=request.model,
            thinking=model_api.reasoning(message) if _thinks(request) else "",
            text=model_api.content(message),
            tool_uses=tuple((call.call_id, call.name, model_api.argument_object(call.arguments)) for call in calls),
            stop_reason="stop_sequence" if stop is not None and reason == "end_turn" else reason,
            stop_sequence=stop,
            n_prompt_tokens=completion.n_prompt_tokens,
            n_cached_tokens=completion.n_cached_tokens or 0,
            n_response_tokens=completion.n_response_tokens,
        )

    def _messages(self, value: object) -> list[Message]:
        messages: list[Message] = []
        for number, message in enumerate(model_api.mappings(value, "messages")):
            name = f"messages[{number}].content"
            model_api.refuse(message, MESSAGE.refused, f"messages[{number}]")
            content = message.get("content")
            blocks = (
                [{"type": "text", "text": content}] if isinstance(content, str) else model_api.mappings(content, name)
            )
            role = message.get("role")
            if role == "user":
                messages += _users(blocks, name)
            elif role == "assistant":
                messages.append(self._assistants(blocks, name))
            elif role == "system":
                messages += _system(blocks)
            else:
                raise BadRequest(f"{role!r} is not a known role", f"messages[{number}].role")
        return messages

    def _assistants(self, blocks: Sequence[Mapping[str, Any]], name: str) -> Message:
        text, thought, calls = [], [], []
        for number, block in enumerate(blocks):
            kind, where = block.get("type"), f"{name}[{number}]"
            if kind == "text":
                text.append(model_api.word(block.get("text"), f"{where}.text"))
            elif kind == "thinking":
                thought.append(model_api.word(block.get("thinking"), f"{where}.thinking"))
            elif kind == "tool_use":
                calls.append(self._call(block, where))
            elif kind != "redacted_thinking":
                raise BadRequest(f"a block of type {kind!r} is not taken from an assistant", where)
        return model_api.assistant("\n".join(text), "\n".join(thought), calls)

    def _call(self, block: Mapping[str, Any], name: str) -> AnsweredToolCall:
        call_id = model_api.word(block.get("id"), f"{name}.id")
        given = block.get("input")
        written = self._written.get(call_id)
        if written is not None and model_api.argument_object(written.arguments) == given:
            return AnsweredToolCall(call_id, model_api.word(block.get("name"), f"{name}.name"), written.arguments)
        if not isinstance(given, dict):
            raise BadRequest("must be an object", f"{name}.input")
        return AnsweredToolCall(
            call_id, model_api.word(block.get("name"), f"{name}.name"), orjson.dumps(given).decode()
        )


def _schema(body: Mapping[str, Any]) -> dict[str, Any] | None:
    config = body.get("output_config")
    if not isinstance(config, dict | None):
        raise BadRequest("must be an object", "output_config")
    given = (config or {}).get("format") or body.get("output_format")
    return schema_of_format(given, "output_config.format", flat=True)


def _thinks(request: ParsedRequest) -> bool:
    thinking = request.body.get("thinking")
    return isinstance(thinking, dict) and thinking.get("type") not in (None, "disabled")


def _system(value: object) -> list[Message]:
    text = model_api.plain(value, "system", _TEXT)
    return [{"role": "system", "content": text}] if text else []


def _users(blocks: Sequence[Mapping[str, Any]], name: str) -> list[Message]:
    """Return tool results as separate messages, with the text between them in order."""
    messages: list[Message] = []
    for number, block in enumerate(blocks):
        where = f"{name}[{number}]"
        if block.get("type") == "tool_result":
            shown = model_api.shown(block.get("content"), f"{where}.content", _TEXT)
            call_id = model_api.word(block.get("tool_use_id"), f"{where}.tool_use_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": shown})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] = joined([messages[-1]["content"], model_api.shown([block], where, _TEXT)], "\n")
        else:
            messages.append({"role": "user", "content": model_api.shown([block], where, _TEXT)})
    return messages


def _tools(value: object) -> tuple[list[ChatCompletionToolParam], list[str]]:
    """Return the tools that have a schema, and the names of the vendor's own tools, which have none."""
    if not value:
        return [], []
    tools, left_out = [], []
    for number, tool in enumerate(model_api.mappings(value, "tools")):
        if isinstance(tool.get("input_schema"), dict):
            name = model_api.word(tool.get("name"), f"tools[{number}].name")
            tools.append(model_api.function(name, _described(tool, f"tools[{number}]"), tool["input_schema"]))
        else:
            left_out.append(str(tool.get("type") or tool.get("name")))
    return tools, left_out


def _described(tool: Mapping[str, Any], name: str) -> object:
    """Return a tool's description with its examples appended: chat templates have no other place for them."""
    described, examples = tool.get("description"), tool.get("input_examples")
    if not examples:
        return described
    shown = [orjson.dumps(each).decode() for each in model_api.mappings(examples, f"{name}.input_examples")]
    head = [described] if isinstance(described, str) and described else []
    return "\n".join([*head, "Examples of its input:", *shown])
