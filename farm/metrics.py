"""Metrics of a farm for Prometheus, read from the store at every scrape.

The store holds everything, so any machine can serve them, at any rate: no counts are kept in processes that may end.
Gauges describe open work; histograms cover all rollouts ever run and only grow. No label names a batch, a node or an
engine, so the number of series is bounded. `farm_violations` is the alarm: it must be 0. While the database is
unavailable, the only metric is `farm_store_up` with value 0. Their server wants the farm's key, by `authorization:
credentials_file` of Prometheus.
"""

from __future__ import annotations

import hmac
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Connection, case, func, literal, select

from farm.errors import NotFound, StoreUnavailable
from farm.records.engine_state import STATUSES
from farm.records.node import BROKEN, DRAINING, UP
from farm.records.rollout import Stage, State
from farm.store import llm_engines, nodes
from farm.store.database import Store
from farm.store.reports import audit, histograms
from farm.store.reports.demand import slots_wanted
from farm.store.reports.histograms import KINDS, HistogramKind
from farm.store.rollouts import rollouts
from farm.store.sql.clock import age_of, db_now, left_until
from farm.store.sql.database_sessions import silent_transactions
from farm.store.sql.schema import NodeRow

_AUDIT_AGAIN_S = 30.0
_AUDIT_S = 1.0
"""Seconds of audits per scrape; batches that were left out come first in the next one."""
_WAIT_TIMEOUT_S = 3.0
"""Seconds to wait for the database; a scraper gives up after 10."""
_AGE = "Seconds that the oldest startable rollout has waited"
_SLOTS = "Rollouts and borrowed sandboxes that hold a slot of a node or wait for one: scale nodes by it"
_SILENT = "Database sessions that are idle in a transaction and may hold locks"
_live = rollouts.c.finish_seq.is_(None)

_REQUEST_S = 30.0


class FarmCollector(Collector):
    """Reads the store at every scrape; each open batch is audited at most every `_AUDIT_AGAIN_S` seconds."""

    def __init__(self, store: Store, node_timeout_s: float) -> None:
        self._store = store
        self._node_timeout_s = node_timeout_s
        self._audited: dict[str, tuple[float, int]] = {}

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, for prometheus_client."""
        try:
            metrics = list(self._metrics())
        except StoreUnavailable:
            metrics = []
        yield _family("farm_store_up", "1 if the database answers, else 0", (), [(bool(metrics),)])
        yield from metrics

    def _metrics(self) -> Iterator[Metric]:
        yield _family("farm_rollouts", "Rollouts that have not ended", ("stage", "state"), self._read(_by_state))
        yield _family("farm_slots_wanted", _SLOTS, (), self._read(_wanted))
        yield _family("farm_nodes", "Nodes by state", ("state",), self._read(_nodes, self._node_timeout_s))
        yield _family("farm_engines", "LLM servers by state", ("state",), self._read(_engines))
        yield _family("farm_leases_expired", "Claims whose lease expired", (), self._read(_expired))
        yield _family("farm_silent_transactions", _SILENT, (), self._read(_silent))
        yield _family("farm_queue_age_seconds", _AGE, ("stage",), self._read(_queue_age))
        yield _family("farm_violations", "Violated invariants; must be 0", (), [(self._violations(),)])
        yield from _histograms(self._store.read(histograms.stored, _WAIT_TIMEOUT_S))

    def _read(self, ask: Callable[..., Sequence[Any]], *arguments: Any) -> Sequence[Any]:
        return self._store.read(lambda connection: ask(connection, *arguments), _WAIT_TIMEOUT_S)

    def _violations(self) -> int:
        # a copy until it is complete: other scrapes may run in other threads
        audited = {each: self._audited.get(each, (-math.inf, 0)) for each in self._read(audit.open_batches)}
        began = time.monotonic()
        for batch_id, (audited_at, _) in sorted(audited.items(), key=lambda item: item[1][0]):
            if began - audited_at < _AUDIT_AGAIN_S or time.monotonic() - began > _AUDIT_S:
                break
            audited[batch_id] = (time.monotonic(), self._n_violations(batch_id))
        self._audited = audited
        return sum(n for _, n in audited.values())

    def _n_violations(self, batch_id: str) -> int:
        try:
            return len(self._read(audit.violations, batch_id))
        except NotFound:
            return 0


def registry(store: Store, node_timeout_s: float) -> CollectorRegistry:
    """Return a registry with the farm's metrics, for `prometheus_client` to serve or print."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(FarmCollector(store, node_timeout_s))
    return registry


