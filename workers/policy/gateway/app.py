"""The gateway as a web application: routes, the key, and calls that are answered whole or as they are sampled."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from workers.interfaces import Completion, Delta
from workers.policy.gateway.anthropic_messages import MessagesApi
from workers.policy.gateway.calls import GatewayCalls
from workers.policy.gateway.chat_completions import ChatApi
from workers.policy.gateway.error_responses import ANY, json_response, problem_of, refusal
from workers.policy.gateway.model_api import Api, ApiProblem, ParsedRequest
from workers.policy.gateway.request_limits import HeldBytesLimit, body_of
from workers.policy.gateway.responses import ResponsesApi
from workers.policy.gateway.streaming import ClientDisconnected, EventStreamResponse, until_disconnected
from workers.policy.tokens.messages import n_chars

SILENCE_S = 15.0
"""Seconds without a delta after which a streamed answer sends a ping: some clients time out on silence."""
MODEL = "policy"
"""The name under which the policy is listed; requests may use any."""

_UNAUTHORISED = ApiProblem(401, "invalid_api_key", "the key is wrong")


def application(calls: GatewayCalls, key: str, silence_s: float = SILENCE_S) -> ASGIApp:
    """Return the application that serves `/t/KEY`; any other path is answered with 401."""
    routes = _Routes(calls, silence_s)
    chat, responses, messages = ChatApi(), ResponsesApi(), MessagesApi()
    inner = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.answering(chat), methods=["POST"]),
            Route("/v1/responses", routes.answering(responses), methods=["POST"]),
            Route("/v1/messages", routes.answering(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", routes.counting(messages), methods=["POST"]),
            Route("/v1/models", _models),
            Route("/v1/models/{name:path}", _model),
        ],
        exception_handlers={404: _not_there, 405: _not_there},
    )
    return _Guarded(HeldBytesLimit(inner), f"/t/{key}")


class _Guarded:
    """A guard that passes on requests with the key, and answers all others with 401."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"].encode("utf-8", "replace")
        size = len(self._prefix)
        if not secrets.compare_digest(path[:size], self._prefix) or path[size : size + 1] != b"/":
            await refusal(ANY, _UNAUTHORISED)(scope, receive, send)
            return
        await self._app(
            {**scope, "path": scope["path"][size:], "raw_path": scope["path"][size:].encode()}, receive, send
        )


class _Routes:
    """The endpoints, for the calls of one rollout."""

    def __init__(self, calls: GatewayCalls, silence_s: float) -> None:
        self._calls = calls
        self._silence_s = silence_s

    def answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                parsed_request = api.parse(await body_of(request))
                if parsed_request.stream:
                    return EventStreamResponse(api, api.events(parsed_request), self._pieces(parsed_request))
                completion = await until_disconnected(request.receive, self._calls.complete(parsed_request))
                return json_response(api.answer(parsed_request, completion))
            except (ClientDisconnected, ClientDisconnect):
                # the client reads no answer
                return Response(status_code=499)
            except Exception as error:
                return refusal(api, problem_of(error))

        return answer

    def counting(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def count(request: Request) -> Response:
            """Return an estimate by the rollout's last call: the gateway has no tokenizer."""
            try:
                parsed_request = api.parse(await body_of(request))
            except Exception as error:
                return refusal(api, problem_of(error))
            n_tokens = n_chars(parsed_request.messages, parsed_request.tools) / self._calls.n_chars_per_token
            return json_response({"input_tokens": max(1, round(n_tokens))})

        return count

    async def _pieces(self, asked: ParsedRequest) -> AsyncIterator[Delta | Completion | None]:
        """Yield an answer as it is sampled, the completion last; None after each `silence_s` without a delta."""
        said: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._calls.complete(asked, said.put_nowait))
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            while not task.done() or not said.empty():
                try:
                    async with asyncio.timeout(self._silence_s):
                        delta = await said.get()
                except TimeoutError:
                    yield None
                    continue
                if delta is not None:
                    yield delta
            yield await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(ANY, ApiProblem(404, "not_found", f"there is no {request.method} {request.url.path}"))


def _listed(name: str) -> dict[str, Any]:
    """Return a model entry with the fields of both vendors."""
    ours = {"id": name, "object": "model", "created": 0, "owned_by": "farm"}
    return {**ours, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _models(request: Request) -> Response:
    return json_response(
        {"object": "list", "data": [_listed(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    )


async def _model(request: Request) -> Response:
    return json_response(_listed(request.path_params["name"]))
