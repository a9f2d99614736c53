"""The chat route of every OpenAI-compatible server: the engine renders and tokenises the messages itself.

If a server refuses the fields that request token ids, later requests omit them: its rollouts can be scored, but are
never token-exact.
"""

from __future__ import annotations

import json
from typing import Any

from farm.errors import EngineError
from farm.records.request import SamplingParams
from workers.plugins.interfaces import Completion
from workers.policy.answer_form import FormedSampling, chat_fields
from workers.policy.engines import chat_response, failures, refusals
from workers.policy.engines.chat_history import named, parseable
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal, most_bytes
from workers.policy.engines.wire import SHAPE, SHORT_SEED, salted, sampling_fields
from workers.policy.generation import ChatRequest, EngineAddress, EngineBusy, ImagesRefused, ImageUnreadable
from workers.policy.message_images import as_sent, digests_of

_RECORDING = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
"""Fields that request the data for training. They do not change the sampling, so they can be omitted."""

_FORM = frozenset({"tool_choice", "response_format"})
"""Fields that define the form of the answer, which not every server supports."""

_MAX_CHANGES = 5
"""The number of variants of one request to try with an engine that refuses it."""

_MAX_REASON = 300


class ChatRoute:
    """The chat route of one engine, over a connection that its owner closes."""

    def __init__(self, address: EngineAddress, connection: EngineConnection) -> None:
        self._engine = address.url
        self._base = address.url.removeprefix(connection.root)
        self._model = address.model
        self._plain = address.plain_chat
        self._connection = connection

    async def complete(self, request: ChatRequest) -> Completion:
        """Return the next assistant message. Raises the errors of Engine."""
        body = _body(request)
        body["model"] = request.model or await self.model()
        completion = self._completion(await self._ask(body, request), request.max_tokens)
        if completion.finish_reason == "abort":
            raise EngineBusy(f"engine {self._engine} aborted the generation; is it paused for new weights?")
        return completion

    async def model(self) -> str:
        """Return the model to request if none is named: the first that the engine lists."""
        if not self._model:
            try:
                listed = await self._connection.get(f"{self._base}/models")
                models = listed["data"]
                self._model = _text(models[0]["id"]) if models else ""
            except Refusal as refusal:
                raise self._refused(refusal) from refusal
            except FAILURES as error:
                raise failures.broken(self._engine, error) from error
            except SHAPE as error:
                raise failures.unreadable(self._engine, error) from error
            if not self._model:
                raise EngineError(f"engine {self._engine} lists no model; load one or name one for the engine")
        return self._model

    async def _ask(self, body: dict[str, Any], request: ChatRequest) -> Any:
        """Return the answer's JSON; a refused request is changed according to the refusal, then retried."""
        for _ in range(_MAX_CHANGES):
            try:
                return await self._post(body, request.session_id)
            except Refusal as refusal:
                if digests_of(request.messages):
                    self._check_images(body["model"], refusal)
                body = self._changed(body, request.sampling, refusal)
        raise EngineError(f"engine {self._engine} refuses {_MAX_CHANGES} variants of the request; see its log")

    def _changed(self, body: dict[str, Any], sampling: SamplingParams, refusal: Refusal) -> dict[str, Any]:
        """Return the request to send after a refusal. Raises the error of the refusal if no change would help."""
        if refusal.status not in (400, 413, 422):
            raise self._refused(refusal) from refusal
        if refusals.unknown_fields(refusal.body, frozenset(_RECORDING)):
            self._plain = True
            return body
        if refusals.context_full(refusal.body):
            room = refusals.room(refusal.body)
            if 0 < room < body["max_tokens"]:
                return body | {name: min(body[name], room) for name in ("max_tokens", "min_tokens") if name in body}
            raise self._refused(refusal) from refusal
        if free := body.keys() & _FORM:
            if isinstance(sampling, FormedSampling) and sampling.required:
                raise self._refused(refusal) from refusal
            return {name: value for name, value in body.items() if name not in free}
        messages = parseable(body["messages"])
        if messages != body["messages"]:
            return body | {"messages": messages}
        raise self._refused(refusal) from refusal

    async def _post(self, body: dict[str, Any], session_id: str) -> Any:
        # The standard library's JSON encodes any text and number that a model put into the history.
        sent = json.dumps(body if self._plain else body | _RECORDING).encode()
        headers = {"x-session-id": session_id} if session_id else {}
        most = most_bytes(len(sent), body["max_tokens"])
        try:
            return json.loads(await self._connection.ask(f"{self._base}/chat/completions", sent, headers, most))
        except FAILURES as error:
            raise failures.broken(self._engine, error) from error
        except (ValueError, RecursionError) as error:
            raise EngineError(f"engine {self._engine} gave an unreadable answer: {error}") from error

    def _completion(self, answer: Any, max_tokens: int) -> Completion:
        try:
            return chat_response.completion(answer, self._engine, max_tokens)
        except SHAPE as error:
            reason = str(error) if type(error) is ValueError else repr(error)
            raise failures.Unreadable(
                f"engine {self._engine} gave an answer that is not a chat completion ({reason}); check that it is "
                "an OpenAI-compatible server"
            ) from error

    def _check_images(self, model: str, refusal: Refusal) -> None:
        """Raise the error of a refusal that is about the request's images."""
        reason = refusals.message_of(refusal.body)[:_MAX_REASON]
        answered = f"engine {self._engine} answered {refusal.status}: {reason}"
        if refusals.no_images(refusal.body):
            raise ImagesRefused(
                f"{answered}; its model {model!r} does not support this conversation's images: choose one that does, "
                "or set agent_requests.images to `text`"
            ) from refusal
        if refusals.bad_image(refusal.body):
            raise ImageUnreadable(f"{answered}; an image of the conversation is corrupt", reason) from refusal

    def _refused(self, refusal: Refusal) -> Exception:
        return failures.refused(self._engine, refusal.status, refusal.headers, refusal.body)


def _text(found: Any) -> str:
    if isinstance(found, str):
        return found
    raise TypeError(f"model name {found!r}")


def _body(request: ChatRequest) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": as_sent(named(request.messages)), "max_tokens": request.max_tokens}
    body |= sampling_fields(request.sampling, request.max_tokens) | salted(request.sampling)
    if request.sampling.seed is not None:
        body["seed"] = request.sampling.seed & SHORT_SEED
    body |= chat_fields(request.sampling)
    if request.tools:
        body["tools"] = [dict(tool) for tool in request.tools]
    if request.template_kwargs:
        body["chat_template_kwargs"] = dict(request.template_kwargs)
    return body
