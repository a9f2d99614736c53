"""The timeline of a rollout: its stages by attempt, its model calls, the tools between two calls.

The page draws these spans, `trace_events` converts them for Perfetto and chrome://tracing (Trace Event Format, complete
events, microseconds), and `TraceExporter` sends them to a collector, all with the same names.

Every id in a trace is derived from what it identifies, so no trace context has to be passed along. Whichever workers
ran the stages, and however many attempts there were, a rollout is one trace, and a span that is sent twice is the same
span. The packages of `rollout-farm[otel]` are imported only by the first exporter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farm.extras import not_installed
from farm.records.rollout import Rollout, State, Timing
from farm.records.trajectory import Message, ModelCall

CALLS, TOOLS = "model calls", "tools"
"""The lanes of model calls, and of the tools between them."""

_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time, in seconds since the rollout was submitted. `lane` is the line in which it is drawn."""

    lane: str
    kind: str
    """`queued`, `init`, `run`, `eval`, `call` or `between`."""
    name: str
    label: str
    start_s: float
    end_s: float
    origin: Timing | ModelCall
    """The stage that it belongs to or waits for, or the call that it is or follows."""

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


def spans(rollout: Rollout, timings: Sequence[Timing], calls: Sequence[ModelCall], now: float) -> list[Span]:
    """Return all spans of a rollout; an open one ends `now`."""
    return stage_spans(rollout, timings, now) + call_spans(rollout, calls)


def stage_spans(rollout: Rollout, timings: Sequence[Timing], now: float) -> list[Span]:
    """Return the spans of stages, and of the wait for each."""
    zero = rollout.submitted_at
    spans = []
    for timing in timings:
        lane, stage = f"attempt {timing.attempt}", timing.stage.value
        started = timing.started_at if timing.started_at is not None else now
        if started > timing.queued_at:
            name = f"{stage} queued"
            spans.append(Span(lane, "queued", name, name, timing.queued_at - zero, started - zero, timing))
        if timing.started_at is not None:
            end = max(timing.finished_at if timing.finished_at is not None else now, started)
            spans.append(Span(lane, stage, stage, _label(timing), timing.started_at - zero, end - zero, timing))
    return spans


def call_spans(rollout: Rollout, calls: Sequence[ModelCall]) -> list[Span]:
    """Return the spans of an attempt's model calls, and of the tools between them."""
    zero = rollout.submitted_at
    spans = []
    before: ModelCall | None = None
    for call in calls:
        if before is not None and call.started_at > (end := before.started_at + before.latency_s):
            names = ", ".join(_tools(before.response)) or "environment"
            spans.append(Span(TOOLS, "between", names, names, end - zero, call.started_at - zero, before))
        label = f"call {call.index}: {call.n_prompt_tokens} + {call.n_response_tokens} tokens"
        start = call.started_at - zero
        spans.append(Span(CALLS, "call", "model call", label, start, start + call.latency_s, call))
        before = call
    return spans


def _tools(message: Message) -> list[str]:
    """Return the names of the tools that a message calls; `?` for a malformed call."""
    calls = message.get("tool_calls") or ()
    functions = [
        each.get("function") if isinstance(each, dict) else None
        for each in (calls if isinstance(calls, list | tuple) else (calls,))
    ]
    return [str(each.get("name", "?")) if isinstance(each, dict) else "?" for each in functions]


def _label(timing: Timing) -> str:
    node = f" on {timing.node}" if timing.node else ""
    return f"{timing.stage.value}{node}: {timing.result or 'active'}"


def trace_events(rollout: Rollout, drawn: Sequence[Span]) -> dict[str, Any]:
    """Return the document for Perfetto; each lane is a thread of the rollout."""
    lanes = {name: number for number, name in enumerate(dict.fromkeys(span.lane for span in drawn), 1)}
    names = [
        {"name": "process_name", "ph": "M", "pid": 1, "tid": 0, "args": {"name": rollout.rollout_id}},
        *(
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": lane}}
            for lane, number in lanes.items()
        ),
    ]
    events = [
        {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "ts": round((rollout.submitted_at + span.start_s) * 1e6),
            "dur": max(1, round(span.length_s * 1e6)),
            "pid": 1,
            "tid": lanes[span.lane],
            "args": {"label": span.label},
        }
        for span in drawn
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *events]}


def trace_id_of(rollout_id: str) -> int:
    """Return the id of a rollout's trace."""
    return int.from_bytes(hashlib.sha256(rollout_id.encode()).digest()[:16], "big")


