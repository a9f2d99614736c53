"""Traces as received by a collector: of completed, broken and retried rollouts; nothing is imported where it is off."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from sqlalchemy import update

import farm
from farm.observing.observer import Observer
from farm.observing.timeline import span_id_of, trace_id_of
from farm.records.rollout import Failure, Stage
from farm.retry_policy import retry_decision
from farm.store import attempts, trajectories
from farm.store.attempts import RetrySettings
from farm.store.database import Store
from farm.store.reports import histograms
from farm.store.rollouts import attempts as stages
from tests.contract.store.test_store import advance, announce, claimed, finish, new_batch, place, run_to_end
from tests.services.farms import NOOP, embedded, farm_folder, until
from tests.services.model_calls import model_call
from tests.services.servers.otlp_collector import TraceCollector, collector

BROKEN = 2
"""OTLP's code of a span that failed."""


def trace(found: TraceCollector, rollout_id: str) -> list[Any]:
    return found.spans.get(f"{trace_id_of(rollout_id):032x}", [])


def tree(spans: list[Any]) -> dict[str, str]:
    """Return each span's name by its parent's name."""
    names = {span.span_id: span.name for span in spans}
    return {span.name: names.get(span.parent_span_id, "") for span in spans}


def values_of(span: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}


def test_trace_contains_attempts_stages_calls_and_tools_by_parent(sqlite_store: Store) -> None:
    announce(sqlite_store)
    batch_id = new_batch(sqlite_store, max_attempts=2)
    rollout_id = f"{batch_id}.0.0"
    place(sqlite_store, batch_id)
    held = claimed(sqlite_store, rollout_id, Stage.INIT)
    ended = partial(attempts.end_attempt, held=held, failure=Failure("sandbox_error", "no disk"))
    decided = partial(ended, decision=retry_decision("sandbox_error"), retry_settings=RetrySettings(0.0, 60.0))
    sqlite_store.write(decided)
    place(sqlite_store, batch_id)
    advance(sqlite_store, claimed(sqlite_store, rollout_id, Stage.INIT, 2))
    run = claimed(sqlite_store, rollout_id, Stage.RUN, 2)
    rows = trajectories.CallLog(rollout_id, 2)
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "bash", "arguments": "{}"}}]}
    for call in (
        model_call(0, started_at=100.0, latency_s=2.0, response=message, n_response_tokens=7),
        model_call(1, started_at=105.0, latency_s=1.0),
    ):
        sqlite_store.write(partial(trajectories.record_call, row=rows.row(call)))
    advance(sqlite_store, run, policy_outcome="submitted", submission={})
    finish(sqlite_store, claimed(sqlite_store, rollout_id, Stage.EVAL, 2), 0.5)
    # a wait may be too short to be a span
    longer = update(stages).values(queued_at=stages.c.queued_at - 1.0)
    sqlite_store.write(lambda connection: connection.execute(longer))
    with collector() as found:
        observer = Observer(sqlite_store, lambda: True, found.url)
        observer.look()
        observer.look()
        observer.close()
    spans = trace(found, rollout_id)
    assert found.services == {"rollout-farm"}
    assert len({span.span_id for span in spans}) == len(spans), "each is sent once"
    by_name = {span.name: span for span in spans}
    assert tree(spans) == {
        "rollout": "",
        "attempt": "rollout",
        **{stage.value: "attempt" for stage in Stage},
        **{f"{stage.value} queued": "attempt" for stage in Stage},
        "model call": "run",
        "bash": "run",
    }
    assert [span.status.message for span in spans if span.status.code == BROKEN] == ["no disk"]
    assert values_of(by_name["rollout"])["farm.reward"] == 0.5
    tool = by_name["bash"]
    assert (tool.start_time_unix_nano, tool.end_time_unix_nano) == (102 * 10**9, 105 * 10**9)
    first = next(span for span in spans if span.name == "model call" and values_of(span)["farm.call"] == 0)
    assert values_of(first)["gen_ai.usage.output_tokens"] == 7
    run_span = next(span for span in spans if span.name == "run")
    assert first.parent_span_id == run_span.span_id
    assert run_span.span_id == span_id_of(rollout_id, "attempt 2", "run").to_bytes(8, "big")


def test_stages_of_three_workers_form_one_trace() -> None:
    with (
        collector() as found,
        farm_folder() as folder,
        embedded(folder, FARM_OTEL_ENDPOINT=found.url) as running,
        farm.connect(running.store_url, broker_url=running.broker_url) as client,
    ):
        batch_id = client.submit({"instances": [NOOP, NOOP | {"fields": {"fail": "run:final"}}]})
        client.wait(batch_id, 600)
        ids = [each.rollout_id for each in client.rollouts(batch_id)]
        until(lambda: all(trace(found, each) for each in ids), "their traces are sent")
        for rollout_id, stages in zip(ids, (["init", "run", "eval"], ["init", "run"]), strict=True):
            assert [span.name for span in trace(found, rollout_id) if span.name in [*Stage]] == stages
        (broken,) = (span for span in trace(found, ids[1]) if span.name == "run")
        assert broken.status.code == BROKEN
        assert "asks for a final error" in broken.status.message


def test_unavailable_collector_loses_only_traces(sqlite_store: Store) -> None:
    announce(sqlite_store)
    batch_id = new_batch(sqlite_store)
    place(sqlite_store, batch_id)
    advance(sqlite_store, claimed(sqlite_store, f"{batch_id}.0.0", Stage.INIT))
    advance(
        sqlite_store, claimed(sqlite_store, f"{batch_id}.0.0", Stage.RUN), policy_outcome="submitted", submission={}
    )
    finish(sqlite_store, claimed(sqlite_store, f"{batch_id}.0.0", Stage.EVAL), 1.0)
    observer = Observer(sqlite_store, lambda: True, "http://127.0.0.1:1")
    observer.look()
    observer.close()


def test_traces_over_the_time_limit_are_dropped_and_metrics_are_counted(sqlite_store: Store) -> None:
    announce(sqlite_store)
    batch_id = new_batch(sqlite_store, 2)
    place(sqlite_store, batch_id)
    for index in range(2):
        run_to_end(sqlite_store, f"{batch_id}.{index}.0")
    with collector() as found:
        observer = Observer(sqlite_store, lambda: True, found.url, traces_s=0.0)
        observer.look()
        observer.close()
    assert found.spans == {}
    assert sum(sqlite_store.read(histograms.stored)["farm_reward", ""].counts) == 2


@pytest.mark.parametrize(
    "program",
    [
        "import farm.scheduler.dispatcher, farm.observing.observer, workers.queue.tasks, sys\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry.exporter')]",
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from farm.errors import NotInstalled\nfrom farm.observing.timeline import TraceExporter\n"
        "try: TraceExporter('http://127.0.0.1:1')\n"
        "except NotInstalled as error: assert 'rollout-farm[otel]' in str(error); raise SystemExit(0)\n"
        "raise SystemExit(1)",
    ],
    ids=["nothing is loaded where it is off", "without the packages one line says what to install"],
)
def test_exporter_is_imported_only_if_traces_are_enabled(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
