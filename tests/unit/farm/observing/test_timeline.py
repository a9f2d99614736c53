"""The timeline of a rollout, and its trace."""

from __future__ import annotations

from farm.observing.timeline import spans, trace_events
from farm.records.rollout import Stage, Timing
from tests.services.model_calls import model_call
from tests.unit.farm.web.test_siblings import rollout

TIMINGS = [
    Timing(1, Stage.INIT, 0.0, 1.0, 3.0, "n", "advanced", None),
    Timing(1, Stage.RUN, 3.0, 3.5, None, "n", None, None),
]
CALLS = [
    model_call(0, started_at=4.0, latency_s=1.0, response={"tool_calls": [{"function": {"name": "bash"}}]}),
    model_call(1, started_at=7.0, latency_s=0.5),
]


def test_stages_calls_and_gaps_between_them_are_spans() -> None:
    made = [(each.lane, each.kind, each.start_s, each.end_s) for each in spans(rollout(0), TIMINGS, CALLS, 9.0)]
    assert made == [
        ("attempt 1", "queued", 0.0, 1.0),
        ("attempt 1", "init", 1.0, 3.0),
        ("attempt 1", "queued", 3.0, 3.5),
        ("attempt 1", "run", 3.5, 9.0),
        ("model calls", "call", 4.0, 5.0),
        ("tools", "between", 5.0, 7.0),
        ("model calls", "call", 7.0, 7.5),
    ]


def test_trace_has_every_span_as_a_complete_event() -> None:
    drawn = spans(rollout(0), TIMINGS, CALLS, 9.0)
    document = trace_events(rollout(0), drawn)
    events = [each for each in document["traceEvents"] if each["ph"] == "X"]
    assert len(events) == len(drawn)
    assert all(each["dur"] >= 1 and each["ts"] >= 0 for each in events)
    lanes = {each["tid"]: each["args"]["name"] for each in document["traceEvents"] if each["name"] == "thread_name"}
    assert set(lanes.values()) == {"attempt 1", "model calls", "tools"}
    assert {each["tid"] for each in events} == set(lanes)


def test_rollout_that_has_not_begun_has_no_spans() -> None:
    assert spans(rollout(0), [], [], 9.0) == []