def span_id_of(rollout_id: str, *names: object) -> int:
    """Return the id of a span of a rollout; without names, of the root span."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, (rollout_id, *names))).encode()).digest()[16:24], "big")


class TraceExporter:
    """Sends traces to a collector by OTLP over HTTP, configured by OTEL_EXPORTER_OTLP_HEADERS and similar variables.

    Raises NotInstalled without the packages.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
        except ImportError as error:
            raise not_installed("sending traces", error.name or "opentelemetry", extra="otel") from None
        self._exporter: Any = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=_TIMEOUT_S)
        self._resource = Resource.create({"service.name": "rollout-farm"})

    def close(self) -> None:
        self._exporter.shutdown()

    def export(self, rollout: Rollout, timings: Sequence[Timing], calls: Mapping[int, Sequence[ModelCall]]) -> bool:
        """Send the trace of an ended rollout; `calls` are those of each attempt. False if it was not accepted."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        return self._exporter.export(list(self._spans(rollout, timings, calls))) is SpanExportResult.SUCCESS

    def _spans(
        self, rollout: Rollout, timings: Sequence[Timing], calls: Mapping[int, Sequence[ModelCall]]
    ) -> Iterator[Any]:
        end_s = (rollout.finished_at or rollout.submitted_at) - rollout.submitted_at
        whole = {
            "farm.rollout_id": rollout.rollout_id,
            "farm.batch_id": rollout.batch_id,
            "farm.data_source": rollout.data_source,
            "farm.instance_id": rollout.instance_id,
            "farm.outcome": rollout.outcome and rollout.outcome.value,
            "farm.reward": rollout.reward,
            "farm.turns": rollout.n_turns,
        }
        failed = rollout.state is State.FAILED
        message = rollout.failure.message if failed and rollout.failure else ""
        yield self._span(rollout, "rollout", (), None, (0.0, end_s), whole, message or None if failed else None)
        for attempt in dict.fromkeys(each.attempt for each in timings):
            own_timings = [each for each in timings if each.attempt == attempt]
            stages = stage_spans(rollout, own_timings, rollout.submitted_at + end_s)
            bounds = (
                (min(each.start_s for each in stages), max(each.end_s for each in stages)) if stages else (0.0, 0.0)
            )
            name = (f"attempt {attempt}",)
            yield self._span(rollout, "attempt", name, (), bounds, {"farm.attempt": attempt})
            for span in stages:
                yield self._stage(rollout, span, name)
            for span in call_spans(rollout, calls.get(attempt, ())):
                yield self._call(rollout, span, (*name, "run"))

    def _stage(self, rollout: Rollout, span: Span, attempt: tuple[str, ...]) -> Any:
        timing = span.origin
        assert isinstance(timing, Timing)
        values = {"farm.stage": timing.stage.value, "farm.node": timing.node, "farm.result": timing.result}
        broke = timing.failure if span.kind != "queued" else None
        bounds = (span.start_s, span.end_s)
        return self._span(
            rollout, span.name, (*attempt, span.name), attempt, bounds, values, None if broke is None else broke.message
        )

    def _call(self, rollout: Rollout, span: Span, run: tuple[str, ...]) -> Any:
        call = span.origin
        assert isinstance(call, ModelCall)
        values: dict[str, Any] = {"farm.call": call.index}
        if span.kind == "call":
            values |= {
                "gen_ai.operation.name": "chat",
                "gen_ai.usage.input_tokens": call.n_prompt_tokens,
                "gen_ai.usage.output_tokens": call.n_response_tokens,
                "gen_ai.response.finish_reasons": [call.finish_reason],
                "server.address": call.engine,
                "farm.policy_version": call.policy_version,
            }
        else:
            values |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": span.name}
        return self._span(rollout, span.name, (*run, span.kind, call.index), run, (span.start_s, span.end_s), values)

    def _span(
        self,
        rollout: Rollout,
        name: str,
        path: tuple[object, ...],
        parent: tuple[object, ...] | None,
        bounds: tuple[float, float],
        values: Mapping[str, Any],
        failure: str | None = None,
    ) -> Any:
        """Return a span; its id and its parent's are derived from its path."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, Status, StatusCode, TraceFlags

        def context(names: tuple[object, ...]) -> SpanContext:
            trace_id, span_id = trace_id_of(rollout.rollout_id), span_id_of(rollout.rollout_id, *names)
            return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

        start, end = (round((rollout.submitted_at + each) * 1e9) for each in bounds)
        return ReadableSpan(
            name,
            context(path),
            None if parent is None else context(parent),
            self._resource,
            {key: value for key, value in values.items() if value is not None},
            status=Status(StatusCode.UNSET) if failure is None else Status(StatusCode.ERROR, failure),
            start_time=start,
            end_time=max(start, end),
        )
