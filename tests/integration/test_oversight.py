"""Monitoring of a farm: its metrics for Prometheus, and the condition of its nodes."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from sqlalchemy import Connection, insert, select, update

from farm import metrics
from farm.cli import doctor
from farm.cli.readiness import remarks
from farm.client.batch_progress import progress
from farm.client.local import LocalFarm
from farm.notifications import Signals
from farm.observing.observer import Observer
from farm.records.engine import EngineInfo
from farm.records.engine_state import StoredEngine
from farm.records.node import BROKEN, DRAINING, Node
from farm.records.rollout import Stage
from farm.scheduler.background_work import InvariantChecker
from farm.store import llm_engines, migrations, nodes
from farm.store.database import Store
from farm.store.rollouts import rollouts
from farm.store.sql import schema
from farm.store.sql.clock import db_now
from testkit.postgres import RestartablePostgres, restartable_postgres
from testkit.private_server import Missing
from tests.conftest import absent
from tests.contract.store.test_store import advance, announce, claimed, finish, place
from tests.secret_keys import key_of
from tests.services.api import KEY
from tests.services.farms import NOOP, until
from tests.services.preloaded import farm_command

Numbers = dict[tuple[str, tuple[str, ...]], float]


def read(text: str) -> Numbers:
    """Return (metric, values of its labels) → number."""
    families = list(text_string_to_metric_families(text))
    assert all(family.type in {"gauge", "counter", "histogram"} and family.documentation for family in families)
    return {(sample.name, tuple(sample.labels.values())): sample.value for each in families for sample in each.samples}


def numbers(store: Store) -> Numbers:
    return read(generate_latest(metrics.registry(store, 60.0)).decode())


def test_metrics_count_open_and_ended_rollouts(store: Store) -> None:
    assert numbers(store)["farm_store_up", ()] == 1
    announce(store)
    service = LocalFarm(store, Signals(""), 1000)
    batch_id = service.submit({"instances": [NOOP], "n_samples": 4})
    place(store, batch_id)
    first, second, third, _ = [each.rollout_id for each in service.rollouts(batch_id)]
    advance(store, claimed(store, first, Stage.INIT))
    advance(store, claimed(store, first, Stage.RUN), policy_outcome="submitted", submission={})
    finish(store, claimed(store, first, Stage.EVAL), 1.0)
    claimed(store, second, Stage.INIT, lease_s=-1.0)
    service.cancel(third)
    result = numbers(store)
    assert {key[1]: number for key, number in result.items() if key[0] == "farm_rollouts" and number} == {
        ("init", "queued"): 1,
        ("init", "active"): 1,
    }
    assert result["farm_slots_wanted", ()] == 2
    assert result["farm_leases_expired", ()] == 1
    assert result["farm_violations", ()] == 0
    assert result["farm_queue_age_seconds", ("init",)] >= 0
    assert result["farm_rollouts_ended_total", ("submitted",)] == 0, "what ended is counted by the dispatcher"
    Observer(store, lambda: True).look()
    result = numbers(store)
    ended = {key[1]: number for key, number in result.items() if key[0] == "farm_rollouts_ended_total" and number}
    assert ended == {("submitted",): 1, ("cancelled",): 1}
    assert result["farm_reward_sum", ()] == result["farm_reward_count", ()] == 1
    assert not any(batch_id in value for _, labels in result for value in labels)
    store.write(lambda connection: connection.execute(update(rollouts).values(attempt=0)))
    assert numbers(store)["farm_violations", ()] > 0


def test_metric_series_are_bounded(sqlite_store: Store) -> None:
    before = len(numbers(sqlite_store))
    announce(sqlite_store)
    batch_id = LocalFarm(sqlite_store, Signals(""), 1000).submit({"instances": [NOOP]})
    _copies(sqlite_store, batch_id, 10_000)
    result = numbers(sqlite_store)
    assert len(result) == before < 300
    assert result["farm_rollouts", ("init", "queued")] == 10_001
    assert result["farm_slots_wanted", ()] == 10_001


def _copies(store: Store, batch_id: str, n: int) -> None:
    """Add so many copies of a batch."""
    tables = [row.__table__ for row in (schema.Batch, schema.InstanceRow, schema.RolloutRow)]

    def copy(connection: Connection) -> None:
        for table in tables:
            of_batch = select(table).where(table.c.batch_id == batch_id)
            row = dict(connection.execute(of_batch).mappings().one())
            ids = [name for name in ("batch_id", "rollout_id") if name in row]
            new = [row | {name: row[name].replace(batch_id, f"{batch_id}x{at}") for name in ids} for at in range(n)]
            connection.execute(insert(table), new)

    store.write(copy)


def all_nodes(store: Store) -> None:
    """Add a node in each possible state."""
    known = {
        "well": Node("well", 8, 4, 4, 4, ["noop"], {}),
        "broken": Node("broken", 8, 4, 4, 4, ["noop"], {BROKEN: "its run workers end"}, BROKEN),
        "ending": Node("ending", 8, 4, 4, 4, ["noop"], {}, DRAINING),
        "sick": Node("sick", 8, 4, 4, 4, ["noop"], {}),
        "doubtful": Node("doubtful", 8, 4, 4, 4, ["noop"], {}),
        "silent": Node("silent", 8, 4, 4, 4, ["noop"], {}),
    }
    for node in known.values():
        store.write(lambda connection, node=node: nodes.announce(connection, node))  # type: ignore[misc]
    changes: dict[str, dict[str, Any]] = {
        "sick": {"out_of_service_until": db_now() + 100, "out_of_service_why": "init: no [space]", "n_trips": 1},
        "doubtful": {"out_of_service_until": db_now() - 1, "out_of_service_why": "init: no [space]", "n_trips": 1},
        "silent": {"heartbeat_at": db_now() - 1000},
    }
    for name, values in changes.items():
        change = update(nodes.nodes).where(nodes.nodes.c.node == name).values(**values)
        store.write(lambda connection, change=change: connection.execute(change))  # type: ignore[misc]


REPORTED = (
    "broken gets no rollouts: its run workers end",
    "ending gets no more rollouts: it is draining",
    "sick is out of service until",
    "doubtful gets 2 rollouts at a time: init: no [space]",
    "silent sent no heartbeat for 10",
)


def test_engines_without_current_weights_are_counted_and_reported_once(sqlite_store: Store) -> None:
    url, invariant_checker = "http://a/v1", InvariantChecker(sqlite_store, 0.0)

    def has(version: str) -> None:
        sqlite_store.write(lambda connection: llm_engines.carried_out(connection, url, 1, "", version))

    def n_lacking() -> float:
        return numbers(sqlite_store)["farm_engines", ("without weights",)]

    sqlite_store.write(lambda connection: llm_engines.add(connection, StoredEngine(url), key_of(sqlite_store)))
    sqlite_store.write(lambda connection: llm_engines.set_info(connection, url, EngineInfo(control=True)))
    sqlite_store.write(lambda connection: llm_engines.set_version(connection, "7", None))
    has("7")
    assert (n_lacking(), invariant_checker.look_at_engines()) == (0, [])
    has("default")
    assert n_lacking() == 1
    [alarm] = invariant_checker.look_at_engines()
    assert "lacks version 7" in alarm
    assert invariant_checker.look_at_engines() == [], "once each time"
    finding = doctor._engines(sqlite_store.url)
    assert not finding.ok
    assert "lacks version 7" in finding.detail
    has("7")
    assert invariant_checker.look_at_engines() == []
    assert doctor._engines(sqlite_store.url).ok
    has("default")
    assert len(invariant_checker.look_at_engines()) == 1


def test_doctor_and_watch_report_nodes_that_get_no_work_and_why(store: Store) -> None:
    announce(store)
    alone = doctor._nodes(store.url)
    assert (alone.ok, alone.detail) == (True, "1 known")
    all_nodes(store)
    check_result = doctor._nodes(store.url)
    assert not check_result.ok
    service = LocalFarm(store, Signals(""), 1000)
    status = service.status(service.submit({"instances": [NOOP]}))
    shown = Console(file=io.StringIO(), width=200)
    shown.print(progress(status, 0, 1.0, remarks(service.nodes(), [])))
    assert isinstance(shown.file, io.StringIO)
    for words in REPORTED:
        assert words in check_result.detail
        assert f"node {words}" in shown.file.getvalue()
    assert "well " not in check_result.detail + shown.file.getvalue()
    states = {key[1][0]: number for key, number in numbers(store).items() if key[0] == "farm_nodes"}
    assert states == {"up": 3, "broken": 1, "draining": 1, "out_of_service": 1, "dead": 1}


@pytest.fixture
def postgres() -> Iterator[RestartablePostgres]:
    try:
        with restartable_postgres() as server:
            yield server
    except Missing as missing:
        absent(str(missing))


@contextmanager
def served(store_url: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Run `farm metrics` until the block ends; yield it and the URL of its numbers."""
    env = os.environ | {"FARM_STORE_URL": store_url, "FARM_API_KEY": KEY}
    serving = farm_command(["metrics", "--port", "0"], env, log)
    try:
        until(lambda: log.read_text().endswith("/metrics\n") or serving.poll() is not None, "it is served", 120.0)
        yield serving, log.read_text().strip()
    finally:
        serving.kill()
        serving.wait()


def scraped(url: str) -> Numbers:
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return read(answer.read().decode())


def test_metrics_are_served_during_a_database_outage(postgres: RestartablePostgres, tmp_path: Path) -> None:
    store = Store(postgres.url)
    migrations.migrate(store)
    store.close()
    log = tmp_path / "log"
    with served(postgres.url, log) as (serving, url):
        assert scraped(url)["farm_store_up", ()] == 1
        postgres.cut_down()
        assert scraped(url) == {("farm_store_up", ()): 0}
        postgres.start()
        assert until(lambda: scraped(url)["farm_store_up", ()] == 1, "the database is back")
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(600) == 0
        assert "Traceback" not in log.read_text()
