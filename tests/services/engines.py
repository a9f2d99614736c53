"""Engines for tests of the pool, with settable speed and failures, and recorded orders.

Clients of real servers are tested with real servers; these tests are about which engine is called when.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from farm.errors import EngineError
from farm.records.engine import EngineInfo, PauseMode
from farm.records.engine_state import EngineUse, Paused, StoredEngine
from farm.records.request import SamplingParams
from farm.records.trajectory import TokenIds
from workers.plugins.interfaces import Completion
from workers.policy.generation import (
    ChatRequest,
    Engine,
    EngineAddress,
    EngineBusy,
    EngineUnfit,
    ExpertRange,
    Generation,
    OnIds,
)
from workers.policy.routing.backend import EngineReporter
from workers.policy.routing.router import Call, StickyRouter

PLAIN = EngineInfo(kind="openai", model="m")
CONTROLLED = EngineInfo(kind="vllm", model="m", control=True)

T = TypeVar("T")


class Server:
    """An LLM server: a call of n tokens takes n / `tokens_s`, longer if more than `room` calls share it."""

    def __init__(self, name: str, *, info: EngineInfo = PLAIN, tokens_s: float = 100.0, room: int = 1000) -> None:
        self.url = f"http://{name}/v1"
        self.info = info
        self.tokens_s = tokens_s
        self.room = room
        self.dead = False
        self.hangs = False
        self.is_far = False
        """True: calls reach the server only after its next abort."""
        self.n_travelling = 0
        self.first_s = 0.0
        """Seconds until it answers a query for its capabilities."""
        self.failures = 0
        self.busy: list[float | None] = []
        self.deadly: set[str] = set()
        self.key = ""
        self.n_detected = 0
        self.weights = "default"
        self.disobeys = False
        self.paused = False
        self.n_aborts = 0
        self.received: list[str] = []
        self.n_running = 0
        self.n_most = 0
        self.n_clients = 0
        self.started: list[tuple[float, str]] = []
        self.answered: list[str] = []

    def listed(self, **values: Any) -> StoredEngine:
        return StoredEngine(self.url, **{"info": self.info, **values})

    async def _travel(self) -> None:
        n_aborts = self.n_aborts
        self.n_travelling += 1
        while self.is_far and self.n_aborts == n_aborts:  # noqa: ASYNC110 - tests set it from outside
            await asyncio.sleep(0.05)
        self.n_travelling -= 1

    async def answer(self, n_tokens: int, who: str) -> str:
        """Answer one call with the engine's URL."""
        self.check()
        self.started.append((asyncio.get_running_loop().time(), who))
        if who in self.deadly:
            self.dead = True
            raise EngineError(f"engine {self.url} closed the connection")
        if self.busy:
            raise EngineBusy(f"engine {self.url} answered 429", self.busy.pop(0))
        if self.failures:
            self.failures -= 1
            raise EngineError(f"engine {self.url} answered 500")
        self.n_running += 1
        self.n_most = max(self.n_most, self.n_running)
        try:
            await self._travel()
            left, n_aborts = float(n_tokens), self.n_aborts
            # a call that comes during a pause waits until it is over, or until the next abort
            while self.paused and self.n_aborts == n_aborts:  # noqa: ASYNC110 - tests set it from outside
                await asyncio.sleep(0.05)
            # in steps, so that it gets slower when others come
            while (left > 0 or self.hangs) and self.n_aborts == n_aborts:
                await asyncio.sleep(0.05)
                left -= 0.05 * self.tokens_s * min(1.0, self.room / self.n_running)
        finally:
            self.n_running -= 1
        self.answered.append(who)
        return self.url

    def check(self) -> None:
        if self.dead:
            raise EngineError(f"engine {self.url} cannot be reached")

    def n_started(self, who: str = "") -> int:
        return sum(each == who or not who for _, each in self.started)


