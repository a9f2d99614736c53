"""The gateway: a web application, and its server, one per rollout, in the worker's event loop.

The server listens on a Unix socket in the sandbox's folder. Separate sockets isolate rollouts: a sandbox cannot reach
another's, whatever key it guesses. The key matters if a TCP port is open as well.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from workers.plugins.interfaces import Completion, Delta
from workers.policy.gateway.calls import GatewayCalls
from workers.policy.gateway.conversations import is_retry
from workers.policy.gateway.dialects.anthropic_messages import MessagesApi
from workers.policy.gateway.dialects.chat_completions import ChatApi
from workers.policy.gateway.dialects.google_contents import GoogleApi
from workers.policy.gateway.dialects.model_api import Api, ApiProblem, BadRequest, ParsedRequest, digest_of
from workers.policy.gateway.dialects.openai_answers import ModelDict
from workers.policy.gateway.dialects.request_pictures import RequestPictures, without_media
from workers.policy.gateway.dialects.responses import ResponsesApi
from workers.policy.gateway.gateway_http import (
    ANY,
    ClientDisconnected,
    EventStreamResponse,
    HeldBytesLimit,
    body_in,
    data_of,
    encoding_of,
    forget_frames,
    header_labels,
    json_response,
    problem_of,
    refusal,
    until_disconnected,
)
from workers.policy.tokens.long_texts import LongTexts
from workers.policy.tokens.messages import n_chars

SILENCE_S = 15.0
"""Seconds without a delta after which a streamed answer sends a ping: some clients time out on silence."""
MODEL = "policy"
"""The name under which the policy is listed; requests may use any name."""

_LARGE_BODY_BYTES = 200_000
"""Size from which a body takes milliseconds to parse."""
_GOOGLE_VERSIONS = ("v1beta", "v1", "v1alpha")
_STREAMED = "streamGenerateContent"
_GOOGLE_VERBS = ("generateContent", _STREAMED, "countTokens")

_UNAUTHORISED = ApiProblem(401, "invalid_api_key", "the key is wrong")
SOCKET = "gateway.sock"
MAX_CONNECTIONS = 256
"""Connections per rollout; further ones are closed, as the policy's programs can reach the socket too."""
_CLOSE_S = 5.0
_ALL = ("0.0.0.0", "::")  # noqa: S104 - that is what the setting means
# Clients keep connections open throughout, and all of them belong to one rollout.
_KEEP_ALIVE_S = 86_400


