"""The farm's API for tests: served by a thread of the tests, or by a separate process that can be killed."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.app import ApiServer, ConnectionLimits, Page
from farm.api.endpoints import ApiConfig, Endpoints
from farm.api.protocols import spoken
from farm.cli.listening import bind, url_of
from farm.client.local import LocalFarm
from farm.settings import settings
from tests.services.preloaded import farm_command
from tests.services.servers.broker import free_ports

KEY = "of-these-tests"
_START_S = 30.0


@contextmanager
def shown_key() -> Iterator[None]:
    """Make this process's clients use the key of the tests' APIs."""
    os.environ["FARM_API_KEY"] = KEY
    settings.cache_clear()
    try:
        yield
    finally:
        del os.environ["FARM_API_KEY"]
        settings.cache_clear()


@contextmanager
def served(
    service: LocalFarm,
    key: str = KEY,
    around: Callable[[ASGIApp], ASGIApp] | None = None,
    speak: Sequence[str] = (),
    config: ApiConfig | None = None,
    page: Page | None = None,
    **limits: Any,
) -> Iterator[str]:
    """Yield the URL of an API on a service, until the block ends. `around` wraps its application."""
    listener = bind("127.0.0.1", 0)
    ready = threading.Event()
    endpoints = Endpoints(service, config or ApiConfig.of(settings()))
    protocols = [spoken(name) for name in speak]
    server = ApiServer(endpoints, key, ready.set, ConnectionLimits(**limits), protocols, page=page)
    if around is not None:
        server.config.app = around(server.config.app)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    with listener:
        thread.start()
        if not ready.wait(_START_S):
            raise RuntimeError(f"the API does not listen after {_START_S} s")
        try:
            yield url_of(listener)
        finally:
            server.should_exit = True
            thread.join(_START_S)


class ResponseDropper:
    """Executes a POST and breaks the connection instead of answering, the first `n` times."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.n = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)

        loses = scope["method"] == "POST" and self.n > 0
        self.n -= loses
        await self._app(scope, receive, without_body if loses else send)


class RestartableApi:
    """`farm api` for the farm in a folder, at a fixed port: can be killed and restarted, or terminated."""

    def __init__(self, home: Path, log: Path, key: str, *options: str) -> None:
        [port] = free_ports(1)
        self._env = os.environ | {"FARM_HOME": str(home), "FARM_API_KEY": key}
        self.url = f"http://127.0.0.1:{port}"
        self._command = ["api", "--url", str(home), "--port", str(port), *options]
        self._log = log
        self.process = self._started()

    def start(self) -> None:
        """Start it; it may not listen yet."""
        self.process = self._started()

    def listens(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/healthz").is_success
        except httpx2.TransportError:
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> int:
        """Terminate it; return its exit status."""
        self.process.terminate()
        return self.process.wait(30)

    def _started(self) -> subprocess.Popen[bytes]:
        return farm_command(self._command, self._env, self._log)


@contextmanager
def killable_api(home: Path, log: Path, key: str = KEY, *options: str) -> Iterator[RestartableApi]:
    """Yield it; it is killed at the end, if it still runs."""
    api = RestartableApi(home, log, key, *options)
    try:
        yield api
    finally:
        api.kill()
