"""A cancel takes effect everywhere on a node, even without the notification over the broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from farm.client.local import LocalFarm
from farm.ids import eval_sandbox_id, sandbox_id
from farm.notifications import Signals
from farm.records.request import SandboxSpec
from farm.records.rollout import Stage
from farm.store.database import Store
from testkit.scratch_folder import sandbox_config
from tests.conftest import absent
from tests.contract.sandboxes.sandbox_kinds import farm_in
from tests.contract.store.test_store import NODE, advance, claimed, new_batch, place
from tests.services.farms import farm_folder, until
from workers.node.node_cleanup import CancelledSandboxReaper
from workers.plugins.registry import sandbox as provider_of
from workers.process.lease_renewal import Leases


def test_worker_polls_the_store_despite_a_working_broker(store: Store, broker_url: str) -> None:
    batch_id = new_batch(store)
    place(store, batch_id)
    result: Counter[str] = Counter()

    @event.listens_for(store.engine, "before_cursor_execute")
    def count(connection: Any, cursor: Any, statement: str, *rest: object) -> None:
        result[statement.split()[0]] += 1

    signals = Signals(broker_url)
    held = claimed(store, f"{batch_id}.0.0", Stage.INIT)
    result.clear()
    leases = Leases(store, signals, "w", lease_s=4.5, stall_s=60.0)
    with leases.hold(held):
        until(lambda: result["UPDATE"] >= 3, "its lease was renewed three times")
    leases.close()
    signals.close()
    assert result["SELECT"] > result["UPDATE"]


@pytest.fixture
def folder() -> Iterator[Path]:
    if missing := provider_of("namespace").missing():
        absent(missing)
    with farm_folder() as made, farm_in(made):
        yield made


def test_sandboxes_of_cancelled_rollouts_end_in_every_stage(postgres_store: Store, folder: Path) -> None:
    config = sandbox_config()
    store = postgres_store
    batch_id = new_batch(store, 4)
    place(store, batch_id)
    waits, runs, goes_on, starts = (f"{batch_id}.{index}.0" for index in range(4))
    for rollout_id in (waits, runs, goes_on):
        advance(store, claimed(store, rollout_id, Stage.INIT))
    claimed(store, runs, Stage.RUN)
    claimed(store, starts, Stage.INIT)
    names = [sandbox_id(rollout_id, 1) for rollout_id in (waits, runs, goes_on, starts)]
    provider = provider_of("namespace")
    scored_in = eval_sandbox_id(names[1])
    sandboxes = [asyncio.run(provider.start(name, SandboxSpec())) for name in (*names, scored_in)]
    gone = {*names, scored_in} - {names[2]}
    stopped = threading.Event()
    orphans = CancelledSandboxReaper(store, Signals(""), NODE, config.sandboxes_folder, stopped)
    looking = threading.Thread(target=orphans.run)
    looking.start()
    try:
        service = LocalFarm(store, Signals(""), max_open=1000)
        for cancelled in (runs, starts, waits):
            service.cancel(cancelled)
        until(lambda: not any((config.sandboxes_folder / name).exists() for name in gone), "they are gone")
    finally:
        stopped.set()
        looking.join()
    assert (config.sandboxes_folder / names[2]).exists(), "what was not cancelled is wanted"
    for sandbox in sandboxes:
        asyncio.run(sandbox.stop())
