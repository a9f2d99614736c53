"""Pausing an engine for new weights, and naming the weights it has: by the server's own endpoints, where it has any.

| the farm says | vLLM | SGLang |
|---|---|---|
| drain | `wait` | waits until nothing runs, then `in_place` |
| keep | `keep` | `retract`, so that what is kept is computed anew under the new weights, as vLLM does |
| abort | `abort` | `abort` |

SGLang has no way to let calls end and hold new ones back; the pool sends none while its engines are paused.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Protocol

from farm.engine import EngineInfo, PauseMode
from farm.errors import EngineError
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, Connection, Refusal

_POLL_S = 0.2


class Control(Protocol):
    """As Engine says of the methods of these names."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: str) -> None: ...

    async def version(self) -> str: ...

    async def paused(self) -> bool | None: ...


class VllmControl:
    """Endpoints that vLLM opens with VLLM_SERVER_DEV_MODE=1."""

    _ADVICE = "start vLLM with VLLM_SERVER_DEV_MODE=1 to let the farm pause it"
    _MODES: dict[PauseMode, str] = {"drain": "wait", "keep": "keep", "abort": "abort"}  # noqa: RUF012

    def __init__(self, connection: Connection, engine: str) -> None:
        self._calls = _Calls(connection, engine, self._ADVICE)

    async def pause(self, mode: PauseMode) -> None:
        await self._calls.call("POST", f"/pause?mode={self._MODES[mode]}")

    async def resume(self) -> None:
        await self._calls.call("POST", "/resume")

    async def set_version(self, version: str) -> None:
        await self._calls.call("POST", "/update_weight_version", {"new_version": version})

    async def version(self) -> str:
        found = await self._calls.call("GET", "/weight_info")
        return str(found.get("weight_version") or "")

    async def paused(self) -> bool:
        return bool((await self._calls.call("GET", "/is_paused")).get("is_paused"))


class SglangControl:
    """SGLang's endpoints. A server with an admin key takes them only with that key."""

    _ADVICE = "a newer SGLang has it; if the server has an admin key, register the engine with that key"
    _MODES: dict[PauseMode, str] = {"drain": "in_place", "keep": "retract", "abort": "abort"}  # noqa: RUF012

    def __init__(self, connection: Connection, engine: str) -> None:
        self._calls = _Calls(connection, engine, self._ADVICE)
        self._connection = connection

    async def pause(self, mode: PauseMode) -> None:
        if mode == "drain":
            await self._idle()
        await self._calls.call("POST", "/pause_generation", {"mode": self._MODES[mode]})

    async def resume(self) -> None:
        await self._calls.call("POST", "/continue_generation", {})

    async def set_version(self, version: str) -> None:
        """Its own default aborts all that runs."""
        body = {"new_version": version, "abort_all_requests": False}
        await self._calls.call("POST", "/update_weight_version", body)

    async def version(self) -> str:
        found = await self._calls.call("GET", "/model_info")
        return str(found.get("weight_version") or "")

    async def paused(self) -> bool | None:
        return None

    async def _idle(self) -> None:
        """Its cache can be flushed only while nothing runs; after new weights it is of no use anyway."""
        while True:
            try:
                await self._connection.post("/flush_cache", {})
            except Refusal as refusal:
                if refusal.status != 400:
                    raise self._calls.failure("/flush_cache", refusal) from refusal
            except FAILURES as error:
                raise self._calls.broken(error) from error
            else:
                return
            await asyncio.sleep(_POLL_S)


class NoControl:
    """A server that cannot be paused; the farm then holds its own calls back."""

    def __init__(self, engine: str, advice: str) -> None:
        self._message = f"engine {engine} takes no pause or version itself; the farm holds calls back instead{advice}"

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError(self._message)

    async def resume(self) -> None:
        raise EngineError(self._message)

    async def set_version(self, version: str) -> None:
        raise EngineError(self._message)

    async def version(self) -> str:
        return ""

    async def paused(self) -> bool | None:
        return None


def control(info: EngineInfo, connection: Connection, engine: str) -> Control:
    if info.control and info.kind == "vllm":
        return VllmControl(connection, engine)
    if info.control and info.kind == "sglang":
        return SglangControl(connection, engine)
    return NoControl(engine, "; or start vLLM with VLLM_SERVER_DEV_MODE=1" if info.kind == "vllm" else "")


class _Calls:
    """Calls whose failures say which engine, and what would open the endpoint."""

    def __init__(self, connection: Connection, engine: str, advice: str) -> None:
        self._connection = connection
        self._engine = engine
        self._advice = advice

    async def call(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> dict[str, Any]:
        """The answer's JSON object. Raises EngineError also if the answer says that it did not succeed."""
        try:
            found = await (self._connection.get(path) if method == "GET" else self._connection.post(path, body))
        except Refusal as refusal:
            raise self.failure(path, refusal) from refusal
        except FAILURES as error:
            raise self.broken(error) from error
        if not isinstance(found, dict) or found.get("success") is False:
            raise EngineError(f"engine {self._engine} did not do {path}: {str(found)[:300]}; look at its log")
        return found

    def failure(self, path: str, refusal: Refusal) -> Exception:
        if refusal.status in (401, 403, 404, 405):
            return EngineError(f"engine {self._engine} has no {path} (status {refusal.status}); {self._advice}")
        return failures.refused(self._engine, refusal.status, refusal.headers, refusal.body)

    def broken(self, error: Exception) -> EngineError:
        return failures.broken(self._engine, error)
