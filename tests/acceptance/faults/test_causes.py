"""A failing instance is quarantined and a failing node is taken out of service; the rest continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

import farm
from farm.cli.doctor import _nodes
from farm.errors import InvalidRequest
from farm.records.node import UP, Node
from farm.store import nodes
from farm.store.database import Store
from testkit.postgres import postgres_database
from tests.services.farms import farm_folder, node, until
from tests.services.servers.redis import redis_server
from tests.services.unruly import installed_in


@pytest.fixture(scope="module")
def store(postgres_url: str, migrated_postgres: str) -> Iterator[Store]:
    with postgres_database(postgres_url, migrated_postgres) as url:
        opened = Store(url)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


@pytest.fixture(scope="module")
def broker_url() -> Iterator[str]:
    """Yield the URL of this module's own Redis: the one of the run is emptied for each test."""
    with redis_server() as url:
        yield url


@pytest.fixture(scope="module")
def client(folder: Path, store: Store, broker_url: str) -> Iterator[farm.Farm]:
    """Yield a client of a farm with two nodes, which the tests share."""
    env: dict[str, Any] = installed_in(folder) | {"FARM_WARM_POOL": "0"}
    with (
        node(folder, "one", store.url, broker_url, **env),
        node(folder, "two", store.url, broker_url, **env),
        farm.connect(store.url, broker_url=broker_url) as connected,
    ):
        up = {"one": UP, "two": UP}
        until(lambda: {name: each.state for name, each in known(store).items()} == up, "both nodes are up", 120.0)
        yield connected


def known(store: Store) -> dict[str, Node]:
    return {each.node: each for each in store.read(nodes.listing)}


def unruly(fault: str = "", **more: Any) -> dict[str, Any]:
    return {"data_source": "unruly", "fields": {"fault": fault} | more}


def test_failing_node_is_taken_out_of_service_and_recovers(
    client: farm.Farm, store: Store, folder: Path, tmp_path: Path
) -> None:
    broken = unruly("node:sick", nodes=["two"], times=14, marks=str(tmp_path), seconds=0.2)
    batch_id = client.submit({"instances": [broken] * 60, "max_attempts": 10})
    until(lambda: known(store)["two"].n_trips, "the node is taken out", 120.0)
    rollouts = client.collect(batch_id, timeout_s=600)
    assert all(rollout.reward == 1.0 for rollout in rollouts), Counter(str(rollout.failure) for rollout in rollouts)
    sick = known(store)["two"]
    assert sick.out_of_service_why.startswith("init: ")
    assert "no space is left on this node" in sick.out_of_service_why
    assert known(store)["one"].n_trips == 0
    check_result = _nodes(store.url)
    assert not check_result.ok
    assert "two is out of service until" in check_result.detail
    assert "Node two is out of service for" in (folder / "two.log").read_text() + (folder / "one.log").read_text()
    # the cause there is fixed, and its time is over
    for mark in range(14):
        (tmp_path / str(mark)).touch()
    over = update(nodes.nodes).where(nodes.nodes.c.node == "two").values(out_of_service_until=1.0)
    store.write(lambda connection: connection.execute(over))
    again = client.submit({"instances": [broken] * 60})
    until(lambda: not known(store)["two"].n_trips, "something went well there", 120.0)
    assert client.wait(again, 600).n_completed == 60
    assert _nodes(store.url).ok


def test_agent_installed_at_runtime_is_found_without_quarantine(
    client: farm.Farm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = {"instances": [unruly()], "n_samples": 40, "max_attempts": 1, "quarantine_after": 2}
    monkeypatch.syspath_prepend(str(folder / "site"))
    with pytest.raises(InvalidRequest, match="there is no agent 'later'"):
        client.submit({**request, "agent": "later"})
    points = "later = later_agent:LaterAgent\nbroken = later_agent:NoAgent\nrubbish = no_python:Agent\n"
    (folder / "site/later_agent.py").write_text(
        "from tests.services.unruly import UnrulyAgent as LaterAgent\ndef exiting(calls): raise SystemExit(3)\n"
    )
    (folder / "site/no_python.py").write_text("def")
    info = folder / "site/later-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: later\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[farm.agents]\n{points}[farm.row_builders]\nexiting = later_agent:exiting\n"
    )
    rollouts = client.collect(client.submit({**request, "agent": "later"}), timeout_s=600)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 40, rollouts[0].failure
    for agent, why in (("broken", "cannot be imported here"), ("rubbish", "SyntaxError")):
        batch_id = client.submit({**request, "agent": agent})
        failures = [rollout.failure for rollout in client.collect(batch_id, timeout_s=600)]
        assert {failure.kind for failure in failures if failure is not None} == {"agent_error"}
        messages = [failure.message for failure in failures if failure is not None]
        assert len(messages) == 40
        assert all(why in each and "quarantine" not in each for each in messages), messages[0]


def test_failing_row_builder_is_named_in_the_failure(
    client: farm.Farm, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder / "site"))
    batch_id = client.submit({"instances": [unruly()], "n_samples": 2, "max_attempts": 1, "row_builder": "exiting"})
    for rollout in client.collect(batch_id, timeout_s=600):
        assert rollout.failure is not None
        assert rollout.outcome == "agent_error"
        assert f"{rollout.rollout_id}: row builder 'exiting' broke: SystemExit: 3" in rollout.failure.message


def test_failing_instance_is_quarantined_and_others_complete(client: farm.Farm) -> None:
    request = {"instances": [unruly("agent:raise"), unruly()], "n_samples": 64, "max_attempts": 20}
    batch_id = client.submit(request)
    rollouts = client.collect(batch_id, timeout_s=600)
    bad, good = rollouts[:64], rollouts[64:]
    assert all(rollout.reward == 1.0 for rollout in good)
    assert {rollout.outcome for rollout in bad} == {"agent_error"}
    messages = [rollout.failure.message for rollout in bad if rollout.failure is not None]
    assert len(messages) == 64
    assert all(f"instance {batch_id}.0 (unruly) is in quarantine" in message for message in messages)
    assert all("on one, two" in message and "RuntimeError: the instance asks" in message for message in messages)
    assert max(rollout.n_failures for rollout in bad) < 20
    assert client.status(batch_id).failures == {"agent_error": 64}
    assert not any(map(client.rewards, [rollout.rollout_id for rollout in bad]))
