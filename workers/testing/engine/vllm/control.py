"""vLLM's control endpoints used by the farm: models, health, pauses, weights, the prefix cache."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from workers.testing.engine.engine_machine import Machine
from workers.testing.engine.vllm.sampling import CREATED
from workers.testing.engine.web import Json, RequestRefused, body_of

OWNER = "vllm-test-double"
VERSION = "0.33.0"
_PAUSE_MODES = ("abort", "wait", "keep")


class VllmControlEndpoints:
    """Some of them exist in vLLM only with VLLM_SERVER_DEV_MODE=1."""

    def __init__(self, machine: Machine, *, version: str = VERSION) -> None:
        self._machine = machine
        self._scheduler = machine.scheduler
        self._version = version

    def routes(self) -> list[Route]:
        return [*self.open_routes(), *self.control_routes()]

    def open_routes(self) -> list[Route]:
        """Return those that every vLLM has."""
        return [
            Route("/health", self._health),
            Route("/version", self._say_version),
            Route("/v1/models", self._models),
        ]

    def control_routes(self) -> list[Route]:
        """Return those of the development mode."""
        return [
            Route("/pause", self._pause, methods=["POST"]),
            Route("/resume", self._resume, methods=["POST"]),
            Route("/is_paused", self._is_paused),
            Route("/update_weight_version", self._update_version, methods=["POST"]),
            Route("/weight_info", self._weight_info),
            Route("/reset_prefix_cache", self._reset_cache, methods=["POST"]),
            Route("/collective_rpc", self._collective_rpc, methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        return Response(status_code=200 if self._machine.healthy else 503)

    async def _say_version(self, request: Request) -> Response:
        return Json({"version": self._version})

    async def _models(self, request: Request) -> Response:
        permission = {
            "id": "modelperm-0",
            "object": "model_permission",
            "created": CREATED,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": self._machine.name,
            "object": "model",
            "created": CREATED,
            "owned_by": OWNER,
            "root": str(self._machine.root),
            "parent": None,
            "max_model_len": self._machine.context_tokens,
            "permission": [permission],
        }
        return Json({"object": "list", "data": [card]})

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in _PAUSE_MODES:
            raise RequestRefused(f"no such mode: {mode!r}", kind="Bad Request", param="query.mode")
        clear_cache = request.query_params.get("clear_cache", "true").lower() not in ("false", "0")
        await self._scheduler.pause(mode, clear_cache=clear_cache)
        return Json({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        self._scheduler.resume()
        return Json({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return Json({"is_paused": bool(self._scheduler.paused)})

    async def _collective_rpc(self, request: Request) -> Response:
        """Only loads weights; the double has none, and notes the path."""
        body = await body_of(request)
        if body.get("method") != "reload_weights":
            raise RequestRefused(f"no such method: {body.get('method')!r}", kind="Bad Request")
        self._machine.loaded.append(str(body.get("kwargs", {}).get("weights_path")))
        return Json({"results": [None]})

    async def _update_version(self, request: Request) -> Response:
        self._scheduler.version = str((await body_of(request))["new_version"])
        return Json({"success": True, "new_version": self._scheduler.version})

    async def _weight_info(self, request: Request) -> Response:
        return Json({"weight_version": self._scheduler.version})

    async def _reset_cache(self, request: Request) -> Response:
        self._scheduler.cache.clear()
        return Json({"success": True})
