"""Thousands of rollouts at once: they are admitted in bulk, a small batch overtakes them, and batches take turns."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

import farm
from farm.embedded.embedded_farm import Embedded
from farm.records.rollout import Rollout
from farm.settings import Settings
from testkit.deadline import LONG_S
from testkit.processes import forget_peak, named, peak_mb, tree
from tests.services.farms import NOOP, QUICK, PreloadedFarm, farm_folder, until

SLOTS = (2, 4, 2)
"""Slots of the pools of a small farm: a large one would need more rollouts to be full."""
ROOM = sum(SLOTS)
"""Its capacity, in rollouts at a time."""
HUGE = 3000


@pytest.fixture(scope="module")
def here() -> Iterator[Embedded]:
    node_options = [f"--{pool}={slots}" for pool, slots in zip(("init", "run", "eval"), SLOTS, strict=True)]
    with farm_folder() as folder:
        own = Settings(home=folder / "home", scratch=folder / "scratch", store_url="", broker_url="")
        with PreloadedFarm(own, node_options=node_options, flower=False, env=QUICK) as running:
            yield running


@pytest.fixture
def client(here: Embedded) -> Iterator[farm.Farm]:
    """Yield a client whose batches are cancelled at the end."""
    with farm.connect(here.home) as connected:
        yield connected
        for batch_id in connected.recent(100):
            connected.cancel(batch_id)


@pytest.fixture
def huge_batch(client: farm.Farm) -> str:
    """Return a running batch that takes far longer than a test."""
    batch_id = client.submit({"instances": [NOOP] * (HUGE // 8), "n_samples": 8})
    until(lambda: client.status(batch_id).n_finished >= ROOM, "it runs")
    return batch_id


def ended_during(client: farm.Farm, batch_id: str, others: list[Rollout]) -> int:
    """Return how many rollouts of a batch ended between the submit of the others and the end of the last of them."""
    since = others[0].submitted_at
    until_then = max(other.finished_at or 0.0 for other in others)
    ends = [rollout.finished_at for rollout in client.rollouts(batch_id)]
    return sum(end is not None and since < end < until_then for end in ends)


def test_small_batch_overtakes_a_huge_one(client: farm.Farm, huge_batch: str) -> None:
    small = client.collect(client.submit({"instances": [NOOP] * 24}), timeout_s=LONG_S)
    # it has half of the slots for itself; in a queue it would have waited for all of them
    assert ended_during(client, huge_batch, small) < 4 * len(small)


def test_higher_priority_gets_all_slots(client: farm.Farm, huge_batch: str) -> None:
    small = client.collect(client.submit({"instances": [NOOP] * 50, "priority": 1}), timeout_s=LONG_S)
    # those placed before it, and those that took their slots while its last ones ran: equals get the same number
    assert ended_during(client, huge_batch, small) < 33


def test_lower_priority_waits_for_higher_priority(client: farm.Farm) -> None:
    higher = client.submit({"instances": [NOOP] * 70, "priority": 1})
    lower = client.submit({"instances": [NOOP] * 8})
    low = client.collect(lower, timeout_s=600)
    assert client.wait(higher, 600).n_completed == 70
    begun = min(timing.started_at or 0.0 for each in low for timing in client.timings(each.rollout_id))
    ends = [rollout.finished_at or 0.0 for rollout in client.rollouts(higher)]
    assert sum(end > begun for end in ends) <= 2 * ROOM, "no more than had been placed already"


def test_batches_beyond_capacity_take_turns(client: farm.Farm) -> None:
    ids = [client.submit({"instances": [NOOP] * 20}) for _ in range(2 * ROOM)]
    until(lambda: sum(client.status(each).n_finished for each in ids) >= 4 * len(ids), "some of them ended")
    assert min(client.status(batch_id).n_finished for batch_id in ids) >= 1


def test_memory_does_not_grow_with_waiting_rollouts(client: farm.Farm) -> None:
    client.wait(client.submit({"instances": [NOOP] * 2 * ROOM}), 600)
    supervisor = named(tree(os.getpid()), "-m workers.node")
    before = peak_mb(supervisor)
    forget_peak(supervisor)
    batch_id = client.submit({"instances": [NOOP] * (HUGE // 8), "n_samples": 8})
    until(lambda: client.status(batch_id).n_finished >= 4 * ROOM, "it runs", 120)
    assert peak_mb(supervisor) < before + 30


def test_refused_batch_leaves_nothing(
    here: Embedded, client: farm.Farm, huge_batch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = client.recent(1000)
    monkeypatch.setenv("FARM_MAX_OPEN", str(HUGE))
    farm.settings.settings.cache_clear()
    try:
        with farm.connect(here.home) as bounded:
            with pytest.raises(farm.ServiceError, match="submit again when some have ended"):
                bounded.submit({"instances": [NOOP] * 2000})
            with pytest.raises(farm.UsageError, match="several batches"):
                bounded.submit({"instances": [NOOP] * (HUGE + 1)})
            bounded.cancel(huge_batch)
            accepted = bounded.submit({"instances": [NOOP] * 20})
            assert bounded.wait(accepted, 120).n_completed == 20
    finally:
        farm.settings.settings.cache_clear()
    assert client.recent(1000) == [accepted, *known]
