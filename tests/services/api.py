"""The farm's API for tests: served by a thread of the tests, or by a process of its own that may be killed."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from farm.api.desk import Desk
from farm.api.server import Server, bind, url_of
from farm.service import Service
from tests.services.broker import free_ports

FARM = Path(sys.executable).parent / "farm"
_START_S = 30.0


@contextmanager
def served(service: Service, key: str = "", around: Callable[[ASGIApp], ASGIApp] | None = None) -> Iterator[str]:
    """The URL of an API on a service, until the block ends. `around` puts something before it."""
    listener = bind("127.0.0.1", 0, key)
    ready = threading.Event()
    server = Server(Desk(service), key, ready.set)
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


class Loses:
    """Does what a POST asks for and cuts the connection in place of an answer, so often as `n` says."""

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


class Mortal:
    """`farm api` for the farm in a folder, at a port that stays its own: killed and started again, or told to end."""

    def __init__(self, home: Path, log: Path) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self._command: list[str | Path] = [FARM, "api", "--url", home, "--port", str(port)]
        self._log = log
        self.process = self._started()

    def start(self) -> None:
        """Begun; it may not listen yet."""
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
        """Its exit status."""
        self.process.terminate()
        return self.process.wait(30)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as output:
            return subprocess.Popen(self._command, stdout=output, stderr=output, start_new_session=True)


@contextmanager
def mortal_api(home: Path, log: Path) -> Iterator[Mortal]:
    """Killed at the end, if it still runs."""
    api = Mortal(home, log)
    try:
        yield api
    finally:
        api.kill()
