"""A receiver of webhooks, which can refuse messages, and be unavailable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.serving import serving


@dataclass
class Receiver:
    """All received messages, with their headers; `answers` is the status of each answer."""

    url: str = ""
    answers: int = 200
    messages: list[tuple[dict[str, str], bytes]] = field(default_factory=list)

    @property
    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, body in self.messages]

    async def take(self, request: Request) -> Response:
        self.messages.append((dict(request.headers), await request.body()))
        return Response(status_code=self.answers, headers={"location": f"{self.url}/elsewhere"})


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Run one on a free port."""
    made = Receiver()
    with serving(Starlette(routes=[Route("/{rest:path}", made.take, methods=["GET", "POST"])])) as url:
        made.url = f"{url}/hook"
        yield made
