"""The numbers of a farm for Prometheus, read from the store when they are asked for.

They come from the one place where everything is written, so it does not matter on which machine they are served, nor
how often: nothing is counted in a process that may die. What ends goes with its batch, so all of them are gauges.
`farm_violations` is the alarm: it must be 0. While the database is away there is `farm_store_up` alone, which is 0.
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
from farm.rollout import State
from farm.store import audit, nodes
from farm.store.clock import db_now
from farm.store.engine import Store
from farm.store.rollouts import rollouts
from farm.store.tables import NodeRow

_AUDIT_AGAIN_S = 30.0
_PATIENCE_S = 3.0
"""Who scrapes gives up after 10 s."""
_LIVE = "Rollouts that have not ended"
_ENDED = "Rollouts that have ended, of batches that are open or ended a short while ago"
_LOST = "Attempts lost with a worker or a node, of such batches"
_AGE = "How long the oldest rollout waits that could be begun"
_live = rollouts.c.finish_seq.is_(None)


class FarmCollector(Collector):
    """Asks the store at every scrape; each open batch is audited at most every half a minute."""

    def __init__(self, store: Store, node_timeout_s: float) -> None:
        self._store = store
        self._node_timeout_s = node_timeout_s
        self._audited: dict[str, tuple[float, int]] = {}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """All metrics, as prometheus_client wants them."""
        try:
            found = list(self._found())
        except StoreUnavailable:
            found = []
        yield _family("farm_store_up", "Whether the database answers", (), [(bool(found),)])
        yield from found

    def _found(self) -> Iterator[GaugeMetricFamily]:
        opened = self._read(audit.open_batches)
        yield _family("farm_rollouts", _LIVE, ("batch", "stage", "state"), self._read(_by_state))
        yield _family("farm_rollouts_ended", _ENDED, ("batch", "outcome"), self._read(_ended, opened))
        yield _family("farm_attempts_lost", _LOST, ("batch",), self._read(_lost, opened))
        yield _family("farm_nodes", "Nodes by how they are", ("state",), self._read(_nodes, self._node_timeout_s))
        yield _family("farm_leases_expired", "Claims that nobody renewed", (), self._read(_expired))
        yield _family("farm_queue_age_seconds", _AGE, ("stage",), self._read(_queue_age))
        yield _family("farm_violations", "What must never be, and is", ("batch",), self._violations(opened))

    def _read(self, ask: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        return self._store.read(lambda connection: ask(connection, *arguments), _PATIENCE_S)

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
    """What `prometheus_client` serves or prints."""
    made = CollectorRegistry(auto_describe=False)
    made.register(FarmCollector(store, node_timeout_s))
    return made


def _family(name: str, what: str, labels: Sequence[str], rows: Sequence[Any]) -> GaugeMetricFamily:
    """A metric of rows that end in its value."""
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
    sick = (NodeRow.sick_until > db_now()).label("sick")
    found = connection.execute(select(NodeRow.state, sick, (db_now() - NodeRow.heartbeat_at).label("age")))
    states = Counter({nodes.UP: 0, nodes.DRAINING: 0, nodes.BROKEN: 0, "sick": 0, "dead": 0})
    for row in found:
        states["dead" if row.age > node_timeout_s else "sick" if row.sick else row.state] += 1
    return list(states.items())


def _expired(connection: Connection) -> Sequence[Any]:
    late = (_live, rollouts.c.state == State.ACTIVE.value, rollouts.c.lease_expires_at < db_now())
    return connection.execute(select(func.count(literal(1))).where(*late)).all()


def _queue_age(connection: Connection) -> Sequence[Any]:
    waits = (_live, rollouts.c.state == State.QUEUED.value)
    age = func.max(case((rollouts.c.ready_at < db_now(), db_now() - rollouts.c.queued_at), else_=0.0))
    statement = select(rollouts.c.stage, age).where(*waits).group_by(rollouts.c.stage)
    return connection.execute(statement).all()