class Double:
    """A client of a Server, with the methods of `Engine`."""

    def __init__(self, server: Server, address: EngineAddress, info: EngineInfo) -> None:
        self.server = server
        self.address = address
        self.info = info
        server.n_clients += 1

    async def generate(
        self,
        prompt_ids: TokenIds,
        sampling: SamplingParams,
        max_tokens: int,
        *,
        model: str = "",
        session_id: str = "",
        on_ids: OnIds | None = None,
        n_vocabulary: int | None = None,
        experts: ExpertRange | None = None,
    ) -> Generation:
        raise NotImplementedError

    async def chat(self, request: ChatRequest) -> Completion:
        raise NotImplementedError

    async def healthy(self) -> bool:
        return not self.server.dead

    async def pause(self, mode: PauseMode) -> None:
        self.server.check()
        if self.server.disobeys:
            raise EngineError(f"engine {self.server.url} has no /pause")
        self.server.received.append(f"pause {mode}")
        self.server.paused = True
        self.server.n_aborts += mode == "abort"

    async def resume(self) -> None:
        self.server.check()
        self.server.received.append("resume")
        self.server.paused = False

    async def paused(self) -> bool | None:
        self.server.check()
        return self.server.paused

    async def set_version(self, version: str) -> None:
        self.server.check()
        self.server.received.append(f"version {version}")
        self.server.weights = version

    async def load_weights(self, path: str) -> None:
        self.server.check()
        self.server.received.append(f"load {path}")

    async def version(self) -> str:
        self.server.check()
        return self.server.weights

    async def aclose(self) -> None:
        self.server.n_clients -= 1


class Servers:
    """A list of servers as the farm publishes it, and what a pool needs to reach them."""

    def __init__(self, *servers: Server) -> None:
        self.by_url = {server.url: server for server in servers}
        self.list = [server.listed() for server in servers]

    def __call__(self) -> Sequence[StoredEngine]:
        return self.list

    def add(self, server: Server, **values: Any) -> None:
        self.by_url[server.url] = server
        self.list.append(server.listed(**values))

    def change(self, server: Server, **values: Any) -> None:
        """Change how the farm lists it from now on."""
        self.list = [replace(each, **values) if each.url == server.url else each for each in self.list]

    def remove(self, server: Server) -> None:
        self.list = [each for each in self.list if each.url != server.url]

    def open(self, address: EngineAddress, info: EngineInfo) -> Engine:
        return Double(self.by_url[address.url], address, info)

    async def detect(self, address: EngineAddress, timeout_s: float) -> EngineInfo:
        server = self.by_url[address.url]
        server.check()
        server.n_detected += 1
        if server.key not in ("", address.key):
            raise EngineUnfit(f"engine {server.url} answered 401")
        if server.hangs or server.first_s > timeout_s:
            await asyncio.sleep(timeout_s)
            raise EngineError(f"engine {server.url} did not answer in time")
        await asyncio.sleep(server.first_s)
        return server.info


class RecordingReporter(EngineReporter):
    """A reporter that keeps its reports; `leading` tells whether this pool may give orders."""

    def __init__(self, leading: bool = False) -> None:
        self.leading = leading
        self.is_settled = True
        self.infos: dict[str, EngineInfo] = {}
        self.failures: list[tuple[str, str]] = []
        self.reports: list[Mapping[str, EngineUse]] = []
        self.orders: list[tuple[str, int, Paused, str]] = []

    def report_info(self, url: str, info: EngineInfo) -> None:
        self.infos[url] = info

    def report_failure(self, url: str, why: str) -> None:
        self.failures.append((url, why))

    def report(self, in_flight: Mapping[str, EngineUse]) -> None:
        self.reports.append(in_flight)

    async def is_leader(self) -> bool:
        return self.leading

    async def has_settled(self, url: str, order: int) -> bool:
        return self.is_settled

    async def report_done(self, url: str, order: int, paused: Paused, version: str) -> None:
        self.orders.append((url, order, paused, version))


async def routed(
    router: StickyRouter, n_tokens: int, ask: Callable[[Engine], Awaitable[T]], most_answer_tokens: int | None = None
) -> T:
    """Call the engines that a router lends, until one has answered."""
    call = Call(n_tokens, most_answer_tokens)
    while True:
        async with router.acquire(call) as engine:
            return await ask(engine)


def engine_call(n_tokens: int, who: str) -> Callable[[Engine], Awaitable[str]]:
    """Return a call that a router can make, whose result is the URL of the engine that answered."""

    async def ask(engine: Engine) -> str:
        assert isinstance(engine, Double)
        if engine.server.key not in ("", engine.address.key):
            raise EngineUnfit(f"engine {engine.address.url} answered 401")
        return await engine.server.answer(n_tokens, who)

    return ask