def _family(name: str, what: str, labels: Sequence[str], rows: Sequence[Any]) -> GaugeMetricFamily:
    """Return a metric with a sample per row; the last value of a row is the number, the others are label values."""
    family = GaugeMetricFamily(name, what, labels=labels)
    for *values, number in rows:
        family.add_metric([str(value) for value in values], float(number))
    return family


def _histograms(measured: histograms.Histograms) -> Iterator[Metric]:
    whole = histograms.complete(measured)
    for kind in KINDS.values():
        labels = [kind.label] if kind.label else []
        if not kind.bounds:
            yield _counter(kind, labels, whole)
            continue
        family = HistogramMetricFamily(kind.name, kind.what, labels=labels)
        for value in kind.values:
            counts = whole[kind.name, value]
            family.add_metric([value] if labels else [], counts.cumulative(), counts.total)
        yield family


def _counter(kind: HistogramKind, labels: Sequence[str], whole: histograms.Histograms) -> CounterMetricFamily:
    family = CounterMetricFamily(kind.name, kind.what, labels=labels)
    for value in kind.values:
        family.add_metric([value] if labels else [], whole[kind.name, value].total)
    return family


def _by_state(connection: Connection) -> Sequence[Any]:
    key = (rollouts.c.stage, rollouts.c.state)
    states = Counter({(stage.value, state.value): 0 for stage in Stage for state in (State.QUEUED, State.ACTIVE)})
    rows = connection.execute(select(*key, func.count(literal(1))).where(_live).group_by(*key))
    states.update({(stage, state): n for stage, state, n in rows})
    return [(stage, state, n) for (stage, state), n in states.items()]


def _wanted(connection: Connection) -> Sequence[Any]:
    return [(slots_wanted(connection),)]


def _nodes(connection: Connection, node_timeout_s: float) -> Sequence[Any]:
    out_of_service = left_until(nodes.nodes.c.out_of_service_until, nodes.MAX_OUT_OF_SERVICE_S).label("out_of_service")
    rows = connection.execute(select(NodeRow.state, out_of_service, age_of(nodes.nodes.c.heartbeat_at).label("age")))
    states = Counter({UP: 0, DRAINING: 0, BROKEN: 0, "out_of_service": 0, "dead": 0})
    for row in rows:
        states["dead" if row.age > node_timeout_s else "out_of_service" if row.out_of_service else row.state] += 1
    return list(states.items())


def _engines(connection: Connection) -> Sequence[Any]:
    states = Counter(dict.fromkeys(STATUSES, 0))
    states.update(engine.status for engine in llm_engines.listing(connection))
    return list(states.items())


def _expired(connection: Connection) -> Sequence[Any]:
    expired = (_live, rollouts.c.state == State.ACTIVE.value, rollouts.c.lease_expires_at < db_now())
    return connection.execute(select(func.count(literal(1))).where(*expired)).all()


def _silent(connection: Connection) -> Sequence[Any]:
    return [(len(silent_transactions(connection)),)]


def _queue_age(connection: Connection) -> Sequence[Any]:
    waits = (_live, rollouts.c.state == State.QUEUED.value)
    age = func.max(case((rollouts.c.ready_at < db_now(), db_now() - rollouts.c.queued_at), else_=0.0))
    statement = select(rollouts.c.stage, age).where(*waits).group_by(rollouts.c.stage)
    return list((dict.fromkeys(map(str, Stage), 0.0) | dict(connection.execute(statement).tuples().all())).items())


def server(listener: socket.socket, numbers: CollectorRegistry, key: str) -> WSGIServer:
    """Return a server of the metrics on a listening socket; the caller runs its `serve_forever`."""
    server = _Server(listener.getsockname()[:2], _Request, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    server.server_name, server.server_port = listener.getsockname()[:2]
    server.setup_environ()
    server.server_activate()
    server.set_app(_guarded(make_wsgi_app(numbers), f"Bearer {key}"))
    return server


def _guarded(app: WSGIApplication, expected: str) -> WSGIApplication:
    def answer(environ: WSGIEnvironment, respond: StartResponse) -> Iterable[bytes]:
        shown = str(environ.get("HTTP_AUTHORIZATION", ""))
        # compared as received: a header may hold any byte
        if hmac.compare_digest(shown.encode("latin-1"), expected.encode()):
            return app(environ, respond)
        respond("401 Unauthorized", [("content-type", "text/plain; charset=utf-8"), ("www-authenticate", "Bearer")])
        return [b"these numbers want the farm's key: send `Authorization: Bearer KEY`\n"]

    return answer


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Request(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do not log requests."""
