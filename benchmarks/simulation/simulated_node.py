"""A node of a simulated cluster: it makes the same store operations as a real one, and only simulates rollouts."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from benchmarks.simulation.cost_meter import CostMeter
from benchmarks.simulation.virtual_time import VirtualTime
from farm.records.node import Node
from farm.records.rollout import Stage
from farm.scheduler.dispatcher import ROLE
from farm.store import epoch, leader, leases, llm_engines, nodes, placement, rollouts
from farm.store.database import Store
from farm.store.placement import StageMessage
from farm.store.rollouts import Claim, RunSummary

T = TypeVar("T")

SLOTS = {Stage.INIT: 4, Stage.RUN: 64, Stage.EVAL: 8}
"""The slots of a node's pools, the defaults of `farm node`."""
ROOM = sum(SLOTS.values())
LEASE_S = 1e6
"""Simulations take longer than their virtual time, and no lease may expire during one."""
_INIT_S, _EVAL_S = 0.3, 0.5
_SPREAD = 0.2
"""The relative variation of rollout lengths around their mean."""
RESEND_AFTER_S = 60.0
_SUMMARY = RunSummary("submitted", {}, n_turns=20, n_response_tokens=8000)
PERIODIC: dict[str, float] = {
    "look for lost claims": 4.0,
    "sandboxes to end": 2.2,
    "list engines": 1.5,
    "leader of dispatchers": 0.5,
    "epoch": 0.5,
    "heartbeat": 0.2,
    "renew leases": 0.1,
}
"""Periodic queries per second of a busy node, by its run worker and another worker with claims."""


@dataclass(slots=True)
class Shared:
    """The shared state of a cluster's nodes. `ended` is called when a rollout has ended."""

    store: Store
    meter: CostMeter
    time: VirtualTime
    rollout_s: float
    ended: Callable[[], None]
    chance: random.Random = field(default_factory=lambda: random.Random(1))


class SimulatedNode:
    """One node, with the slots of its pools; `busy_s` is the used time of its run slots so far."""

    def __init__(self, name: str, shared: Shared) -> None:
        self.name = name
        self.busy_s = 0.0
        self.claim_delays_s: list[float] = []
        self._shared = shared
        self._free = dict(SLOTS)
        self._queued: dict[Stage, deque[tuple[str, int]]] = {stage: deque() for stage in Stage}
        self._running: dict[str, float] = {}
        self._freed_at: deque[float] = deque()

    @property
    def owner(self) -> str:
        return f"{self.name}/{Stage.RUN}/1"

    def announced(self) -> Node:
        slots = (SLOTS[Stage.INIT], SLOTS[Stage.RUN], SLOTS[Stage.EVAL])
        return Node(self.name, ROOM, *slots, ["noop"], {"lease_s": LEASE_S})

    def receive(self, message: StageMessage) -> None:
        """Receive a message of the dispatcher."""
        self._queued[message.stage].append((message.rollout_id, message.attempt))
        self._claim_waiting(message.stage)

    def resume(self, held: Claim) -> None:
        """Continue a rollout whose run stage began some time ago."""
        left_s = self._shared.chance.uniform(0.0, self._shared.rollout_s)
        self._free[held.stage] -= 1
        self._running[held.rollout_id] = self._shared.time()
        self._shared.time.at(self._shared.time() + left_s, partial(self._end, held))

    def stop_counting(self) -> None:
        """Add the time of running stages to `busy_s`."""
        now = self._shared.time()
        self.busy_s += sum(now - since for since in self._running.values())
        self._running = dict.fromkeys(self._running, now)

    def _claim_waiting(self, stage: Stage) -> None:
        while self._free[stage] and self._queued[stage]:
            self._claim(stage, *self._queued[stage].popleft())

    def _claim(self, stage: Stage, rollout_id: str, attempt: int) -> None:
        owner = f"{self.name}/{stage}/1"
        work = partial(
            rollouts.claim,
            rollout_id=rollout_id,
            attempt=attempt,
            stage=stage,
            node=self.name,
            owner=owner,
            lease_s=LEASE_S,
            tries=[],
        )
        held, took_s = self._write("claim", work)
        if held is None:  # a duplicate message
            return
        self._free[stage] -= 1
        began = self._shared.time() + took_s
        if stage is Stage.RUN:
            self._running[rollout_id] = began
            if self._freed_at:
                self.claim_delays_s.append(began - self._freed_at.popleft())
        self._shared.time.at(began + self._lasts_s(stage), partial(self._end, held))

    def _lasts_s(self, stage: Stage) -> float:
        if stage is not Stage.RUN:
            return _INIT_S if stage is Stage.INIT else _EVAL_S
        return self._shared.rollout_s * self._shared.chance.uniform(1 - _SPREAD, 1 + _SPREAD)

    def _end(self, held: Claim) -> None:
        now = self._shared.time()
        self._free[held.stage] += 1
        if held.stage is Stage.EVAL:
            finish = partial(rollouts.finish, held=held, value=1.0, details={}, evaluator="simulated")
            _, took_s = self._write("finish", finish)
            self._shared.time.at(now + took_s, self._shared.ended)
        else:
            following = rollouts.NEXT_STAGE[held.stage]
            summary = _SUMMARY if held.stage is Stage.RUN else None
            advance = partial(rollouts.advance, held=held, resend_after_s=RESEND_AFTER_S, summary=summary)
            _, took_s = self._write("advance", advance)
            message = StageMessage(held.rollout_id, held.attempt, following, self.name)
            self._shared.time.at(now + took_s, partial(self.receive, message))
        if held.stage is Stage.RUN:
            self.busy_s += now - self._running.pop(held.rollout_id)
            self._freed_at.append(now)
        self._claim_waiting(held.stage)

    def _write(self, kind: str, work: Callable[[Connection], T]) -> tuple[T, float]:
        return self._shared.meter.measure(kind, lambda: self._shared.store.write(work))

    def ask_by_the_clock(self) -> None:
        """Run each periodic operation of a node (`PERIODIC`) once."""
        store, measure = self._shared.store, self._shared.meter.measure
        ids = set(self._running)
        reads: dict[str, Callable[[Connection], object]] = {
            "look for lost claims": partial(leases.taken, owner=self.owner, node=self.name, held=ids),
            "sandboxes to end": partial(placement.live_sandboxes, node=self.name),
            "list engines": llm_engines.listing,
            "leader of dispatchers": partial(leader.is_led_by_other, role=ROLE, owner=self.name, lease_s=10.0),
            "epoch": epoch.current,
        }
        writes: dict[str, Callable[[Connection], object]] = {
            "heartbeat": partial(nodes.heartbeat, node=self.announced()),
            "renew leases": partial(leases.renew, owner=self.owner, held=ids, lease_s=LEASE_S),
        }
        for kind, work in reads.items():
            measure(kind, partial(store.read, work))
        for kind, work in writes.items():
            measure(kind, partial(store.write, work))
