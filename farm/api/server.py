"""The server of one API process, which runs until a signal stops it."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import uvicorn

from farm.api.app import Page, application
from farm.api.connections import ConnectionLimits, TimedConnection
from farm.api.endpoints import Endpoints, Examine, no_findings
from farm.api.protocols import SpokenProtocol
from farm.client.local import LocalFarm
from farm.errors import InvalidRequest

WAIT_TIMEOUT_S = 5.0
"""Seconds to wait for an unavailable database, as it blocks a thread; then the client gets an error and retries."""
_GRACE_PERIOD_S = 10
"""Seconds for requests in flight to finish when the process ends."""
_LAST_ANSWERS_S = 2
"""Seconds to write the answers of those that did not finish."""
# longer than clients keep an unused connection, else they find it closed at their next request
_KEEP_ALIVE_S = 75
_BOUNDS = ConnectionLimits()


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A certificate with its chain, and its key, as PEM files."""

    certificate: str
    key: str

    def check(self) -> None:
        """Raise InvalidRequest unless they are readable and belong together."""
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(self.certificate, self.key, "")
        except (OSError, ssl.SSLError) as error:
            files = f"{self.certificate} and {self.key} are no certificate and its key without a passphrase"
            raise InvalidRequest(f"{files}: {error}", field="--tls-cert") from None


class ApiServer(uvicorn.Server):
    """A server that reports when it listens, and answers all waiting requests when it ends."""

    def __init__(
        self,
        endpoints: Endpoints,
        key: str,
        listening: Callable[[], None],
        bounds: ConnectionLimits = _BOUNDS,
        speak: Sequence[SpokenProtocol] = (),
        tls: TlsFiles | None = None,
        page: Page | None = None,
    ) -> None:
        config = uvicorn.Config(
            application(endpoints, key, bounds, speak, page),
            http=partial(TimedConnection, bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            # uvicorn would log each malformed request
            log_level="error",
            # the process's own handlers log them
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_PERIOD_S,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        super().__init__(config)
        self._endpoints = endpoints
        self._listening = listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._endpoints.close()
        await super().shutdown(sockets)
        # cancelled requests are answered, too, and uvicorn does not wait for that
        if cancelled := set(self.server_state.tasks):
            await asyncio.wait(cancelled, timeout=_LAST_ANSWERS_S)


def serve(
    farm: LocalFarm,
    listeners: Sequence[socket.socket],
    key: str,
    listening: Callable[[], None],
    examine: Examine = no_findings,
    speak: Sequence[SpokenProtocol] = (),
    strict_compat: bool = False,
    tls: TlsFiles | None = None,
    page: Page | None = None,
) -> None:
    """Serve until a signal stops it; requests in flight are still answered.

    `examine` makes the answer of `/v1/doctor`; `listeners` include those of `speak`. `strict_compat` as in Endpoints.
    """
    ApiServer(Endpoints(farm, examine, strict_compat), key, listening, speak=speak, tls=tls, page=page).run(
        sockets=list(listeners)
    )
