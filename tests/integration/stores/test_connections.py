"""The number of Postgres connections of a running node, counted by Postgres."""

from __future__ import annotations

import os
import threading
from collections import Counter
from typing import Any

from sqlalchemy import text

import farm
from farm.store.database import Store
from farm.store.nodes import NODE_CONNECTIONS
from tests.doubles import EngineDouble
from tests.services.farms import NOOP, embedded, farm_folder, until
from workers.testing.scripted_model import Branch, Script, ScriptedProblem, ScriptedTurn
from workers.testing.serving import serving

QUESTION = "How many hops?"
SCRIPT = Script(
    [ScriptedProblem(match=QUESTION, branches=(Branch(name="right", turns=(ScriptedTurn(content="three"),)),))]
)
CHAT: dict[str, Any] = {"data_source": "chat", "fields": {"question": QUESTION, "expected": "three"}}
_OPEN = text(
    "SELECT application_name, pid FROM pg_stat_activity "
    "WHERE datname = current_database() AND backend_type = 'client backend' AND application_name LIKE 'farm %'"
)


class SessionCounter:
    """Counts the sessions of all other farm processes repeatedly, until closed."""

    def __init__(self, store: Store) -> None:
        self.most = self.n_looks = 0
        self.pids_of: dict[str, set[int]] = {}
        self._store = store
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(0.05):
            values = self._store.read(lambda c: c.execute(_OPEN).tuples().all())
            others = [(name, pid) for name, pid in values if not name.endswith(f"/{os.getpid()}")]
            for name, pid in others:
                self.pids_of.setdefault(name, set()).add(pid)
            self.most = max(self.most, len(others))
            self.n_looks += 1


def test_node_has_one_connection_per_process(postgres_store: Store) -> None:
    with (
        farm_folder() as folder,
        serving(EngineDouble(SCRIPT, weight_version="0").app()) as policy,
        embedded(folder, postgres_store.url, FARM_POLICY_URL=f"{policy}/v1", FARM_AUDIT_S="0.1") as here,
        farm.connect(here.store_url, broker_url=here.broker_url) as client,
    ):
        census = SessionCounter(postgres_store)
        try:
            # more than run at once
            ids = [client.submit({"instances": [each] * 10, "n_samples": 2}) for each in (NOOP, CHAT, NOOP)]
            client.cancel(ids[2])
            for batch_id in ids:
                client.wait(batch_id, 120)
            n_looks = census.n_looks
            # heartbeats, renewals, lists of engines, audits
            until(lambda: census.n_looks > n_looks + 20, "what is done by the clock was seen too")
        finally:
            census.close()
        assert [client.status(batch_id).n_completed for batch_id in ids[:2]] == [20, 20]
    assert census.most == NODE_CONNECTIONS == 4
    sessions = Counter({name: len(pids) for name, pids in census.pids_of.items()})
    assert set(sessions.values()) == {1}, f"no process opened a second one: {sessions}"
