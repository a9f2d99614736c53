"""An OpenTelemetry collector: receives traces by OTLP over HTTP, and decodes them with the protocol's own package."""

from __future__ import annotations

import gzip
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
class TraceCollector:
    """All received spans, by trace: each as its decoded message."""

    url: str = ""
    spans: dict[str, list[Any]] = field(default_factory=dict)
    services: set[str] = field(default_factory=set)

    async def take(self, request: Request) -> Response:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages

        body = await request.body()
        if request.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        sent = messages.ExportTraceServiceRequest.FromString(body)
        for resource in sent.resource_spans:
            named = {each.key: each.value.string_value for each in resource.resource.attributes}
            self.services.add(named["service.name"])
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.trace_id.hex(), []).append(span)
        answer = messages.ExportTraceServiceResponse().SerializeToString()
        return Response(answer, media_type="application/x-protobuf")


@contextmanager
def collector() -> Iterator[TraceCollector]:
    """Run one on a free port."""
    made = TraceCollector()
    with serving(Starlette(routes=[Route("/v1/traces", made.take, methods=["POST"])])) as url:
        made.url = url
        yield made
