"""The chat route, which every OpenAI-compatible server has: the engine renders and tokenises the messages itself.

A server that refuses the fields which ask for token ids is remembered as plain and asked without them: its rollouts
can be scored, but are never token exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import httpx2
from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, OpenAIError

from farm.errors import EngineError
from farm.request import SamplingParams
from farm.trajectory import Message
from workers.interfaces import Completion
from workers.policy.engines import answers, failures, refusals
from workers.policy.engines.connection import readable, without_key
from workers.policy.engines.history import named, parseable
from workers.policy.engines.wire import sampling_fields
from workers.policy.generation import EngineAddress, EngineBusy

_RECORDING = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
"""Fields that ask for what training needs. They do not change what is sampled, so they may be left out."""

_MAX_CHANGES = 5
"""How many forms of one request are tried with an engine that refuses it."""


class ChatRoute:
    """One engine's chat, over connections that its owner closes."""

    def __init__(self, address: EngineAddress, client: httpx2.AsyncClient, *, timeout_s: float) -> None:
        self._engine = address.url
        self._model = address.model
        self._plain = False
        # Who waits and who fails over is the pool's to say, so nothing is tried again here.
        self._client = AsyncOpenAI(
            base_url=address.url,
            api_key=address.key or "none",
            http_client=client,
            timeout=httpx2.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None),
            max_retries=0,
        )

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> Completion:
        """The next assistant message. Errors as Engine says."""
        body = _body(messages, tools, sampling, max_tokens, template_kwargs)
        body["model"] = model or await self.model()
        completion = self._completion(await self._ask(body, session_id))
        if completion.finish_reason == "abort":
            raise EngineBusy(f"engine {self._engine} aborted the generation; is it paused for new weights?")
        if completion.finish_reason == "error":
            raise EngineError(f"engine {self._engine} broke the generation off; look at its log")
        return completion

    async def model(self) -> str:
        """The model asked for where nobody names one: the first that the engine lists."""
        if not self._model:
            try:
                listed = await self._client.models.list()
            except OpenAIError as error:
                raise self._failure(error) from error
            if not listed.data:
                raise EngineError(f"engine {self._engine} lists no model; load one or name one for the engine")
            self._model = listed.data[0].id
        return self._model

    async def _ask(self, body: dict[str, Any], session_id: str) -> Any:
        """The answer's JSON; a refused request is changed as far as the refusal tells how."""
        for _ in range(_MAX_CHANGES):
            try:
                return await self._post(body, session_id)
            except APIStatusError as error:
                body = self._changed(body, error)
        raise EngineError(f"engine {self._engine} refuses the request in {_MAX_CHANGES} forms; look at its log")

    def _changed(self, body: dict[str, Any], error: APIStatusError) -> dict[str, Any]:
        """The request to send after a refusal. Raises what the refusal means if none would be answered."""
        if error.status_code not in (400, 413, 422):
            raise self._failure(error) from error
        if refusals.unknown_fields(error.body, frozenset(_RECORDING)):
            self._plain = True
            return body
        if refusals.context_full(error.body):
            room = refusals.room(error.body)
            if 0 < room < body["max_tokens"]:
                return body | {"max_tokens": room}
            raise self._failure(error) from error
        messages = parseable(body["messages"])
        if messages != body["messages"]:
            return body | {"messages": messages}
        raise self._failure(error) from error

    async def _post(self, body: dict[str, Any], session_id: str) -> Any:
        sent = body if self._plain else body | _RECORDING
        headers = {"x-session-id": session_id} if session_id else {}
        try:
            return await self._client.post("/chat/completions", cast_to=object, body=sent, options={"headers": headers})
        except APIStatusError:
            raise
        except (OpenAIError, ValueError) as error:
            raise self._failure(error) from error

    def _completion(self, answer: Any) -> Completion:
        try:
            return answers.completion(answer, self._engine)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"engine {self._engine} gave an answer that is no chat completion ({error!r}); check that it is "
                "an OpenAI-compatible server"
            ) from error

    def _failure(self, error: Exception) -> Exception:
        if isinstance(error, APIStatusError):
            body = readable(without_key(error.response.content, self._client.api_key))
            return failures.refused(self._engine, error.status_code, error.response.headers, body)
        if isinstance(error, APITimeoutError):
            return failures.broken(self._engine, TimeoutError())
        if isinstance(error, APIConnectionError):
            return failures.broken(self._engine, error.__cause__ or error)
        return EngineError(f"engine {self._engine} gave an answer that cannot be read: {error}")


def _body(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    max_tokens: int,
    template_kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": named(messages), "max_tokens": max_tokens} | sampling_fields(sampling)
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    if template_kwargs:
        body["chat_template_kwargs"] = dict(template_kwargs)
    return body
