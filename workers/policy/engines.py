"""One LLM server behind the chat API: vLLM, SGLang, or any plain OpenAI-compatible one.

A server that refuses the fields which ask for token ids is remembered as plain and asked without them: its rollouts
can be scored, but are never token exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openai import APIConnectionError, APIStatusError, APITimeoutError, AsyncOpenAI, OpenAIError

from farm.errors import EngineError, LimitReached
from farm.request import SamplingParams
from farm.rollout import Outcome
from farm.trajectory import Message
from workers.interfaces import Completion
from workers.policy import answers, refusals
from workers.policy.history import parseable

_RECORDING = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
"""Fields that ask for what training needs. They do not change what is sampled, so they may be left out."""
_MAX_ABORTS = 2
"""How often a generation that the engine aborted (a weight update) is asked for again."""

_MAX_CHANGES = 5
"""How many forms of one request are tried with an engine that refuses it."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine is, `http://host:port/v1`. An empty model takes the first that the engine lists."""

    url: str
    model: str = ""
    key: str = "none"


class ChatEngine:
    """A client of one engine, for one event loop. Busy answers (429, 5xx) are tried again, as Retry-After says."""

    def __init__(self, address: EngineAddress, *, timeout_s: float = 600.0, max_retries: int = 2) -> None:
        self.address = address
        self._model = address.model
        self._plain = False
        self._client = AsyncOpenAI(
            base_url=address.url, api_key=address.key or "none", timeout=timeout_s, max_retries=max_retries
        )

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        sampling: SamplingParams,
        max_tokens: int,
        model: str = "",
    ) -> Completion:
        """The next assistant message. Raises EngineError, and LimitReached if the context is full."""
        body = _body(messages, tools, sampling, max_tokens) | {"model": model or await self.model()}
        for _ in range(_MAX_ABORTS + 1):
            completion = self._completion(await self._ask(body))
            if completion.finish_reason not in ("abort", "error"):
                return completion
        raise EngineError(f"engine {self.address.url} aborted the generation {_MAX_ABORTS + 1} times; is it paused?")

    async def model(self) -> str:
        """The model asked for where the request names none."""
        if not self._model:
            try:
                listed = await self._client.models.list()
            except OpenAIError as error:
                raise self._failure(error) from error
            if not listed.data:
                raise EngineError(f"engine {self.address.url} lists no model; load one or name one for the engine")
            self._model = listed.data[0].id
        return self._model

    async def aclose(self) -> None:
        await self._client.close()

    async def _ask(self, body: dict[str, Any]) -> Any:
        """The answer's JSON; a refused request is changed as far as the refusal tells how."""
        for _ in range(_MAX_CHANGES):
            try:
                return await self._post(body)
            except APIStatusError as error:
                body = self._changed(body, error)
        raise EngineError(f"engine {self.address.url} refuses the request in {_MAX_CHANGES} forms; look at its log")

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
            raise LimitReached(Outcome.CONTEXT_FULL, f"engine {self.address.url}: {refusals.detail(error.body)[:300]}")
        messages = parseable(body["messages"])
        if messages != body["messages"]:
            return body | {"messages": messages}
        raise self._failure(error) from error

    async def _post(self, body: dict[str, Any]) -> Any:
        sent = body if self._plain else body | _RECORDING
        try:
            return await self._client.post("/chat/completions", cast_to=object, body=sent)
        except APIStatusError:
            raise
        except (OpenAIError, ValueError) as error:
            raise self._failure(error) from error

    def _completion(self, answer: Any) -> Completion:
        try:
            return answers.completion(answer, self.address.url)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(
                f"engine {self.address.url} gave an answer that is no chat completion ({error!r}); check that it is "
                "an OpenAI-compatible server"
            ) from error

    def _failure(self, error: Exception) -> EngineError:
        if isinstance(error, APITimeoutError):
            what = "did not answer in time; look at its load, or raise FARM_POLICY_TIMEOUT_S"
        elif isinstance(error, APIConnectionError):
            what = f"cannot be reached ({error.__cause__ or error}); is it running, and is the address right?"
        elif isinstance(error, APIStatusError):
            what = f"answered {error.status_code}: {refusals.detail(error.body)[:300]}; {_advice(error.status_code)}"
        else:
            what = f"gave an answer that cannot be read: {error}"
        return EngineError(f"engine {self.address.url} {what}")


def _advice(status: int) -> str:
    if status in (401, 403):
        return "check the engine's API key"
    if status == 404:
        return "check the address (it ends in /v1) and the model's name"
    if status == 429 or status >= 500:
        return "it is overloaded or broken: look at its log"
    return "it refuses the request: check the sampling parameters and that it allows tools"


def _body(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], sampling: SamplingParams, max_tokens: int
) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": list(messages), "max_tokens": max_tokens}
    for name in ("temperature", "top_p", "top_k", "seed"):
        value = getattr(sampling, name)
        if value is not None:
            body[name] = value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if tools:
        body["tools"] = [dict(tool) for tool in tools]
    return body
