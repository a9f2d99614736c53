"""The server of one API process, which runs until a signal stops it."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from functools import partial

import uvicorn

from farm.api.app import application
from farm.api.connections import ConnectionLimits, TimedConnection
from farm.api.endpoints import Endpoints, Examine, no_findings
from farm.api.protocols import SpokenProtocol
from farm.client.local import LocalFarm

WAIT_TIMEOUT_S = 5.0
"""Seconds to wait for an unavailable database, as it holds a thread; then the client gets an error and retries."""
_GRACE_PERIOD_S = 10
"""Seconds that requests in flight get to finish when the process ends."""
# longer than clients keep a connection that they do not use, or they find it closed when they ask
_KEEP_ALIVE_S = 75
_BOUNDS = ConnectionLimits()


class ApiServer(uvicorn.Server):
    """A server that reports when it listens, and answers all waiting requests when it ends."""

    def __init__(
        self,
        endpoints: Endpoints,
        key: str,
        listening: Callable[[], None],
        bounds: ConnectionLimits = _BOUNDS,
        speak: Sequence[SpokenProtocol] = (),
    ) -> None:
        config = uvicorn.Config(
            application(endpoints, key, bounds, speak),
            http=partial(TimedConnection, bounds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=_GRACE_PERIOD_S,
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


def serve(
    farm: LocalFarm,
    listeners: Sequence[socket.socket],
    key: str,
    listening: Callable[[], None],
    examine: Examine = no_findings,
    speak: Sequence[SpokenProtocol] = (),
    strict_compat: bool = False,
) -> None:
    """Serve until a signal stops it; requests in flight are still answered.

    `examine` is what `/v1/doctor` answers with; `listeners` are those of `speak` as well. `strict_compat` as in
    Endpoints.
    """
    ApiServer(Endpoints(farm, examine, strict_compat), key, listening, speak=speak).run(sockets=list(listeners))
