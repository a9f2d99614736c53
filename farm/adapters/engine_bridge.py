"""Serves an engine that only the trainer's process can call to the farm's nodes over HTTP.

The engine clients of verl, SkyRL and OpenRLHF take and return token ids, and have no address. The bridge answers the
farm's requests through them, on the token route of vLLM (`/inference/v1/generate`). It is registered as an engine of
the training run (`TrainerRun.use_servers`). The trainer updates the weights itself, and each answer names their
version. Needs uvicorn, which the trainers' own servers need, too.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import io
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from farm.adapters.trainer_step import TrainerRun, TrainerServer
from farm.errors import FarmError
from farm.records.engine import BRIDGE_OWNER

log = logging.getLogger(__name__)

GENERATE = "/inference/v1/generate"
_START_S = 30.0
_POLL_S = 0.02
_STOP_S = 5
_MAX_BODY = 64_000_000
"""Bytes of a request: a prompt of ten million ids."""


@dataclass(frozen=True, slots=True)
class SampledByTrainer:
    """Tokens sampled by the trainer's engine: ids and their log-probabilities, of one length.

    `finish_reason` is `stop`, `length`, or `abort` for an answer to be continued later. `version` is the weight
    version, if the trainer reports it. `prompt_ids` are those that the engine saw, if it reports them. `routed_experts`
    are of prompt and answer, [tokens, layers, top_k], with or without the last token, which was never an input.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    finish_reason: str
    version: str = ""
    stop_reason: int | str | None = None
    prompt_ids: Sequence[int] | None = None
    routed_experts: Any = None


def known_parameters(sampling: Mapping[str, Any], dropped: Collection[str], refused: Collection[str]) -> dict[str, Any]:
    """Return vLLM's parameters without those in `dropped`. Raises ValueError for one in `refused`."""
    if lacking := [name for name in refused if sampling.get(name) is not None]:
        raise ValueError(f"the trainer's engine does not support {lacking[0]}: leave out the constraint on answers")
    return {name: value for name, value in sampling.items() if name not in dropped}


Generate: TypeAlias = Callable[[list[int], dict[str, Any], str], Awaitable[SampledByTrainer]]
"""`generate(prompt_ids, sampling, session)`: `sampling` are vLLM's parameters, with `cache_salt`; calls of one session
share a prefix."""


