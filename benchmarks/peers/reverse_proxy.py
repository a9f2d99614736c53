"""A bare reverse proxy to an engine: it passes bytes on unchanged, with the same server and client as the gateway.

    python -m benchmarks.peers.reverse_proxy ENGINE

It prints its address, without `/v1`, once it listens.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from workers.testing.serving import serve

_NO_LIMITS = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
_OF_A_CONNECTION = {"host", "connection", "content-length", "transfer-encoding"}


def application(engine: str) -> Starlette:
    client = httpx2.AsyncClient(timeout=None, limits=_NO_LIMITS, trust_env=False)

    async def forward(request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in _OF_A_CONNECTION}
        url = engine.removesuffix("/v1") + request.url.path
        forwarded = client.build_request(request.method, url, headers=headers, content=await request.body())
        answer = await client.send(forwarded, stream=True)
        back = {name: value for name, value in answer.headers.items() if name not in _OF_A_CONNECTION}
        return StreamingResponse(_pieces(answer), answer.status_code, back)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])], lifespan=lifespan)


async def _pieces(answer: httpx2.Response) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


if __name__ == "__main__":
    serve(application(sys.argv[1]), "127.0.0.1", 0, lambda url: print(url, flush=True), keep_alive_s=600.0)