def application(calls: GatewayCalls, key: str, silence_s: float = SILENCE_S) -> ASGIApp:
    """Return the application that serves `/t/KEY`; any other path is answered with 401."""
    routes = _Routes(calls, silence_s)
    chat, responses, messages, contents = ChatApi(), ResponsesApi(), MessagesApi(), GoogleApi()
    inner = Starlette(
        routes=[
            Route("/v1/chat/completions", routes.answering(chat), methods=["POST"]),
            Route("/v1/responses", routes.answering(responses), methods=["POST"]),
            Route("/v1/responses/input_tokens", routes.counting(responses), methods=["POST"]),
            Route("/v1/messages", routes.answering(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", routes.counting(messages), methods=["POST"]),
            *(
                Route(f"/{version}/models/{{model:path}}:{verb}", endpoint, methods=["POST"])
                for version in _GOOGLE_VERSIONS
                for verb, endpoint in (
                    ("generateContent", routes.answering(contents)),
                    (_STREAMED, routes.answering(contents)),
                    ("countTokens", routes.counting(contents)),
                    ("embedContent", _no_embeddings),
                    ("batchEmbedContents", _no_embeddings),
                )
            ),
            Route("/v1/embeddings", _no_embeddings, methods=["POST"]),
            Route("/v1/responses/compact", _no_compaction, methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/v1beta/models", routes.models),
            Route("/v1beta/models/{name:path}", routes.model),
            Route("/v1/models/{name:path}", routes.model),
        ],
        exception_handlers={404: _not_there, 405: _not_there},
    )
    return _Guarded(HeldBytesLimit(inner), f"/t/{key}")


class _Guarded:
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
    def __init__(self, calls: GatewayCalls, silence_s: float) -> None:
        self._calls = calls
        self._silence_s = silence_s
        self._large_bodies = LongTexts()
        self._pictures = RequestPictures()

    def answering(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            try:
                parsed_request = await self._parsed(api, request)
                parsed_request.labels.update(header_labels(request.headers))
                if parsed_request.stream:
                    return EventStreamResponse(api, api.events(parsed_request), self._pieces(parsed_request))
                completion = await until_disconnected(request.receive, self._calls.complete(parsed_request))
                return json_response(api.answer(parsed_request, completion))
            except (ClientDisconnected, ClientDisconnect):
                # The client has gone and reads no answer.
                return Response(status_code=499)
            except Exception as error:
                refused = refusal(api, problem_of(error))
                forget_frames(error)
                return refused

        return answer

    def counting(self, api: Api) -> Callable[[Request], Awaitable[Response]]:
        async def count(request: Request) -> Response:
            """Return an estimate from the rollout's last call: the gateway has no tokenizer."""
            try:
                parsed_request = await self._parsed(api, request)
            except Exception as error:
                return refusal(api, problem_of(error))
            n_tokens = n_chars(parsed_request.messages, parsed_request.tools) / self._calls.n_chars_per_token
            return json_response(api.counted(max(1, round(n_tokens))))

        return count

    async def models(self, request: Request) -> Response:
        names = [MODEL, *self._calls.roles]
        listed = [self._listed(name) for name in names]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": listed, "models": listed, **ends})

    async def model(self, request: Request) -> Response:
        return json_response(self._listed(request.path_params["name"]))

    def _listed(self, name: str) -> dict[str, Any]:
        """Return a model entry with the fields of all vendors, and the token limits of a call."""
        openai: ModelDict = {"id": name, "object": "model", "created": 0, "owned_by": "farm"}
        google = {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": list(_GOOGLE_VERBS)}
        anthropic = {"type": "model", "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        budget = {} if name in self._calls.roles else self._calls.token_budget.fields()
        return {**openai, **google, **anthropic, **budget}

    async def _parsed(self, api: Api, request: Request) -> ParsedRequest:
        """Return the parsed request. A large one is parsed in a thread, as all rollouts share the event loop."""
        data, encoding = await data_of(request), encoding_of(request)

        def read() -> ParsedRequest:
            body = _with_path(request, body_in(data, encoding))
            digest, is_again = digest_of(body), is_retry(request.headers)
            parsed = api.parse(self._with_media(body))
            return replace(parsed, digest=digest, is_retry=is_again)

        is_small = len(data) < _LARGE_BODY_BYTES and not encoding
        return read() if is_small else await self._large_bodies.run(read)

    def _with_media(self, body: dict[str, Any]) -> dict[str, Any]:
        rule = self._calls.image_rule
        if rule == "engine":
            return self._pictures.put_into(body)
        return without_media(body) if rule == "text" else body

    async def _pieces(self, request: ParsedRequest) -> AsyncIterator[Delta | Completion | None]:
        """Yield an answer as it is sampled, the completion last; None after each `silence_s` without a delta.

        If the client leaves before it has read everything, the answer is kept for the request's retry.
        """
        deltas: asyncio.Queue[Delta | None] = asyncio.Queue()
        task = asyncio.ensure_future(self._calls.complete(request, deltas.put_nowait))
        task.add_done_callback(lambda _: deltas.put_nowait(None))
        is_read = False
        try:
            while not task.done() or not deltas.empty():
                try:
                    async with asyncio.timeout(self._silence_s):
                        delta = await deltas.get()
                except TimeoutError:
                    yield None
                    continue
                if delta is not None:
                    yield delta
            yield await task
            is_read = True
        finally:
            task.cancel()
            (outcome,) = await asyncio.gather(task, return_exceptions=True)
            if isinstance(outcome, Completion) and not is_read:
                self._calls.went_unread(request, outcome)


def _with_path(request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """Return the request's JSON object, with the fields that Google's API has in the path."""
    if "model" not in request.path_params:
        return body
    streamed = request.url.path.endswith(f":{_STREAMED}")
    if streamed and request.query_params.get("alt") != "sse":
        raise BadRequest("a stream is only available as server-sent events: ask for alt=sse", "alt")
    return {**body, "model": request.path_params["model"], "stream": streamed}


async def _not_there(request: Request, error: Exception) -> Response:
    return refusal(ANY, ApiProblem(404, "not_found", f"there is no {request.method} {request.url.path}"))


async def _no_embeddings(request: Request) -> Response:
    message = "embeddings are not supported: turn off the program's features that need them, or bring a model for them"
    return refusal(ANY, ApiProblem(404, "not_found", message, "model"))


async def _no_compaction(request: Request) -> Response:
    message = "summaries are not supported: send the items that the model should see"
    return refusal(ANY, ApiProblem(404, "not_found", message, "input"))


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a rollout's gateway: its key, and the port of 127.0.0.1 if one was opened."""

    key: str
    port: int | None = None

    @property
    def url(self) -> str:
        """The base URL for OpenAI's clients; those of Anthropic use it without the `/v1`."""
        return f"http://127.0.0.1:{self.port}/t/{self.key}/v1"


@asynccontextmanager
async def gateway(
    calls: GatewayCalls, folder: Path | None = None, *, tcp: bool = False, silence_s: float = SILENCE_S
) -> AsyncIterator[Address]:
    """Answer a rollout's calls in the block; its end aborts running ones, and waits until all answers are recorded.

    The socket is created in `folder`. Raises OSError if that fails.
    """
    key = secrets.token_urlsafe(24)
    listeners = [_unix(folder / SOCKET)] if folder is not None else []
    port = None
    if tcp:
        listeners.append(bind("127.0.0.1")[0])
        port = listeners[-1].getsockname()[1]
    try:
        async with listening(application(calls, key, silence_s), listeners):
            yield Address(key, port)
    finally:
        await calls.settle()


def bind(address: str) -> tuple[socket.socket, str]:
    """Listen at a free port of an address of this node. Returns the socket and the URL. Raises OSError."""
    host = address.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # the protocol is named, because asyncio would otherwise not disable Nagle's delay, which costs each answer 40 ms
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.bind((host, 0))
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    name = socket.gethostname() if host in _ALL else f"[{host}]" if ":" in host else host
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def _unix(path: Path) -> socket.socket:
    """Return a Unix socket at a path of any length. Its folder's mode controls access; the socket itself admits all."""
    listener = socket.socket(socket.AF_UNIX)
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # The kernel's limit is 107 bytes.
        listener.bind(f"/proc/self/fd/{folder}/{path.name}")
        _let_all_connect(path.name, folder)
    except BaseException:
        listener.close()
        raise
    finally:
        os.close(folder)
    return listener


def _let_all_connect(name: str, folder: int) -> None:
    """Make the socket writable for all, but not a file that the sandbox may have put in its place."""
    made = os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
    try:
        Path(f"/proc/self/fd/{made}").chmod(0o777)
    finally:
        os.close(made)


class _Connection(H11Protocol):
    """A connection, aborted at once if there are too many."""

    def __init__(self, most: int, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._most = most

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._most:
            transport.abort()


@asynccontextmanager
async def listening(
    app: ASGIApp, listeners: Sequence[socket.socket], max_connections: int = MAX_CONNECTIONS
) -> AsyncIterator[None]:
    """Serve on the running event loop, without uvicorn's own, until the block ends."""
    config = uvicorn.Config(
        app,
        http=partial(_Connection, max_connections),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        # Otherwise malformed requests would fill the worker's log.
        log_level="error",
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    # Its own loop wakes ten times a second, for signals and the time.
    await server.startup(list(listeners))
    try:
        yield
    finally:
        await _close(server)


async def _close(server: uvicorn.Server) -> None:
    """Close all connections; calls in progress are cancelled as if their clients had disconnected."""
    for listening in server.servers:
        listening.close()
    for connection in list(server.server_state.connections):
        connection.transport.abort()
    if server.server_state.tasks:
        await asyncio.wait(server.server_state.tasks, timeout=_CLOSE_S)
    for task in server.server_state.tasks:
        task.cancel()
