"""A cluster of simulated nodes on a real Postgres, a real Redis and the farm's own dispatcher.

Time is virtual: an operation lasts as long as its CPU time, of the client and of the database, so the figures are those
of a machine with unlimited cores like this one's. The dispatcher is one server: its next round begins after the last
has ended, and not earlier than a real one. The database has as many cores as it needs; their number is a result.
"""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

from sqlalchemy import Connection, text

from benchmarks.simulation.cost_meter import CostMeter
from benchmarks.simulation.simulated_node import LEASE_S, RESEND_AFTER_S, ROOM, SLOTS, Shared, SimulatedNode
from benchmarks.simulation.virtual_time import VirtualTime
from farm.notifications import ENDED, Signals, redis_client
from farm.records.rollout import Stage
from farm.scheduler.broker import queue_name
from farm.scheduler.dispatcher import Dispatcher, rest_s
from farm.settings import Settings
from farm.store import nodes
from farm.store.database import Store
from farm.store.placement import StageMessage
from farm.store.rollouts import Claim

_TICK_S = 0.5
_SAMPLED = 8
"""Nodes on which the cost of periodic operations is measured."""
_PLACE_ALL = text(
    """
    UPDATE rollouts SET node = 'n' || lpad((place / :room)::text, 4, '0'), stage = 'run', n_sends = 1,
        resend_at = resend_at + 1e6, state = CASE WHEN place % :room < :slots THEN 'active' ELSE 'queued' END,
        owner = CASE WHEN place % :room < :slots THEN 'n' || lpad((place / :room)::text, 4, '0') || '/run/1' END,
        lease_expires_at = CASE WHEN place % :room < :slots THEN ready_at + :lease_s END
    FROM (SELECT rollout_id AS id, row_number() OVER (ORDER BY group_index, sample_index, batch_id) - 1 AS place
          FROM rollouts) AS numbered
    WHERE id = rollout_id AND place < :n
    """
)
_BEGUN = text(
    """
    INSERT INTO attempts (rollout_id, attempt, stage, node, worker, queued_at, started_at, finished_at, result)
    SELECT rollout_id, 1, began, node, node || '/' || began || '/1', queued_at, queued_at,
        CASE began WHEN 'init' THEN queued_at END, CASE began WHEN 'init' THEN 'advanced' END
    FROM rollouts, unnest(ARRAY['init', 'run']) AS began
    WHERE node IS NOT NULL AND (began = 'init' OR state = 'active')
    """
)
_PLACED = text(
    "SELECT rollout_id, owner, batch_id, group_index, sample_index, node, state FROM rollouts WHERE node IS NOT NULL"
    # running slots first
    " ORDER BY state"
)


class SimulatedCluster:
    """`n_nodes` nodes, full from the start, with rollouts of a mean length. Waiting rollouts were submitted before."""

    def __init__(self, store_url: str, broker_url: str, n_nodes: int, rollout_s: float) -> None:
        self.n_finished = 0
        self.rounds: list[tuple[float, int]] = []
        self.time = VirtualTime()
        self._store = Store(store_url)
        self.meter = CostMeter(self._store)
        shared = Shared(self._store, self.meter, self.time, rollout_s, self._ended)
        names = [f"n{number:04d}" for number in range(n_nodes)]
        self.nodes = {name: SimulatedNode(name, shared) for name in names}
        settings = Settings(
            store_url=store_url,
            broker_url=broker_url,
            node_timeout_s=LEASE_S,
            lease_s=LEASE_S,
            resend_after_s=RESEND_AFTER_S,
            audit_s=0.0,
        )
        self._dispatcher = Dispatcher(self._store, Signals(""), settings, "n0000/1", clock=self.time)
        broker = redis_client(broker_url)
        assert broker is not None
        self._broker = broker
        self._resting = True
        self._hinted = False
        self._n_rests = 0

    def fill(self) -> None:
        """Announce the nodes, and fill each: its run slots in the middle of their work, the rest with queued ones."""
        for node in self.nodes.values():
            self._store.write(partial(_announce, node=node))
        n = ROOM * len(self.nodes)
        sizes = {"room": ROOM, "slots": SLOTS[Stage.RUN], "lease_s": LEASE_S, "n": n}
        self._store.write(lambda connection: connection.execute(_PLACE_ALL, sizes).rowcount)
        self._store.write(lambda connection: connection.execute(_BEGUN).rowcount)
        with self._store.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM ANALYZE"))
        for row in self._store.read(lambda connection: connection.execute(_PLACED).all()):
            node = self.nodes[row.node]
            if row.state == "active":
                place = (row.batch_id, row.group_index, row.sample_index)
                node.resume(Claim(row.rollout_id, 1, Stage.RUN, row.owner, *place, row.node, None, None))
            else:
                node.receive(StageMessage(row.rollout_id, 1, Stage.RUN, row.node))

    def run(self, virtual_s: float, wall_s: float) -> None:
        """Run for so many virtual or real seconds; then run the periodic operations of some nodes."""
        # first, connections are made and statements are prepared
        self._dispatcher.run_round()
        self._wake()
        deadline = time.monotonic() + wall_s
        while self.time() < virtual_s and time.monotonic() < deadline and self.time.step():
            pass
        for node in list(self.nodes.values())[:_SAMPLED]:
            node.ask_by_the_clock()
        for node in self.nodes.values():
            node.stop_counting()

    def close(self) -> None:
        self._store.close()
        self._broker.close()

    def _ended(self) -> None:
        self.n_finished += 1
        if self._dispatcher.is_due(ENDED, ""):
            self._wake()

    def _wake(self) -> None:
        self._hinted = True
        if self._resting:
            self._resting = False
            self.time.at(self.time(), self._round)

    def _round(self) -> None:
        self._hinted = False
        busy, took_s = self.meter.measure("dispatcher", self._dispatcher.run_round)
        messages = list(self._sent())
        self.rounds.append((took_s, len(messages)))
        done = self.time() + took_s
        for message in messages:
            self.time.at(done, partial(self.nodes[message.node].receive, message))
        self.time.at(done + rest_s(took_s, _TICK_S) * busy, self._rest)

    def _rest(self) -> None:
        self._resting = True
        self._n_rests += 1
        if self._hinted:
            self._wake()
        else:
            self.time.at(self.time() + _TICK_S, partial(self._tick, self._n_rests))

    def _tick(self, rest: int) -> None:
        if self._resting and rest == self._n_rests:
            self._wake()

    def _sent(self) -> Iterator[StageMessage]:
        """Take the messages that the dispatcher has sent since the last time out of the broker."""
        queues = list(self._broker.scan_iter(match=queue_name(Stage.INIT, "*"), count=10_000))
        with self._broker.pipeline(transaction=False) as pipeline:
            for queue in queues:
                pipeline.lrange(queue, 0, -1)
                pipeline.delete(queue)
            answers = pipeline.execute()
        for queue, messages in zip(queues, answers[::2], strict=True):
            node = queue.decode().partition(".")[2]
            for message in reversed(messages):
                rollout_id, attempt = _arguments(json.loads(message))
                yield StageMessage(rollout_id, attempt, Stage.INIT, node)


def _announce(connection: Connection, node: SimulatedNode) -> None:
    nodes.announce(connection, node.announced())


def _arguments(envelope: dict[str, Any]) -> tuple[str, int]:
    """Return the rollout and the attempt of a message in the broker."""
    arguments, _, _ = json.loads(base64.b64decode(envelope["body"]))
    return arguments[0], arguments[1]
