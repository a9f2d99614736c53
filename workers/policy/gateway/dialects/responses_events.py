"""An answer of OpenAI's responses API: its items, and the numbered events of a stream.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from farm.records.trajectory import Message
from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.dialects import model_api, token_logprobs
from workers.policy.gateway.dialects.model_api import AnsweredToolCall, ApiProblem
from workers.policy.gateway.dialects.openai_answers import OutputItem, ResponseDict

if TYPE_CHECKING:
    from openai.types.responses import ResponseFunctionToolCallParam, ResponseOutputTextParam
    from openai.types.responses.response_output_text_param import Logprob
    from openai.types.responses.response_reasoning_item_param import Content

Kind: TypeAlias = Literal["reasoning", "message"]
Finish: TypeAlias = "Callable[[Completion, list[OutputItem]], ResponseDict]"
"""Makes the finished response from a completion and its streamed items."""


def output_items(completion: Completion, calls: Sequence[AnsweredToolCall]) -> list[OutputItem]:
    """Return an assistant message as output items: reasoning, text, and tool calls."""
    message, logprobs = completion.response, token_logprobs.of_openai(completion)
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
        self._logprobs = token_logprobs.of_openai(completion)
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
        where = {"item_id": item["id"], "output_index": index}
        begun: ResponseFunctionToolCallParam = {**item, "arguments": "", "status": "in_progress"}
        arguments = "response.function_call_arguments"
        self._items.append(item)
        return b"".join(
            [
                self._event("response.output_item.added", output_index=index, item=begun),
                self._event(f"{arguments}.delta", delta=call.arguments, **where),
                self._event(f"{arguments}.done", arguments=call.arguments, name=call.name, **where),
                self._event("response.output_item.done", output_index=index, item=item),
            ]
        )

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._items), content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        return model_api.event({"type": kind, "sequence_number": self._number, **fields}, kind)


_PREFIXES: dict[Kind, str] = {"reasoning": "rs", "message": "msg"}
_TEXTS: dict[Kind, str] = {"reasoning": "response.reasoning_text", "message": "response.output_text"}


def _more(kind: Kind, logprobs: Sequence[Logprob] = ()) -> dict[str, Any]:
    """Return the fields that only events of one kind have."""
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
