"""Metrics of a farm for Prometheus, read from the store at every scrape.

They come from the one place where everything is written, so it does not matter on which machine they are served, nor
how often: nothing is counted in a process that may end. Counts go with their batch, so all of them are gauges.
`farm_violations` is the alarm: it must be 0. While the database is unavailable, `farm_store_up` is the only one: 0.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector
from sqlalchemy import Connection, case, func, literal, select

from farm.errors import NotFound, StoreUnavailable
from farm.records.engine_state import STATUSES
from farm.records.node import BROKEN, DRAINING, UP
from farm.records.rollout import State
from farm.store import llm_engines, nodes
from farm.store.database import Store
from farm.store.reports import audit
from farm.store.rollouts import rollouts
from farm.store.sql.clock import age_of, db_now, left_until
from farm.store.sql.open_transactions import silent_transactions
from farm.store.sql.schema import NodeRow

_AUDIT_AGAIN_S = 30.0
_WAIT_TIMEOUT_S = 3.0
"""Seconds to wait for the database; a scraper gives up after 10."""
_LIVE = "Rollouts that have not ended"
_ENDED = "Rollouts that have ended, of batches that are open or ended a short while ago"
_LOST = "Attempts lost with a worker or a node, of such batches"
_AGE = "How long the oldest rollout waits that could be begun"
_SILENT = "Sessions of the database that went silent in a transaction, whose locks others may wait for"
_live = rollouts.c.finish_seq.is_(None)


class FarmCollector(Collector):
    """A collector that reads the store at every scrape; each open batch is audited at most every half a minute."""

    def __init__(self, store: Store, node_timeout_s: float) -> None:
        self._store = store
        self._node_timeout_s = node_timeout_s
        self._audited: dict[str, tuple[float, int]] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all metrics, for prometheus_client."""
        try:
            result = list(self._found())
        except StoreUnavailable:
            result = []
        yield _family("farm_store_up", "Whether the database answers", (), [(bool(result),)])
        yield from result

    def _found(self) -> Iterator[GaugeMetricFamily]:
        opened = self._read(audit.open_batches)
        yield _family("farm_rollouts", _LIVE, ("batch", "stage", "state"), self._read(_by_state))
        yield _family("farm_rollouts_ended", _ENDED, ("batch", "outcome"), self._read(_ended, opened))
        yield _family("farm_attempts_lost", _LOST, ("batch",), self._read(_lost, opened))
        yield _family("farm_nodes", "Nodes by how they are", ("state",), self._read(_nodes, self._node_timeout_s))
        yield _family("farm_engines", "LLM servers by how they are", ("state",), self._read(_engines))
        yield _family("farm_leases_expired", "Claims that nobody renewed", (), self._read(_expired))
        yield _family("farm_silent_transactions", _SILENT, (), self._read(_silent))
        yield _family("farm_queue_age_seconds", _AGE, ("stage",), self._read(_queue_age))
        yield _family("farm_violations", "What must never be, and is", ("batch",), self._violations(opened))

    def _read(self, ask: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        return self._store.read(lambda connection: ask(connection, *arguments), _WAIT_TIMEOUT_S)

    def _violations(self, opened: Sequence[str]) -> list[tuple[str, int]]:
        # of this scrape alone until it is whole: others may be under way, each in a thread of its own
        audited = {batch_id: self._audited.get(batch_id, (-math.inf, 0)) for batch_id in opened}
        for batch_id, (audited_at, _) in audited.items():
            if time.monotonic() - audited_at > _AUDIT_AGAIN_S:
                audited[batch_id] = (time.monotonic(), self._n_violations(batch_id))
        self._audited = audited
        return [(batch_id, n) for batch_id, (_, n) in audited.items()]

    def _n_violations(self, batch_id: str) -> int:
        try:
            return len(self._read(audit.violations, batch_id))
        except NotFound:
            return 0


def registry(store: Store, node_timeout_s: float) -> CollectorRegistry:
    """Return a registry with the farm's metrics, for `prometheus_client` to serve or print."""
    made = CollectorRegistry(auto_describe=False)
    made.register(FarmCollector(store, node_timeout_s))
    return made


def _family(name: str, what: str, labels: Sequence[str], rows: Sequence[Any]) -> GaugeMetricFamily:
    """Return a metric with a sample for each row: label values, then the number."""
    family = GaugeMetricFamily(name, what, labels=labels)
    for *values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _by_state(connection: Connection) -> Sequence[Any]:
    key = (rollouts.c.batch_id, rollouts.c.stage, rollouts.c.state)
    return connection.execute(select(*key, func.count(literal(1))).where(_live).group_by(*key)).all()


def _ended(connection: Connection, opened: Sequence[str]) -> Sequence[Any]:
    key = (rollouts.c.batch_id, rollouts.c.outcome)
    ended = (rollouts.c.batch_id.in_(opened), rollouts.c.finish_seq.is_not(None))
    return connection.execute(select(*key, func.count(literal(1))).where(*ended).group_by(*key)).all()


def _lost(connection: Connection, opened: Sequence[str]) -> Sequence[Any]:
    lost = select(rollouts.c.batch_id, func.sum(rollouts.c.n_lost)).where(rollouts.c.batch_id.in_(opened))
    return connection.execute(lost.group_by(rollouts.c.batch_id)).all()


def _nodes(connection: Connection, node_timeout_s: float) -> Sequence[Any]:
    sick = left_until(nodes.nodes.c.sick_until, nodes.MAX_OUT_OF_SERVICE_S).label("sick")
    result = connection.execute(select(NodeRow.state, sick, age_of(nodes.nodes.c.heartbeat_at).label("age")))
    states = Counter({UP: 0, DRAINING: 0, BROKEN: 0, "sick": 0, "dead": 0})
    for row in result:
        states["dead" if row.age > node_timeout_s else "sick" if row.sick else row.state] += 1
    return list(states.items())


def _engines(connection: Connection) -> Sequence[Any]:
    states = Counter(dict.fromkeys(STATUSES, 0))
    states.update(engine.status for engine in llm_engines.listing(connection))
    return list(states.items())


def _expired(connection: Connection) -> Sequence[Any]:
    late = (_live, rollouts.c.state == State.ACTIVE.value, rollouts.c.lease_expires_at < db_now())
    return connection.execute(select(func.count(literal(1))).where(*late)).all()


def _silent(connection: Connection) -> Sequence[Any]:
    return [(len(silent_transactions(connection)),)]


def _queue_age(connection: Connection) -> Sequence[Any]:
    waits = (_live, rollouts.c.state == State.QUEUED.value)
    age = func.max(case((rollouts.c.ready_at < db_now(), db_now() - rollouts.c.queued_at), else_=0.0))
    statement = select(rollouts.c.stage, age).where(*waits).group_by(rollouts.c.stage)
    return connection.execute(statement).all()
