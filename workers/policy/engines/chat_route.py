"""The chat route of every OpenAI-compatible server: the engine renders and tokenises the messages itself.

If a server refuses the fields that request token ids, later requests omit them: its rollouts can be scored, but are
never token-exact. Ids are never rebuilt from text: if any are missing, the call is text only; if they disagree, the
answer is refused by the checks of `GenerationBuilder`, as on the token wires. The fields are those of vLLM's
`return_token_ids` (`prompt_token_ids` at the top, `choices[].token_ids`); SGLang puts both in the choice, the second as
`response_token_ids`.

Deviations of servers without a different meaning are accepted: arguments as JSON values, content as parts of text, a
null finish reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from farm.errors import EngineError
from farm.records.request import SamplingParams
from farm.records.trajectory import Message, SampledTokens, TokenIds, VersionSpan, field_values, token_ids
from workers.plugins.interfaces import Completion
from workers.policy.answer_form import FormedSampling, chat_fields
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal, most_bytes
from workers.policy.engines.generation_builder import GenerationBuilder, count, finish_reason, stop_reason, version
from workers.policy.engines.wire import SHAPE, SHORT_SEED, salted, sampling_fields
from workers.policy.generation import ChatRequest, EngineAddress, EngineBusy, Generation, ImagesRefused, ImageUnreadable
from workers.policy.message_images import as_sent, digests_of

_RECORDING = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True}
"""Fields that request the data for training. They do not change the sampling, so they can be omitted."""
_FORM = frozenset({"tool_choice", "response_format"})
"""Fields that define the form of the answer, which not every server supports."""
_MAX_CHANGES = 5
"""The number of variants of one request to try with an engine that refuses it."""
_MAX_REASON = 300


def named(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with reasoning under both names: vLLM reads only `reasoning`, others `reasoning_content`.

    A server that does not find the reasoning of an earlier turn omits it from the prompt.
    """
    return [_named(message) for message in messages]


def _named(message: Message) -> Message:
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    return {**message, "reasoning": reasoning, "reasoning_content": reasoning} if reasoning else message


