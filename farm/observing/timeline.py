"""The timeline of a rollout: its stages by attempt, its model calls, the tools between two calls.

The page draws these spans, `trace_events` converts them for Perfetto and chrome://tracing (Trace Event Format, complete
events, microseconds), and `rollout_traces` sends them to a collector, all with the same names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from farm.records.rollout import Rollout, Timing
from farm.records.trajectory import Message, ModelCall

CALLS, TOOLS = "model calls", "tools"
"""The lanes of model calls, and of the tools between them."""


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
    result = []
    for timing in timings:
        lane, stage = f"attempt {timing.attempt}", timing.stage.value
        started = timing.started_at if timing.started_at is not None else now
        if started > timing.queued_at:
            name = f"{stage} queued"
            result.append(Span(lane, "queued", name, name, timing.queued_at - zero, started - zero, timing))
        if timing.started_at is not None:
            end = max(timing.finished_at if timing.finished_at is not None else now, started)
            result.append(Span(lane, stage, stage, _label(timing), timing.started_at - zero, end - zero, timing))
    return result


def call_spans(rollout: Rollout, calls: Sequence[ModelCall]) -> list[Span]:
    """Return the spans of an attempt's model calls, and of the tools between them."""
    zero = rollout.submitted_at
    result = []
    before: ModelCall | None = None
    for call in calls:
        if before is not None and call.started_at > (end := before.started_at + before.latency_s):
            names = ", ".join(_tools(before.response)) or "environment"
            result.append(Span(TOOLS, "between", names, names, end - zero, call.started_at - zero, before))
        label = f"call {call.index}: {call.n_prompt_tokens} + {call.n_response_tokens} tokens"
        start = call.started_at - zero
        result.append(Span(CALLS, "call", "model call", label, start, start + call.latency_s, call))
        before = call
    return result


def _tools(message: Message) -> list[str]:
    """Return the names of the tools that a message calls; `?` for a malformed call."""
    made = message.get("tool_calls") or ()
    functions = [
        each.get("function") if isinstance(each, dict) else None
        for each in (made if isinstance(made, list | tuple) else (made,))
    ]
    return [str(each.get("name", "?")) if isinstance(each, dict) else "?" for each in functions]


def _label(timing: Timing) -> str:
    place = f" on {timing.node}" if timing.node else ""
    return f"{timing.stage.value}{place}: {timing.result or 'active'}"


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
