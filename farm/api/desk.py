"""Turns functions into endpoints: each runs in a thread, as what it asks may have to wait for the database."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from sqlalchemy import text
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from farm import wire
from farm.api.hints import Hints
from farm.api.questions import Question, Refused, question
from farm.errors import ServiceError, StoreUnavailable
from farm.problems import Problem, problem_of
from farm.service import Service

T = TypeVar("T")
Answer = Callable[[Question], Any]

N_THREADS = 12
"""As many as a store has connections, but for a few."""
_HEALTH_S = (1.0, 5.0)
"""How long a health check asks a database that is away, and how long it waits for it in all."""


@dataclass(frozen=True, slots=True)
class Poll:
    """What is asked again until it is settled or `wait_s` are over; no thread waits meanwhile."""

    batch_id: str
    ask: Callable[[], Any]
    settled: Callable[[Any], bool]
    wait_s: float


class Desk:
    """Where questions come in and are answered from the store of a service."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self._hints = Hints(service.signals)
        self._threads = ThreadPoolExecutor(N_THREADS, thread_name_prefix="answer")
        # a health check must not wait behind those who wait for the database
        self._health = ThreadPoolExecutor(1, thread_name_prefix="health")

    def get(self, path: str, answer: Answer) -> Route:
        """Answers a question that changes nothing."""
        return Route(path, self._endpoint(lambda asked: self._run(answer, asked)), methods=["GET"])

    def post(self, path: str, answer: Answer) -> Route:
        """Has something done."""
        return Route(path, self._endpoint(lambda asked: self._run(answer, asked)), methods=["POST"])

    def poll(self, path: str, begin: Callable[[Question], Poll]) -> Route:
        """As `get`, once there is something to answer."""

        async def answer(asked: Question) -> Any:
            wanted = begin(asked)
            return await self._hints.awaited(
                wanted.batch_id, lambda: self._run(wanted.ask), wanted.settled, wanted.wait_s
            )

        return Route(path, self._endpoint(answer), methods=["GET"])

    def health(self, path: str) -> Route:
        """Whether the database answers."""

        async def answer(asked: Question) -> Any:
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout(_HEALTH_S[1]):
                    await loop.run_in_executor(self._health, self._ask_store)
            except TimeoutError:
                raise StoreUnavailable("the database does not answer") from None
            return {"status": "ok"}

        return Route(path, self._endpoint(answer), methods=["GET"])

    def close(self) -> None:
        """Answers those who wait for something to happen; what is asked from now on waits for nothing."""
        self._hints.close()

    def _ask_store(self) -> None:
        self.service.store.read(lambda connection: connection.execute(text("SELECT 1")).scalar_one(), _HEALTH_S[0])

    async def _run(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _endpoint(self, answer: Callable[[Question], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                found = await answer(await question(request))
                if isinstance(found, Response):
                    return found
                return Response(await self._run(wire.written, found), media_type="application/json")
            except Refused as refused:
                return refusal(refused.problem)
            except ClientDisconnect:
                # nobody reads it
                return Response(status_code=499)
            except Exception as error:
                again = {"retry-after": "1"} if isinstance(error, ServiceError) else None
                return refusal(problem_of(error), again)

        return endpoint


def refusal(problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """The answer that names a problem."""
    return Response(problem.body(), problem.status, headers, "application/json")