def parseable(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with tool call arguments that are not a JSON object wrapped as `{"malformed": text}`.

    Only for servers that parse arguments and refuse the history as sampled: it changes the prompt's ids.
    """
    return [
        {**message, "tool_calls": [_parseable_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _parseable_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        if isinstance(json.loads(function["arguments"]), dict):
            return call
    except (ValueError, RecursionError):
        pass
    return {**call, "function": {**function, "arguments": json.dumps({"malformed": function["arguments"]})}}


def completion(answer: Any, engine: str, max_tokens: int | None = None) -> Completion:
    """Convert a chat answer. Raises one of SHAPE if it is inconsistent or not a chat completion."""
    choice = answer["choices"][0]
    usage = answer.get("usage") or {}
    exact = _exact(answer, choice, usage, max_tokens)
    n_prompt = _counted(usage, "prompt_tokens", exact.prompt_ids if exact else None)
    n_response = _counted(usage, "completion_tokens", exact.response_ids if exact else None)
    reason = _finish_reason(choice, usage, max_tokens)
    if usage.get("completion_tokens") == 0 and reason != "abort":
        raise ValueError(f"no tokens, but finish reason {reason!r}")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None and count(cached) > n_prompt + n_response:
        raise ValueError(f"{cached} tokens cached of {n_prompt}")
    tokens = replace(
        exact or SampledTokens(finish_reason=reason),
        stop_reason=stop_reason(choice.get("stop_reason", choice.get("matched_stop"))),
        n_cached_tokens=cached,
    )
    return Completion(
        **field_values(tokens, SampledTokens),
        response=_message(choice["message"]),
        engine=engine,
        n_prompt_tokens=n_prompt,
        n_response_tokens=n_response,
        policy_version=_version(answer, choice),
    )


def _counted(usage: dict[str, Any], name: str, ids: TokenIds | None) -> int:
    reported = usage.get(name)
    if reported is not None:
        return count(reported)
    return 0 if ids is None else len(ids)


def _finish_reason(choice: dict[str, Any], usage: dict[str, Any], max_tokens: int | None) -> str:
    """Return the finish reason. Null means `length` if the limit is reached, else `stop`."""
    if "finish_reason" not in choice or choice["finish_reason"] is not None:
        return finish_reason(choice.get("finish_reason"))
    return "length" if max_tokens is not None and (usage.get("completion_tokens") or 0) >= max_tokens else "stop"


def _message(sent: dict[str, Any]) -> Message:
    """Return the message for the history: unset fields are omitted, every tool call has an id."""
    content, thought = _content(sent.get("content"))
    message: Message = {"role": "assistant", "content": content}
    # vLLM's name is `reasoning`; SGLang and the chat templates use `reasoning_content`.
    reasoning = _text(sent.get("reasoning_content")) or _text(sent.get("reasoning")) or thought
    if reasoning:
        message["reasoning_content"] = reasoning
    calls = sent.get("tool_calls") or []
    if calls:
        message["tool_calls"] = [_call(call, index) for index, call in enumerate(calls)]
    return message


def _content(value: Any) -> tuple[str, str]:
    """Return the text of a message, and the reasoning among its parts."""
    if not isinstance(value, list):
        return _text(value), ""
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    for part in value:
        if isinstance(part, str):
            texts["text"].append(part)
        elif part["type"] in ("text", "output_text"):
            texts["text"].append(_text(part["text"]))
        elif part["type"] == "thinking":
            # Mistral nests parts of text
            texts["thinking"].append(_content(part["thinking"])[0])
        else:
            raise ValueError(f"content has a part of type {str(part['type'])[:40]!r}, which is not text")
    return "".join(texts["text"]), "".join(texts["thinking"])


def _text(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    raise ValueError(f"text is a {type(value).__name__}")


def _call(call: dict[str, Any], index: int) -> dict[str, Any]:
    function = call["function"]
    return {
        "id": _text(call.get("id")) or f"call_{index}",
        "type": "function",
        "function": {"name": _text(function.get("name")), "arguments": _arguments(function.get("arguments"))},
    }


def _arguments(value: Any) -> str:
    """Return arguments as JSON text, as the API requires; some servers send the value itself."""
    return _text(value) if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _exact(
    answer: dict[str, Any], choice: dict[str, Any], usage: dict[str, Any], max_tokens: int | None
) -> Generation | None:
    """Return the generation; None if ids or log-probabilities are missing. An empty list of ids is an error."""
    prompt = answer.get("prompt_token_ids") or choice.get("prompt_token_ids")
    response = choice.get("token_ids", choice.get("response_token_ids"))
    entries = (choice.get("logprobs") or {}).get("content")
    if not prompt or response is None or entries is None:
        return None
    if usage.get("prompt_tokens", len(prompt)) != len(prompt):
        raise ValueError(f"{len(prompt)} prompt ids, {usage['prompt_tokens']} tokens counted")
    builder = GenerationBuilder(token_ids(()), max_tokens)
    builder.saw(prompt)
    builder.add(response, [entry["logprob"] for entry in entries])
    builder.n_counted = usage.get("completion_tokens", len(response))
    builder.end(_finish_reason(choice, usage, max_tokens))
    builder.spans(choice.get("weight_versions") or answer.get("weight_versions"))
    whole = (answer.get("metadata") or {}).get("weight_version")
    if whole is not None and not builder.versions and len(response):
        builder.versions = (VersionSpan(version(whole), 0, len(response)),)
    return builder.generation()


def _version(answer: dict[str, Any], choice: dict[str, Any]) -> str:
    """Return the version of the weights; the oldest if it changed meanwhile, to never understate staleness."""
    spans = choice.get("weight_versions") or answer.get("weight_versions") or []
    if spans:
        return version(spans[0]["version"])
    return version((answer.get("metadata") or {}).get("weight_version"))


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
                name = listed["data"][0]["id"] if listed["data"] else ""
                if not isinstance(name, str):
                    raise TypeError(f"model name {name!r}")
                self._model = name
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
        if failures.unknown_fields(refusal.body, frozenset(_RECORDING)):
            self._plain = True
            return body
        if failures.context_full(refusal.body):
            room = failures.room(refusal.body)
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
            return completion(answer, self._engine, max_tokens)
        except SHAPE as error:
            reason = str(error) if type(error) is ValueError else repr(error)
            raise failures.Unreadable(
                f"engine {self._engine} gave an answer that is not a chat completion ({reason}); check that it is "
                "an OpenAI-compatible server"
            ) from error

    def _check_images(self, model: str, refusal: Refusal) -> None:
        reason = failures.message_of(refusal.body)[:_MAX_REASON]
        answered = f"engine {self._engine} answered {refusal.status}: {reason}"
        if failures.no_images(refusal.body):
            raise ImagesRefused(
                f"{answered}; its model {model!r} does not support this conversation's images: choose one that does, "
                "or set agent_requests.images to `text`"
            ) from refusal
        if failures.bad_image(refusal.body):
            raise ImageUnreadable(f"{answered}; an image of the conversation is corrupt", reason) from refusal

    def _refused(self, refusal: Refusal) -> Exception:
        return failures.refused(self._engine, refusal.status, refusal.headers, refusal.body)


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
