"""Start of a node: what it refuses, its name, when it is announced, and its log lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import farm
from farm.records.node import BROKEN, UP
from farm.store import migrations, nodes
from farm.store.database import Store
from tests.services.farms import NOOP, farm_folder, node, until
from tests.services.servers.redis import redis_broker, redis_server


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def store(folder: Path) -> Iterator[Store]:
    opened = Store(f"sqlite:///{folder / 'farm.db'}")
    migrations.migrate(opened)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def broker_url() -> Iterator[str]:
    with redis_server() as url:
        yield url


def names(store: Store) -> set[str]:
    return {each.node for each in store.read(nodes.listing)}


def n_up(store: Store) -> int:
    return sum(each.state == UP for each in store.read(nodes.listing))


def test_node_without_a_broker_is_refused(folder: Path, store: Store) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("FARM_")}
    env |= {"FARM_STORE_URL": store.url, "FARM_SCRATCH": str(folder / "scratch")}
    command = [str(Path(sys.executable).parent / "farm"), "node"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: FARM_BROKER_URL is not set")
    assert names(store) == set()


def test_nodes_of_slurm_on_one_machine_have_distinct_names(folder: Path, store: Store, broker_url: str) -> None:
    slurm = {"SLURMD_NODENAME": "rack%7", "SLURM_JOB_ID": "42"}
    with ExitStack() as running:
        for number in range(2):
            env: dict[str, Any] = slurm | {"FARM_NODE": "", "FARM_LOG": "json" if number else "text"}
            running.enter_context(node(folder, f"log{number}", store.url, broker_url, **env))
            until(lambda n=number: n_up(store) == n + 1, "it is announced", 120.0)  # type: ignore[misc]
        assert names(store) == {"rack%7", "rack%7-42"}
        # announced nodes are subscribed to the broker, so all of them run at once
        with farm.connect(store.url, broker_url=broker_url) as client:
            assert client.wait(client.submit({"instances": [NOOP] * 30}), 600).n_completed == 30
        with node(folder, "rack%7", store.url, broker_url) as taken:
            assert taken.wait(600) == 1
        reported = (folder / "rack%7.log").read_text()
        assert (
            reported == "Error: node rack%7 runs on this machine already: set FARM_NODE to another name for this one\n"
        )
    first = (folder / "log0.log").read_text()
    ready = re.findall(r"INFO rack%7 workers.node: Node rack%7 is ready: 4 init, 8 run, 4 eval.*", first)
    assert len(ready) == 1
    assert "farm.db" in ready[0]
    assert broker_url.split("@")[-1] in ready[0]
    assert "celery@" not in first
    assert "[tasks]" not in first
    assert all("rack%7" in line for line in first.splitlines() if re.match(r"\d{4}-", line))
    lines = [json.loads(line) for line in (folder / "log1.log").read_text().splitlines()]
    assert {line["node"] for line in lines} == {"rack%7-42"}
    assert any("is ready" in line["message"] for line in lines)


def test_node_reports_an_absent_broker_and_is_announced_later(folder: Path, store: Store) -> None:
    with redis_broker() as broker:
        broker.kill()
        before = n_up(store)
        with node(folder, "early", store.url, broker.url) as process:
            log = folder / "early.log"
            until(lambda: "Cannot connect to redis" in log.read_text(), "it says what it waits for", 120.0)
            assert process.poll() is None
            assert n_up(store) == before
            broker.start()
            until(lambda: n_up(store) == before + 1, "it is announced", 120.0)
    assert "Traceback" not in log.read_text()


def test_removed_database_file_ends_the_node_with_one_line(broker_url: str) -> None:
    with farm_folder() as folder:
        store = Store(f"sqlite:///{folder / 'farm.db'}")
        migrations.migrate(store)
        with node(folder, "bereft", store.url, broker_url) as process:
            until(lambda: n_up(store) == 1, "it is announced", 120.0)
            store.close()
            for path in folder.glob("farm.db*"):
                path.unlink()
            process.wait(120)
        reported = (folder / "bereft.log").read_text()
        ends = [line for line in reported.splitlines() if "Node bereft exits: the database file" in line]
        assert len(ends) == 1, reported
        assert "farm.db was removed while it was in use: end this process, put the file back, start again" in ends[0]
        assert "Traceback" not in reported, reported
        assert not (folder / "farm.db").exists()


def test_node_without_the_secret_key_takes_nothing_until_it_has_it(folder: Path, store: Store, broker_url: str) -> None:
    def reported() -> str:
        [known] = store.read(nodes.listing)
        return str(known.info.get(BROKEN, ""))

    key, elsewhere = folder / "secret_key", folder / "elsewhere"
    with (
        node(folder, "keyless", store.url, broker_url),
        farm.connect(store.url, broker_url=broker_url) as client,
    ):
        until(lambda: n_up(store) == 1, "it is announced")
        client.add_engine("http://127.0.0.1:9/v1", key="of-an-engine")
        key.rename(elsewhere)
        try:
            until(reported, "it knows")
            assert re.search("node keyless has no secret key of the farm, .*FARM_SECRET_KEY", reported())
            batch_id = client.submit({"instances": [NOOP]})
        finally:
            elsewhere.rename(key)
        assert client.wait(batch_id, 600).n_completed == 1
        assert reported() == ""
