"""kill -9 of whole nodes, and SIGTERM: another node, or the same one, continues their rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import farm
from farm.client.farm import Farm
from farm.client.sandboxes.borrower import LentHandle
from farm.errors import SandboxEnded
from farm.store.database import Store
from tests.acceptance.faults.test_kill import SLOW, every_rollout_ended_once
from tests.services.farms import NOOP, farm_folder, left_of, node, until


@pytest.fixture
def folder() -> Iterator[Path]:
    with farm_folder() as made:
        yield made


def test_rollouts_of_killed_node_run_on_another_node(folder: Path, postgres_store: Store, broker_url: str) -> None:
    with (
        node(folder, "one", postgres_store.url, broker_url, FARM_SANDBOX="namespace") as first,
        node(folder, "two", postgres_store.url, broker_url, FARM_SANDBOX="namespace") as second,
        farm.connect(postgres_store.url, broker_url=broker_url) as client,
    ):
        lent = _one_on_each(client, "one", "two")
        batch_id = client.submit({"instances": [SLOW] * 60, "max_attempts": 5})
        until(lambda: {rollout.node for rollout in client.rollouts(batch_id)} >= {"one", "two"}, "both run")
        until(lambda: client.status(batch_id).n_finished >= 5, "some have ended")
        first.kill()
        first.wait()
        every_rollout_ended_once(client, batch_id)
        assert second.poll() is None
        until(lambda: lent["one"].state().ended, "what the killed node lent has ended")
        with pytest.raises(SandboxEnded, match="its node was lost: one"):
            lent["one"].exec("true")
        assert lent["two"].exec("echo", "here").stdout == "here\n"
        assert client.submit({"instances": [NOOP]}), "the one that is left takes more"
    assert left_of(folder) == []


def _one_on_each(client: Farm, *names: str) -> dict[str, LentHandle]:
    """Borrow until each node has a sandbox."""
    until(lambda: {each.node for each in client.nodes()} >= {*names}, "the nodes are announced")
    lent: dict[str, LentHandle] = {}
    for _ in range(20):
        handle = client.sandboxes.start()
        lent.setdefault(handle.state().node, handle)
        if lent.keys() >= {*names}:
            return lent
    raise AssertionError(f"20 sandboxes are all on {', '.join(lent)}")


def test_restarted_node_resumes_its_rollouts(folder: Path, postgres_store: Store, broker_url: str) -> None:
    # nothing expires by itself: the node knows when it comes back
    patient = partial(
        node, folder, "one", postgres_store.url, broker_url, FARM_LEASE_S="600", FARM_NODE_TIMEOUT_S="600"
    )
    with farm.connect(postgres_store.url, broker_url=broker_url) as client:
        with patient() as first:
            batch_id = client.submit({"instances": [SLOW] * 30, "max_attempts": 1})
            until(lambda: client.status(batch_id).n_finished >= 5, "some have ended", 120)
            first.kill()
            first.wait()
            assert client.status(batch_id).n_finished < 30
        with patient():
            every_rollout_ended_once(client, batch_id)
        assert any(rollout.attempt > 1 for rollout in client.rollouts(batch_id)), "the kill took some rollouts away"
    assert left_of(folder) == []


def test_terminated_node_requeues_its_rollouts(folder: Path, postgres_store: Store, broker_url: str) -> None:
    with farm.connect(postgres_store.url, broker_url=broker_url) as client:
        with node(folder, "one", postgres_store.url, broker_url):
            batch_id = client.submit({"instances": [SLOW | {"fields": {"seconds": 300}}] * 4 + [SLOW] * 4})
            until(lambda: client.status(batch_id).n_finished == 4, "the short ones have ended")
        rollouts = client.rollouts(batch_id)
        assert [rollout.state for rollout in rollouts] == ["queued"] * 4 + ["completed"] * 4
        assert {rollout.node for rollout in rollouts[:4]} == {None}
        client.cancel(batch_id)
    assert left_of(folder) == []
