"""What a farm says of itself: its numbers for Prometheus, and how its nodes are."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from sqlalchemy import update

from farm import display, doctor, metrics
from farm.rollout import Stage
from farm.service import Service
from farm.signals import Signals
from farm.store import migrations, nodes
from farm.store.clock import db_now
from farm.store.engine import Store
from farm.store.rollouts import rollouts
from tests.conftest import absent
from tests.contract.test_store import advance, announce, claimed, finish, place
from tests.services.farms import NOOP, until
from tests.services.postgres import Mortal, mortal_postgres
from tests.services.process import Missing

Numbers = dict[tuple[str, tuple[str, ...]], float]
FARM = str(Path(sys.executable).parent / "farm")


def read(text: str) -> Numbers:
    """(metric, values of its labels) → number."""
    families = list(text_string_to_metric_families(text))
    assert all(family.type == "gauge" and family.documentation for family in families)
    return {(sample.name, tuple(sample.labels.values())): sample.value for each in families for sample in each.samples}


def numbers(store: Store) -> Numbers:
    return read(generate_latest(metrics.registry(store, 60.0)).decode())


def test_the_numbers_are_those_of_open_batches(store: Store) -> None:
    assert numbers(store)["farm_store_up", ()] == 1
    announce(store)
    service = Service(store, Signals(""), 1000)
    batch_id = service.submit({"instances": [NOOP], "n_samples": 4})
    place(store, batch_id)
    first, second, third, _ = [each.rollout_id for each in service.rollouts(batch_id)]
    advance(store, claimed(store, first, Stage.INIT))
    advance(store, claimed(store, first, Stage.RUN), policy_outcome="submitted", submission={})
    finish(store, claimed(store, first, Stage.EVAL), 1.0)
    claimed(store, second, Stage.INIT, lease_s=-1.0)
    service.cancel(third)
    found = numbers(store)
    assert {key[1]: number for key, number in found.items() if key[0].startswith("farm_rollouts")} == {
        (batch_id, "init", "queued"): 1,
        (batch_id, "init", "active"): 1,
        (batch_id, "submitted"): 1,
        (batch_id, "cancelled"): 1,
    }
    assert found["farm_leases_expired", ()] == 1
    assert found["farm_violations", (batch_id,)] == 0
    assert found["farm_queue_age_seconds", ("init",)] >= 0
    # and what they are about is few, however many rollouts there are
    assert not any(first.startswith(value) and value != batch_id for _, labels in found for value in labels)
    store.write(lambda connection: connection.execute(update(rollouts).values(n_lost=2, attempt=0)))
    assert numbers(store)["farm_attempts_lost", (batch_id,)] == 8
    assert numbers(store)["farm_violations", (batch_id,)] > 0


def all_nodes(store: Store) -> None:
    """One in each state that there is."""
    known = {
        "well": nodes.Node("well", 8, 4, 4, 4, ["noop"], {}),
        "broken": nodes.Node("broken", 8, 4, 4, 4, ["noop"], {nodes.BROKEN: "its run workers end"}, nodes.BROKEN),
        "ending": nodes.Node("ending", 8, 4, 4, 4, ["noop"], {}, nodes.DRAINING),
        "sick": nodes.Node("sick", 8, 4, 4, 4, ["noop"], {}),
        "doubtful": nodes.Node("doubtful", 8, 4, 4, 4, ["noop"], {}),
        "silent": nodes.Node("silent", 8, 4, 4, 4, ["noop"], {}),
    }
    for node in known.values():
        store.write(lambda connection, node=node: nodes.announce(connection, node))  # type: ignore[misc]
    changes: dict[str, dict[str, Any]] = {
        "sick": {"sick_until": db_now() + 100, "sick_why": "init: no [space]", "n_trips": 1},
        "doubtful": {"sick_until": db_now() - 1, "sick_why": "init: no [space]", "n_trips": 1},
        "silent": {"heartbeat_at": db_now() - 1000},
    }
    for name, values in changes.items():
        change = update(nodes.nodes).where(nodes.nodes.c.node == name).values(**values)
        store.write(lambda connection, change=change: connection.execute(change))  # type: ignore[misc]


SAID = (
    "broken takes nothing: its run workers end",
    "ending takes nothing more, as it is ending",
    "sick takes nothing until",
    "doubtful is given 2 rollouts at a time: init: no [space]",
    "silent has said nothing for 10",
)


def test_doctor_and_watch_say_which_nodes_are_given_nothing_and_why(store: Store) -> None:
    announce(store)
    alone = doctor._nodes(store.url)
    assert (alone.ok, alone.detail) == (True, "1 known")
    all_nodes(store)
    found = doctor._nodes(store.url)
    assert not found.ok
    service = Service(store, Signals(""), 1000)
    status = service.status(service.submit({"instances": [NOOP]}))
    shown = Console(file=io.StringIO(), width=200)
    shown.print(display.progress(status, 0, 1.0, service.nodes()))
    assert isinstance(shown.file, io.StringIO)
    for words in SAID:
        assert words in found.detail
        assert f"node {words}" in shown.file.getvalue()
    assert "well " not in found.detail + shown.file.getvalue()
    states = {key[1][0]: number for key, number in numbers(store).items() if key[0] == "farm_nodes"}
    assert states == {"up": 3, "broken": 1, "draining": 1, "sick": 1, "dead": 1}


@pytest.fixture
def postgres() -> Iterator[Mortal]:
    try:
        with mortal_postgres() as server:
            yield server
    except Missing as missing:
        absent(str(missing))


@contextmanager
def served(store_url: str, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`farm metrics` until the block ends, and where its numbers are."""
    env = os.environ | {"FARM_STORE_URL": store_url}
    with log.open("wb") as out:
        serving = subprocess.Popen([FARM, "metrics", "--port", "0"], env=env, stdout=out, stderr=out)
    try:
        until(lambda: log.read_text().endswith("/metrics\n") or serving.poll() is not None, "it is served", 120.0)
        yield serving, log.read_text().strip()
    finally:
        serving.kill()
        serving.wait()


def scraped(url: str) -> Numbers:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return read(answer.read().decode())


def test_a_scrape_is_answered_while_the_database_is_away(postgres: Mortal, tmp_path: Path) -> None:
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
        assert serving.wait(60) == 0
        assert "Traceback" not in log.read_text()