@dataclass
class EngineBridge:
    """Serves `generate` between `start` and `close`, on a free port of all interfaces, to requests with its key.

    It calls the engine only while it is `admitted`, as trainers put their engines to sleep between steps. Other
    requests get status 503, and the farm repeats them.

    `tokenizer` is a folder or a name on a hub. `loop` is the event loop for calls of `generate`; by default the
    bridge's own. `host` is this machine's address as reachable from the farm's nodes; by default that of its default
    route.
    """

    generate: Generate
    tokenizer: str = ""
    context_tokens: int | None = None
    host: str = ""
    loop: asyncio.AbstractEventLoop | None = None
    _key: str = field(default_factory=lambda: secrets.token_urlsafe(24), init=False, repr=False)
    _port: int = field(default=0, init=False)
    _n_admitting: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _server: Any = field(default=None, init=False, repr=False)
    _thread: threading.Thread | None = field(default=None, init=False, repr=False)

    @property
    def server(self) -> TrainerServer:
        """The address, key and tokenizer to register it with."""
        host = self.host or reachable_address()
        host = f"[{host}]" if ":" in host else host
        return TrainerServer(f"http://{host}:{self._port}/v1", self._key, self.tokenizer)

    @contextlib.contextmanager
    def admitted(self) -> Iterator[None]:
        """Let calls reach the engine during the block; blocks may overlap."""
        with self._lock:
            self._n_admitting += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_admitting -= 1

    def start(self) -> None:
        """Start listening unless it already does. Raises FarmError if it cannot."""
        if self._server is not None:
            return
        try:
            import uvicorn
        except ImportError:
            raise FarmError("the bridge to the trainer's engine needs uvicorn: `pip install uvicorn`") from None
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("0.0.0.0", 0))  # noqa: S104 - the nodes are on other machines, and each request needs the key
        self._port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            proxy_headers=False,
            lifespan="off",
            ws="none",
            log_level="error",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_STOP_S,
        )
        server = uvicorn.Server(config)
        self._thread = threading.Thread(target=server.run, args=([listener],), name="farm-engine-bridge", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_S
        while not server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                server.should_exit = True
                raise FarmError(f"the bridge to the trainer's engine did not start in {_START_S:g} s")
            time.sleep(_POLL_S)
        self._server = server

    def close(self) -> None:
        """Stop answering."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(2 * _STOP_S)
            self._server = None

    async def _app(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        answer = await self._answer(scope, receive)
        if answer is not None:
            await answer.send(send)

    async def _answer(self, scope: Mapping[str, Any], receive: Any) -> _Answer | None:
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        key = headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(key.encode(), self._key.encode()):
            return _failed(401, "this is not the key of the trainer's engine")
        route = scope["method"], scope["path"]
        if route == ("POST", GENERATE):
            body = await _body(receive)
            if body is None:
                return _failed(413, f"the request has more than {_MAX_BODY} bytes")
            return await _unless_disconnected(receive, self._generated(body, headers.get("x-session-id", "")))
        if route == ("GET", "/v1/models"):
            card = {
                "id": self.tokenizer or "policy",
                "object": "model",
                "owned_by": BRIDGE_OWNER,
                "root": self.tokenizer,
            }
            return _Answer(200, {"object": "list", "data": [card | {"max_model_len": self.context_tokens}]})
        if route == ("GET", "/health"):
            return _Answer(200, {})
        return _failed(404, "the trainer's engine has no such route")

    async def _generated(self, body: bytes, session: str) -> _Answer:
        try:
            request = json.loads(body)
            prompt, sampling = [int(each) for each in request["token_ids"]], dict(request["sampling_params"])
            if request.get("cache_salt"):
                sampling["cache_salt"] = str(request["cache_salt"])
            experts_start = int(sampling.pop("routed_experts_prompt_start", 0))
        except (ValueError, KeyError, TypeError) as error:
            return _failed(400, f"{type(error).__name__}: {error}")
        if not self._n_admitting:
            return _failed(503, "the trainer runs no rollouts now, and its engine may be asleep")
        try:
            answer = _response(prompt, await self._sampled(prompt, sampling, session), experts_start)
        except (ValueError, TypeError) as error:
            return _failed(400, f"{type(error).__name__}: {error}")
        except Exception as error:
            return _failed(500, f"{type(error).__name__}: {error}")
        return _Answer(200, answer, is_stream=bool(request.get("stream")))

    async def _sampled(self, prompt: list[int], sampling: dict[str, Any], session: str) -> SampledByTrainer:
        if self.loop is None:
            return await self.generate(prompt, sampling, session)

        async def sample() -> SampledByTrainer:
            return await self.generate(prompt, sampling, session)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(sample(), self.loop))


class OwnEngines:
    """The engines of a trainer: the bridge to them, started and registered when needed.

    `host` is that of the bridge. Without a bridge, the run's batches use the farm's engines, and this does nothing.
    """

    def __init__(self, run: TrainerRun, host: str = "") -> None:
        self.bridge: EngineBridge | None = None
        self._host = host
        self._run = run
        self._lock = threading.Lock()
        self._started = False

    @contextlib.contextmanager
    def admitted(self, loop: asyncio.AbstractEventLoop | None = None) -> Iterator[None]:
        """Let the farm call the engines during a block; `loop` is the event loop of their client."""
        if self.bridge is None:
            yield
            return
        self.bridge.loop = loop
        with self.bridge.admitted():
            # the farm probes a new engine at once, and only now is it awake
            self._start(self.bridge)
            yield

    def _start(self, bridge: EngineBridge) -> None:
        with self._lock:
            if not self._started:
                bridge.host = self._host or bridge.host
                bridge.start()
                self._run.use_servers([bridge.server])
                self._started = True
                atexit.register(self.close)

    def close(self) -> None:
        """Remove the bridge from the farm, and stop it."""
        with self._lock:
            if self.bridge is None or not self._started:
                return
            self._started = False
            atexit.unregister(self.close)
            try:
                self._run.remove_servers()
            except Exception as error:
                log.warning("Engines of run %s stay registered: the farm does not answer (%s)", self._run.model, error)
            self.bridge.close()


def reachable_address() -> str:
    """Return this machine's address for others: the source address of its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # sends nothing: the kernel only chooses the interface
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


@dataclass(frozen=True, slots=True)
class _Answer:
    """An HTTP answer of JSON, or a stream of one event."""

    status: int
    value: Mapping[str, Any]
    is_stream: bool = False

    async def send(self, send: Any) -> None:
        body, kind = json.dumps(self.value).encode(), b"application/json"
        if self.is_stream:
            body, kind = b"data: %s\n\ndata: [DONE]\n\n" % body, b"text/event-stream"
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _failed(status: int, message: str) -> _Answer:
    return _Answer(status, {"error": {"message": message}})


def _response(prompt: Sequence[int], sampled: SampledByTrainer, experts_start: int) -> dict[str, Any]:
    """Return the answer in vLLM's format. Raises FarmError for ids without log-probabilities."""
    ids = [int(each) for each in sampled.ids]
    if len(sampled.logprobs) != len(ids):
        raise FarmError(
            f"the trainer's engine sampled {len(ids)} tokens, with {len(sampled.logprobs)} log-probabilities"
        )
    pairs = zip(ids, sampled.logprobs, strict=True)
    versions = [{"version": sampled.version, "start": 0, "end": len(ids)}] if sampled.version and ids else None
    choice = {
        "index": 0,
        "finish_reason": sampled.finish_reason,
        "stop_reason": sampled.stop_reason,
        "token_ids": ids,
        "logprobs": {"content": [{"token_id": each, "logprob": float(logprob)} for each, logprob in pairs]},
        "weight_versions": versions,
    }
    if sampled.routed_experts is not None and ids:
        rows = np.asarray(sampled.routed_experts)[: len(prompt) + len(ids) - 1][experts_start:]
        choice["routed_experts"] = _npy(rows)
    usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
    seen = None if sampled.prompt_ids is None else [int(each) for each in sampled.prompt_ids]
    return {"prompt_token_ids": seen, "usage": usage, "choices": [choice]}


def _npy(rows: np.ndarray[Any, Any]) -> str:
    with io.BytesIO() as file:
        np.save(file, rows, allow_pickle=False)
        return base64.b64encode(file.getvalue()).decode()


async def _body(receive: Any) -> bytes | None:
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) > _MAX_BODY:
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def _unless_disconnected(receive: Any, answering: Awaitable[_Answer]) -> _Answer | None:
    """Return the answer; None if the client disconnected, which cancels the engine's call."""
    answer = asyncio.ensure_future(answering)
    disconnect = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((answer, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        for task in (answer, disconnect):
            task.cancel()


async def _disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
