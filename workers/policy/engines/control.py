"""Pausing an engine for new weights, and naming its weights: by the server's own endpoints, if it has any.

| mode | vLLM | SGLang |
|---|---|---|
| drain | `wait` | waits until nothing runs, then `in_place` |
| keep | `keep` | `retract`, so that the kept prefixes are recomputed under the new weights, as in vLLM |
| abort | `abort` | `abort` |

SGLang cannot drain and hold new calls back; the pool sends no calls while its engines are paused.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from farm.errors import EngineError
from farm.records.engine import PauseMode
from workers.policy.engines import failures
from workers.policy.engines.connection import FAILURES, EngineConnection, Refusal

NO_ROUTE = (401, 403, 404, 405)
"""The statuses by which a server shows that an endpoint is missing or disabled."""


class Control(Protocol):
    """The methods of Engine that control a server."""

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def set_version(self, version: str) -> None: ...

    async def load_weights(self, path: str) -> None: ...

    async def version(self) -> str: ...

    async def paused(self) -> bool | None: ...


class NoControl:
    """The control of a server that cannot be paused; the farm holds its own calls back instead."""

    def __init__(self, engine: str, advice: str = "") -> None:
        self._message = f"engine {engine} takes no pause or version itself; the farm holds calls back instead{advice}"

    async def pause(self, mode: PauseMode) -> None:
        raise EngineError(self._message)

    async def resume(self) -> None:
        raise EngineError(self._message)

    async def set_version(self, version: str) -> None:
        raise EngineError(self._message)

    async def load_weights(self, path: str) -> None:
        raise EngineError(self._message)

    async def version(self) -> str:
        return ""

    async def paused(self) -> bool | None:
        return None


class ControlCalls:
    """Calls whose errors name the engine, and the option that would enable the endpoint."""

    def __init__(self, connection: EngineConnection, advice: str) -> None:
        self._connection = connection
        self._engine = connection.url
        self._advice = advice

    async def call(self, method: Literal["GET", "POST"], path: str, body: Any = None) -> dict[str, Any]:
        """Return the answer's JSON object. Raises EngineError also if the answer reports a failure."""
        try:
            result = await (self._connection.get(path) if method == "GET" else self._connection.post(path, body))
        except Refusal as refusal:
            raise self.failure(path, refusal) from refusal
        except FAILURES as error:
            raise self.broken(error) from error
        if not isinstance(result, dict) or result.get("success") is False:
            raise EngineError(f"engine {self._engine} did not carry out {path}: {str(result)[:300]}; see its log")
        return result

    def failure(self, path: str, refusal: Refusal) -> Exception:
        if refusal.status in NO_ROUTE:
            return EngineError(f"engine {self._engine} has no {path} (status {refusal.status}); {self._advice}")
        return failures.refused(self._engine, refusal.status, refusal.headers, refusal.body)

    def broken(self, error: Exception) -> EngineError:
        return failures.broken(self._engine, error)
