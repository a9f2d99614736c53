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
from workers.policy.gateway.bodies import Bounded, body_of
from workers.policy.gateway.calls import Calls, n_chars
from workers.policy.gateway.chat import ChatApi
from workers.policy.gateway.messages import MessagesApi
from workers.policy.gateway.refusals import ANY, json_response, problem_of, refusal
from workers.policy.gateway.responses import ResponsesApi
from workers.policy.gateway.streams import Gone, Stream, until_gone
from workers.policy.gateway.wire import Api, Asked, Problem

SILENCE_S = 15.0
"""After so long without a word a streamed answer is begun, or goes on, with a ping: some clients give up on silence."""
MODEL = "policy"
"""The name under which the policy is listed; requests may use any."""

_UNAUTHORISED = Problem(401, "invalid_api_key", "the key is wrong")


def application(calls: Calls, key: str, silence_s: float = SILENCE_S) -> ASGIApp:
    """What is served under `/t/KEY`; any other path answers 401, whatever it is."""
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
    return _Guarded(Bounded(inner), f"/t/{key}")


class _Guarded:
    """Lets through what comes with the key, and says nothing to the rest."""

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

    def __init__(self, calls: Calls, silence_s: float) -> None:
        self._calls = calls
        self._silence_s = silence_s

    def answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                asked = api.asked(await body_of(request))
                if asked.stream:
                    return Stream(api, api.events(asked), self._pieces(asked))
                completion = await until_gone(request.receive, self._calls.complete(asked))
                return json_response(api.answer(asked, completion))
            except (Gone, ClientDisconnect):
                # nobody reads it
                return Response(status_code=499)
            except Exception as error:
                return refusal(api, problem_of(error))

        return answer

    def counting(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def count(request: Request) -> Response:
            """An estimate, by the rollout's last call: the gateway has no tokenizer."""
            try:
                asked = api.asked(await body_of(request))
            except Exception as error:
                return refusal(api, problem_of(error))
            return json_response({"input_tokens": max(1, round(n_chars(asked) / self._calls.n_chars_per_token))})

        return count

    async def _pieces(self, asked: Asked) -> AsyncIterator[Delta | Completion | None]:
        """An answer as it is sampled, the completion last; None for each while in which nothing is."""
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
    return refusal(ANY, Problem(404, "not_found", f"there is no {request.method} {request.url.path}"))


def _listed(name: str) -> dict[str, Any]:
    """A model in the words of both vendors."""
    ours = {"id": name, "object": "model", "created": 0, "owned_by": "farm"}
    return {**ours, "type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z"}


async def _models(request: Request) -> Response:
    return json_response(
        {"object": "list", "data": [_listed(MODEL)], "has_more": False, "first_id": MODEL, "last_id": MODEL}
    )


async def _model(request: Request) -> Response:
    return json_response(_listed(request.path_params["name"]))
