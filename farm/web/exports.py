"""Exports of the page: a rollout as a standalone page or as a trace, filtered rollouts as JSONL or Parquet."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from farm.api.endpoints import Endpoints
from farm.client.exports.parquet_writer import parquet_parts
from farm.client.exports.rollout_export import exported
from farm.client.exports.rollout_line import written
from farm.observing.timeline import spans, trace_events
from farm.web.batch_views import filter_of
from farm.web.rendering import HEADERS, rendered
from farm.web.rollout_views import conversation

Form = Callable[[Iterator[dict[str, Any]]], Iterator[bytes]]
"""A function that writes rollouts, chunk by chunk."""
_IMAGES = {
    re.compile(rb"\x89PNG\r\n\x1a\n"): "image/png",
    re.compile(rb"\xff\xd8\xff"): "image/jpeg",
    re.compile(rb"GIF8"): "image/gif",
    re.compile(rb"RIFF....WEBP", re.DOTALL): "image/webp",
}
"""The media types of images by the first bytes of their data."""


class Exports:
    """The exports."""

    def __init__(self, endpoints: Endpoints) -> None:
        self._endpoints = endpoints

    async def trace(self, request: Request) -> Response:
        """Return a rollout's timeline for Perfetto."""
        rollout_id = request.path_params["id"]

        def made() -> bytes:
            farm = self._endpoints.farm
            rollout = farm.rollout(rollout_id)
            drawn = spans(rollout, farm.timings(rollout_id), farm.calls(rollout_id), time.time())
            return json.dumps(trace_events(rollout, drawn)).encode()

        return _attached(await self._endpoints.run(made), "application/json", _file_name(rollout_id, "trace.json"))

    async def static_page(self, request: Request) -> Response:
        """Return a rollout's transcript as one standalone file without scripts."""
        rollout_id = request.path_params["id"]

        def made() -> bytes:
            farm = self._endpoints.farm
            text = rendered(
                "static_rollout.html",
                rollout=farm.rollout(rollout_id),
                messages=conversation(farm.calls(rollout_id)),
                timings=farm.timings(rollout_id),
                rewards=farm.rewards(rollout_id),
                artefacts=farm.artefacts(rollout_id),
                style=(files("farm.web") / "static" / "page.css").read_text(),
            )
            return text.encode("utf-8", "replace")

        return _attached(await self._endpoints.run(made), "text/html; charset=utf-8", _file_name(rollout_id, "html"))

    async def artefact(self, request: Request) -> Response:
        """Return an artefact: an image for display, anything else as a download."""
        rollout_id, name = request.path_params["id"], request.query_params.get("name", "")
        data = await self._endpoints.run(self._endpoints.farm.artefact, rollout_id, name)
        kind = next((kind for start, kind in _IMAGES.items() if start.match(data)), None)
        # an image is never interpreted as a document, whatever its contents; the sandbox directive makes sure of it
        sandboxed = {**HEADERS, "content-security-policy": "default-src 'none'; sandbox"}
        if kind is None:
            return Response(data, 200, {**sandboxed, "content-disposition": "attachment"}, "application/octet-stream")
        return Response(data, 200, sandboxed, kind)

    async def lines(self, request: Request) -> Response:
        """Stream filtered rollouts as JSONL, with messages, scores and training rows."""
        return await self._streamed(request, "application/jsonl", "jsonl", lambda rollouts: map(written, rollouts))

    async def parquet(self, request: Request) -> Response:
        """Stream filtered rollouts as a Parquet file."""
        return await self._streamed(request, "application/vnd.apache.parquet", "parquet", parquet_parts)

    async def _streamed(self, request: Request, media_type: str, ending: str, form: Form) -> Response:
        batch_id, wanted = request.path_params["id"], filter_of(dict(request.query_params))
        parts = form(exported(self._endpoints.farm, batch_id, wanted))
        # errors are raised before anything is sent
        first = await self._endpoints.run(next, parts, b"")

        async def content() -> AsyncIterator[bytes]:
            part: bytes | None = first
            while part is not None:
                if part:
                    yield part
                part = await self._endpoints.run(next, parts, None)

        headers = {**HEADERS, "content-disposition": f'attachment; filename="{_file_name(batch_id, ending)}"'}
        return StreamingResponse(content(), 200, headers, media_type)


def _attached(data: bytes, media_type: str, name: str) -> Response:
    return Response(data, 200, {**HEADERS, "content-disposition": f'attachment; filename="{name}"'}, media_type)


def _file_name(id: str, kind: str) -> str:
    return f"{id}.{kind}"
